"""Compare the time of a call with the OpenVINO backend of accel and with optimum-intel.

    python benchmarks/optimum_intel.py --work FOLDER --peer-python PYTHON_OF_OPTIMUM_INTEL [--model MODEL_FOLDER --sequence 16]

Without `--model`, the script uses the model in the shape of DistilBERT from `openvino_backend.py`, with one row of 128 tokens. Both
libraries run the same model on the same inputs with the same precision, number of threads, performance hint and thread pinning. Each
library has its own process and environment, and the processes take turns. The model is called as users call it: `model(**inputs)` with
torch tensors as inputs and outputs. In float32 and bfloat16, each library runs its own export. In int8, and in rows named "our graph in
both", both libraries run the graph of accel. The processes are started several times, because their memory layout changes times by some
percent. The script prints one JSON object, in which `speed` is the time of optimum-intel divided by the time of accel: above 1, accel is
faster.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

HINTS = {"float32": "f32", "bfloat16": "bf16"}


def feeds(types: bool, sequence: int) -> dict[str, torch.Tensor]:
    ids = torch.randint(1000, 30000, (1, sequence), generator=torch.Generator().manual_seed(0))
    row = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
    return row | ({"token_type_ids": torch.zeros_like(ids)} if types else {})


# Functions that run in the measured processes


def load_ours(spec: dict[str, Any]) -> Any:
    from accel import ORTModelForSequenceClassification, SessionOptions

    return ORTModelForSequenceClassification.from_pretrained(
        spec["path"],
        backend="openvino",
        session_options=SessionOptions(
            threads=spec["threads"], compute_dtype=spec["precision"], buckets=tuple(spec["buckets"])
        ),
    )


def load_theirs(spec: dict[str, Any]) -> Any:
    from optimum.intel import OVModelForSequenceClassification

    settings = {
        "PERFORMANCE_HINT": "LATENCY",
        "INFERENCE_NUM_THREADS": spec["threads"],
        "INFERENCE_PRECISION_HINT": HINTS[spec["precision"]],
        "ENABLE_CPU_PINNING": False,
        "DYNAMIC_QUANTIZATION_GROUP_SIZE": 0,
    }
    path = Path(spec["path"])
    if not (path / "openvino_model.xml").is_file():
        OVModelForSequenceClassification.from_pretrained(spec["source"], export=True, compile=False).save_pretrained(
            str(path)
        )
    model = OVModelForSequenceClassification.from_pretrained(str(path), ov_config=settings)
    model.compile()
    return model


def serve(load: Callable[[], Any], inputs: dict[str, torch.Tensor], threads: int) -> None:
    """Read lines with a number of calls from the standard input, make these calls, and print their times."""
    # The libraries may print text, which must not mix with the printed times, so their output goes to standard error.
    answers, sys.stdout = sys.stdout, sys.stderr
    torch.set_num_threads(threads)
    model = load()
    clock = time.perf_counter_ns
    with torch.inference_mode():
        for _ in range(30):
            logits = model(**inputs).logits
        print(json.dumps(logits.tolist()), file=answers, flush=True)
        for line in sys.stdin:
            times = []
            for _ in range(int(line)):
                started = clock()
                model(**inputs)
                times.append((clock() - started) / 1e6)
            print(json.dumps(times), file=answers, flush=True)


class Side:
    """Process of one library that runs `serve` and measures on request."""

    def __init__(self, python: str, spec: dict[str, Any], script: str = __file__) -> None:
        self._process = subprocess.Popen(
            [python, script, "--serve", json.dumps(spec)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        self.logits = torch.tensor(self._answer())

    def time(self, calls: int) -> list[float]:
        return self.ask(str(calls))

    def ask(self, request: str) -> list[float]:
        """Send a line to the process, and return the times that it answers, in milliseconds."""
        assert self._process.stdin is not None
        self._process.stdin.write(f"{request}\n")
        self._process.stdin.flush()
        times: list[float] = self._answer()
        return times

    def close(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait(timeout=60)

    def _answer(self) -> Any:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise SystemExit("A measured process failed. Its error message is printed above.")
        return json.loads(line)


# Functions that run in the main process


def summary(times: list[float]) -> dict[str, float]:
    """Return the median, the 5th percentile and the slowest time, in milliseconds."""
    ordered = sorted(times)
    return {
        "median_ms": round(statistics.median(ordered), 3),
        "p5_ms": round(ordered[len(ordered) // 20], 3),
        "p95_ms": round(ordered[-1 - len(ordered) // 20], 3),
    }


def compare(
    args: argparse.Namespace, types: bool, ours: dict[str, Any], theirs: dict[str, Any], precision: str
) -> dict[str, Any]:
    """Measure both libraries in turns, several times with new processes."""
    same = {"precision": precision, "threads": args.threads, "types": types, "sequence": args.sequence}
    specs = {
        "ours": (sys.executable, {"side": "ours", "buckets": [], **ours, **same}),
        "theirs": (args.peer_python, {"side": "theirs", **theirs, **same}),
    }
    times: dict[str, list[float]] = {"ours": [], "theirs": []}
    ratios: list[float] = []
    difference = 0.0
    for again in range(args.processes):
        sides = {name: Side(*specs[name]) for name in (specs if again % 2 == 0 else reversed(specs))}
        difference = max(difference, float((sides["ours"].logits - sides["theirs"].logits).abs().max()))
        for turn in range(args.rounds):
            medians = {}
            for name in ("ours", "theirs") if turn % 2 == 0 else ("theirs", "ours"):
                durations = sides[name].time(args.calls)
                times[name] += durations
                medians[name] = statistics.median(durations)
            ratios.append(medians["theirs"] / medians["ours"])
        for side in sides.values():
            side.close()
    low, middle, high = statistics.quantiles(ratios, n=4)
    return {
        **{name: summary(column) for name, column in times.items()},
        "speed": round(middle, 3),
        "speed_quartiles_of_rounds": [round(low, 3), round(high, 3)],
        "max_abs_difference": round(difference, 6),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--work", type=Path, help="folder for exported and quantized models")
    parser.add_argument("--peer-python", help="Python interpreter of the environment with optimum-intel")
    parser.add_argument("--model", type=Path, help="a transformers folder for text classification")
    parser.add_argument("--sequence", type=int, default=128)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--processes", type=int, default=3, help="number of times that the processes are started")
    parser.add_argument("--rounds", type=int, default=8)
    parser.add_argument("--calls", type=int, default=25)
    parser.add_argument("--rows", nargs="*", help="names of the rows to measure (default: all rows)")
    parser.add_argument("--serve", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.serve:
        spec = json.loads(args.serve)
        load = load_ours if spec["side"] == "ours" else load_theirs
        serve(lambda: load(spec), feeds(spec["types"], spec["sequence"]), spec["threads"])
        return
    if args.work is None or args.peer_python is None:
        parser.error("The options --work and --peer-python are required.")
    from openvino_backend import create_once, distilbert, int8_of

    from accel import export
    from accel.interfaces.cpu_features import cpu_flags

    args.work.mkdir(parents=True, exist_ok=True)
    source = distilbert(args.work / "distilbert") if args.model is None else args.model
    name = source.name
    ir = create_once(args.work / f"{name}-ir", lambda out: export(source, out, backend="openvino"))
    types = any(spec.name == "token_type_ids" for spec in ir.component().inputs)
    int8 = int8_of(ir, args.work / f"{name}-int8", args.sequence, types)
    peer = {"source": str(source), "path": str(args.work / f"{name}-optimum-intel")}
    buckets = {"buckets": [args.sequence // 2, args.sequence]}
    ours, both, quantized = {"path": str(ir.path)}, {"path": str(ir.path)}, {"path": str(int8.path)}
    rows = {
        "float32": (ours, peer, "float32"),
        "float32, our graph in both": (ours, both, "float32"),
        "float32, ours with buckets": (ours | buckets, peer, "float32"),
        "bfloat16": (ours, peer, "bfloat16"),
        "bfloat16, our graph in both": (ours, both, "bfloat16"),
        "bfloat16, ours with buckets": (ours | buckets, peer, "bfloat16"),
        "int8": (quantized, quantized, "float32"),
        "int8, ours with buckets": (quantized | buckets, quantized, "float32"),
        "int8, bfloat16 elsewhere": (quantized, quantized, "bfloat16"),
        "int8, bfloat16 elsewhere, ours with buckets": (quantized | buckets, quantized, "bfloat16"),
    }
    result = {}
    computes = {"float32", "bfloat16"} if {"avx512_bf16", "amx_bf16"} & set(cpu_flags()) else {"float32"}
    for title, row in rows.items():
        if row[-1] not in computes:
            print(f"{title}: this processor does not compute in {row[-1]}", file=sys.stderr)
        elif not args.rows or title in args.rows:
            result[title] = compare(args, types, *row)
            print(title, result[title], file=sys.stderr)
    print(json.dumps({"model": name, "shape": [1, args.sequence], **result}, indent=1))


if __name__ == "__main__":
    main()
