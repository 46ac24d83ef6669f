"""Measure the time that `model(**inputs)` needs in addition to `run` of the same ONNX Runtime session with the same arrays.

    python benchmarks/wrapper_cost.py [MODEL_FOLDER] [--sequence 16] [--calls 1000]

The script uses one thread and batch size 1. Both kinds of calls take turns. The script prints the medians in microseconds. Without a
folder, it uses the model that ships with `accel`.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from pathlib import Path

import torch

import accel
from accel import ORTModelForSequenceClassification, SessionOptions

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("model", nargs="?", default=Path(accel.__file__).parent / "demo" / "model")
parser.add_argument("--sequence", type=int, default=16)
parser.add_argument("--calls", type=int, default=1000)
args = parser.parse_args()

torch.set_num_threads(1)
model = ORTModelForSequenceClassification.from_pretrained(args.model, session_options=SessionOptions(threads=1))
ids = torch.randint(5, 900, (1, args.sequence))
inputs = {"input_ids": ids, "attention_mask": torch.ones_like(ids), "token_type_ids": torch.zeros_like(ids)}
runtime = model.sessions["model"].runtime
arrays = {name: tensor.numpy() for name, tensor in inputs.items()}
names = [value.name for value in runtime.get_outputs()]

wrapped, raw = [], []
with torch.inference_mode():
    for _ in range(args.calls + 100):
        started = time.perf_counter_ns()
        model(**inputs)
        middle = time.perf_counter_ns()
        runtime.run(names, arrays)
        raw.append(time.perf_counter_ns() - middle)
        wrapped.append(middle - started)
wrapped, raw = wrapped[100:], raw[100:]
result = {
    "model": Path(args.model).name,
    "shape": [1, args.sequence],
    "wrapped_us": statistics.median(wrapped) / 1e3,
    "raw_us": statistics.median(raw) / 1e3,
    "difference_us": statistics.median(a - b for a, b in zip(wrapped, raw, strict=True)) / 1e3,
}
print(json.dumps(result))
