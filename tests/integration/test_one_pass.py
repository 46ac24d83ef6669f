"""Check the export, optimization and quantization in one pass: same files as with three stages, and a check that detects errors."""

from __future__ import annotations

import filecmp
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

import accel
from accel.artifact import Artifact
from accel.capture.streamed_weights import StreamedWeight, streamed_weights, weights_loaded
from accel.config import QuantizeConfig
from accel.errors import ConfigError, QuantizeError
from accel.testing.models import tiny_tokenizer

_COMMON: dict[str, Any] = {"vocab_size": 200, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
_SIZES: dict[str, Any] = {
    **_COMMON, "hidden_size": 128, "intermediate_size": 160, "num_hidden_layers": 2, "num_attention_heads": 4,
}  # fmt: skip
_DECODER = {**_SIZES, "num_key_value_heads": 2}
_MODELS: dict[str, Callable[[], transformers.PreTrainedModel]] = {
    "llama": lambda: transformers.LlamaForCausalLM(transformers.LlamaConfig(**_DECODER, tie_word_embeddings=True)),
    "qwen2": lambda: transformers.Qwen2ForCausalLM(transformers.Qwen2Config(**_DECODER, tie_word_embeddings=False)),
    "gpt2": lambda: transformers.GPT2LMHeadModel(
        transformers.GPT2Config(**_COMMON, n_embd=128, n_layer=2, n_head=4, n_positions=64)
    ),
    "bert": lambda: transformers.BertForSequenceClassification(
        transformers.BertConfig(**_SIZES, max_position_embeddings=64, num_labels=3)
    ),
    "t5": lambda: transformers.T5ForConditionalGeneration(
        transformers.T5Config(**_COMMON, d_model=128, d_kv=32, d_ff=160, num_layers=2, num_heads=4, decoder_start_token_id=0)
    ),
    "mixtral": lambda: transformers.MixtralForCausalLM(transformers.MixtralConfig(**_DECODER, num_local_experts=4)),
}  # fmt: skip


def saved(folder: Path, name: str, dtype: torch.dtype = torch.bfloat16, **settings: Any) -> Path:
    """Save a tiny model with random weights, of which some are above and some below the limit for streaming."""
    torch.manual_seed(0)
    model = _MODELS[name]().to(dtype)
    model.save_pretrained(folder, **settings)
    tiny_tokenizer().save_pretrained(folder)
    return folder


def in_three_stages(model: Path, out: Path, **settings: Any) -> Artifact:
    """Export, optimize and quantize a model with three calls."""
    exported = accel.export(model, out / "exported")
    optimized = accel.optimize(exported, out / "optimized")
    artifact = accel.quantize(optimized, out / "quantized", **settings)
    assert isinstance(artifact, Artifact)
    return artifact


def assert_same_files(artifact: Artifact, other: Artifact) -> None:
    """Check that two artifacts have the same graph and weight files, byte for byte."""
    assert {path.name for path in artifact.path.iterdir()} == {path.name for path in other.path.iterdir()}
    for component in other.components:
        for record in component.files:
            assert filecmp.cmp(artifact.path / record.name, other.path / record.name, shallow=False), record.name
    assert artifact.manifest.quantization == other.manifest.quantization
    assert [c.inputs for c in artifact.components] == [c.inputs for c in other.components]
    assert [step.stage for step in artifact.manifest.steps] == [step.stage for step in other.manifest.steps]


def is_one_pass(artifact: Artifact) -> bool:
    """Return whether the artifact was made in one pass."""
    return "weight_error" in artifact.manifest.steps[-1].validation


def thorough(*values: Any) -> Any:
    """Return a parameter of tests that run only in the complete suite."""
    return pytest.param(*values, marks=pytest.mark.thorough)


@pytest.mark.parametrize("name", ["llama", "bert", *map(thorough, ("qwen2", "gpt2", "t5"))])
def test_files_are_those_of_three_stages(name: str, tmp_path: Path) -> None:
    model = saved(tmp_path / "model", name)
    artifact = accel.export(model, tmp_path / "out", quantize="weight-int4")
    assert is_one_pass(artifact)
    validation = artifact.manifest.steps[-1].validation
    assert validation["max_abs_difference"] < 1e-5 < validation["tolerance"]
    assert 0.05 < validation["weight_error"] < 0.12
    assert artifact.manifest.steps[-1].report["embeddings"]
    assert_same_files(artifact, in_three_stages(model, tmp_path, scheme="weight-int4"))


@pytest.mark.parametrize(
    "settings",
    [
        {"scheme": "weight-int4", "block_size": 128, "symmetric": False},
        thorough({"scheme": "weight-int8"}),
        thorough({"scheme": "weight-int4", "algorithm": "hqq"}),
        thorough({"scheme": "weight-int4", "ratio": 0.5}),
        thorough({"scheme": "weight-int4", "exclude": ("model.layers.0.self_attn.o_proj",)}),
        thorough({"scheme": "weight-int4", "exclude": ("model.embed_tokens",)}),
    ],
)
def test_settings_of_the_quantization_apply(settings: dict[str, Any], tmp_path: Path) -> None:
    model = saved(tmp_path / "model", "llama")
    artifact = accel.export(model, tmp_path / "out", quantize=QuantizeConfig(**settings))
    assert is_one_pass(artifact)
    assert_same_files(artifact, in_three_stages(model, tmp_path, **settings))


def test_sharded_checkpoints_in_float16_are_streamed(tmp_path: Path) -> None:
    model = saved(tmp_path / "model", "qwen2", torch.float16, max_shard_size="100KB")
    assert len(list(model.glob("*.safetensors"))) > 1
    assert is_one_pass(accel.export(model, tmp_path / "out", quantize="weight-int4"))


def test_float32_checkpoints_go_through_three_stages(tmp_path: Path) -> None:
    model = saved(tmp_path / "model", "llama", torch.float32)
    artifact = accel.export(model, tmp_path / "out", quantize="weight-int4")
    assert not is_one_pass(artifact)
    assert_same_files(artifact, in_three_stages(model, tmp_path, scheme="weight-int4"))


def test_weights_that_loading_computes_are_not_streamed(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    # transformers makes one parameter of the weights of all experts.
    model = saved(tmp_path / "model", "mixtral")
    with caplog.at_level(logging.WARNING):
        artifact = accel.export(model, tmp_path / "out", quantize="weight-int4")
    assert not is_one_pass(artifact)
    assert "experts" in caplog.text


def test_models_that_need_a_second_trace_go_through_three_stages(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Swin can only be exported for one image size. The export tries this after the trace with a variable size failed."""
    config = transformers.SwinConfig(
        image_size=32, patch_size=2, embed_dim=32, depths=[2, 2], num_heads=[2, 4], window_size=4
    )
    torch.manual_seed(0)
    transformers.SwinForImageClassification(config).to(torch.bfloat16).save_pretrained(tmp_path / "model")
    with caplog.at_level(logging.WARNING):
        artifact = accel.export(tmp_path / "model", tmp_path / "out", quantize="weight-int8")
    assert "variable image size" in caplog.text
    assert artifact.manifest.quantization is not None


def test_settings_of_the_export_are_checked(tmp_path: Path) -> None:
    model = saved(tmp_path / "model", "bert")
    with pytest.raises(ConfigError, match="bfloat16"):
        accel.export(model, tmp_path / "out", quantize="weight-int8", dtype="bfloat16")
    with pytest.raises(ConfigError, match="speed"):
        accel.export(model, tmp_path / "out", quantize="weight-int8", options={"speed": "fast"})


class _ThreeStagesError(Exception):
    """Raised instead of an export in three stages."""


@pytest.fixture
def only_one_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    """Raise if the three stages run."""

    def refuse(*_: Any, **__: Any) -> None:
        raise _ThreeStagesError

    monkeypatch.setattr("accel.stages.quantized_export.export_resolved", refuse)


@pytest.mark.usefixtures("only_one_pass")
def test_wrong_weights_are_detected(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Write two weights of each byte in the wrong order: the weights differ from the checkpoint."""
    from accel_plugins.ortkit.quantization import weight_only

    model, add = saved(tmp_path / "model", "llama"), weight_only.add_blocks

    def swapped(layer: Any, packed: np.ndarray, *others: Any) -> Any:
        return add(layer, (packed >> 4) | (packed << 4), *others)

    monkeypatch.setattr(weight_only, "add_blocks", swapped)
    with caplog.at_level(logging.WARNING), pytest.raises(_ThreeStagesError):
        accel.export(model, tmp_path / "out", quantize="weight-int4")
    assert "differs from the checkpoint by" in caplog.text


@pytest.mark.usefixtures("only_one_pass")
def test_wrong_embeddings_are_detected(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Write the rows of an embedding table in the wrong order."""
    from accel_plugins.ortkit.quantization import lookups

    model, quantize = saved(tmp_path / "model", "qwen2"), lookups.quantize_blocks

    def reversed_rows(weight: np.ndarray, **settings: Any) -> Any:
        return quantize(weight[:, ::-1], **settings)

    monkeypatch.setattr(lookups, "quantize_blocks", reversed_rows)
    with caplog.at_level(logging.WARNING), pytest.raises(_ThreeStagesError):
        accel.export(model, tmp_path / "out", quantize="weight-int4")
    assert "embed_tokens.weight differs from the checkpoint by" in caplog.text


@pytest.mark.usefixtures("only_one_pass")
def test_wrong_graphs_are_detected(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Use the weight of another layer of the same size in the graph, while the weights in the file are right."""
    from accel_plugins.ortkit.quantization import weight_only

    model, put = saved(tmp_path / "model", "llama"), weight_only.put_blocks
    stored: dict[tuple[int, int], Any] = {}

    def other_weight(layer: Any, constants: Any, *, inner: int, outer: int, **settings: Any) -> None:
        put(layer, stored.setdefault((inner, outer), constants), inner=inner, outer=outer, **settings)

    monkeypatch.setattr(weight_only, "put_blocks", other_weight)
    with caplog.at_level(logging.WARNING), pytest.raises(_ThreeStagesError):
        accel.export(model, tmp_path / "out", quantize="weight-int4")
    assert "of the new graph differs from the original by" in caplog.text


def test_from_pretrained_quantizes_and_caches(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ACCEL_HOME", str(tmp_path / "home"))
    folder = saved(tmp_path / "model", "llama")
    model = accel.ORTModelForCausalLM.from_pretrained(folder, backend="cpu", quantization="weight-int4")
    tokens = torch.tensor([[5, 6, 7, 8]])
    first = model.generate(input_ids=tokens, max_new_tokens=3, do_sample=False)
    assert first.shape == (1, 7)
    exports = sorted((tmp_path / "home" / "exports").iterdir())
    assert len(exports) == 1
    assert Artifact.load(exports[0]).manifest.quantization is not None
    again = accel.ORTModelForCausalLM.from_pretrained(folder, backend="cpu", quantization="weight-int4")
    assert sorted((tmp_path / "home" / "exports").iterdir()) == exports
    assert torch.equal(again.generate(input_ids=tokens, max_new_tokens=3, do_sample=False), first)
    with pytest.raises(ConfigError, match="contains an exported graph"):
        accel.ORTModelForCausalLM.from_pretrained(exports[0], quantization="weight-int4")


def test_schemes_with_calibration_need_data(tmp_path: Path) -> None:
    with pytest.raises(QuantizeError, match="calibration data"):
        accel.export(saved(tmp_path / "model", "bert"), tmp_path / "out", quantize="static-int8")
    assert not (tmp_path / "out").exists()


def test_modules_in_memory_go_through_three_stages(tmp_path: Path) -> None:
    torch.manual_seed(0)
    artifact = accel.export(_MODELS["bert"]().eval(), tmp_path / "out", quantize="weight-int8")
    assert not is_one_pass(artifact)
    assert artifact.manifest.quantization is not None


def test_streamed_weights_are_read_and_released(tmp_path: Path) -> None:
    tensors = {
        "large": torch.randn(300, 401).to(torch.bfloat16),
        "half": torch.randn(70_001).to(torch.float16),
        "small": torch.randn(3, 4).to(torch.bfloat16),
        "float": torch.randn(200, 200),
    }
    save_file(tensors, tmp_path / "model.safetensors")
    weights = streamed_weights(tmp_path)
    assert weights is not None
    for name, tensor in load_file(tmp_path / "model.safetensors").items():
        placed = weights.state_dict[name]
        weight = weights.at(placed.data_ptr())
        assert (weight is not None) == (name in ("large", "half"))
        if weight is None:
            assert torch.equal(placed, tensor)
            continue
        assert isinstance(weight, StreamedWeight)
        assert placed.isnan().all()
        assert torch.equal(weight.read(), tensor.float())
        assert weights.at(placed.data_ptr() + placed.nbytes - 4) is weight
    assert weights.at(0) is None


def test_modules_have_their_weights_only_in_calls() -> None:
    model = torch.nn.Sequential(torch.nn.Linear(3, 3), torch.nn.Linear(3, 3))
    model[1].weight = model[0].weight
    expected = model(torch.ones(1, 3))
    values = model[0].weight.detach().clone()
    model[0].weight.data = torch.full((3, 3), torch.nan)
    reads: list[str] = []

    def read(name: str) -> Callable[[], torch.Tensor]:
        return lambda: reads.append(name) or values  # type: ignore[func-returns-value]

    with weights_loaded(model, {name: read(name) for name in ("0.weight", "1.weight")}):
        assert torch.equal(model(torch.ones(1, 3)), expected)
        assert model[0].weight.isnan().all()
        with pytest.raises(RuntimeError):
            model(torch.ones(1, 4))
        assert model[0].weight.isnan().all()
    assert reads[:2] == ["0.weight", "1.weight"]
    assert model(torch.ones(1, 3)).isnan().all()
