"""Tests of threads that load, export and compile models at the same time. Only one thread at a time may change the
global state of libraries.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

import accel
from accel.artifact import Artifact
from accel.testing.generative_models import save_generator
from accel.testing.models import tiny_model
from accel_plugins.pytorch.upstream import cpp_compiler


def at_once(*works: Callable[[], Any]) -> list[Any]:
    with ThreadPoolExecutor(len(works)) as pool:
        return [done.result() for done in [pool.submit(work) for work in works]]


def test_parallel_exports(tmp_path: Path) -> None:
    models = [tiny_model(family) for family in ("bert", "roberta", "bert")]
    formats = ("onnx", "onnx", "openvino_ir")

    def exported(place: int) -> Artifact:
        return accel.export(models[place], tmp_path / str(place), format=formats[place])

    artifacts = at_once(*(partial(exported, place) for place in range(3)))
    assert tuple(artifact.format for artifact in artifacts) == formats
    assert not torch.compiler.is_exporting()


def test_parallel_loading_keeps_tied_weights(tmp_path: Path) -> None:
    """Models that two threads load at the same time have tied weights. Without a lock, transformers' `from_pretrained`
    would leave the process in a state in which it ties no weights.
    """
    folder = save_generator(tmp_path / "t5", "t5")

    def load() -> accel.ORTModelForSeq2SeqLM:
        return accel.ORTModelForSeq2SeqLM.from_pretrained(folder, backend="pytorch")

    ids = torch.tensor([[5, 6, 7, 1]])
    first, *others = [model.generate(ids, max_new_tokens=5) for model in (*at_once(load, load, load), load())]
    assert all(torch.equal(first, other) for other in others)


@pytest.mark.skipif(cpp_compiler() is None, reason="no C++ compiler is installed")
@pytest.mark.thorough
def test_compilation_during_an_export(tmp_path: Path) -> None:
    model, exported = tiny_model("bert"), tiny_model("roberta")
    ids = torch.ones(1, 7, dtype=torch.int64)

    def call() -> torch.Tensor:
        accel.accelerate(model, keep_slower=True)
        with torch.no_grad():
            return model(input_ids=ids, attention_mask=ids).logits

    with torch.no_grad():
        expected = model(input_ids=ids, attention_mask=ids).logits
    logits, _ = at_once(call, lambda: accel.export(exported, tmp_path / "out"))
    assert (logits - expected).abs().max() < 1e-5
    assert [form["state"] for form in model.acceleration.report()] == ["compiled"]
