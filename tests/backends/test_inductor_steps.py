"""Tests of compiled decoding steps on the CPU. The `inductor` backend itself opens decoders only on GPUs."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

import accel
from accel.testing.generative_models import save_generator
from accel.testing.models import tiny_tokenizer
from accel_plugins.pytorch.backend import PytorchBackend
from accel_plugins.pytorch.inductor import steps
from accel_plugins.pytorch.inductor.steps import CompiledStepsSession
from accel_plugins.pytorch.upstream import cpp_compiler

pytestmark = pytest.mark.skipif(cpp_compiler() is None, reason="no C++ compiler is installed")


def _save(folder: Path, family: str) -> Path:
    """Save a small generative model. The family "llama4" has chunked attention, which is visible only in its mask."""
    if family != "llama4":
        return save_generator(folder, family)
    torch.manual_seed(0)
    config = transformers.Llama4TextConfig(
        vocab_size=99, hidden_size=32, intermediate_size=32, intermediate_size_mlp=48, num_hidden_layers=2, head_dim=8,
        num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=256, attention_chunk_size=4, moe_layers=[],
        no_rope_layers=[1, 0], layer_types=["chunked_attention", "full_attention"], bos_token_id=1, eos_token_id=2,
        pad_token_id=0,
    )  # fmt: skip
    transformers.Llama4ForCausalLM(config).save_pretrained(folder)
    tiny_tokenizer().save_pretrained(folder)
    return folder


@pytest.fixture
def opened(
    shared: Callable[..., Path], monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> tuple[Any, Any]:
    """Return the same small decoder (Llama by default) twice: without and with compiled decoding steps."""
    family = getattr(request, "param", "llama")
    folder = shared(f"inductor-{family}", lambda folder: _save(folder, family))
    plain = accel.ORTModelForCausalLM.from_pretrained(folder, backend="pytorch")

    def decoder(self: PytorchBackend, model: Any, part: Any, component: Any, request: Any, dtype: str) -> Any:
        return CompiledStepsSession(model, part, component, request.device, dtype, forms=2)

    monkeypatch.setattr(PytorchBackend, "decoder", decoder)
    return plain, accel.ORTModelForCausalLM.from_pretrained(folder, backend="pytorch")


@pytest.mark.thorough
def test_compiled_steps_give_the_models_tokens(opened: tuple[Any, Any], caplog: pytest.LogCaptureFixture) -> None:
    plain, stepping = opened
    ids = torch.randint(5, 60, (2, 7), generator=torch.Generator().manual_seed(0))
    mask = torch.ones_like(ids)
    mask[0, :3] = 0
    for settings in ({}, {"num_beams": 3}):
        options = {"attention_mask": mask, "max_new_tokens": 8, "min_new_tokens": 8, "do_sample": False, **settings}
        assert torch.equal(stepping.generate(ids, **options), plain.generate(ids, **options)), settings
    session = stepping.decoder_step.session
    assert sorted(session._steps) == [(2, 256), (6, 256)]
    assert not session._why_eager

    # The third batch size exceeds the limit. The model then runs without compiled code, and logs a warning.
    three = torch.cat([ids, ids[:1]])
    options = {"attention_mask": torch.ones_like(three), "max_new_tokens": 4, "min_new_tokens": 4, "do_sample": False}
    assert torch.equal(stepping.generate(three, **options), plain.generate(three, **options))
    assert "Decoding steps are compiled for 2 sizes" in caplog.text

    # Crop the cache, then add several tokens at once. Both operations move the cache out of the buffer of the compiled
    # code, and the next step moves the cache into the buffer again.
    caches = [model(ids).past_key_values for model in opened]
    for cut in (None, -6):
        logits = []
        for model, cache in zip(opened, caches, strict=True):
            if cut is not None:
                cache.crop(cut)
            model(ids[:, :1], past_key_values=cache)
            model(ids[:, :3], past_key_values=cache)
            logits.append(model(ids[:, 3:4], past_key_values=cache).logits)
        assert (logits[0] - logits[1]).abs().max() <= 1e-4 * logits[0].abs().max()


@pytest.mark.parametrize(
    ("opened", "why"),
    [("mistral", "attention with sliding_window"), ("llama4", "layers with chunked_attention")],
    indirect=["opened"],
)
def test_sliding_windows_are_refused_before_compilation(
    opened: tuple[Any, Any], why: str, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    def not_to_be_called(*args: object) -> None:
        raise AssertionError("it was compiled")

    monkeypatch.setattr(steps, "compiled", lambda *args, **how: not_to_be_called)
    plain, stepping = opened
    ids = torch.tensor([[5, 6, 7, 8]])
    options = {"attention_mask": torch.ones_like(ids), "max_new_tokens": 5, "min_new_tokens": 5, "do_sample": False}
    assert torch.equal(stepping.generate(ids, **options), plain.generate(ids, **options))
    assert stepping.decoder_step.session._why_eager == f"NotImplementedError: compiled steps do not support {why}"
    assert why in caplog.text


@pytest.mark.thorough
def test_wrong_steps_fall_back_to_the_model(opened: tuple[Any, Any], caplog: pytest.LogCaptureFixture) -> None:
    plain, stepping = opened
    session = stepping.decoder_step.session
    right = session._step_code
    session._step_code = lambda *args: 1.1 * right(*args)
    ids = torch.tensor([[5, 6, 7, 8]])
    options = {"attention_mask": torch.ones_like(ids), "max_new_tokens": 5, "min_new_tokens": 5, "do_sample": False}
    assert torch.equal(stepping.generate(ids, **options), plain.generate(ids, **options))
    assert "the logits differ by" in session._why_eager
    assert "the logits differ by" in caplog.text
