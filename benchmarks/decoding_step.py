"""Measure the time of a decode step in addition to the run of the runtime, in `forward` and in `generate`.

    python benchmarks/decoding_step.py [--json OUT] [--rounds 15]

The decoder has two layers, so that the runs of the graph are short. It runs with one thread and one row. The time of the runtime's runs is
subtracted. The time of 100 tokens is subtracted from the time of 400 tokens, so that the prompt and the set-up do not count. Results are
microseconds per token: the second best round and the median. ADR 31 and ADR 38 contain measured values.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import openvino
import torch
from transformers import Qwen2Config, Qwen2ForCausalLM

from accel import ORTModelForCausalLM, SessionOptions, export
from accel_plugins.ortkit.runtime.values import ReusedBinding

RUNS = {"cpu": (ReusedBinding, "run"), "openvino": (openvino.InferRequest, "infer")}
FEW, MANY, PROMPT = 100, 400, 16


def decoder(folder: Path) -> Path:
    """Return the folder of the decoder, which never generates an end token."""
    torch.manual_seed(0)
    config = Qwen2Config(
        vocab_size=2000,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=4096,
        bos_token_id=1,
        eos_token_id=2,
    )
    model = Qwen2ForCausalLM(config).eval()
    model.generation_config.eos_token_id = None
    model.save_pretrained(folder)
    return folder


@contextmanager
def runtime_timed(backend: str) -> Iterator[list[float]]:
    """Record the duration of each run of the runtime inside the context, in microseconds."""
    owner, name = RUNS[backend]
    real: Callable[..., Any] = getattr(owner, name)
    durations: list[float] = []

    def timed(self: Any, *args: Any, **kwargs: Any) -> Any:
        started = time.perf_counter()
        result = real(self, *args, **kwargs)
        durations.append((time.perf_counter() - started) * 1e6)
        return result

    setattr(owner, name, timed)
    try:
        yield durations
    finally:
        setattr(owner, name, real)


def ways(model: ORTModelForCausalLM) -> dict[str, Callable[[int], object]]:
    """Return the functions to compare by name. Each function has one argument, the number of tokens."""
    ids = torch.randint(3, 2000, (1, PROMPT))

    def forward(tokens: int) -> None:
        cache, mask = model.new_cache(), torch.ones((1, PROMPT + tokens), dtype=torch.int64)
        model(input_ids=ids, past_key_values=cache)
        for i in range(tokens - 1):
            model(
                input_ids=ids[:, :1],
                attention_mask=mask[:, : PROMPT + 1 + i],
                past_key_values=cache,
                logits_to_keep=1,
            )

    return {
        "forward": forward,
        "greedy": lambda n: model.generate(ids, max_new_tokens=n, do_sample=False),
        "sampled": lambda n: model.generate(ids, max_new_tokens=n, do_sample=True, top_k=0),
        "sampled, top k and p": lambda n: model.generate(ids, max_new_tokens=n, do_sample=True, top_k=50, top_p=0.9),
    }


def main() -> None:
    """Measure ONNX Runtime and OpenVINO, and print the table as JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--rounds", type=int, default=15)
    args = parser.parse_args()
    torch.set_num_threads(1)
    results: dict[str, dict[str, list[float]]] = {}
    with tempfile.TemporaryDirectory() as folder:
        source = decoder(Path(folder) / "decoder")
        for backend in RUNS:
            artifact = export(source, Path(folder) / backend, task="text-generation", backend=backend)
            model = ORTModelForCausalLM.from_pretrained(
                artifact.path, backend=backend, session_options=SessionOptions(threads=1)
            )
            results[backend] = {}
            with runtime_timed(backend) as runs:

                def beyond(way: Callable[[int], object], tokens: int, runs: list[float] = runs) -> float:
                    runs.clear()
                    started = time.perf_counter()
                    way(tokens)
                    return (time.perf_counter() - started) * 1e6 - sum(runs)

                for name, way in ways(model).items():
                    beyond(way, 8)
                    rounds = sorted((beyond(way, MANY) - beyond(way, FEW)) / (MANY - FEW) for _ in range(args.rounds))
                    results[backend][name] = [round(rounds[1], 1), round(statistics.median(rounds), 1)]
    print(json.dumps(results, indent=2))
    if args.json is not None:
        args.json.write_text(json.dumps(results, indent=2) + "\n")


if __name__ == "__main__":
    main()
