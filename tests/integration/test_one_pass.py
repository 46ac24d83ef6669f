"""Check the export, optimization and quantization in one pass: same files as with three stages, and a check that detects errors.

The tests run for each backend and scheme that the specs declare for exports.
"""

from __future__ import annotations

import logging
import re
import subprocess
import sys
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
from accel.backends import registry
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


def declared() -> list[tuple[str, str]]:
    """Return each backend and scheme that an installed backend declares for exports."""
    inventory = registry.inventory()
    return [
        (spec.name, scheme)
        for spec in inventory.specs
        for capability in spec.capabilities
        if capability.stage == "export" and inventory.missing(spec) is None
        for scheme in capability.schemes
    ]


BACKENDS = sorted({backend for backend, _ in declared()})


def in_three_stages(model: Path, out: Path, backend: str = "cpu", **settings: Any) -> Artifact:
    """Export, optimize and quantize a model with three calls."""
    artifact = accel.export(model, out / "exported", backend=backend)
    if registry.describe(backend).capability("optimize", artifact.format) is not None:
        artifact = accel.optimize(artifact, out / "optimized", backend=backend)
    quantized = accel.quantize(artifact, out / "quantized", backend=backend, **settings)
    assert isinstance(quantized, Artifact)
    return quantized


def content(path: Path) -> bytes:
    """Return the content of a file. In OpenVINO's names, the numbers that count the nodes of the process are replaced by numbers that count
    the nodes of the file.
    """
    data = path.read_bytes()
    if path.suffix != ".xml":
        return data
    numbers: dict[bytes, int] = {}
    return re.sub(rb"(?<=_)\d+", lambda match: b"%d" % numbers.setdefault(match[0], len(numbers)), data)


def assert_same_files(artifact: Artifact, other: Artifact) -> None:
    """Check that two artifacts of this process have the same graph and weight files."""
    assert {path.name for path in artifact.path.iterdir()} == {path.name for path in other.path.iterdir()}
    for component in other.components:
        for record in component.files:
            assert content(artifact.path / record.name) == content(other.path / record.name), record.name
    assert artifact.manifest.quantization == other.manifest.quantization
    assert [c.inputs for c in artifact.components] == [c.inputs for c in other.components]
    assert [step.stage for step in artifact.manifest.steps] == [step.stage for step in other.manifest.steps]


def is_one_pass(artifact: Artifact) -> bool:
    """Return whether the artifact was made in one pass."""
    return "weight_error" in artifact.manifest.steps[-1].validation


def thorough(*values: Any) -> Any:
    """Return a parameter of tests that run only in the complete suite."""
    return pytest.param(*values, marks=pytest.mark.thorough)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("name", ["llama", "bert", *map(thorough, ("qwen2", "gpt2"))])
def test_files_are_those_of_three_stages(name: str, backend: str, tmp_path: Path) -> None:
    model = saved(tmp_path / "model", name)
    artifact = accel.export(model, tmp_path / "out", backend=backend, quantize="weight-int4")
    assert_same_files(artifact, in_three_stages(model, tmp_path, backend, scheme="weight-int4"))
    # OpenVINO's converter transposes the weights of GPT-2.
    assert is_one_pass(artifact) == ((name, backend) != ("gpt2", "openvino"))
    if not is_one_pass(artifact):
        return
    validation = artifact.manifest.steps[-1].validation
    assert validation["max_abs_difference"] < 1e-5 < validation["tolerance"]
    assert 0.05 < validation["weight_error"] < 0.12
    if backend == "cpu":
        assert artifact.manifest.steps[-1].report["embeddings"]


@pytest.mark.thorough
@pytest.mark.parametrize("backend", BACKENDS)
def test_files_of_encoders_and_decoders_are_those_of_three_stages(backend: str, tmp_path: Path) -> None:
    # OpenVINO also quantizes the embeddings of positions, whose size is the number of heads, so blocks of 32 are too large.
    model = saved(tmp_path / "model", "t5")
    artifact = accel.export(model, tmp_path / "out", backend=backend, quantize="weight-int8")
    assert is_one_pass(artifact)
    assert_same_files(artifact, in_three_stages(model, tmp_path, backend, scheme="weight-int8"))


@pytest.mark.parametrize(
    ("backend", "settings"),
    [
        *(thorough(backend, {"scheme": scheme}) for backend, scheme in declared() if scheme != "weight-int4"),
        ("cpu", {"block_size": 128, "symmetric": False}),
        thorough("cpu", {"algorithm": "hqq"}),
        thorough("cpu", {"ratio": 0.5}),
        thorough("cpu", {"exclude": ("model.layers.0.self_attn.o_proj",)}),
        thorough("cpu", {"exclude": ("model.embed_tokens",)}),
        ("openvino", {"ratio": 0.5, "symmetric": True, "block_size": 16}),
        thorough("openvino", {"exclude": ("re:linear_3/",)}),
        thorough("openvino", {"scheme": "weight-int8", "symmetric": True}),
    ],
)
def test_settings_of_the_quantization_apply(backend: str, settings: dict[str, Any], tmp_path: Path) -> None:
    if backend not in BACKENDS:
        pytest.skip(f"{backend} is not installed")
    model, settings = saved(tmp_path / "model", "llama"), {"scheme": "weight-int4", **settings}
    artifact = accel.export(model, tmp_path / "out", backend=backend, quantize=QuantizeConfig(**settings))
    assert is_one_pass(artifact)
    assert_same_files(artifact, in_three_stages(model, tmp_path, backend, **settings))


@pytest.mark.parametrize("backend", [backend for backend in BACKENDS if backend == "openvino"])
def test_commands_write_the_same_bytes(backend: str, tmp_path: Path) -> None:
    """In new processes, OpenVINO's numbers in names are the same too."""
    saved(tmp_path / "model", "llama")
    for command in (
        "convert model out --scheme weight-int4",
        "export model exported",
        "quantize exported quantized --scheme weight-int4",
    ):
        arguments = [*command.split(), "--backend", backend]
        subprocess.run([sys.executable, "-m", "accel", *arguments], cwd=tmp_path, check=True)
    artifact = Artifact.load(tmp_path / "out")
    assert is_one_pass(artifact)
    for record in artifact.components[0].files:
        of_one_pass, of_three_stages = (
            (tmp_path / folder / record.name).read_bytes() for folder in ("out", "quantized")
        )
        assert of_one_pass == of_three_stages, record.name


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


def test_errors_show_the_folder_of_the_call(tmp_path: Path) -> None:
    model = saved(tmp_path / "model", "bert")
    with pytest.raises(QuantizeError, match="float16 artifact") as error:
        accel.export(model, tmp_path / "out", quantize="weight-int8", dtype="float16")
    assert str(error.value).startswith(f"{tmp_path / 'out'} is a float16 artifact")


class _ThreeStagesError(Exception):
    """Raised instead of an export in three stages."""


@pytest.fixture
def only_one_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    """Raise if the three stages run."""

    def refuse(*_: Any, **__: Any) -> None:
        raise _ThreeStagesError

    monkeypatch.setattr("accel.stages.quantized_export.export_resolved", refuse)


def _swap_integers(patch: pytest.MonkeyPatch) -> None:
    """Write two weights of each byte in the wrong order."""
    from accel_plugins.ortkit.quantization import weight_only

    add = weight_only.add_blocks

    def swapped(layer: Any, packed: np.ndarray, *others: Any) -> Any:
        return add(layer, (packed >> 4) | (packed << 4), *others)

    patch.setattr(weight_only, "add_blocks", swapped)


def _reverse_values(patch: pytest.MonkeyPatch) -> None:
    """Compress the values of each weight in the reverse order."""
    from accel_plugins.openvino import checkpoint_weights

    read = checkpoint_weights.CheckpointWeights._read

    def reverse(weights: Any, constant: Any) -> np.ndarray | None:
        values = read(weights, constant)
        return None if values is None else np.ascontiguousarray(np.flip(values))

    patch.setattr(checkpoint_weights.CheckpointWeights, "_read", reverse)


def _use_first_blocks(patch: pytest.MonkeyPatch) -> None:
    """Use the weight of the first layer of the same size in each layer."""
    from accel_plugins.ortkit.quantization import weight_only

    put = weight_only.put_blocks
    stored: dict[tuple[int, int], Any] = {}

    def other_weight(layer: Any, constants: Any, *, inner: int, outer: int, **settings: Any) -> None:
        put(layer, stored.setdefault((inner, outer), constants), inner=inner, outer=outer, **settings)

    patch.setattr(weight_only, "put_blocks", other_weight)


def _exchange_weights(patch: pytest.MonkeyPatch) -> None:
    """Exchange the weights of the first two products with weights of the same shape."""
    from accel_plugins.openvino.quantizer import NncfQuantizer

    compress = NncfQuantizer.compress

    def exchanged(quantizer: Any, model: Any, config: QuantizeConfig) -> Any:
        compressed, by_shape = compress(quantizer, model, config), dict[str, Any]()
        for node in compressed.get_ordered_ops():
            if node.get_type_name() != "MatMul" or node.input_value(1).get_node().get_type_name() != "Convert":
                continue
            other = by_shape.setdefault(str(node.input_value(1).get_shape()), node)
            if other is not node:
                weights = other.input_value(1), node.input_value(1)
                node.input(1).replace_source_output(weights[0])
                other.input(1).replace_source_output(weights[1])
                return compressed
        raise AssertionError("the graph has no two products of the same shape")

    patch.setattr(NncfQuantizer, "compress", exchanged)


@pytest.mark.usefixtures("only_one_pass")
@pytest.mark.parametrize(
    ("backend", "plant", "message"),
    [
        ("cpu", _swap_integers, "differs from the checkpoint by"),
        ("cpu", _use_first_blocks, "of the new graph differs from the original by"),
        ("openvino", _reverse_values, "differs from the checkpoint by"),
        ("openvino", _exchange_weights, "of the new graph differs from the original by"),
    ],
)
def test_planted_errors_are_detected(
    backend: str,
    plant: Callable[[pytest.MonkeyPatch], None],
    message: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    if backend not in BACKENDS:
        pytest.skip(f"{backend} is not installed")
    model = saved(tmp_path / "model", "llama")
    plant(monkeypatch)
    with caplog.at_level(logging.WARNING), pytest.raises(_ThreeStagesError):
        accel.export(model, tmp_path / "out", backend=backend, quantize="weight-int4")
    assert message in caplog.text


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
@pytest.mark.parametrize("settings", [{"algorithm": "awq"}, {"scale_estimation": True}])
def test_algorithms_that_need_several_weights_go_through_three_stages(settings: dict[str, Any], tmp_path: Path) -> None:
    if "openvino" not in BACKENDS:
        pytest.skip("openvino is not installed")
    config = QuantizeConfig(scheme="weight-int4", **settings)
    with pytest.raises(_ThreeStagesError):
        accel.export(saved(tmp_path / "model", "bert"), tmp_path / "out", backend="openvino", quantize=config)


@pytest.mark.usefixtures("only_one_pass")
@pytest.mark.parametrize("backend", BACKENDS)
def test_declared_schemes_take_one_pass_on_every_backend(backend: str, tmp_path: Path) -> None:
    for scheme in (scheme for name, scheme in declared() if name == backend):
        model = saved(tmp_path / f"model-{scheme}", "bert")
        assert is_one_pass(accel.export(model, tmp_path / scheme, backend=backend, quantize=scheme))


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
