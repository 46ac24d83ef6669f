"""Tests of the reuse of keys and values of prompts that begin with the same tokens."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import accel
from accel.artifact import Artifact
from accel.serving.continuous_batching.prefix_cache import PrefixCache
from accel.testing.generative_models import save_generator

NEW = accel.GenerationOptions(max_new_tokens=6, ignore_eos=True, temperature=0)


def prompt(seed: int, length: int) -> list[int]:
    return torch.randint(5, 60, (length,), generator=torch.Generator().manual_seed(seed)).tolist()


def expected(model: Any, ids: list[int]) -> list[int]:
    tensor = torch.tensor([ids])
    tokens = model.generate(
        tensor, attention_mask=torch.ones_like(tensor), max_new_tokens=6, min_new_tokens=6, do_sample=False
    )
    return list(tokens[0, len(ids) :].tolist())


@pytest.fixture(scope="module", params=["cpu", "openvino", "pytorch"])
def model(request: pytest.FixtureRequest, generator: Callable[..., Artifact], shared: Callable[..., Path]) -> Any:
    if request.param == "pytorch":
        folder = shared("generator-llama", lambda folder: save_generator(folder, "llama"))
        return accel.ORTModelForCausalLM.from_pretrained(folder, backend="pytorch")
    return accel.ORTModelForCausalLM.from_pretrained(generator("llama", request.param).path)


def test_prompts_with_the_same_beginning(model: Any) -> None:
    system = prompt(0, 80)
    prompts = [system + prompt(seed, 6) for seed in range(1, 5)]
    longer = prompts[0] + prompt(9, 30)
    with accel.GenerationEngine(model) as engine:
        for ids, reused in zip([*prompts, longer, longer, system[:40]], [0, 80, 80, 80, 86, 115, 39], strict=True):
            generation = engine.submit(ids, NEW)
            assert [token.id for token in generation] == expected(model, ids)
            assert generation.reused_tokens == reused


def test_simultaneous_prompts_reuse_the_first(model: Any) -> None:
    system = prompt(0, 80)
    prompts = [system + prompt(seed, 6) for seed in range(1, 5)]
    with accel.GenerationEngine(model) as engine:
        generations = [engine.submit(ids, NEW) for ids in prompts]
        assert [[token.id for token in each] for each in generations] == [expected(model, ids) for ids in prompts]
        assert [each.reused_tokens for each in generations] == [0, 80, 80, 80]


def test_reuse_can_be_turned_off(model: Any) -> None:
    with accel.GenerationEngine(model, limits=accel.GenerationLimits(prefix_bytes=0)) as engine:
        generations = [engine.submit(prompt(0, 80), NEW) for _ in range(2)]
        assert [len(list(each)) for each in generations] == [6, 6]
        assert [each.reused_tokens for each in generations] == [0, 0]


def test_state_space_models_do_not_reuse(generator: Callable[..., Artifact]) -> None:
    model = accel.ORTModelForCausalLM.from_pretrained(generator("mamba").path)
    with accel.GenerationEngine(model) as engine:
        for _ in range(2):
            generation = engine.submit(prompt(0, 80), NEW)
            assert [token.id for token in generation] == expected(model, prompt(0, 80))
            assert generation.reused_tokens == 0


def read(model: Any, ids: list[int]) -> Any:
    cache, step = model.new_cache(), model.decoder_step
    step(step.embed(torch.tensor([ids])), cache)
    return cache


def test_least_recently_used_prompts_are_removed(model: Any) -> None:
    probe = PrefixCache(1 << 30)
    first, second, third = (prompt(seed, 64) for seed in range(3))
    probe.store(first, 0, read(model, first))
    prefixes = PrefixCache(2 * probe.used_bytes)
    for ids in (first, second):
        prefixes.store(ids, 0, read(model, ids))
    assert prefixes.find(first) is not None
    prefixes.store(third, 0, read(model, third))
    assert [prefixes.find(ids) is not None for ids in (first, second, third)] == [True, False, True]
    assert prefixes.used_bytes == 2 * probe.used_bytes
    prefixes.store(prompt(5, 150), 0, read(model, prompt(5, 150)))
    assert prefixes.find(prompt(5, 150)) is None
    prefixes.clear()
    assert prefixes.find(first) is None


def test_extended_prompt_replaces_its_beginning(model: Any) -> None:
    prefixes = PrefixCache(1 << 30)
    ids = prompt(0, 100)
    prefixes.store(ids[:50], 0, read(model, ids[:50]))
    small = prefixes.used_bytes
    prefixes.store(ids, 49, read(model, ids))
    assert prefixes.used_bytes == 2 * small
    # Almost everything of this prompt was reused, so it is not stored.
    prefixes.store([*ids[:99], 7, 8], 99, read(model, [*ids[:99], 7, 8]))
    assert prefixes.used_bytes == 2 * small
