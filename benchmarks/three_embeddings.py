"""Compare the time of BGE-M3's dense embedding with the time of its dense, sparse and multi-vector embeddings in one pass.

    python benchmarks/three_embeddings.py [--backend cpu openvino] [--sequence 32 128] [--batch 1 8] [--layers 6] [--rounds 20]

The model has random weights and the shape of BGE-M3's layers: hidden size 1024, 16 heads, 4096 in the feed-forward layers. BGE-M3 has 24
layers. A smaller number of layers makes the heads a larger part of the time, so the ratio is an upper bound. One graph has the heads of all
three embeddings, the other graph only the dense embedding. Each graph has its own process, and the processes take turns: they compute one
batch each in every round. `encode` is called as users call it, with texts. The script prints one JSON object with the median time in ms of
each variant, and the median and the quartiles of the ratio of the two times of a round.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
import transformers

import accel
from accel.testing.models import rescale, save_tiny

HIDDEN = 1024
VARIANTS = ("dense", "all")


def save_model(folder: Path, layers: int, *, heads: bool) -> None:
    """Save a model with the tokenizer of accel's tiny models."""
    save_tiny(folder, "xlm-roberta", "feature-extraction")
    config = transformers.XLMRobertaConfig(
        vocab_size=1000, hidden_size=HIDDEN, num_hidden_layers=layers, num_attention_heads=16, intermediate_size=4096,
        max_position_embeddings=514, type_vocab_size=1, pad_token_id=1,
    )  # fmt: skip
    network: Any = rescale(transformers.XLMRobertaModel(config, add_pooling_layer=False)).eval()
    network.save_pretrained(folder)
    entries = [
        {"path": "", "type": "sentence_transformers.models.Transformer"},
        {"path": "1_Pooling", "type": "sentence_transformers.models.Pooling"},
        {"path": "2_Normalize", "type": "sentence_transformers.models.Normalize"},
    ]
    (folder / "modules.json").write_text(json.dumps(entries))
    (folder / "1_Pooling").mkdir()
    (folder / "1_Pooling" / "config.json").write_text(json.dumps({"pooling_mode": "cls"}))
    if heads:
        for name, size in (("sparse", 1), ("colbert", HIDDEN)):
            torch.save(torch.nn.Linear(HIDDEN, size).state_dict(), folder / f"{name}_linear.pt")


def serve(folder: str, backend: str) -> None:
    """Read rounds from stdin, and write the seconds of each."""
    model = accel.ORTModelForFeatureExtraction.from_pretrained(folder, backend=backend)
    for line in sys.stdin:
        request: dict[str, Any] = json.loads(line)
        started = time.perf_counter()
        model.encode(request["texts"], batch_size=len(request["texts"]), outputs=request["outputs"])
        print(json.dumps(time.perf_counter() - started), flush=True)


def measured(folder: Path, backend: str, texts: list[str], rounds: int) -> dict[str, Any]:
    """Return the times of both variants, which take turns."""
    outputs = {"dense": ["dense"], "all": ["dense", "sparse", "multi_vector"]}
    workers = {
        name: subprocess.Popen(
            [sys.executable, __file__, "--serve", str(folder / f"{backend}-{name}"), "--backend", backend],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        for name in VARIANTS
    }
    times: dict[str, list[float]] = {name: [] for name in VARIANTS}
    for i in range(rounds + 3):
        for name in VARIANTS if i % 2 else reversed(VARIANTS):
            worker = workers[name]
            assert worker.stdin is not None
            assert worker.stdout is not None
            worker.stdin.write(json.dumps({"texts": texts, "outputs": outputs[name]}) + "\n")
            worker.stdin.flush()
            seconds = json.loads(worker.stdout.readline())
            # The first rounds warm up.
            if i >= 3:
                times[name].append(seconds)
    for worker in workers.values():
        worker.communicate()
    ratios = [b / a for a, b in zip(times["dense"], times["all"], strict=True)]
    low, middle, high = statistics.quantiles(ratios, n=4)
    medians = {f"{name}_ms": round(1000 * statistics.median(values), 2) for name, values in times.items()}
    return {**medians, "ratio": round(middle, 3), "quartiles": [round(low, 3), round(high, 3)]}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--backend", nargs="*", default=["cpu", "openvino"])
    parser.add_argument("--sequence", nargs="*", type=int, default=[32, 128])
    parser.add_argument("--batch", nargs="*", type=int, default=[1, 8])
    parser.add_argument("--layers", type=int, default=6)
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--serve", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.serve:
        serve(args.serve, args.backend[0])
        return
    results = []
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        for name in VARIANTS:
            save_model(folder / name, args.layers, heads=name == "all")
            for backend in args.backend:
                accel.export(folder / name, folder / f"{backend}-{name}", backend=backend)
        for backend in args.backend:
            for sequence in args.sequence:
                for batch in args.batch:
                    texts = [" ".join(["card"] * (sequence - 2))] * batch
                    shape = {"backend": backend, "batch": batch, "sequence": sequence}
                    results.append({**shape, **measured(folder, backend, texts, args.rounds)})
                    print(json.dumps(results[-1]), file=sys.stderr, flush=True)
    print(json.dumps({"layers": args.layers, "rounds": args.rounds, "results": results}))


if __name__ == "__main__":
    main()
