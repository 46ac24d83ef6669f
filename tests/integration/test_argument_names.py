"""Tests of argument names that users of transformers and Optimum pass, and of attributes that their scripts read."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

import accel
from accel.artifact import Artifact
from accel.errors import ConfigError, InputError, TaskError, UnknownBackendError
from accel.models.loading_arguments import LoadingArguments


@pytest.fixture
def artifact(tiny_artifact: Callable[..., Artifact]) -> Artifact:
    return tiny_artifact()


@pytest.mark.thorough
def test_base_class_opens_any_task(artifact: Artifact, tiny_folder: Callable[..., Path], generator: Any) -> None:
    assert type(accel.ORTModel.from_pretrained(artifact.path)) is accel.ORTModelForSequenceClassification
    assert type(accel.ORTModel.from_pretrained(generator("gpt2").path)) is accel.ORTModelForCausalLM
    folder = tiny_folder()
    assert type(accel.ORTModel.from_pretrained(folder)) is accel.ORTModelForSequenceClassification
    embedder = accel.ORTModel.from_pretrained(folder, task="feature-extraction", backend="pytorch")
    assert type(embedder) is accel.ORTModelForFeatureExtraction


def test_subclasses_keep_their_class_and_task(artifact: Artifact, tiny_folder: Callable[..., Path]) -> None:
    class Mine(accel.ORTModelForSequenceClassification):
        def forward(self, *args: Any, **kwargs: Any) -> Any:
            return super().forward(*args, **kwargs).logits

    ids = torch.tensor([[2, 5, 3]])
    for source, settings in ((artifact.path, {}), (tiny_folder(), {"task": "text-classification"})):
        model = Mine.from_pretrained(source, **settings)
        assert isinstance(model, Mine)
        assert model(input_ids=ids, attention_mask=torch.ones_like(ids)).shape == (1, 3)
    with pytest.raises(TaskError, match="does not support the task 'fill-mask'"):
        Mine.from_pretrained(artifact.path, task="fill-mask")


def test_ignored_arguments_are_accepted(artifact: Artifact, caplog: pytest.LogCaptureFixture) -> None:
    cls = accel.ORTModelForSequenceClassification
    with caplog.at_level(logging.DEBUG, logger="accel.models.loading_arguments"):
        model = cls.from_pretrained(
            artifact.path,
            use_cache=None,
            use_io_binding=True,
            use_merged=None,
            library_name="transformers",
            force_download=False,
            providers=["CPUExecutionProvider"],
        )
    assert "The argument use_io_binding=True of from_pretrained has no effect" in caplog.text
    assert model.backend == "cpu"
    with pytest.raises(ConfigError, match="but the first entry of providers is"):
        cls.from_pretrained(artifact.path, provider="CUDAExecutionProvider", providers=["CPUExecutionProvider"])
    with pytest.raises(ConfigError, match="force_download"):
        cls.from_pretrained(artifact.path, force_download=True)
    with pytest.raises(ValueError, match="no backend"):
        cls.from_pretrained(artifact.path, provider="NoSuchExecutionProvider")
    assert issubclass(UnknownBackendError, LookupError)


def test_attributes_that_scripts_read(artifact: Artifact, generator: Any) -> None:
    model = accel.ORTModel.from_pretrained(artifact.path)
    assert model.providers == ["CPUExecutionProvider"]
    assert list(model.input_names) == [spec.name for spec in artifact.component().inputs]
    assert model.output_names == {"logits": 0}
    assert model.path == artifact.path / "model.onnx"
    assert model.path.is_file()
    assert model.model_save_dir == artifact.path
    assert (model.can_use_cache, model.use_cache) == (False, False)
    generating = accel.ORTModel.from_pretrained(generator("gpt2").path)
    assert (generating.can_use_cache, generating.use_cache) == (True, True)
    without = accel.ORTModel.from_pretrained(generator("gpt2").path, use_cache=False)
    assert (without.can_use_cache, without.use_cache) == (True, False)


def test_methods_of_torch_modules(artifact: Artifact, caplog: pytest.LogCaptureFixture) -> None:
    model = accel.ORTModel.from_pretrained(artifact.path)
    assert model.float() is model
    assert model.train(False) is model
    assert model.eval() is model
    assert not caplog.text
    assert model.half() is model
    assert "A graph's dtype is fixed" in caplog.text
    assert model.dtype == torch.float32
    with pytest.raises(InputError, match="cannot be trained"):
        model.train()
    if not torch.cuda.is_available():
        assert model.cuda() is model
        assert "Load the model again with from_pretrained" in caplog.text


def test_pipeline_with_an_open_model(artifact: Artifact) -> None:
    model = accel.ORTModel.from_pretrained(artifact.path)
    expected = accel.pipeline(model=model)("where is my card")
    assert accel.pipeline(model=model, device="cpu")("where is my card") == expected
    assert accel.pipeline(model=model, device=-1)("where is my card") == expected
    with pytest.raises(ConfigError, match="The model is already loaded"):
        accel.pipeline(model=model, backend="cpu")


def test_question_and_context_as_positional_arguments(tiny_folder: Callable[..., Path]) -> None:
    folder = tiny_folder("bert", "question-answering")
    answer = accel.pipeline("question-answering", model=folder, backend="pytorch")
    named = answer(question="where is my card", context="my card is lost not here")
    assert answer("where is my card", "my card is lost not here") == named
    assert answer(["where is my card"] * 2, "my card is lost not here") == [named, named]


def test_default_model_of_a_task(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    calls: list[tuple[Any, ...]] = []

    def load(task: str, model: str, arguments: LoadingArguments) -> Any:
        calls.append((task, model, arguments.hub.revision))
        raise TaskError("enough")

    monkeypatch.setattr("accel.models.pipelines.pipeline._load", load)
    usual = transformers.pipelines.PIPELINE_REGISTRY.check_task("text-classification")[1]["default"]["model"]
    with pytest.raises(TaskError, match="enough"):
        accel.pipeline("sentiment-analysis")
    assert calls == [("sentiment-analysis", *usual)]
    assert "called without a model" in caplog.text
    with pytest.raises(ConfigError, match="called without a model"):
        accel.pipeline()

    # For a pipeline that transformers 5 removed, the default model is the default model of transformers 4.
    for task in ("question-answering", "translation_en_to_fr"):
        with pytest.raises(TaskError, match="enough"):
            accel.pipeline(task)
    assert calls[1:] == [
        ("question-answering", "distilbert/distilbert-base-cased-distilled-squad", "564e9b5"),
        ("translation_en_to_fr", "google-t5/t5-base", "a9723ea"),
    ]
