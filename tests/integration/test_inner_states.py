"""Tests of hidden states and attentions as graph outputs, on request. Models return them as tuples, like transformers."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import transformers

import accel
from accel.errors import InputError, TaskError

TEXTS = ["where is my card", "help"]
BOTH = {"output_hidden_states": True, "output_attentions": True}


def compare(model: accel.ORTModel, folder: Path, auto: str) -> None:
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    inputs = tokenizer(TEXTS, padding=True, return_tensors="pt")
    theirs = getattr(transformers, auto).from_pretrained(folder, attn_implementation="eager").eval()
    with torch.inference_mode():
        expected, outputs = theirs(**inputs, **BOTH), model(**inputs, **BOTH)
    for name in ("hidden_states", "attentions"):
        assert isinstance(outputs[name], tuple)
        assert len(outputs[name]) == len(expected[name])
        for state, other in zip(outputs[name], expected[name], strict=True):
            assert torch.allclose(state, other, atol=1e-4)


@pytest.mark.parametrize("backend", ["cpu", "pytorch", pytest.param("openvino", marks=pytest.mark.thorough)])
def test_hidden_states_and_attentions_are_tuples(backend: str, tiny_folder: Callable[..., Path]) -> None:
    folder = tiny_folder("bert", "text-classification")
    model = accel.ORTModelForSequenceClassification.from_pretrained(folder, backend=backend, **BOTH)
    compare(model, folder, "AutoModelForSequenceClassification")


@pytest.mark.thorough
def test_inner_states_with_embeddings_and_fusions(tiny_folder: Callable[..., Path], tmp_path: Path) -> None:
    folder = tiny_folder("bert", "feature-extraction")
    exported = accel.export(folder, tmp_path / "one", task="sentence-similarity", **BOTH)
    plain = accel.ORTModelForFeatureExtraction(exported)
    assert "sentence_embedding" in plain(**plain_inputs(folder))
    compare(plain, folder, "AutoModel")
    compare(accel.ORTModelForFeatureExtraction(accel.optimize(exported, tmp_path / "two")), folder, "AutoModel")


def plain_inputs(folder: Path) -> dict[str, torch.Tensor]:
    return dict(transformers.AutoTokenizer.from_pretrained(folder)(TEXTS, padding=True, return_tensors="pt"))


def test_inner_states_that_were_not_exported_are_refused(
    tiny_folder: Callable[..., Path], tiny_artifact: Callable[..., Path]
) -> None:
    model = accel.ORTModelForSequenceClassification(tiny_artifact())
    with pytest.raises(InputError, match="output_attentions=True was passed, but the graph was exported without"):
        model(**plain_inputs(tiny_folder()), output_attentions=True)


def test_generating_models_refuse_inner_states(shared: Callable[..., Path], tmp_path: Path) -> None:
    from accel.testing.generative_models import save_generator

    folder = shared("generator-llama", lambda out: save_generator(out, "llama"))
    with pytest.raises(TaskError, match="cannot return hidden states"):
        accel.export(folder, tmp_path / "out", task="text-generation", output_hidden_states=True)
