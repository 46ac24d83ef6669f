"""Tests that deleted models release their weights, although libraries keep the code that they traced and compiled."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import accel
from accel import ORTModelForSequenceClassification, SessionOptions
from accel.errors import ConfigError
from accel.testing.generative_models import tiny_generator
from accel.testing.models import save_tiny, tiny_model
from accel_plugins.pytorch.upstream import cpp_compiler

compiler = pytest.mark.skipif(cpp_compiler() is None, reason="no C++ compiler is installed")
IDS = {name: torch.ones(2, 8, dtype=torch.int64) for name in ("input_ids", "attention_mask")}
# No other weight in the process has this shape, so the test can find the weights of its model.
WORDS, SIZE = 1_009, 32


def collect() -> None:
    """Run the garbage collector several times, because some objects are released only after other objects."""
    for _ in range(3):
        gc.collect()


@pytest.mark.parametrize("backend", ["cpu", "openvino"])
@pytest.mark.parametrize(
    "make", [lambda: tiny_model("bert"), lambda: tiny_generator("llama")], ids=["encoder", "generator"]
)
def test_export_releases_the_weights(tmp_path: Path, backend: str, make: Callable[[], Any]) -> None:
    model = make()
    weights = [weakref.ref(weight) for weight in model.parameters()]
    accel.export(model, tmp_path / "out", backend=backend)
    del model
    collect()
    assert not any(weight() is not None for weight in weights)


@compiler
@pytest.mark.parametrize("restored", [False, pytest.param(True, marks=pytest.mark.thorough)])
def test_accelerated_model_releases_the_weights(restored: bool) -> None:
    model = tiny_model("bert")
    weights = [weakref.ref(weight) for weight in model.parameters()]
    accel.accelerate(model, keep_slower=True)
    with torch.no_grad():
        model(**IDS)
    assert model.acceleration.report()[0]["state"] == "compiled"
    if restored:
        model.acceleration.restore()
    del model
    collect()
    assert not any(weight() is not None for weight in weights)


@pytest.mark.parametrize("backend", ["pytorch", pytest.param("inductor", marks=compiler)])
def test_session_releases_the_weights(tmp_path: Path, backend: str) -> None:
    def tables() -> int:
        collect()
        return sum(type(item) is torch.nn.Parameter and item.shape == (WORDS, SIZE) for item in gc.get_objects())

    save_tiny(tmp_path, "bert", vocab_size=WORDS, hidden_size=SIZE)
    assert tables() == 0
    with pytest.raises(ConfigError):
        ORTModelForSequenceClassification.from_pretrained(
            tmp_path, backend=backend, session_options=SessionOptions(profile="profile")
        )
    assert tables() == 0
    model = ORTModelForSequenceClassification.from_pretrained(tmp_path, backend=backend)
    model(**IDS)
    assert tables() == 1
    del model
    assert tables() == 0
