"""`accel demo`: the main job on a real model, offline.

In: nothing. Out: a table of variants of the shipped model, measured here.

The model is a two-layer BERT distilled on BANKING77 by `examples/distill_demo_model.py`; the data is BANKING77's test set, and
128 training queries for calibration (see `ATTRIBUTION.md`). What is shipped is named here; `walkthrough` does the job.
"""

from __future__ import annotations

import csv
from pathlib import Path

FOLDER = Path(__file__).parent
MODEL = FOLDER / "model"
TEST_SET = FOLDER / "banking77" / "test.csv"
CALIBRATION_SET = FOLDER / "banking77" / "calibration.csv"


def read_test_set() -> tuple[list[str], list[str]]:
    """The test queries and their intents."""
    with TEST_SET.open(newline="", encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    return [row["text"] for row in rows], [row["category"] for row in rows]
