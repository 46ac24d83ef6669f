"""Compare static int8 models that Neural Compressor and accel quantized: accuracy and speed in ONNX Runtime.

    python benchmarks/static_int8.py MODEL TRAIN.csv TEST.csv OUT.json --keep FOLDER [--parts prepare,accuracy,speed]

The CSV files have the columns `text` and `category`. Both quantizers calibrate with the same 256 rows of TRAIN.csv. Run the part `speed`
on a quiet machine. Each part adds its results to OUT.json.
"""

from __future__ import annotations

import argparse
import json
import os
from pathlib import Path
from typing import Any

from openvino_backend import time_variants

import accel
from accel.backends.machine import machine
from accel.measuring.latency.variants import Variant

COLUMNS = {"text": "text", "label": "category"}
TASK = "text-classification"
SHAPES = ((1, 16), (1, 128), (8, 64))


def prepare(model: Path, train: Path, root: Path) -> dict[str, Path]:
    """Return the artifacts by name. Existing artifacts are not created again."""
    paths = {name: root / name for name in ("float32", "own", "own-O2", "neural-compressor", "neural-compressor-O2")}
    integer_model = root / "integers"
    if not paths["float32"].exists():
        accel.export(model, paths["float32"])
    settings: dict[str, Any] = {"scheme": "static-int8", "calibration": str(train)}
    if not paths["own"].exists():
        accel.quantize(paths["float32"], paths["own"], backend="cpu", **settings)
    if not paths["own-O2"].exists():
        accel.optimize(paths["float32"], root / "float32-O2", level="O2")
        accel.quantize(root / "float32-O2", paths["own-O2"], backend="cpu", **settings)
    if not integer_model.exists():
        accel.quantize(model, integer_model, backend="neural-compressor", **settings)
    if not paths["neural-compressor"].exists():
        accel.export(integer_model, paths["neural-compressor"])
    if not paths["neural-compressor-O2"].exists():
        accel.optimize(paths["neural-compressor"], paths["neural-compressor-O2"], level="O2")
    return paths


def accuracy(paths: dict[str, Path], test: Path) -> dict[str, float]:
    """Return the accuracy of each artifact on the rows of TEST.csv, in per cent."""
    return {name: 100 * accel.evaluate(path, str(test), columns=COLUMNS).value for name, path in paths.items()}


def speed(paths: dict[str, Path], rounds: int) -> dict[str, Any]:
    """Return the median, the 5th and the 95th percentile of the time of a call for each shape, in milliseconds.

    Each variant runs in its own process, and the processes take turns.
    """
    results: dict[str, Any] = {}
    for batch, length in SHAPES:
        variants = [Variant(name=name, path=path, task=TASK) for name, path in paths.items()]
        cells = time_variants(variants, batch, length, rounds, 20)
        rows = {name: [cell.latency.median, cell.p5, cell.latency.p95] for name, cell in cells.items()}
        results[f"{batch}x{length}"] = {
            "ms": rows,
            "neural-compressor / own": rows["neural-compressor"][0] / rows["own"][0],
            "neural-compressor-O2 / own-O2": rows["neural-compressor-O2"][0] / rows["own-O2"][0],
        }
    return results


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path)
    parser.add_argument("train", type=Path)
    parser.add_argument("test", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("--keep", type=Path, required=True)
    parser.add_argument("--rounds", type=int, default=8)
    parser.add_argument("--parts", default="prepare,accuracy,speed")
    parser.add_argument(
        "--only", help="names of the artifacts whose accuracy is measured, separated by commas (default: all artifacts)"
    )
    arguments = parser.parse_args()
    arguments.keep.mkdir(parents=True, exist_ok=True)
    report: dict[str, Any] = json.loads(arguments.out.read_text()) if arguments.out.exists() else {}
    paths = prepare(arguments.model, arguments.train, arguments.keep)
    if "accuracy" in arguments.parts:
        names = arguments.only.split(",") if arguments.only else list(paths)
        accuracies = accuracy({name: paths[name] for name in names}, arguments.test)
        report["accuracy"] = {**report.get("accuracy", {}), **accuracies}
    if "speed" in arguments.parts:
        report["speed"] = speed(paths, arguments.rounds)
        facts = machine()
        report["processors"], report["libraries"] = facts["processors"], facts["libraries"]
    arguments.out.write_text(json.dumps(report, indent=1) + "\n")
    print(json.dumps(report, indent=1))


if __name__ == "__main__":
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    main()
