"""Measure the accuracy of quantized graphs for GPUs, on the CPU. Q/DQ pairs have the same meaning in every runtime.

    python benchmarks/gpu_quantization.py MODEL_FOLDER TEST.csv CALIBRATION.csv

The script prints one JSON object with the accuracy of the float16 artifact and of each variant of each quantization scheme.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from pathlib import Path
from typing import Any

import accel

VARIANTS: dict[str, dict[str, Any]] = {
    "feed-forward layers": {"exclude": ("re:attention",)},
    "all linear layers": {},
    "attention's products too": {"operators": ("MatMul", "Gemm", "Attention")},
}


def main(model: str, test: str, calibration: str) -> None:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        exported = accel.export(model, folder / "float")
        half = accel.optimize(exported, folder / "float16", backend="tensorrt", level="O4")
        accuracies = {"float16": round(100 * accel.evaluate(half, test, max_length=64, backend="cpu").value, 2)}
        for scheme in ("static-int8", "static-fp8"):
            for variant, settings in VARIANTS.items():
                quantized = accel.quantize(
                    half, folder / f"{scheme} {variant}", backend="tensorrt", scheme=scheme, calibration=calibration,
                    samples=256, max_length=64, **settings,
                )  # fmt: skip
                value = accel.evaluate(quantized, test, max_length=64, backend="cpu").value
                accuracies[f"{scheme}, {variant}"] = round(100 * value, 2)
                print(scheme, variant, accuracies[f"{scheme}, {variant}"], file=sys.stderr)
        print(json.dumps(accuracies, indent=2))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", help="transformers folder")
    parser.add_argument("test", help="labelled rows to measure on")
    parser.add_argument("calibration", help="rows to calibrate with")
    args = parser.parse_args()
    main(args.model, args.test, args.calibration)
