"""Tests of the conversion of tokens to final text, and of the conditions that end a generation."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

import accel
from accel import ORTModelForCausalLM
from accel.artifact import Artifact
from accel.decoding.generation_options import GenerationOptions
from accel.errors import InputError
from accel.serving.continuous_batching.generation_engine import GenerationEngine
from accel.testing.models import tiny_tokenizer


@pytest.fixture(scope="module")
def model(generator: Callable[..., Artifact]) -> Any:
    return accel.ORTModelForCausalLM.from_pretrained(generator("llama").path)


def test_text_prompt_gives_text(model: Any) -> None:
    with GenerationEngine(model) as engine:
        generated = engine("where is my card", GenerationOptions(max_new_tokens=9))
    tokenizer = engine.tokenizer
    inputs = tokenizer("where is my card", return_tensors="pt")
    ids = model.generate(inputs["input_ids"], attention_mask=inputs["attention_mask"], max_new_tokens=9)[0]
    assert generated.text == tokenizer.decode(ids[inputs["input_ids"].shape[1] :], skip_special_tokens=True)
    assert (generated.prompt_tokens, generated.new_tokens, generated.finish) == (
        inputs["input_ids"].shape[1],
        9,
        "length",
    )


def test_stop_string_ends_the_generation(model: Any) -> None:
    with GenerationEngine(model) as engine:
        unstopped = engine("where is my card", GenerationOptions(max_new_tokens=40))
        word = unstopped.text.split()[5]
        stopped = engine("where is my card", GenerationOptions(max_new_tokens=40, stop=(word,)))
    assert stopped.text == unstopped.text[: unstopped.text.index(word)]
    assert stopped.finish == "stop"
    assert stopped.new_tokens < 20


def test_chat_requires_a_template(model: Any) -> None:
    messages = [{"role": "user", "content": "where is my card"}]
    tokenizer = tiny_tokenizer()
    with GenerationEngine(model, tokenizer) as engine:
        with pytest.raises(InputError, match="no chat template"):
            engine(messages)
        tokenizer.chat_template = (
            "{% for m in messages %}{{ raise_exception('roles') if m.role == 'odd' }}{{ m.content }}{% endfor %}"
        )
        assert engine.encode(messages) == tokenizer.apply_chat_template(messages, return_dict=True)["input_ids"]
        with pytest.raises(InputError, match="roles"):
            engine.encode([{"role": "odd", "content": ""}])


def test_empty_prompt_needs_special_tokens(model: Any) -> None:
    tokenizer = tiny_tokenizer()
    with GenerationEngine(model, tokenizer) as engine:
        assert engine.encode("") == tokenizer("")["input_ids"]
        tokenizer.backend_tokenizer.post_processor = None
        with pytest.raises(InputError, match="adds no token"):
            engine.encode("")


def test_stop_string_is_not_split_into_letters() -> None:
    assert GenerationOptions(stop="card").stop == ("card",)  # type: ignore[arg-type]  # users pass a string
    assert GenerationOptions(stop=["card", "pay"]).stop == ("card", "pay")  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "wrong",
    [
        {"max_new_tokens": 2.5}, {"max_new_tokens": True}, {"max_new_tokens": "4"}, {"seed": "x"}, {"seed": 1.0},
        {"top_k": 2.0}, {"temperature": "hot"}, {"temperature": True}, {"top_p": "0.9"}, {"presence_penalty": None},
        {"logit_bias": [1, 2]}, {"logit_bias": {1: "a"}}, {"stop": None}, {"stop": (1,)}, {"stop": 5}, {"ignore_eos": "no"},
        {"temperature": -0.1}, {"top_p": 0.0}, {"top_p": 1.1}, {"top_k": -1}, {"max_new_tokens": 0}, {"stop": ("",)},
        {"repetition_penalty": 0.0}, {"presence_penalty": float("nan")}, {"seed": 1 << 64}, {"temperature": float("inf")},
    ],
)  # fmt: skip
def test_invalid_options_are_named(wrong: dict[str, Any]) -> None:
    (name,) = wrong
    with pytest.raises(InputError, match=name) as caught:
        GenerationOptions(**wrong)
    assert caught.value.fix


def test_prompts_are_texts_tokens_or_messages(generator: Callable[..., Artifact]) -> None:
    options = GenerationOptions(max_new_tokens=4, temperature=0)
    with GenerationEngine(ORTModelForCausalLM(generator("llama"))) as engine:
        expected = engine([5, 6, 7], options).text
        for prompt in ((5, 6, 7), torch.tensor([5, 6, 7]), np.array([5, 6, 7])):
            assert engine(prompt, options).text == expected  # type: ignore[arg-type]  # users pass arrays
        for wrong in (
            [1.5, 2.5],
            [True, False],
            [[5, 6]],
            torch.tensor([[5, 6]]),
            ["a", "b"],
            None,
            5,
            {"role": "user"},
        ):
            with pytest.raises(InputError, match="The prompt has the unsupported type"):
                engine(wrong, options)  # type: ignore[arg-type]
        with pytest.raises(InputError, match="options is a dict"):
            engine([5, 6, 7], {"max_new_tokens": 4})  # type: ignore[arg-type]
        assert engine([5, 6, 7], options).text == expected
