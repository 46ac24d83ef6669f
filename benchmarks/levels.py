"""Measure the accuracy of every optimization level in float32 and after quantization, and the memory of the calibration.

    python benchmarks/levels.py MODEL_FOLDER TEST.csv TRAIN.csv > levels.json

The script prints one JSON object. It contains the accuracy for each optimization level and quantization scheme (256 calibration rows),
and the additional peak memory of a separate process that calibrates with 64 and with 640 rows.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path

import accel
from accel import QuantizeConfig
from accel.data.batches import calibration_batches
from accel.measuring.processes import peak_memory

LEVELS = (None, "O1", "O2", "O3")
SCHEMES = (None, "dynamic-int8", "static-int8")
_CHILD = "--calibrate"


def calibrate(artifact: str, data: str, samples: int) -> None:
    """Quantize a model and print the peak memory in kilobytes. This function runs in a separate process."""
    config = QuantizeConfig(scheme="static-int8", calibration="percentile", samples=samples)
    opened = accel.Artifact.load(artifact)
    batches = calibration_batches(opened, data, config=config)
    with tempfile.TemporaryDirectory() as folder:
        accel.quantize(opened, Path(folder) / "out", calibration=batches, config=config)
    print(peak_memory() // 1024)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name in ("model", "test", "train"):
        parser.add_argument(name)
    args = parser.parse_args()
    accuracies: dict[str, dict[str, float]] = {}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        plain = accel.export(args.model, folder / "plain")
        for level in LEVELS:
            optimized = plain if level is None else accel.optimize(plain, folder / level, level=level)
            row = accuracies[level or "plain"] = {}
            for scheme in SCHEMES:
                artifact = optimized
                if scheme is not None:
                    calibration = args.train if scheme == "static-int8" else None
                    artifact = accel.quantize(
                        optimized, folder / f"{level}-{scheme}", scheme=scheme, calibration=calibration, samples=256
                    )
                row[scheme or "float32"] = round(100 * accel.evaluate(artifact, args.test).value, 2)
            print(level, row, file=sys.stderr)
        peaks = {}
        for samples in (64, 640):
            command = [sys.executable, __file__, _CHILD, str(plain.path), args.train, str(samples)]
            peaks[samples] = int(subprocess.run(command, capture_output=True, text=True, check=True).stdout.split()[-1])
    growth = peaks[640] / peaks[64] - 1
    print(json.dumps({"accuracy": accuracies, "calibration_peak_kb": peaks, "growth": round(growth, 3)}, indent=1))


if __name__ == "__main__":
    if sys.argv[1:2] == [_CHILD]:
        calibrate(sys.argv[2], sys.argv[3], int(sys.argv[4]))
    else:
        main()
