"""Tests of decoder graphs whose attention is rewritten to basic ONNX operators and whose KV cache grows by
concatenation, computed on the CPU.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from accel import SessionOptions, capture, export, optimize
from accel.artifact import Artifact
from accel.backends import registry
from accel.errors import SessionError
from accel.interfaces.protocols import OpenRequest, Session
from accel.interfaces.specs import DeviceSpec
from accel.testing.models import VOCABULARY
from accel_plugins.ortkit.graph.editing import nodes, read_graph, save_graph
from accel_plugins.ortkit.optimization.concatenated_cache import growing_form
from accel_plugins.ortkit.runtime.session import OrtSession, open_runtime

Artifacts = Callable[[str], Artifact]
CPU = DeviceSpec("cpu")
_SMALL = {
    "vocab_size": VOCABULARY, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 8, "max_position_embeddings": 64, "initializer_range": 0.3,
}  # fmt: skip
CAPPED = ("Gemma2", {"attn_logit_softcapping": 5.0, "sliding_window": 4})
WITH_SINKS = ("GptOss", {"num_local_experts": 2, "num_experts_per_tok": 1, "sliding_window": 4})


def decoder_of(artifact: Artifact) -> str:
    return next(component.name for component in artifact.components if component.stateful)


def both(artifact: Artifact) -> tuple[Session, Session]:
    """Return two sessions of the decoder: one with the original graph, and one whose attention is rewritten to basic
    operators.
    """
    component = artifact.component(decoder_of(artifact))
    path = artifact.path / component.file
    form = growing_form(path, component)
    runtime = open_runtime(
        path, form.component, provider="CPUExecutionProvider", provider_options={}, options=SessionOptions(), model=form.model
    )  # fmt: skip
    spelled = OrtSession(runtime, form.component, CPU, artifact.dtype)
    backend = registry.load(registry.describe("cpu"))
    return backend.open(artifact, OpenRequest(device=CPU))[component.name], spelled


def step(session: Session, state: Any, mask: torch.Tensor, new: int, artifact: Artifact) -> torch.Tensor:
    """Return the logits of `new` tokens that follow the tokens in the state's KV cache."""
    rows, total = mask.shape
    sizes = {"batch": rows, "sequence": new, "total": total, "kept": new, "encoder_sequence": 6}
    plain_inputs = [spec for spec in session.inputs if spec.pair is None]
    feeds = dict(capture.feeds_for(plain_inputs, sizes, seed=total, folder=artifact.path))
    optional_feeds = {
        "attention_mask": mask,
        "position_ids": (mask.cumsum(1) - 1).clamp(min=0)[:, -new:],
        "logits_to_keep": torch.arange(new),
    }
    feeds |= {name: value for name, value in optional_feeds.items() if name in feeds}
    return session.run(feeds, outputs=("logits",), state=state)["logits"]


def differences(artifact: Artifact) -> list[float]:
    """Return the largest differences between the two sessions for a left-padded prompt, for one token after the prompt,
    and for several tokens after the rows were reordered.
    """
    sessions = both(artifact)
    states = [session.new_state(3) for session in sessions]
    mask = torch.ones(3, 5).long()
    mask[0, :3] = 0
    largest = []
    longer = torch.cat([mask, mask[:, -1:]], 1)
    for new, step_mask in ((5, mask), (1, longer)):
        logits, other = (
            step(session, state, step_mask, new, artifact) for session, state in zip(sessions, states, strict=True)
        )
        real = step_mask[:, -new:].bool()
        largest.append(float((logits - other)[real].abs().max()))
    order = torch.tensor([2, 0])
    mask = torch.cat([longer[order], torch.ones(2, 2).long()], 1)
    for state in states:
        state.reorder(order)
    logits, other = (step(session, state, mask, 2, artifact) for session, state in zip(sessions, states, strict=True))
    return [*largest, float((logits - other).abs().max())]


@pytest.mark.parametrize(
    "family",
    [
        "qwen3",
        pytest.param("t5", marks=pytest.mark.thorough),
        pytest.param("qwen3-next", marks=pytest.mark.thorough),
        pytest.param("bart", marks=pytest.mark.thorough),
        pytest.param("falcon-h1", marks=pytest.mark.thorough),
        pytest.param("granite-4", marks=pytest.mark.thorough),
        pytest.param("whisper", marks=pytest.mark.thorough),
    ],
)
def test_attention_in_basic_operators_gives_equal_logits(generator: Artifacts, family: str) -> None:
    assert max(differences(generator(family))) < 1e-3


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("architecture", "settings"),
    [CAPPED, WITH_SINKS],
    ids=["softcap", "sinks"],
)
def test_softcaps_and_attention_sinks(architecture: str, settings: dict[str, Any], tmp_path: Path) -> None:
    torch.manual_seed(0)
    config = getattr(transformers, f"{architecture}Config")(**_SMALL, **settings)
    model = getattr(transformers, f"{architecture}ForCausalLM")(config).eval()
    artifact = export(model, tmp_path / "exported", task="text-generation")
    attentions = nodes(
        read_graph(artifact.path / artifact.component("model").file), "GroupQueryAttention", domain="com.microsoft"
    )
    read = [{"softcap" in node.attributes, len(node.inputs) > 11} for node in attentions]
    assert read == [{True, False}] * 2
    assert max(differences(artifact)) < 1e-3


@pytest.mark.thorough
def test_float16(generator: Artifacts, tmp_path: Path) -> None:
    halved = optimize(generator("falcon-h1"), tmp_path / "halved", backend="cuda", level="O4")
    assert max(differences(halved)) < 0.15


def test_cache_grows_by_concatenation(generator: Artifacts) -> None:
    artifact = generator("qwen3")
    component = artifact.component("model")
    form = growing_form(artifact.path / component.file, component)
    pairs = {spec.pair: spec.shape[2] for spec in form.component.inputs if spec.pair}
    assert set(pairs.values()) == {"past"}
    assert {spec.shape[2] for spec in form.component.outputs if spec.name in pairs} == {"total"}


def test_unsupported_attention_is_refused(generator: Artifacts, tmp_path: Path) -> None:
    artifact = generator("qwen3")
    component = artifact.component("model")
    model = read_graph(artifact.path / component.file)
    for node in nodes(model, "GroupQueryAttention", domain="com.microsoft"):
        node.attributes.add(type(node.attributes["scale"])("local_window_size", node.attributes["num_heads"].type, 4))
    save_graph(model, tmp_path / "model.onnx")
    with pytest.raises(SessionError, match="cannot express in basic ONNX"):
        growing_form(tmp_path / "model.onnx", component)
