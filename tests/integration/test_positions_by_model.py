"""Tests of position ids in models that do not simply count tokens from 0: RoBERTa-like models, and models whose rotary
angles depend on the text's length.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

import accel

BACKENDS = ["pytorch", pytest.param("cpu", marks=pytest.mark.thorough)]
SMALL = {
    "vocab_size": 96, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
}  # fmt: skip

LONG_ROPE = {
    "rope_type": "longrope", "rope_theta": 1e4, "original_max_position_embeddings": 16,
    "short_factor": [1.0] * 4, "long_factor": [3.0] * 4,
}  # fmt: skip


def saved(config: transformers.PreTrainedConfig, folder: Path) -> Any:
    """Save and return a model whose weights are so large that positions affect its outputs."""
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(std=0.3)
    model.save_pretrained(folder)
    return model


def opened(folder: Path, backend: str) -> Any:
    return accel.ORTModelForCausalLM.from_pretrained(folder, backend=backend)


@pytest.mark.parametrize("backend", BACKENDS)
def test_long_text_is_recomputed_with_new_angles(backend: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Phi-3 with LongRoPE uses different rotary angles for texts of up to 16 tokens and for longer texts. When a text
    becomes longer than 16 tokens, all keys are computed again.
    """
    monkeypatch.setenv("ACCEL_HOME", str(tmp_path / "home"))
    config = transformers.Phi3Config(
        **SMALL, num_key_value_heads=2, max_position_embeddings=128, original_max_position_embeddings=16,
        rope_parameters=LONG_ROPE, bos_token_id=1, eos_token_id=None, pad_token_id=0,
    )  # fmt: skip
    original = saved(config, tmp_path / "phi")
    model = opened(tmp_path / "phi", backend)
    ids = torch.randint(3, 96, (3, 9), generator=torch.Generator().manual_seed(4))
    mask = torch.ones_like(ids)
    mask[1, :4] = mask[2, :2] = 0
    rows = {"input_ids": ids.masked_fill(mask == 0, 0), "attention_mask": mask, "max_new_tokens": 14}
    for settings in ({"num_beams": 1}, {"num_beams": 3}):
        expected = original.generate(**rows, do_sample=False, **settings)
        assert torch.equal(model.generate(**rows, do_sample=False, **settings), expected)
    options = {"max_new_tokens": 20, "do_sample": False, "return_dict_in_generate": True, "output_logits": True}
    expected, outputs = original.generate(ids[:1], **options), model.generate(ids[:1], **options)
    for reference, logits in zip(expected.logits, outputs.logits, strict=True):
        torch.testing.assert_close(logits, reference, rtol=1e-4, atol=1e-4 * float(reference.abs().max()))


_TOWER = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 1,
    "num_blocks": 1,
    "num_attention_heads": 4,
    "image_size": 64,
    "patch_size": 8,
    "crop_size": 64,
}
OUTGROWN: dict[str, dict[str, Any]] = {
    "Phimoe": {
        "num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": None,
        "rope_parameters": {**LONG_ROPE, "short_mscale": 1.1, "long_mscale": 1.3},
    },
    "Phi4Multimodal": {
        "vision_config": _TOWER, "audio_config": _TOWER,
        "rope_parameters": {**LONG_ROPE, "partial_rotary_factor": 1.0},
    },
}  # fmt: skip


@pytest.mark.parametrize("family", OUTGROWN)
def test_other_phi_models_recompute_long_texts(family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The expected tokens are generated without a KV cache. With a cache, transformers 5.24 loses Phi-4-multimodal's
    earlier tokens when the angles change.
    """
    monkeypatch.setenv("ACCEL_HOME", str(tmp_path / "home"))
    config = getattr(transformers, f"{family}Config")(
        **SMALL, **OUTGROWN[family], num_key_value_heads=2, max_position_embeddings=128,
        original_max_position_embeddings=16, bos_token_id=1, eos_token_id=None, pad_token_id=0,
    )  # fmt: skip
    original = saved(config, tmp_path / "phi")
    model = opened(tmp_path / "phi", "pytorch")
    ids = torch.randint(3, 96, (3, 9), generator=torch.Generator().manual_seed(4))
    mask = torch.ones_like(ids)
    mask[1, :4] = mask[2, :2] = 0
    rows = {"input_ids": ids.masked_fill(mask == 0, 0), "attention_mask": mask, "max_new_tokens": 14}
    expected = original.generate(**rows, do_sample=False, use_cache=False)
    assert torch.equal(model.generate(**rows, do_sample=False), expected)


@pytest.mark.parametrize("backend", BACKENDS)
def test_roberta_positions_start_after_the_padding_id(
    backend: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without position ids, RoBERTa counts only the tokens that are not padding."""
    monkeypatch.setenv("ACCEL_HOME", str(tmp_path / "home"))
    original = saved(
        transformers.RobertaConfig(**SMALL, max_position_embeddings=64, is_decoder=True, pad_token_id=1),
        tmp_path / "roberta",
    )
    model = opened(tmp_path / "roberta", backend)
    ids = torch.randint(5, 96, (2, 8), generator=torch.Generator().manual_seed(0))
    mask = torch.ones_like(ids)
    mask[1, :3] = 0
    padded = {"input_ids": ids.masked_fill(mask == 0, 1), "attention_mask": mask}
    with torch.no_grad():
        expected, of_padded = original(input_ids=ids).logits, original(**padded).logits
    close = {"rtol": 1e-4, "atol": 1e-4 * float(expected.abs().max())}
    torch.testing.assert_close(model(input_ids=ids).logits, expected, **close)
    torch.testing.assert_close(model(**padded).logits[mask.bool()], of_padded[mask.bool()], **close)
    first = model(input_ids=ids[:, :5])
    then = model(input_ids=ids[:, 5:], past_key_values=first.past_key_values).logits
    torch.testing.assert_close(then, expected[:, 5:], **close)
