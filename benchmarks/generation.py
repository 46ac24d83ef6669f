"""Measure text generation with your own model, or with random weights in the shape of Qwen with 0.5 billion parameters.

    python benchmarks/generation.py --work FOLDER [--model FOLDER] [--rows "PyTorch float32" "cpu float32" ...]

Each row of the table is a separate process that loads the model and several times generates `--new` tokens from a prompt of `--prompt`
tokens. The processes take turns `--rounds` times. The script prints a table and writes FOLDER/generation.json:

- first token: time from the call of `generate` to the first token;
- tokens/s: number of tokens after the first token divided by their time; the median over all runs, with the slowest and the fastest run;
- step: median time of a decode step in `forward` of accel without the run of the runtime, in microseconds;
- long: time of a token with 2,048 cached tokens divided by the time of a token after the prompt;
- memory: resident memory after the generation, and its ratio to the size of the weights.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import torch

ROWS: dict[str, dict[str, Any]] = {
    "PyTorch float32": {"pytorch": "float32"},
    "PyTorch bfloat16": {"pytorch": "bfloat16"},
    "cpu float32": {"backend": "cpu"},
    "cpu float32 O2": {"backend": "cpu", "level": "O2"},
    "cpu int8": {"backend": "cpu", "scheme": "weight-int8"},
    "cpu int4": {"backend": "cpu", "scheme": "weight-int4"},
    "openvino float32": {"backend": "openvino"},
    "openvino bfloat16": {"backend": "openvino", "compute_dtype": "bfloat16"},
    "openvino int8": {"backend": "openvino", "scheme": "weight-int8"},
    "openvino int4": {"backend": "openvino", "scheme": "weight-int4"},
}


def qwen(folder: Path) -> Path:
    """Return the folder of a model with random weights in the shape of Qwen2-0.5B."""
    import transformers

    if not (folder / "config.json").is_file():
        torch.manual_seed(0)
        config = transformers.Qwen2Config(
            vocab_size=151_936, hidden_size=896, intermediate_size=4864, num_hidden_layers=24, num_attention_heads=14,
            num_key_value_heads=2, max_position_embeddings=32_768, tie_word_embeddings=True, bos_token_id=1, eos_token_id=2,
        )  # fmt: skip
        model = transformers.Qwen2ForCausalLM(config).eval()
        model.generation_config.eos_token_id = None
        model.save_pretrained(folder)
    return folder


def artifact_of(work: Path, model: Path, row: dict[str, Any]) -> Path:
    """Return the artifact of a row. If it does not exist, create it and print the duration to standard error."""
    import accel

    def step(name: str, make: Any) -> Path:
        folder = work / name
        if not folder.is_dir():
            started = time.perf_counter()
            make(folder)
            print(f"{name}: {time.perf_counter() - started:.0f} s", file=sys.stderr)
        return folder

    if "pytorch" in row:
        return model
    plain = step(row["backend"], lambda out: accel.export(model, out, backend=row["backend"]))
    if "level" in row:
        return step(f"{row['backend']}-{row['level']}", lambda out: accel.optimize(plain, out, level=row["level"]))
    if "scheme" in row:
        start = plain if row["backend"] == "openvino" else artifact_of(work, model, ROWS["cpu float32 O2"])
        name = f"{row['backend']}-{row['scheme']}"
        return step(name, lambda out: accel.quantize(start, out, scheme=row["scheme"], block_size=row.get("block", 32)))
    return plain


class Clock:
    """Streamer that records the time of each token. The first recorded time is the time of the prompt."""

    def __init__(self) -> None:
        self.times: list[float] = []

    def put(self, _: Any) -> None:
        self.times.append(time.perf_counter())

    def end(self) -> None: ...


def measure(folder: Path, row: dict[str, Any], args: argparse.Namespace) -> dict[str, Any]:
    """Measure one row of the table. This function runs in the process of the row."""
    torch.manual_seed(0)
    ids = torch.randint(10, 30_000, (args.batch, max(args.prompt, args.long)))
    if "pytorch" in row:
        import transformers

        model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=getattr(torch, row["pytorch"])).eval()
    else:
        from accel import ORTModelForCausalLM, SessionOptions

        options = SessionOptions(compute_dtype=row.get("compute_dtype"))
        model = ORTModelForCausalLM.from_pretrained(folder, backend=row["backend"], session_options=options)

    def run(length: int, new: int) -> tuple[float, float]:
        clock, started = Clock(), time.perf_counter()
        prompt = ids[:, :length]
        model.generate(
            prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=new, min_new_tokens=new, do_sample=False,
            streamer=clock if args.batch == 1 else None,
        )  # fmt: skip
        if args.batch > 1:
            return 0.0, new * args.batch / (time.perf_counter() - started)
        first, *rest = clock.times[1:]
        return first - started, len(rest) / (rest[-1] - first)

    run(16, 4)
    runs = [run(args.prompt, args.new) for _ in range(args.runs)]
    result: dict[str, Any] = {"first_token_ms": [1e3 * a for a, _ in runs], "tokens_per_s": [b for _, b in runs]}
    result["resident_gb"] = _resident() / 1e9
    if args.long and args.batch == 1:
        result["long_tokens_per_s"] = run(args.long, 24)[1]
    if "pytorch" not in row:
        result["step_us"] = step_cost(model, ids[:, : args.prompt])
    return result


def _resident() -> int:
    """Return the private resident bytes of this process, including weights that are mapped from a file."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("VmRSS"):
            return int(line.split()[1]) * 1024
    return 0


def step_cost(model: Any, prompt: torch.Tensor) -> float:
    """Return the time of `forward` in a decode step without the run of the runtime, in microseconds."""
    session = model._decoder_session  # noqa: SLF001
    inside: list[float] = []
    run = session.run

    def timed(*args: Any, **kwargs: Any) -> Any:
        started = time.perf_counter()
        try:
            return run(*args, **kwargs)
        finally:
            inside.append(time.perf_counter() - started)

    cache = model(prompt).past_key_values
    token, outside = torch.tensor([[7]]), []
    session.run = timed
    try:
        for position in range(prompt.shape[1], prompt.shape[1] + 24):
            mask = torch.ones((1, position + 1), dtype=torch.int64)
            started = time.perf_counter()
            model(token, attention_mask=mask, past_key_values=cache, logits_to_keep=1)
            outside.append(time.perf_counter() - started)
    finally:
        del session.run
    return 1e6 * statistics.median(a - b for a, b in zip(outside, inside, strict=True))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--work", type=Path, required=True, help="folder for exported and quantized models")
    parser.add_argument("--model", type=Path, help="a transformers folder of a causal language model")
    parser.add_argument("--rows", nargs="*", choices=ROWS, default=list(ROWS))
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--prompt", type=int, default=128)
    parser.add_argument("--new", type=int, default=64)
    parser.add_argument("--long", type=int, default=2048, help="length of the long context; 0 leaves it out")
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--row", help=argparse.SUPPRESS)
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.row:
        print(json.dumps(measure(args.folder, ROWS[args.row], args)))
        return
    args.work.mkdir(parents=True, exist_ok=True)
    model = args.model or qwen(args.work / "qwen")
    folders = {name: artifact_of(args.work, model, ROWS[name]) for name in args.rows}
    results: dict[str, list[dict[str, Any]]] = {name: [] for name in args.rows}
    for turn in range(args.rounds):
        for name in args.rows if turn % 2 == 0 else reversed(args.rows):
            command = [sys.executable, __file__, *sys.argv[1:], "--row", name, "--folder", str(folders[name])]
            answer = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True, env=dict(os.environ))
            results[name].append(json.loads(answer.stdout.splitlines()[-1]))
            print(name, results[name][-1], file=sys.stderr)
    weights = sum(path.stat().st_size for path in model.glob("*.safetensors"))
    base = None
    report: dict[str, Any] = {"shape": [args.batch, args.prompt, args.new], "weights_gb": weights / 1e9, "rows": {}}
    print(
        "| | first token ms | tokens/s (slowest to fastest) | ratio | step us | long | memory GB |\n|---|---|---|---|---|---|---|"
    )
    for name, rounds in results.items():
        speeds = [speed for measurement in rounds for speed in measurement["tokens_per_s"]]
        middle = statistics.median(speeds)
        base = base or middle
        row = {
            "first_token_ms": statistics.median(ms for measurement in rounds for ms in measurement["first_token_ms"]),
            "tokens_per_s": middle,
            "spread": [min(speeds), max(speeds)],
            "ratio": middle / base,
            "resident_gb": max(measurement["resident_gb"] for measurement in rounds),
            "disk_gb": sum(p.stat().st_size for p in folders[name].iterdir() if p.is_file()) / 1e9,
            "step_us": statistics.median(measurement.get("step_us", 0) for measurement in rounds),
        }
        longs = [measurement["long_tokens_per_s"] for measurement in rounds if "long_tokens_per_s" in measurement]
        row["long"] = middle / statistics.median(longs) if longs else None
        report["rows"][name] = row
        long = f"{row['long']:.2f}" if row["long"] else ""
        print(
            f"| {name} | {row['first_token_ms']:.0f} | {middle:.1f} ({min(speeds):.1f} to {max(speeds):.1f}) | {row['ratio']:.2f} | "
            f"{row['step_us']:.0f} | {long} | {row['resident_gb']:.2f} |"
        )
    (args.work / "generation.json").write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
