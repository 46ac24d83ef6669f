"""Tests of generating models with KV caches (`past_key_values`) that are passed to and from transformers, and with
NumPy inputs.
"""

from __future__ import annotations

import logging
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from transformers.cache_utils import DynamicCache, EncoderDecoderCache

import accel
from accel.capture import CACHE_NAME
from accel.errors import InputError
from accel.testing.generative_models import tiny_generator

IDS = torch.tensor([[3, 4, 5, 6], [7, 8, 9, 10]])
# The KV cache contains projections of activations of order 1, computed in float32.
CLOSE = {"rtol": 1e-4, "atol": 1e-4}


@pytest.fixture(params=["cpu", "openvino"])
def models(request: pytest.FixtureRequest, generator: Any) -> tuple[Any, Any]:
    artifact = generator("llama", request.param)
    original = transformers.AutoModelForCausalLM.from_pretrained(artifact.manifest.source.id)
    return accel.ORTModelForCausalLM(artifact), original.eval()


def test_cache_layers_can_be_read(models: tuple[Any, Any]) -> None:
    model, original = models
    cache = model(input_ids=IDS).past_key_values
    with torch.no_grad():
        reference = original(input_ids=IDS)[CACHE_NAME]
    assert isinstance(cache, DynamicCache)
    assert len(cache.layers) == len(reference.layers)
    for layer, expected in zip(cache.layers, reference.layers, strict=True):
        torch.testing.assert_close(layer.keys, expected.keys, **CLOSE)
        torch.testing.assert_close(layer.values, expected.values, **CLOSE)


def test_cache_layers_follow_the_order_of_rows(models: tuple[Any, Any]) -> None:
    model, _ = models
    cache = model(input_ids=IDS).past_key_values
    before = cache.layers[0].keys
    cache.reorder_cache(torch.tensor([1, 0]))
    assert torch.equal(cache.layers[0].keys, before[[1, 0]])


def test_cache_filled_by_pytorch_is_continued(models: tuple[Any, Any]) -> None:
    model, original = models
    cache, reference = DynamicCache(), DynamicCache()
    with torch.no_grad():
        original(input_ids=IDS[:, :3], **{CACHE_NAME: cache})
        original(input_ids=IDS[:, :3], **{CACHE_NAME: reference})
        expected = original(input_ids=IDS[:, 3:], **{CACHE_NAME: reference}).logits
    output = model(input_ids=IDS[:, 3:], past_key_values=cache)
    torch.testing.assert_close(output.logits, expected, **CLOSE)
    # As in transformers, the model changes the caller's cache object in place, and the caller continues with the same
    # object.
    assert output.past_key_values is cache
    assert cache.get_seq_length() == 4
    torch.testing.assert_close(cache.layers[1].values, reference.layers[1].values, **CLOSE)


def test_generate_accepts_and_fills_a_dynamic_cache(models: tuple[Any, Any]) -> None:
    model, original = models
    cache, reference = DynamicCache(), DynamicCache()
    options = {"max_new_tokens": 4, "do_sample": False}
    assert torch.equal(
        model.generate(IDS, past_key_values=cache, **options),
        original.generate(IDS, **{CACHE_NAME: reference}, **options),
    )
    assert cache.get_seq_length() == reference.get_seq_length()
    torch.testing.assert_close(cache.layers[0].keys, reference.layers[0].keys, **CLOSE)


def test_pytorch_continues_a_copy_of_the_cache(models: tuple[Any, Any]) -> None:
    model, original = models
    cache = model(input_ids=IDS[:, :3]).past_key_values.to_dynamic()
    with torch.no_grad():
        continued = original(input_ids=IDS[:, 3:], **{CACHE_NAME: cache}).logits[:, -1]
        full_logits = original(input_ids=IDS).logits[:, -1]
    torch.testing.assert_close(continued, full_logits, **CLOSE)


@pytest.mark.thorough
@pytest.mark.parametrize("tokens", [5, 9])
def test_incomplete_sliding_window_is_continued(generator: Any, tokens: int) -> None:
    """PyTorch keeps only the last seven tokens in the cache of a sliding window of eight. The exported graph keeps all
    tokens, and its mask excludes the earlier tokens. Therefore the graph can continue PyTorch's cache only until the
    window is full.
    """
    model, original = accel.ORTModelForCausalLM(generator("gemma3")), tiny_generator("gemma3")
    ids = torch.arange(5, 16)[None]
    with torch.no_grad():
        cache = original(input_ids=ids[:, :tokens])[CACHE_NAME]
        expected = original(input_ids=ids).logits[:, tokens:]
    if tokens < 8:
        logits = model(input_ids=ids[:, tokens:], past_key_values=cache).logits
        torch.testing.assert_close(logits, expected, **CLOSE)
        assert cache.get_seq_length() == 11
    else:
        with pytest.raises(InputError, match="DynamicSlidingWindowLayer, which does not contain"):
            model(input_ids=ids[:, tokens:], past_key_values=cache)


def test_cache_of_another_model_is_refused(models: tuple[Any, Any]) -> None:
    model, _ = models
    cache = DynamicCache()
    cache.update(torch.zeros(2, 2, 3, 16), torch.zeros(2, 2, 3, 16), 0)
    with pytest.raises(InputError, match="but the model needs"):
        model(input_ids=IDS, past_key_values=cache)


def test_dynamic_cache_without_encoder_output_is_refused(generator: Any) -> None:
    model = accel.ORTModelForSeq2SeqLM(generator("bart"))
    for cache in (DynamicCache(), EncoderDecoderCache(DynamicCache(), DynamicCache())):
        with pytest.raises(InputError, match=f"is a {type(cache).__name__} of transformers, which this model cannot"):
            model(input_ids=IDS, decoder_input_ids=IDS[:, :1], past_key_values=cache)


@pytest.mark.parametrize("family", ["llama", "bart"])
def test_numpy_in_and_out(generator: Any, family: str) -> None:
    model = accel.ORTModel.from_pretrained(generator(family).path)
    inputs = {"input_ids": IDS, "attention_mask": torch.ones_like(IDS)}
    if family == "bart":
        inputs["decoder_input_ids"] = IDS[:, :1]
    arrays = {name: tensor.numpy() for name, tensor in inputs.items()}
    logits = model(**arrays).logits
    assert isinstance(logits, np.ndarray)
    assert np.array_equal(logits, model(**inputs).logits.numpy())
    tokens = model.generate(arrays["input_ids"], max_new_tokens=3)
    assert isinstance(tokens, np.ndarray)
    assert np.array_equal(tokens, model.generate(IDS, max_new_tokens=3).numpy())


NAMES = ["past_key_values", "cache"]


@pytest.mark.parametrize("name", NAMES)
def test_both_cache_argument_names_are_accepted(models: tuple[Any, Any], name: str) -> None:
    """transformers 5.24 names the argument `cache`, and earlier versions name it `past_key_values`. Models accept both
    names.
    """
    model, _ = models
    cache = model.new_cache()
    expected = model.generate(IDS, max_new_tokens=6, do_sample=False)
    first = model.generate(IDS, max_new_tokens=3, do_sample=False, **{name: cache})
    assert torch.equal(model.generate(first, max_new_tokens=3, do_sample=False, **{name: cache}), expected)
    again = model(input_ids=IDS[:, :3], **{name: DynamicCache()})
    assert again[CACHE_NAME] is again.past_key_values
    last = model(input_ids=IDS[:, 3:], **{name: again[CACHE_NAME]})
    torch.testing.assert_close(last.logits, model(input_ids=IDS).logits[:, 3:], **CLOSE)


@pytest.mark.parametrize("name", NAMES)
def test_both_cache_argument_names_are_accepted_by_encoder_decoders(generator: Any, name: str) -> None:
    model = accel.ORTModelForSeq2SeqLM(generator("bart"))
    cache = model.new_cache()
    tokens = model.generate(IDS, max_new_tokens=3, do_sample=False, **{name: cache})
    inputs = {"input_ids": IDS, "decoder_input_ids": tokens[:, :2]}
    step = model(
        decoder_input_ids=tokens[:, 2:3], attention_mask=torch.ones_like(IDS), **{name: model(**inputs)[CACHE_NAME]}
    )
    torch.testing.assert_close(
        step.logits[:, -1], model(input_ids=IDS, decoder_input_ids=tokens[:, :3]).logits[:, -1], **CLOSE
    )
    assert cache.get_seq_length() == 3


@pytest.mark.parametrize("family", ["llama", "bart"])
def test_both_cache_arguments_at_once_are_refused(generator: Any, family: str) -> None:
    model = accel.ORTModel.from_pretrained(generator(family).path)
    twice = {name: model.new_cache() for name in NAMES}
    with pytest.raises(InputError, match="two arguments for the KV cache: past_key_values and cache"):
        model(input_ids=IDS, decoder_input_ids=IDS[:, :1], **twice) if family == "bart" else model(
            input_ids=IDS, **twice
        )
    with pytest.raises(InputError, match="two arguments for the KV cache"):
        model.generate(IDS, **twice)


@pytest.mark.parametrize("family", ["llama", "bart", pytest.param("whisper", marks=pytest.mark.thorough)])
@pytest.mark.parametrize("name", NAMES)
def test_generate_logs_no_deprecated_names(
    generator: Any, family: str, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`generate` logs no deprecation warning about old cache names.

    transformers logs the warning for outputs only once in a process. For arguments it raises a Python warning, which
    pytest turns into an error.
    """
    warnings: list[str] = []
    monkeypatch.setattr(logging.Logger, "warning_once", lambda _, text, *__: warnings.append(text))
    model = accel.ORTModel.from_pretrained(generator(family).path)
    prompt = torch.randn(1, 80, 40) if family == "whisper" else IDS
    for options in ({}, {"num_beams": 2}, {"return_dict_in_generate": True}, {name: model.new_cache()}):
        model.generate(prompt, max_new_tokens=3, do_sample=False, **options)
    assert not [text for text in warnings if "past_key_values" in text]
