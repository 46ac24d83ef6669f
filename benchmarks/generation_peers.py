"""Compare text generation in accel, onnxruntime-genai and optimum-intel: the time of prompts and of decode steps.

    make bench-peers
    python benchmarks/generation_peers.py OUT.json --work FOLDER [--genai PYTHON] [--optimum-intel PYTHON] [--layers 8]

The model has the shape of Qwen2-0.5B with `--layers` layers, a vocabulary of 32,000 and random weights. It generates one row with greedy
search. Each library is installed in a separate environment, and each row of the result is measured in a process that loads its own artifact
once. The processes take turns for `--rounds` rounds. In each round, they generate `--new` tokens from a prompt of each length in
`--prompts`. The result contains two numbers for each row and length:

- first: milliseconds from the prompt to the first token, as the median and the shortest time;
- tokens/s: tokens per second after the first token, as the median and the 95th percentile.

Rows with "inexact" in their names use the defaults of optimum-intel: bfloat16 if the processor supports it, activations in 8 bits, and
keys and values in 8 bits. accel and optimum-intel are timed with a streamer in `generate` of transformers. onnxruntime-genai is timed in
its own decoding loop, as in its examples.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

Timed = tuple[float, list[float]]
"""Seconds until the first token, and the seconds between the following tokens."""

# The 4-bit weights of accel and onnxruntime-genai are symmetric, except in the row with zero points.
ROWS: dict[str, dict[str, Any]] = {
    "PyTorch float32": {"side": "pytorch"},
    "accel cpu int4": {"side": "ours", "backend": "cpu", "scheme": "weight-int4"},
    "accel cpu int4, blocks of 128": {"side": "ours", "backend": "cpu", "scheme": "weight-int4", "block_size": 128},
    "accel cpu int4, blocks of 128, zero points": {
        "side": "ours",
        "backend": "cpu",
        "scheme": "weight-int4",
        "block_size": 128,
        "symmetric": False,
    },
    "accel cpu int8": {"side": "ours", "backend": "cpu", "scheme": "weight-int8"},
    "accel openvino int4": {"side": "ours", "backend": "openvino", "scheme": "weight-int4"},
    "accel openvino int8": {"side": "ours", "backend": "openvino", "scheme": "weight-int8"},
    "accel openvino int4, inexact": {"side": "ours", "backend": "openvino", "scheme": "weight-int4", "inexact": True},
    "accel openvino int8, inexact": {"side": "ours", "backend": "openvino", "scheme": "weight-int8", "inexact": True},
    "optimum-intel int4": {"side": "optimum-intel", "bits": 4},
    "optimum-intel int8": {"side": "optimum-intel", "bits": 8},
    "genai int4": {"side": "genai", "precision": "int4"},
    "genai int4, blocks of 128": {"side": "genai", "precision": "int4", "block_size": 128},
}


def configuration(layers: int, *, tied: bool = True) -> Any:
    """Return a config with the layer sizes of Qwen2-0.5B and a vocabulary of 32,000."""
    import transformers

    return transformers.Qwen2Config(
        vocab_size=32_000, hidden_size=896, intermediate_size=4864, num_hidden_layers=layers, num_attention_heads=14,
        num_key_value_heads=2, max_position_embeddings=32_768, tie_word_embeddings=tied, bos_token_id=1, eos_token_id=2,
    )  # fmt: skip


def shape(folder: Path, layers: int) -> Path:
    """Save a model with random weights and a tokenizer. The model builder of onnxruntime-genai copies the tokenizer."""
    import torch
    import transformers

    from accel.testing.models import tiny_tokenizer

    if not (folder / "config.json").is_file():
        torch.manual_seed(0)
        model = transformers.Qwen2ForCausalLM(configuration(layers)).eval()
        model.generation_config.eos_token_id = None
        model.save_pretrained(folder)
        tiny_tokenizer().save_pretrained(folder)
    return folder


# Functions that run in the measured processes


class Clock:
    """Streamer that records the time of each token. The first recorded time is the time of the prompt."""

    def __init__(self) -> None:
        self.times: list[float] = []

    def put(self, value: Any) -> None:
        """Record the time of a token or of the prompt."""
        self.times.append(time.perf_counter())

    def end(self) -> None:
        """Do nothing."""


def by_generate(model: Any) -> Callable[[list[int], int], Timed]:
    import torch

    def run(prompt: list[int], new: int) -> Timed:
        ids, clock, started = torch.tensor([prompt]), Clock(), time.perf_counter()
        model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=new,
            min_new_tokens=new,
            do_sample=False,
            streamer=clock,
        )
        first, *rest = clock.times[1:]
        return first - started, [after - before for before, after in itertools.pairwise([first, *rest])]

    return run


def pytorch(spec: dict[str, Any]) -> Any:
    import torch
    import transformers

    return by_generate(transformers.AutoModelForCausalLM.from_pretrained(spec["model"], dtype=torch.float32).eval())


def ours(spec: dict[str, Any]) -> Any:
    import accel

    own_scheme = {name: spec[name] for name in ("block_size", "symmetric") if name in spec}
    folder = Path(spec["work"]) / "-".join([spec["backend"], spec["scheme"], *map(str, own_scheme.values())])
    if not folder.is_dir():
        plain = Path(spec["work"]) / f"{spec['backend']}-float32"
        if not plain.is_dir():
            accel.export(spec["model"], plain, backend=spec["backend"])
        if spec["backend"] == "cpu":
            optimized = Path(spec["work"]) / "cpu-O2"
            plain = optimized if optimized.is_dir() else accel.optimize(plain, optimized, level="O2").path
        accel.quantize(plain, folder, scheme=spec["scheme"], **own_scheme)
    options, provider_options = accel.SessionOptions(threads=spec["threads"]), {}
    if spec.get("inexact"):
        half = "bfloat16" if "avx512_bf16" in Path("/proc/cpuinfo").read_text() else None
        options = replace(options, compute_dtype=half, native={"KV_CACHE_PRECISION": "u8"})
        provider_options = {"dynamic_quantization_group_size": 32}
    return by_generate(
        accel.ORTModelForCausalLM.from_pretrained(
            folder, backend=spec["backend"], session_options=options, provider_options=provider_options
        )
    )


def optimum_intel(spec: dict[str, Any]) -> Any:
    from optimum.intel import OVModelForCausalLM, OVWeightQuantizationConfig

    folder = Path(spec["work"]) / f"optimum-intel-{spec['bits']}"
    if not folder.is_dir():
        quantization = OVWeightQuantizationConfig(bits=spec["bits"])
        OVModelForCausalLM.from_pretrained(
            spec["model"], export=True, compile=False, quantization_config=quantization
        ).save_pretrained(folder)
    settings = {"PERFORMANCE_HINT": "LATENCY", "INFERENCE_NUM_THREADS": spec["threads"]}
    return by_generate(OVModelForCausalLM.from_pretrained(folder, ov_config=settings))


def genai(spec: dict[str, Any]) -> Any:
    import onnxruntime_genai as og

    blocks = spec.get("block_size", 32)
    folder = Path(spec["work"]) / f"genai-{spec['precision']}-{blocks}"
    if not (folder / "genai_config.json").is_file():
        builder = [sys.executable, "-m", "onnxruntime_genai.models.builder", "-i", spec["model"], "-o", str(folder)]
        subprocess.run(
            [*builder, "-p", spec["precision"], "-e", "cpu", "-c", str(folder / "cache"),
             "--extra_options", f"block_size={blocks}"],
            check=True, stdout=sys.stderr,
        )  # fmt: skip
        settings = json.loads((folder / "genai_config.json").read_text())
        settings["model"]["decoder"]["session_options"]["intra_op_num_threads"] = spec["threads"]
        (folder / "genai_config.json").write_text(json.dumps(settings))
    model = og.Model(str(folder))

    def run(prompt: list[int], new: int) -> Timed:
        parameters = og.GeneratorParams(model)
        total = len(prompt) + new
        parameters.set_search_options(max_length=total, min_length=total, do_sample=False)
        generator = og.Generator(model, parameters)
        times = [time.perf_counter()]
        generator.append_tokens([prompt])
        for _ in range(new):
            generator.generate_next_token()
            times.append(time.perf_counter())
        first, *rest = [after - before for before, after in itertools.pairwise(times)]
        return first, rest

    return run


SIDES = {"pytorch": pytorch, "ours": ours, "optimum-intel": optimum_intel, "genai": genai}


def answer(spec: dict[str, Any]) -> None:
    """Read lines with a prompt length and a number of tokens from the standard input, and print the times for each line."""
    # The libraries may print text, which must not mix with the printed times, so their output goes to standard error.
    answers, sys.stdout = sys.stdout, sys.stderr
    run = SIDES[spec["side"]](spec)
    run(list(range(10, 26)), 4)
    print("ready", file=answers, flush=True)
    for line in sys.stdin:
        length, new = map(int, line.split())
        print(json.dumps(run([10 + (37 * i) % 31_000 for i in range(length)], new)), file=answers, flush=True)


# Functions that run in the main process


class Side:
    """Process of one library that measures on request."""

    def __init__(self, python: str, spec: dict[str, Any]) -> None:
        environment = {**os.environ, "OMP_NUM_THREADS": str(spec["threads"])}
        if python != sys.executable:
            environment.pop("PYTHONPATH", None)
        self._process = subprocess.Popen(
            [python, __file__, "--answer", json.dumps(spec)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
            env=environment,
        )  # fmt: skip
        assert self._process.stdout is not None
        if self._process.stdout.readline() != "ready\n":
            raise SystemExit(f"{spec} failed; its error is above")

    def run(self, length: int, new: int) -> Timed:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(f"{length} {new}\n")
        self._process.stdin.flush()
        first, rest = json.loads(self._process.stdout.readline())
        return first, rest

    def close(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait(60)


def summary(firsts: list[float], steps: list[float]) -> dict[str, float]:
    steps = sorted(steps)
    return {
        "first_ms": round(statistics.median(firsts) * 1e3, 1),
        "best_first_ms": round(min(firsts) * 1e3, 1),
        "tokens_per_s": round(1 / statistics.median(steps), 1),
        "best_twentieth_tokens_per_s": round(1 / steps[len(steps) // 20], 1),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", nargs="?", type=Path)
    parser.add_argument("--work", type=Path, help="folder for the models")
    parser.add_argument("--genai", help="Python interpreter of the environment with onnxruntime-genai")
    parser.add_argument("--optimum-intel", help="Python interpreter of the environment with optimum-intel")
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--prompts", type=int, nargs="*", default=[128, 1024, 2048])
    parser.add_argument("--new", type=int, default=48)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--rows", nargs="*", choices=ROWS, default=list(ROWS))
    parser.add_argument("--answer", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.answer is not None:
        answer(json.loads(args.answer))
        return
    interpreters = {
        "genai": args.genai, "optimum-intel": args.optimum_intel, "ours": sys.executable, "pytorch": sys.executable,
    }  # fmt: skip
    args.work.mkdir(parents=True, exist_ok=True)
    model = shape(args.work / f"qwen-{args.layers}", args.layers)
    chosen = {name: row for name, row in ROWS.items() if name in args.rows and interpreters[row["side"]] is not None}
    same = {"model": str(model), "work": str(args.work), "threads": args.threads}
    sides = {name: Side(interpreters[row["side"]], {**row, **same}) for name, row in chosen.items()}
    durations: dict[str, dict[int, tuple[list[float], list[float]]]] = {
        name: {length: ([], []) for length in args.prompts} for name in sides
    }
    for turn in range(args.rounds):
        for length in args.prompts:
            for name in list(sides) if turn % 2 == 0 else reversed(list(sides)):
                first, steps = sides[name].run(length, args.new)
                durations[name][length][0].append(first)
                durations[name][length][1].extend(steps)
    for side in sides.values():
        side.close()
    rows = {name: {length: summary(*times) for length, times in lengths.items()} for name, lengths in durations.items()}
    for length in args.prompts:
        print(f"\nprompt of {length}\n{'':32}first ms    best   tokens/s    best")
        for name, lengths in rows.items():
            values = lengths[length]
            print(
                f"{name:32}{values['first_ms']:8.0f}{values['best_first_ms']:8.0f}{values['tokens_per_s']:11.1f}"
                f"{values['best_twentieth_tokens_per_s']:8.1f}"
            )
    if args.out is not None:
        result = {"processors": args.threads, "layers": args.layers, "load": os.getloadavg()[0], "rows": rows}
        args.out.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
