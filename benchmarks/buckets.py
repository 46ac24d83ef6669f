"""Measure how much faster a model is with static shapes: each artifact with and without `buckets`, at the length of a bucket.

    python benchmarks/buckets.py --work FOLDER [--model MODEL_FOLDER --sequence 16] [--backend cpu]

Without `--model`, the script uses the model in the shape of DistilBERT from `openvino_backend.py`, with one row of 128 tokens. Each variant
runs in its own process, and the processes take turns. The inputs have the length of the bucket, so no variant pads. The script prints one
JSON object, in which `gain` is the median time without buckets divided by the median time with buckets.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from openvino_backend import TASK, create_once, distilbert, int8_of, time_variants

from accel import SessionOptions, export, quantize
from accel.measuring.latency.variants import Variant

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("--work", type=Path, required=True, help="folder for exported and quantized models")
parser.add_argument("--model", type=Path, help="a transformers folder for text classification")
parser.add_argument("--sequence", type=int, default=128)
parser.add_argument("--backend", choices=("cpu", "openvino"), default="cpu")
parser.add_argument("--rounds", type=int, default=8)
parser.add_argument("--calls", type=int, default=25)
args = parser.parse_args()

args.work.mkdir(parents=True, exist_ok=True)
source = args.model or distilbert(args.work / "distilbert")
if args.backend == "cpu":
    floating = create_once(args.work / f"{source.name}-onnx", lambda out: export(source, out))
    int8 = create_once(
        args.work / f"{source.name}-onnx-int8", lambda out: quantize(floating, out, scheme="dynamic-int8")
    )
else:
    floating = create_once(args.work / f"{source.name}-ir", lambda out: export(source, out, backend="openvino"))
    types = len(floating.component().inputs) == 3
    int8 = int8_of(floating, args.work / f"{source.name}-int8", args.sequence, types)
options = {"": SessionOptions(), ", buckets": SessionOptions(buckets=(args.sequence // 2, args.sequence))}
variants = [
    Variant(name=f"{word}{how}", path=artifact.path, task=TASK, backend=args.backend, options=chosen)
    for word, artifact in (("float32", floating), ("int8", int8))
    for how, chosen in options.items()
]
cells = time_variants(variants, 1, args.sequence, args.rounds, args.calls)
medians = {name: cell.latency.median for name, cell in cells.items()}
print(
    json.dumps(
        {
            "model": source.name,
            "backend": args.backend,
            "shape": [1, args.sequence],
            "median_ms": {name: round(ms, 3) for name, ms in medians.items()},
            "p5_p95_ms": {name: [round(cell.p5, 3), round(cell.latency.p95, 3)] for name, cell in cells.items()},
            "gain": {word: round(medians[word] / medians[f"{word}, buckets"], 3) for word in ("float32", "int8")},
        },
        indent=1,
    )
)
