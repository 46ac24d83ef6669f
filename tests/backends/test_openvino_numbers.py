"""Tests of two operations that OpenVINO's converter translates differently from PyTorch: weights in 16 bits, and
negative quotients of integers.
"""

# ruff: noqa: E402

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
import transformers

ov = pytest.importorskip("openvino")

import openvino.opset13 as ops

from accel import ORTModelForAudioXVector, export
from accel_plugins.openvino.divisions import divide_down


@pytest.mark.parametrize("dtype", ["float16", pytest.param("bfloat16", marks=pytest.mark.thorough)])
def test_xvector_head_weights_in_16_bits(dtype: str, tiny_folder: Callable[..., Path], tmp_path: Path) -> None:
    """X-vectors are correct in 16 bits. The x-vector head reads the weights of linear layers directly, and
    transformers' exporter replaces these weights with zeros.
    """
    folder = tiny_folder("wav2vec2", "audio-xvector")
    artifact = export(folder, tmp_path / "out", task="audio-xvector", backend="openvino", dtype=dtype)
    sounds = torch.randn((2, 1200), generator=torch.Generator().manual_seed(0))
    original = transformers.AutoModelForAudioXVector.from_pretrained(folder).eval()
    with torch.inference_mode():
        expected = original(sounds).embeddings
    embeddings = ORTModelForAudioXVector(artifact, backend="openvino")(sounds).embeddings
    assert (embeddings - expected).abs().max() <= {"float16": 1e-2, "bfloat16": 1e-1}[dtype] * expected.abs().max()


@pytest.mark.parametrize("type_", ["i32", "i64"])
def test_integer_division_rounds_down(type_: str) -> None:
    number, divisor = (ops.parameter(ov.PartialShape([-1]), getattr(ov.Type, type_)) for _ in range(2))
    model = ov.Model([ops.floor(ops.divide(number, divisor))], [number, divisor], "quotients")
    divide_down(model)
    numbers = np.array([-17, -9, -8, -1, 0, 1, 7, 8, 17], type_.replace("i", "int"))
    by = np.full_like(numbers, 8)
    assert np.array_equal(ov.compile_model(model, "CPU")([numbers, by])[0], numbers // by)


def test_float_division_is_unchanged() -> None:
    number = ops.parameter(ov.PartialShape([-1]), ov.Type.f32)
    model = ov.Model([ops.floor(ops.divide(number, np.float32(8)))], [number], "quotients")
    before = [node.get_type_name() for node in model.get_ordered_ops()]
    divide_down(model)
    assert [node.get_type_name() for node in model.get_ordered_ops()] == before
