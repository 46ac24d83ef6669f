"""Call a model that `accel.accelerate` compiled with fifty input lengths. Count the compilations and measure the time of padding.

    python benchmarks/inductor_shapes.py [OUT.json] [--shapes 50] [--layers 6] [--rounds 5]

The model has the shape of DistilBERT and random weights from a fixed seed. The inputs have one row and lengths from 3 to 128 in random
order. The model compiles during the first pass over all lengths. In later passes, calls of the compiled model and of the original model
take turns, and the fastest round counts. A padded call is also compared with a call whose input needs no padding for the same compiled
size. The difference is the time of padding the inputs and trimming the outputs.
"""

from __future__ import annotations

import argparse
import copy
import json
import random
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from transformers import DistilBertConfig, DistilBertForSequenceClassification

import accel
from accel.config import available_processors


def milliseconds(call: Callable[[], Any]) -> float:
    begun = time.perf_counter()
    call()
    return 1e3 * (time.perf_counter() - begun)


@torch.inference_mode()
def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", nargs="?", type=Path, default=Path(__file__).parent / "inductor_shapes.json")
    parser.add_argument("--shapes", type=int, default=50)
    parser.add_argument("--layers", type=int, default=6)
    parser.add_argument("--rounds", type=int, default=5)
    args = parser.parse_args()
    torch.set_num_threads(available_processors())
    torch.manual_seed(0)
    eager: Any = DistilBertForSequenceClassification(DistilBertConfig(n_layers=args.layers)).eval()
    model: Any = accel.accelerate(copy.deepcopy(eager), keep_slower=True)
    lengths = random.Random(0).sample(range(3, 129), args.shapes)
    feeds: dict[int, dict[str, torch.Tensor]] = {}
    for length in lengths:
        ids = torch.randint(1000, 30000, (1, length), generator=torch.Generator().manual_seed(length))
        feeds[length] = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
    worst = 0.0
    begun = time.perf_counter()
    for length in lengths:
        actual, expected = model(**feeds[length]).logits, eager(**feeds[length]).logits
        worst = max(worst, float((actual - expected).abs().max() / expected.abs().max()))
    first_pass_s = time.perf_counter() - begun
    engine = model.acceleration.engine
    sizes = sorted(form.sizes.length for form in engine.forms.values())
    for size in sizes:
        ids = torch.randint(1000, 30000, (1, size), generator=torch.Generator().manual_seed(size))
        feeds.setdefault(size, {"input_ids": ids, "attention_mask": torch.ones_like(ids)})
    times: dict[str, dict[int, float]] = {"compiled": {}, "eager": {}}
    for _ in range(args.rounds):
        for length in feeds:
            for name, variant in (("compiled", model), ("eager", eager)):
                took = milliseconds(lambda variant=variant, length=length: variant(**feeds[length]))  # type: ignore[misc]
                times[name][length] = min(took, times[name].get(length, took))
    against_eager = [times["eager"][length] / times["compiled"][length] for length in lengths]
    against_full = [
        times["compiled"][length] / times["compiled"][next(size for size in sizes if size >= length)]
        for length in lengths
    ]
    report = {
        "shapes": args.shapes, "layers": args.layers, "processors": available_processors(), "torch": torch.__version__,
        "sizes": sizes, "compilations": engine.compilations, "calls not compiled": engine.uncompiled_calls,
        "first_pass_s": round(first_pass_s, 1), "largest difference": worst,
        "times eager at its own length": {
            "median": round(statistics.median(against_eager), 3), "least": round(min(against_eager), 3)
        },
        "of a call that fills the size": {
            "median": round(statistics.median(against_full), 3), "most": round(max(against_full), 3)
        },
    }  # fmt: skip
    args.out.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    print(json.dumps(report, indent=1))


if __name__ == "__main__":
    main()
