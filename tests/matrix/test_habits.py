"""Checks that Optimum's tests make for each of its models, applied to a few model families of each kind.

`tests/integration` compares tensors, tokens and text pipelines with transformers. This module tests input types, output
types and options that Optimum's tests check for every model.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from chain import FAMILY

from accel import SessionOptions
from accel.artifact import Artifact
from accel.interfaces.task_registry import task_spec
from accel.models.base import model_class
from accel.testing.generative_models import GENERATORS, tiny_generator
from accel.testing.models import tiny_model
from accel.testing.tiny_batches import tiny_batch

ort = pytest.importorskip("onnxruntime", reason="the extra `onnxruntime` is not installed")

Artifacts = Callable[..., Artifact]
ENCODERS = ("token-classification", "question-answering", "fill-mask", "feature-extraction", "image-classification")
FAMILIES = ("llama", "t5", "vit-gpt2", "whisper")
CHOICES: dict[str, dict[str, Any]] = {
    "greedy": {},
    "sampling": {"do_sample": True, "top_k": 20},
    "beams": {"num_beams": 2},
    "group": {"num_beams": 2, "num_return_sequences": 2},
}


def classed(task: str) -> Any:
    return model_class(task)


def prompt(family: str) -> dict[str, torch.Tensor]:
    """Return the inputs of `generate` for a model family."""
    feeds = tiny_batch(GENERATORS[family][0], tiny_generator(family).config)
    return {name: value for name, value in feeds.items() if name != "decoder_input_ids"}


@pytest.mark.parametrize("task", ENCODERS)
def test_numpy_inputs_give_numpy_outputs(task: str, tiny_artifact: Artifacts) -> None:
    model = classed(task)(tiny_artifact(FAMILY[task], task))
    feeds = tiny_batch(task, model.config)
    expected, outputs = model(**feeds), model(**{name: value.numpy() for name, value in feeds.items()})
    assert list(outputs) == list(expected)
    for name in expected:
        assert isinstance(outputs[name], np.ndarray)
        assert np.array_equal(outputs[name], expected[name].numpy())


@pytest.mark.parametrize("task", ENCODERS)
def test_tuple_outputs_and_positional_inputs(task: str, tiny_artifact: Artifacts) -> None:
    """A model accepts `return_dict=False` and a positional first input, as callers of transformers pass them."""
    model, original = classed(task)(tiny_artifact(FAMILY[task], task)), tiny_model(FAMILY[task], task)
    feeds = tiny_batch(task, model.config)
    first = feeds.pop(original.main_input_name)
    with torch.inference_mode():
        expected = original(first, **feeds, return_dict=False)
    outputs = model(first, **feeds, return_dict=False)
    assert isinstance(outputs, tuple)
    assert len(outputs) == len(expected)
    assert max(float((output - other).abs().max()) for output, other in zip(outputs, expected, strict=True)) <= 1e-4
    assert task == "feature-extraction" or type(model(first, **feeds)).__name__ == task_spec(task).output


# Models with an encoder are tested only in thorough test runs. Without a cache, each new token needs a call with the
# whole sequence.
@pytest.mark.parametrize(
    "family",
    [pytest.param(f, marks=pytest.mark.thorough) if f in ("vit-gpt2", "whisper", "t5") else f for f in FAMILIES],
)
def test_use_cache_does_not_change_tokens(family: str, generator: Artifacts) -> None:
    model = classed(GENERATORS[family][0])(generator(family))
    for choices in ({}, {"num_beams": 2}):
        cached = model.generate(**prompt(family), max_new_tokens=6, **choices)
        assert torch.equal(model.generate(**prompt(family), max_new_tokens=6, use_cache=False, **choices), cached)


@pytest.mark.parametrize("how", CHOICES)
@pytest.mark.parametrize(
    "family", [pytest.param(f, marks=pytest.mark.thorough) if f in ("vit-gpt2", "whisper") else f for f in FAMILIES]
)
def test_saved_and_loaded_from_a_subfolder(family: str, how: str, generator: Artifacts, tmp_path: Path) -> None:
    cls = classed(GENERATORS[family][0])
    cls(generator(family)).save_pretrained(tmp_path / "hub" / "graphs")
    model = cls.from_pretrained(tmp_path / "hub", subfolder="graphs")
    original = tiny_generator(family)
    torch.manual_seed(3)
    expected = original.generate(**prompt(family), max_new_tokens=6, **CHOICES[how])
    torch.manual_seed(3)
    assert torch.equal(model.generate(**prompt(family), max_new_tokens=6, **CHOICES[how]), expected)


@pytest.mark.parametrize(
    "family",
    [
        pytest.param(family_name, marks=pytest.mark.thorough) if family_name in ("vit-gpt2", "whisper") else family_name
        for family_name in FAMILIES
    ],
)
def test_rows_do_not_depend_on_their_batch(family: str, generator: Artifacts) -> None:
    model = classed(GENERATORS[family][0])(generator(family))
    feeds = prompt(family)
    together = model.generate(**feeds, max_new_tokens=6)
    for row in range(3):
        alone = model.generate(**{name: value[row : row + 1] for name, value in feeds.items()}, max_new_tokens=6)
        assert torch.equal(alone[0], together[row])


@pytest.mark.parametrize(
    "runtime_options", [{}, [{}], {"provider": "CPUExecutionProvider"}], ids=["dict", "list", "provider"]
)
@pytest.mark.parametrize("family", ["llama", "t5"])
def test_native_onnx_runtime_options(family: str, runtime_options: Any, generator: Artifacts) -> None:
    options = ort.SessionOptions()
    options.intra_op_num_threads = 1
    how = runtime_options if "provider" in runtime_options else {"provider_options": runtime_options}
    model = classed(GENERATORS[family][0]).from_pretrained(generator(family).path, session_options=options, **how)
    assert model.backend == "cpu"
    for session in model.sessions.values():
        assert session.runtime.get_session_options().intra_op_num_threads == 1
        assert session.runtime.get_providers() == ["CPUExecutionProvider"]
    plain = classed(GENERATORS[family][0])(generator(family), session_options=SessionOptions(threads=1))
    expected = plain.generate(**prompt(family), max_new_tokens=4)
    assert torch.equal(model.generate(**prompt(family), max_new_tokens=4), expected)
