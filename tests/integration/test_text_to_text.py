"""Tests of the generating pipelines that transformers 5 removed: default settings, and their order of precedence."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import GenerationConfig

import accel
from accel.errors import ConfigError
from accel.testing.generative_models import save_generator
from accel.testing.models import tiny_tokenizer

TEXT = "where is my card"
TEXT_TO_TEXT = ["summarization", "translation", "translation_en_to_de", "text2text-generation"]


@pytest.fixture(scope="module")
def opened(shared: Callable[..., Path]) -> Any:
    folder = shared("generator-t5", lambda folder: save_generator(folder, "t5"))
    return accel.ORTModelForSeq2SeqLM.from_pretrained(folder, backend="pytorch")


@pytest.fixture
def model(opened: Any, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Return a model whose config and generation config tests may change."""
    for name in ("config", "generation_config"):
        monkeypatch.setattr(opened, name, copy.deepcopy(getattr(opened, name)))
    return opened


def pipe(model: Any, task: str = "summarization", **settings: Any) -> Any:
    return accel.pipeline(task, model=model, tokenizer=tiny_tokenizer(), **settings)


def settings_of(pipe: Any, monkeypatch: pytest.MonkeyPatch, **call: Any) -> GenerationConfig:
    """Return the generation config that a call of the pipeline uses."""
    configs: list[GenerationConfig] = []

    def record(*_: Any, generation_config: Any = None, **settings: Any) -> torch.Tensor:
        config, _ = pipe.model._prepare_generation_config(generation_config, **settings)
        configs.append(config)
        return torch.tensor([[2, 7, 3]])

    monkeypatch.setattr(pipe.model, "generate", record)
    pipe(TEXT, **call)
    return configs[0]


def lengths(config: GenerationConfig) -> dict[str, Any]:
    names = ("max_new_tokens", "max_length", "num_beams", "min_length")
    limits = {name: value for name in names if (value := getattr(config, name))}
    if "max_new_tokens" in limits:
        # transformers sets `max_length` to 20 and ignores it.
        del limits["max_length"]
    return limits


@pytest.mark.parametrize("task", TEXT_TO_TEXT)
def test_defaults_equal_transformers_4(model: Any, task: str, monkeypatch: pytest.MonkeyPatch) -> None:
    config = settings_of(pipe(model, task), monkeypatch)
    assert (config.max_new_tokens, config.num_beams) == (256, 4)


def test_output_uses_the_defaults(model: Any) -> None:
    answer = pipe(model)(TEXT, max_new_tokens=6, return_tensors=True)[0]["summary_token_ids"]
    inputs = tiny_tokenizer()(TEXT, return_tensors="pt")
    expected = model.generate(**inputs, max_new_tokens=6, num_beams=4, pad_token_id=0)[0]
    assert answer.tolist() == expected.tolist()


TASK = {"summarization": {"prefix": "the ", "max_length": 30, "num_beams": 3, "min_length": 4, "unknown": 1}}
# Each entry maps a case to its generation_config.json, its `task_specific_params`, the arguments of the pipeline, the
# arguments of the call, and the expected settings.
PRECEDENCE: dict[str, tuple[dict[str, Any], dict[str, Any], dict[str, Any], dict[str, Any], dict[str, Any]]] = {
    "the checkpoint": ({"num_beams": 2, "max_new_tokens": 7}, {}, {}, {}, {"max_new_tokens": 7, "num_beams": 2}),
    "one beam of the checkpoint": ({"num_beams": 1}, {}, {}, {}, {"max_new_tokens": 256, "num_beams": 1}),
    "its greatest length": ({"max_length": 50}, {}, {}, {}, {"max_length": 50, "num_beams": 4}),
    "the task": ({"num_beams": 2}, TASK, {}, {}, {"max_length": 30, "num_beams": 3, "min_length": 4}),
    "another task": ({}, {"translation": TASK["summarization"]}, {}, {}, {"max_new_tokens": 256, "num_beams": 4}),
    "the pipeline": ({}, TASK, {"num_beams": 5}, {}, {"max_length": 30, "num_beams": 5, "min_length": 4}),
    "the call": ({}, TASK, {"num_beams": 5}, {"num_beams": 6}, {"max_length": 30, "num_beams": 6, "min_length": 4}),
    "new tokens": ({}, TASK, {}, {"max_new_tokens": 9}, {"max_new_tokens": 9, "num_beams": 3, "min_length": 4}),
    "a generation config": (
        {}, TASK, {}, {"generation_config": GenerationConfig(num_beams=2)}, {"max_new_tokens": 256, "num_beams": 2},
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", PRECEDENCE)
def test_settings_closer_to_the_call_take_precedence(model: Any, case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    checkpoint, of_tasks, making, call, expected = PRECEDENCE[case]
    model.generation_config.update(**checkpoint)
    model.config.task_specific_params = of_tasks
    assert lengths(settings_of(pipe(model, **making), monkeypatch, **call)) == expected


@pytest.mark.parametrize(("settings", "expected"), [({"prefix": "the "}, "the "), ({"prefix": ""}, ""), ({}, "my ")])
def test_prefix_of_the_task_replaces_the_configs_prefix(model: Any, settings: dict[str, Any], expected: str) -> None:
    model.config.prefix, model.config.task_specific_params = "my ", {"summarization": settings}
    assert pipe(model).prefix == expected


def test_languages_of_a_call_apply_to_this_call_only(model: Any) -> None:
    words = {"de": "bank", "fr": "phone"}
    model.config.task_specific_params = {
        f"translation_en_to_{language}": {"prefix": f"{word} "} for language, word in words.items()
    }
    translate = pipe(model, "translation_en_to_de")
    ids = [
        translate.preprocess(TEXT, **languages)["input_ids"].tolist()
        for languages in ({}, {"src_lang": "en", "tgt_lang": "fr"}, {})
    ]
    expected = [tiny_tokenizer()(f"{words[language]} {TEXT}")["input_ids"] for language in ("de", "fr", "de")]
    assert ids == [[row] for row in expected]


def test_stop_sequence_must_be_one_token(model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    tokens = tiny_tokenizer()("card", add_special_tokens=False)["input_ids"]
    assert [settings_of(pipe(model), monkeypatch, stop_sequence="card").eos_token_id] == tokens
    with pytest.raises(ConfigError, match="2 tokens"):
        pipe(model)(TEXT, stop_sequence="my card")
