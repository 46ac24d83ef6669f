"""Tests of the digests of data and models, which are keys in the caches of searches and exports."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from accel.artifact.hub import HubOptions
from accel.capture import code_elsewhere
from accel.tuning.store import data_digest

LONG = np.zeros(16_000, np.float32)
CHANGED = LONG.copy()
CHANGED[8_000] = 1
PICTURE = Image.new("RGB", (64, 64))
DOTTED = PICTURE.copy()
DOTTED.putpixel((32, 32), (1, 2, 3))
RED, BLUE = (Image.new("RGB", (8, 8), color).quantize(4) for color in ("red", "blue"))


@pytest.mark.parametrize(
    ("value", "other"),
    [
        (LONG, CHANGED),
        (torch.from_numpy(LONG), torch.from_numpy(CHANGED)),
        (torch.tensor([1.00001]), torch.tensor([1.00002])),
        (torch.ones(2, dtype=torch.bfloat16), torch.zeros(2, dtype=torch.bfloat16)),
        (PICTURE, DOTTED),
        (RED, BLUE),
        ({"array": LONG, "sampling_rate": 16_000}, {"array": CHANGED, "sampling_rate": 16_000}),
        (["ab", "c"], ["a", "bc"]),
        ([["a"], "b"], [["a", "b"]]),
        (1, "1"),
    ],
    ids=["array", "tensor", "digits", "bfloat16", "image", "palette", "sound", "texts", "lists", "types"],
)
def test_different_rows_have_different_digests(value: Any, other: Any) -> None:
    assert data_digest([{"x": value}]) == data_digest([{"x": value}])
    assert data_digest([{"x": value}]) != data_digest([{"x": other}])


def test_digest_of_a_folder_depends_on_its_content(tmp_path: Path) -> None:
    file = tmp_path / "rows" / "data.arrow"
    file.parent.mkdir()
    file.write_bytes(b"one")
    before = data_digest(file.parent)
    file.write_bytes(b"two")
    assert data_digest(str(file.parent)) != before


def test_digest_includes_code_in_another_folder(tmp_path: Path) -> None:
    model, code = tmp_path / "model", tmp_path / "code"
    model.mkdir()
    code.mkdir()
    (model / "config.json").write_text(json.dumps({"auto_map": {"AutoModel": f"{code}--modeling.Model"}}))
    (code / "modeling.py").write_text("one = 1")
    before = code_elsewhere(model, HubOptions(trust_remote_code=True))
    (code / "modeling.py").write_text("one = 2")
    assert len(before) == 1
    assert code_elsewhere(model, HubOptions(trust_remote_code=True)) != before
    (model / "config.json").write_text(json.dumps({"auto_map": {"AutoModel": "modeling.Model"}}))
    assert code_elsewhere(model, HubOptions(trust_remote_code=True)) == []
