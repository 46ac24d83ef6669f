"""Measure the accuracy of a float export against PyTorch, and search for the fastest quantization within an accuracy budget.

    python benchmarks/accuracy.py MODEL_FOLDER DATA.csv [--calibration DATA.csv] [--max-drop 0.3] [--max-length 64]

Without arguments, the script uses the model and the data that ship with `accel`. It prints one JSON object with the evaluation and its
comparison with PyTorch, the seconds of both models for all rows, and the table of the search.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from pathlib import Path

import accel
from accel.demo import MODEL, TEST_SET
from accel.errors import BudgetError

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("model", nargs="?", default=MODEL)
parser.add_argument("data", nargs="?", default=TEST_SET)
parser.add_argument("--calibration")
parser.add_argument("--max-drop", type=float, default=0.3)
parser.add_argument("--max-length", type=int, default=64)
parser.add_argument("--evaluate-only", action="store_true")


def main() -> None:
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        artifact = accel.export(args.model, Path(folder) / "float")
        result = accel.evaluate(artifact, args.data, max_length=args.max_length, against=True)
        report: dict[str, object] = {"evaluation": result.to_dict()}
        if not args.evaluate_only:
            try:
                quantized = accel.quantize(
                    artifact,
                    Path(folder) / "quantized",
                    max_drop=args.max_drop,
                    data=args.data,
                    calibration=args.calibration,
                    max_length=args.max_length,
                )
                report["search"] = quantized.manifest.steps[-1].report["search"]
            except BudgetError as error:
                report["error"] = str(error)
        print(json.dumps(report, indent=2))


if __name__ == "__main__":  # The measurement starts processes that import this file.
    main()
