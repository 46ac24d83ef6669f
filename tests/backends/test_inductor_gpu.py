"""The backend `inductor` on a GPU: the contract of backends, and decoders whose steps are compiled."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import accel
from accel import SessionOptions
from accel.artifact import Artifact
from accel.config import AccelerateConfig, PrepareConfig
from accel.testing.conformance import BackendConformance
from accel.testing.generators import save_generator

pytestmark = pytest.mark.gpu


class TestInductorOnGpu(BackendConformance):
    backend = "inductor"
    device = "cuda:0"
    artifact_format = "torch"

    def preparation(self, scheme: str) -> PrepareConfig:
        return AccelerateConfig(keep_slower=True)

    def stateful_artifact(self, folder: Path) -> Artifact | None:
        return accel.export(save_generator(folder.parent / "llama", "llama"), folder, format="torch")


@pytest.fixture
def opened(shared: Callable[..., Path]) -> Callable[[str], list[Any]]:
    """A small decoder as PyTorch computes it on this GPU, and with compiled steps; both in float32."""

    def get(family: str) -> list[Any]:
        folder = shared(f"inductor-{family}", lambda folder: save_generator(folder, family))
        options = SessionOptions(compute_dtype="float32")
        return [
            accel.ORTModelForCausalLM.from_pretrained(folder, backend=name, device="cuda:0", session_options=options)
            for name in ("pytorch", "inductor")
        ]

    return get


@pytest.mark.parametrize("family", ["llama", "gpt2", "phi3"])
def test_compiled_steps_give_the_model_s_tokens(family: str, opened: Callable[[str], list[Any]]) -> None:
    plain, stepping = opened(family)
    ids = torch.randint(5, 60, (2, 7), generator=torch.Generator().manual_seed(0)).cuda()
    mask = torch.ones_like(ids)
    mask[0, :3] = 0
    for settings in ({}, {"num_beams": 3}):
        given = {"attention_mask": mask, "max_new_tokens": 12, "min_new_tokens": 12, "do_sample": False, **settings}
        assert torch.equal(stepping.generate(ids, **given), plain.generate(ids, **given)), settings
    session = stepping._decoder_session
    assert not session._why_eager
    assert sorted(session._steps) == [(2, 256), (6, 256)]


def test_attention_that_the_steps_do_not_know(
    opened: Callable[[str], list[Any]], caplog: pytest.LogCaptureFixture
) -> None:
    plain, stepping = opened("mistral")
    ids = torch.tensor([[5, 6, 7, 8]]).cuda()
    given = {"attention_mask": torch.ones_like(ids), "max_new_tokens": 5, "min_new_tokens": 5, "do_sample": False}
    assert torch.equal(stepping.generate(ids, **given), plain.generate(ids, **given))
    assert "attention with sliding_window" in caplog.text
