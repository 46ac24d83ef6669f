"""Tests of models that keep recurrent states of fixed size between calls, and of models without a cache."""

from __future__ import annotations

from collections.abc import Callable
from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from accel import ORTModelForCausalLM, export, optimize, quantize
from accel.artifact import Artifact
from accel.capture import CACHE_NAME
from accel.errors import ExportError, InputError
from accel.testing.generative_models import STATES, save_generator, tiny_generator
from accel.testing.models import VOCABULARY

Artifacts = Callable[..., Artifact]


@pytest.fixture(scope="module")
def rows() -> dict[str, torch.Tensor]:
    """Return three rows of twelve tokens. Two rows are padded on the left."""
    ids = torch.randint(4, VOCABULARY, (3, 12), generator=torch.Generator().manual_seed(3))
    mask = torch.ones_like(ids)
    mask[0, :2], mask[2, :4] = 0, 0
    ids[mask == 0] = 0
    return {"input_ids": ids, "attention_mask": mask}


def logits_of(model: Any, rows: dict[str, torch.Tensor]) -> torch.Tensor:
    with torch.inference_mode():
        logits: torch.Tensor = model(**rows).logits
    return logits


def continued(model: ORTModelForCausalLM, rows: dict[str, torch.Tensor]) -> torch.Tensor:
    """Return the logits of the last five tokens. The model computes them in one call, after a call with the first seven
    tokens.
    """
    ids, mask = rows["input_ids"], rows["attention_mask"]
    cache = model(input_ids=ids[:, :7], attention_mask=mask[:, :7]).past_key_values
    logits: torch.Tensor = model(input_ids=ids[:, 7:], attention_mask=mask, past_key_values=cache).logits
    return logits


@pytest.mark.thorough
def test_states_are_in_the_manifest(generator: Artifacts) -> None:
    components = [generator(family).component() for family in ("lfm2", "mamba")]
    assert all(component.stateful and not component.croppable for component in components)
    shapes = [{s.name: s.shape for s in component.inputs if s.role == "cache"} for component in components]
    # The state of a convolution has channels and a width. The keys have heads, tokens and a head size.
    assert shapes[0]["past_key_values.0.conv"] == ("batch", 64, 3)
    assert shapes[0]["past_key_values.1.key"] == ("batch", 2, "capacity", 16)
    # The recurrent state has heads, keys and values.
    assert shapes[1]["past_key_values.1.recurrent"] == ("batch", 1, 8, 64)


@pytest.mark.parametrize(
    "family", ["lfm2", *(pytest.param(name, marks=pytest.mark.thorough) for name in ("mamba", "falcon-h1"))]
)
def test_several_tokens_after_a_state(family: str, generator: Artifacts, rows: dict[str, torch.Tensor]) -> None:
    # The tokens of the second call also contain padding.
    mask = rows["attention_mask"].clone()
    mask[1, 7:9] = 0
    inputs = {"input_ids": rows["input_ids"] * mask, "attention_mask": mask}
    expected = logits_of(tiny_generator(family), inputs)[:, 7:]
    logits = continued(ORTModelForCausalLM(generator(family)), inputs)
    # The tolerance is for a float32 graph with logits of order 10.
    assert (logits - expected)[mask[:, 7:].bool()].abs().max() <= 1e-3


@pytest.mark.parametrize("family", ["mamba", "falcon-h1", pytest.param("qwen3-next", marks=pytest.mark.thorough)])
def test_pytorch_backend_keeps_states(family: str, rows: dict[str, torch.Tensor], tmp_path: Path) -> None:
    model = ORTModelForCausalLM.from_pretrained(save_generator(tmp_path, family), backend="pytorch")
    original = tiny_generator(family)
    assert (continued(model, rows) - logits_of(original, rows)[:, 7:]).abs().max() <= 1e-3
    padded = {**rows, "attention_mask": rows["attention_mask"].index_fill(1, torch.tensor([9]), 0)}
    with pytest.raises(InputError, match="new tokens of each row as padding"):
        continued(model, padded)
    expected = original.generate(**rows, max_new_tokens=8, num_beams=2)
    assert torch.equal(model.generate(**rows, max_new_tokens=8, num_beams=2), expected)


@pytest.mark.parametrize("family", ["lfm2", pytest.param("mamba", marks=pytest.mark.thorough)])
def test_state_is_copied_and_reordered_but_not_cropped(
    family: str, generator: Artifacts, rows: dict[str, torch.Tensor]
) -> None:
    model = ORTModelForCausalLM(generator(family))
    ids = rows["input_ids"][:2]
    cache = model(input_ids=ids[:, :6]).past_key_values
    copy = cache.clone()
    assert not cache.is_croppable
    with pytest.raises(InputError, match="single tokens cannot be removed from a recurrent state"):
        cache.crop(-2)
    cache.reorder_cache(torch.tensor([1, 0]))
    swapped = model(input_ids=ids.flip(0)[:, 6:7], past_key_values=cache).logits
    assert (swapped - model(input_ids=ids.flip(0)[:, :7], logits_to_keep=1).logits).abs().max() <= 1e-3
    resumed = model(input_ids=ids[:, 6:], past_key_values=copy).logits
    assert (resumed - model(input_ids=ids).logits[:, 6:]).abs().max() <= 1e-3


@pytest.mark.thorough
@pytest.mark.parametrize("family", ["lfm2", "falcon-h1"])
def test_cache_object_of_the_user(family: str, generator: Artifacts, rows: dict[str, torch.Tensor]) -> None:
    """The user's cache object works as in transformers: one object serves every step and turn, and copies serve several
    continuations.
    """
    model, original = ORTModelForCausalLM(generator(family)), tiny_generator(family)
    ids = rows["input_ids"][1:2]
    longer = torch.cat((ids, ids[:, :3]), 1)

    def answers(variant: Any) -> list[Any]:
        cache = transformers.DynamicCache(config=original.config)
        results: list[Any] = [variant.generate(ids, max_new_tokens=3, **{CACHE_NAME: cache}), cache.get_seq_length()]
        prefix = transformers.DynamicCache(config=original.config)
        with torch.inference_mode():
            variant(input_ids=ids[:, :4], **{CACHE_NAME: prefix})
            variant(input_ids=ids[:, 4:], attention_mask=torch.ones_like(ids), **{CACHE_NAME: prefix})
        copies = [deepcopy(prefix) for _ in range(2)]
        results += [variant.generate(longer, max_new_tokens=3, **{CACHE_NAME: copy}) for copy in copies]
        return [*results, prefix.get_seq_length()]

    for actual, expected in zip(answers(model), answers(original), strict=True):
        assert torch.equal(actual, expected) if isinstance(actual, torch.Tensor) else actual == expected


@pytest.mark.thorough
@pytest.mark.parametrize("family", STATES)
def test_other_stages_keep_recurrent_states(
    family: str, generator: Artifacts, rows: dict[str, torch.Tensor], tmp_path: Path
) -> None:
    original = tiny_generator(family)
    better = optimize(generator(family), tmp_path / "o2", level="O2")
    tokens = ORTModelForCausalLM(better).generate(**rows, max_new_tokens=8)
    assert torch.equal(tokens, original.generate(**rows, max_new_tokens=8))
    small = ORTModelForCausalLM(quantize(better, tmp_path / "int8", scheme="weight-int8"))
    expected = logits_of(original, rows)
    # The tolerance is for random weights in 8 bits. A router may select another expert for one or two tokens.
    assert (logits_of(small, rows) - expected).abs().mean() <= 0.05 * expected.abs().max()


@pytest.mark.thorough
def test_model_without_cache_reads_all_tokens_again(generator: Artifacts, rows: dict[str, torch.Tensor]) -> None:
    artifact = generator("openai-gpt")
    model = ORTModelForCausalLM(artifact)
    expected = tiny_generator("openai-gpt").generate(**rows, max_new_tokens=6, num_beams=2)
    assert torch.equal(model.generate(**rows, max_new_tokens=6, num_beams=2), expected)
    assert artifact.component().continues == "none"
    ids = torch.randint(4, VOCABULARY, (2, 7))
    cache = model(input_ids=ids[:, :4]).past_key_values
    assert cache.get_seq_length() == 4
    logits = model(input_ids=ids[:, 4:], past_key_values=cache).logits
    assert torch.allclose(logits, model(input_ids=ids).logits[:, 4:], atol=1e-5)


def test_unknown_states_are_refused(tmp_path: Path) -> None:
    config = transformers.RwkvConfig(vocab_size=VOCABULARY, hidden_size=32, num_hidden_layers=2, context_length=64)
    with pytest.raises(ExportError, match="between tokens in the argument 'state'"):
        export(transformers.RwkvForCausalLM(config).eval(), tmp_path / "out", task="text-generation")
    assert not (tmp_path / "out").exists()


def test_model_with_bidirectional_attention_is_refused(tmp_path: Path) -> None:
    config = transformers.RobertaConfig(
        vocab_size=VOCABULARY, hidden_size=32, num_hidden_layers=1, num_attention_heads=2, intermediate_size=32
    )
    with pytest.raises(ExportError, match=r"is_decoder=False.*\n?.*is_decoder=True"):
        export(transformers.RobertaForCausalLM(config).eval(), tmp_path / "out", task="text-generation")


@pytest.mark.thorough
def test_decoder_without_cache_is_optimized(generator: Artifacts, tmp_path: Path) -> None:
    optimized = optimize(generator("openai-gpt"), tmp_path / "optimized", level="O2")
    rows = torch.tensor([[5, 6, 7], [8, 9, 10]])
    expected = tiny_generator("openai-gpt").generate(rows, max_new_tokens=4, do_sample=False)
    with ORTModelForCausalLM.from_pretrained(optimized) as model:
        assert torch.equal(model.generate(rows, max_new_tokens=4, do_sample=False), expected)


@pytest.mark.thorough
def test_new_text_starts_with_empty_states(rows: dict[str, torch.Tensor], tmp_path: Path) -> None:
    """Kimi Linear has latent keys and recurrent states. A new text must not start with the states of the previous text,
    which OpenVINO's variables still contain.
    """
    torch.manual_seed(0)
    config = transformers.KimiLinearConfig(
        vocab_size=VOCABULARY, hidden_size=32, intermediate_size=48, moe_intermediate_size=16, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=4, linear_num_heads=4, linear_head_dim=8, qk_nope_head_dim=8,
        qk_rope_head_dim=8, v_head_dim=8, kv_lora_rank=16, num_experts=4, num_experts_per_tok=2,
        layer_types=["linear_attention", "full_attention"], pad_token_id=0, eos_token_id=None,
    )  # fmt: skip
    original = transformers.KimiLinearForCausalLM(config).eval()
    model = ORTModelForCausalLM(export(original, tmp_path / "out", task="text-generation", backend="openvino"))
    for count in (2, 2, 3, 2):
        options = {name: tensor[:count] for name, tensor in rows.items()} | {"max_new_tokens": 4, "do_sample": False}
        assert torch.equal(model.generate(**options), original.generate(**options))
