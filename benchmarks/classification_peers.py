"""Compare the latency of accel, optimum-onnx, optimum-intel and PyTorch for DistilBERT with one row of 128 tokens.

    make bench-peers
    python benchmarks/classification_peers.py OUT.json --work FOLDER [--optimum-onnx PYTHON] [--optimum-intel PYTHON]

The model has the shape of DistilBERT and random weights. Each library is installed in a separate environment, and each row of the result is
measured in a process that loads its own artifact once. The model is called as users call it: `model(**inputs)` with torch tensors as inputs
and outputs. The processes take turns. Each library uses its own graph and its own default settings. (In `optimum_intel.py`, both libraries
use the same settings.) Results are the median and the 5th percentile, in milliseconds.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from pathlib import Path
from typing import Any

from optimum_intel import Side, feeds, serve, summary

SEQUENCE = 128
ROWS: dict[str, dict[str, Any]] = {
    "PyTorch float32": {"side": "pytorch"},
    "accel openvino int8": {"side": "ours", "backend": "openvino", "artifact": "distilbert-int8"},
    "accel openvino int8, bfloat16 elsewhere": {
        "side": "ours",
        "backend": "openvino",
        "artifact": "distilbert-int8",
        "options": {"compute_dtype": "bfloat16"},
    },
    "accel openvino int8, bfloat16 elsewhere, buckets": {
        "side": "ours",
        "backend": "openvino",
        "artifact": "distilbert-int8",
        "options": {"compute_dtype": "bfloat16", "buckets": [64, 128]},
    },
    "accel cpu int8": {"side": "ours", "backend": "cpu", "artifact": "distilbert-cpu-int8"},
    "optimum-onnx int8": {"side": "optimum-onnx"},
    "optimum-intel as loaded": {"side": "optimum-intel"},
    "optimum-intel, static shapes": {"side": "optimum-intel", "static": True},
    "optimum-intel, int8 weights": {"side": "optimum-intel", "bits": 8},
}


# Functions that run in the measured processes


def load(spec: dict[str, Any]) -> Any:
    """Return the model for a row of the result. If its artifact does not exist, create it."""
    work, source, threads = Path(spec["work"]), Path(spec["work"]) / "distilbert", spec["threads"]
    if spec["side"] == "pytorch":
        from transformers import AutoModelForSequenceClassification

        return AutoModelForSequenceClassification.from_pretrained(source).eval()
    if spec["side"] == "ours":
        from accel import ORTModelForSequenceClassification as Ours
        from accel import SessionOptions

        options = SessionOptions(threads=threads, **spec.get("options", {}))
        return Ours.from_pretrained(work / spec["artifact"], backend=spec["backend"], session_options=options)
    if spec["side"] == "optimum-onnx":
        return optimum_onnx(source, work / "optimum-onnx", threads)
    from optimum.intel import OVModelForSequenceClassification

    if spec.get("bits"):
        return OVModelForSequenceClassification.from_pretrained(source, export=True, load_in_8bit=True)
    model = OVModelForSequenceClassification.from_pretrained(source, export=True, compile=not spec.get("static"))
    if spec.get("static"):
        model.reshape(1, SEQUENCE)
        model.compile()
    return model


def optimum_onnx(source: Path, folder: Path, threads: int) -> Any:
    """Quantize a model with optimum-onnx: dynamic int8 for the instructions of this processor."""
    import onnxruntime
    from optimum.onnxruntime import ORTModelForSequenceClassification, ORTQuantizer
    from optimum.onnxruntime.configuration import AutoQuantizationConfig

    if not folder.exists():
        ORTModelForSequenceClassification.from_pretrained(source, export=True).save_pretrained(f"{folder}-float32")
        flags = Path("/proc/cpuinfo").read_text(encoding="utf-8")
        kinds = {"avx512_vnni": AutoQuantizationConfig.avx512_vnni, "avx512f": AutoQuantizationConfig.avx512}
        kind = next((factory for flag, factory in kinds.items() if flag in flags), AutoQuantizationConfig.avx2)
        ORTQuantizer.from_pretrained(f"{folder}-float32").quantize(
            save_dir=folder, quantization_config=kind(is_static=False, per_channel=True)
        )
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = threads
    return ORTModelForSequenceClassification.from_pretrained(
        folder, file_name="model_quantized.onnx", session_options=options
    )


# Functions that run in the main process


def prepare(work: Path) -> None:
    """Create the model and the artifacts of accel."""
    from openvino_backend import create_once, distilbert, int8_of, token_rows

    from accel import export, quantize

    work.mkdir(parents=True, exist_ok=True)
    source = distilbert(work / "distilbert")
    int8_of(
        create_once(work / "distilbert-ir", lambda out: export(source, out, backend="openvino")),
        work / "distilbert-int8",
        SEQUENCE,
    )
    graph = create_once(work / "distilbert-onnx", lambda out: export(source, out))
    rows = token_rows(16, 2, SEQUENCE)
    create_once(
        work / "distilbert-cpu-int8",
        lambda out: quantize(graph, out, backend="cpu", scheme="static-int8", calibration=rows),
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", nargs="?", type=Path)
    parser.add_argument("--work", type=Path, help="folder for exported and quantized models")
    parser.add_argument("--optimum-onnx", help="Python interpreter of the environment with optimum-onnx")
    parser.add_argument("--optimum-intel", help="Python interpreter of the environment with optimum-intel")
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--calls", type=int, default=15)
    parser.add_argument("--rows", nargs="*", choices=ROWS, default=list(ROWS))
    parser.add_argument("--serve", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.serve:
        spec = json.loads(args.serve)
        serve(lambda: load(spec), feeds(False, SEQUENCE), spec["threads"])
        return
    if args.out is None or args.work is None:
        parser.error("OUT.json and --work are needed")
    prepare(args.work)
    pythons = {
        "pytorch": sys.executable,
        "ours": sys.executable,
        "optimum-onnx": args.optimum_onnx,
        "optimum-intel": args.optimum_intel,
    }
    same = {"work": str(args.work.resolve()), "threads": args.threads}
    sides = {
        name: Side(pythons[row["side"]], {**row, **same}, __file__)
        for name, row in ROWS.items()
        if name in args.rows and pythons[row["side"]] is not None
    }
    times: dict[str, list[float]] = {name: [] for name in sides}
    for turn in range(args.rounds):
        for name in sides if turn % 2 == 0 else reversed(sides):
            times[name] += sides[name].time(args.calls)
    for side in sides.values():
        side.close()
    rows = {name: summary(column) for name, column in times.items()}
    report = {"processors": args.threads, "shape": [1, SEQUENCE], "rows": rows}
    args.out.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    print(json.dumps(report, indent=1))


if __name__ == "__main__":
    main()
