"""Time to the first token of prompts that share a prefix of 1,000 tokens, with and without reuse of its keys and values.

python benchmarks/serving_prefix.py --work FOLDER [--model FOLDER] [--backend cpu] [--rounds 5]

Without --model, the script exports a random float32 model of the shape of a decoder with 60 million parameters. Both engines take turns in
each round with the same prompts, and their tokens are compared.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from pathlib import Path
from typing import Any

import torch

from accel import GenerationEngine, GenerationLimits, GenerationOptions, ORTModelForCausalLM, export
from accel.testing.generative_models import save_generator
from accel.testing.models import VOCABULARY

SHAPE = {
    "hidden_size": 512, "intermediate_size": 2048, "num_hidden_layers": 12, "num_attention_heads": 8, "head_dim": 64,
    "num_key_value_heads": 2, "max_position_embeddings": 2048,
}  # fmt: skip


def first_token(engine: GenerationEngine, ids: list[int]) -> tuple[float, list[int]]:
    """Return the seconds to the first token, and all tokens."""
    start = time.perf_counter()
    generation = engine.submit(ids, GenerationOptions(max_new_tokens=4, temperature=0, ignore_eos=True))
    tokens, first = [], 0.0
    for token in generation:
        first = first or time.perf_counter() - start
        tokens.append(token.id)
    return first, tokens


def main() -> int:
    """Print the times."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--work", type=Path, required=True)
    parser.add_argument("--model", type=Path)
    parser.add_argument("--backend", default="cpu")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--prefix", type=int, default=1000)
    parser.add_argument("--question", type=int, default=30)
    arguments = parser.parse_args()
    folder = arguments.model or arguments.work / f"prefix-{arguments.backend}"
    if not folder.exists():
        source = save_generator(arguments.work / "prefix-source", "qwen3", **SHAPE)
        export(source, folder, task="text-generation", backend=arguments.backend)
    model: Any = ORTModelForCausalLM.from_pretrained(folder, backend=arguments.backend)
    random = torch.Generator().manual_seed(0)

    def tokens(count: int) -> list[int]:
        return [int(token) for token in torch.randint(5, VOCABULARY, (count,), generator=random)]

    times: dict[bool, list[float]] = {True: [], False: []}
    prefix = tokens(arguments.prefix)
    with (
        GenerationEngine(model) as reusing,
        GenerationEngine(model, limits=GenerationLimits(prefix_bytes=0)) as reading,
    ):
        first_token(reusing, prefix + tokens(arguments.question))
        for _ in range(arguments.rounds):
            ids = prefix + tokens(arguments.question)
            results = {}
            for reuses, engine in ((False, reading), (True, reusing)):
                seconds, results[reuses] = first_token(engine, ids)
                times[reuses].append(seconds)
            if results[True] != results[False]:
                print(f"The tokens differ: {results}")
                return 1
    ratios = [slow / fast for slow, fast in zip(times[False], times[True], strict=True)]
    for reuses, values in times.items():
        print(f"reuse {reuses}: median {1e3 * statistics.median(values):.1f} ms")
    print(f"ratio: median {statistics.median(ratios):.1f}, {min(ratios):.1f} to {max(ratios):.1f}; tokens equal")
    return 0


if __name__ == "__main__":
    sys.exit(main())
