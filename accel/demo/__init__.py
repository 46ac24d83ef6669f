"""`accel demo`: export, optimize, quantize and measure a model that is included in the package, without network access.

In: no input. Out: a table of variants of the included model, measured on this machine.

The model is a two-layer BERT, which `examples/distill_demo_model.py` distilled on BANKING77. The data is the test set of
BANKING77, and 128 training queries for calibration (see `ATTRIBUTION.md`). This module contains the paths of the included
files. The module `walkthrough` runs the demo.
"""

from __future__ import annotations

import csv
from pathlib import Path

FOLDER = Path(__file__).parent
MODEL = FOLDER / "model"
TEST_SET = FOLDER / "banking77" / "test.csv"
CALIBRATION_SET = FOLDER / "banking77" / "calibration.csv"


def read_test_set() -> tuple[list[str], list[str]]:
    """Return the queries of the test set, and their intents."""
    with TEST_SET.open(newline="", encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    return [row["text"] for row in rows], [row["category"] for row in rows]
