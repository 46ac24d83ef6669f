"""Tests that checkpoints that other tools quantized give the same logits as in those tools, with the integers of the checkpoint."""

from __future__ import annotations

import json
import shutil
import tarfile
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torchao.quantization import Float8WeightOnlyConfig, Int8WeightOnlyConfig, quantize_
from transformers import LlamaConfig, LlamaForCausalLM, T5Config, T5ForConditionalGeneration

import accel
from accel.artifact.hub import HubOptions, Location
from accel.capture.quantized_linears import quantized_layers
from accel.capture.source_loader import load_source
from accel.config import ExportConfig
from accel.errors import ExportError, QuantizeError

from .folders import FOREIGN

# The tolerance is for weights in float16 and bfloat16, in which GPTQModel and torchao dequantize.
CLOSE = 5e-3
# The tolerance is for activations that kernels of ONNX Runtime round to 8 bits. Unrelated logits would differ by 1.4.
ROUNDED = 0.03
# The tolerance is for weights that are rounded to 4 bits in two ways, and for output layers and embeddings that are rounded, too.
MORE_ROUNDED = 0.2
SCHEMES = {
    "auto-round": "weight-int4",
    "awq": "weight-int4",
    "compressed-int8": "weight-int8",
    "compressed-zeros": "weight-int4",
    "gptq-channels": "weight-int8",
    "gptq-order": "weight-int4",
    "gptq-zeros": "weight-int4",
    "torchao": "weight-int4",
}
SIZES = {
    "vocab_size": 128,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}
IDS = torch.tensor([[1, 5, 9, 33, 21, 64, 90, 3, 17, 55, 120, 7]])


@pytest.fixture(scope="module")
def packed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with a model that several tools quantized, and with the logits that these tools computed."""
    out = tmp_path_factory.mktemp("packed")
    with tarfile.open(FOREIGN / "packed.tar.xz") as archive:
        archive.extractall(out, filter="data")
    return out


def load(folder: Path, **settings: str) -> torch.nn.Module:
    """Load the PyTorch model that an export traces."""
    location = Location(folder=folder, id=folder.name)
    config = ExportConfig(**settings)
    return load_source(location, task="text-generation", config=config, hub=HubOptions()).model


def expected_logits(packed: Path, name: str) -> torch.Tensor:
    """Return the logits of the tool. There are none for auto-round's layout, which only auto-round reads."""
    return torch.tensor(json.loads((packed / "answers" / f"{name}.json").read_text(encoding="utf-8")))


def distance(actual: torch.Tensor, expected: torch.Tensor) -> float:
    """Return the norm of the difference, relative to the norm of the expected values."""
    return float((actual - expected).norm() / expected.norm())


def logits(folder: Path, backend: str) -> torch.Tensor:
    """Return the logits of an artifact."""
    with accel.ORTModelForCausalLM.from_pretrained(folder, backend=backend) as model:
        result: torch.Tensor = model(input_ids=IDS).logits
    return result


def changed(folder: Path, out: Path, **settings: object) -> Path:
    """Copy a folder, and change settings of its quantization config."""
    shutil.copytree(folder, out)
    config = json.loads((out / "config.json").read_text(encoding="utf-8"))
    config["quantization_config"] |= settings
    (out / "config.json").write_text(json.dumps(config), encoding="utf-8")
    return out


@pytest.mark.parametrize("name", sorted(SCHEMES.keys() - {"auto-round"}))
def test_loaded_layers_compute_the_logits_of_the_tool(name: str, packed: Path) -> None:
    model = load(packed / name)
    assert len(quantized_layers(model)) == 7
    with torch.no_grad():
        assert distance(model(input_ids=IDS).logits, expected_logits(packed, name)) < CLOSE


def test_layout_of_auto_round_has_the_weights_of_the_awq_folder(packed: Path) -> None:
    # auto-round wrote both folders from the same weights: with zero points in the layout of AWQ, and without them in its own layout.
    layers, others = (quantized_layers(load(packed / name)) for name in ("auto-round", "awq"))
    assert layers.keys() == others.keys()
    for name, layer in layers.items():
        assert distance(layer.dequantized(), others[name].dequantized().detach()) < MORE_ROUNDED


@pytest.mark.parametrize("name", sorted(SCHEMES.keys() - {"auto-round"}))
@pytest.mark.parametrize("backend", ["cpu", "openvino"])
def test_exported_graph_has_the_integers(name: str, backend: str, packed: Path, tmp_path: Path) -> None:
    artifact = accel.export(packed / name, tmp_path / "out", backend=backend)
    quantization = artifact.manifest.quantization
    assert quantization is not None
    assert quantization.scheme == SCHEMES[name]
    assert quantization.preset in ("awq", "compressed-tensors", "gptq", "torchao")
    assert distance(logits(tmp_path / "out", backend), expected_logits(packed, name)) < ROUNDED


@pytest.mark.parametrize("name", ["gptq-order", "compressed-int8", "torchao"])
@pytest.mark.parametrize("backend", ["cpu", "openvino"])
def test_scheme_quantizes_the_other_layers(name: str, backend: str, packed: Path, tmp_path: Path) -> None:
    exported = accel.export(packed / name, tmp_path / "export", backend=backend)
    artifact = accel.export(packed / name, tmp_path / "out", quantize=SCHEMES[name], backend=backend)
    quantization = artifact.manifest.quantization
    assert quantization is not None
    assert quantization.preset == exported.manifest.quantization.preset  # type: ignore[union-attr]
    sizes = [
        sum(f.stat().st_size for f in a.path.rglob("*.*") if f.suffix in (".data", ".bin"))
        for a in (exported, artifact)
    ]
    assert sizes[1] < sizes[0]
    assert distance(logits(artifact.path, backend), expected_logits(packed, name)) < MORE_ROUNDED


def test_another_scheme_is_refused(packed: Path, tmp_path: Path) -> None:
    with pytest.raises(QuantizeError, match="already quantized"):
        accel.export(packed / "awq", tmp_path / "out", quantize="weight-int8")
    exported = accel.export(packed / "awq", tmp_path / "export")
    with pytest.raises(QuantizeError, match="already quantized"):
        accel.quantize(exported, tmp_path / "out", scheme="dynamic-int8")


def test_half_precision_is_refused(packed: Path, tmp_path: Path) -> None:
    with pytest.raises(ExportError, match="quantized model"):
        accel.export(packed / "awq", tmp_path / "out", dtype="float16")


@pytest.mark.parametrize(
    ("name", "settings", "message"),
    [
        ("gptq-zeros", {"bits": 3}, "3 bits"),
        ("awq", {"version": "gemv"}, "'gemv'"),
        ("awq", {"bits": 8}, "8 bits"),
        ("awq", {"version": None, "format": "gemv"}, "'gemv'"),
        ("awq", {"group_size": 64}, r"number of groups \[4\] instead of \[2\]"),
        ("awq", {"quant_method": "gptq"}, r"q_proj .* layout of gptq .*: qweight"),
        ("gptq-zeros", {"checkpoint_format": "marlin"}, "'marlin'"),
        ("gptq-zeros", {"quant_method": "awq", "version": "gemm"}, r"q_proj .* layout of awq .*: qweight"),
        ("gptq-zeros", {"group_size": "large"}, "quantization_config in config.json"),
        ("compressed-int8", {"config_groups": ["group"]}, "quantization_config in config.json"),
        ("compressed-int8", {"transform_config": {"config_groups": {"v": {}}}}, "transform_config"),
    ],
)
def test_other_layouts_are_refused(
    name: str, settings: dict[str, object], message: str, packed: Path, tmp_path: Path
) -> None:
    folder = changed(packed / name, tmp_path / "changed", **settings)
    with pytest.raises(ExportError, match=message):
        accel.export(folder, tmp_path / "out")


def test_second_version_of_gptq_has_zero_points_without_an_offset(packed: Path, tmp_path: Path) -> None:
    folder = changed(packed / "gptq-zeros", tmp_path / "changed", checkpoint_format="gptq_v2")
    weights = load_file(folder / "model.safetensors")
    for name in weights:
        if name.endswith(".qzeros"):
            values = weights[name].view(torch.uint8)
            low, high = (values & 15) + 1, (values >> 4) + 1
            weights[name] = ((low & 15) | ((high & 15) << 4)).view(torch.int32)
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    with torch.no_grad():
        actual = load(folder)(input_ids=IDS).logits
    assert distance(actual, expected_logits(packed, "gptq-zeros")) < CLOSE


def test_weights_in_other_files_are_refused(packed: Path, tmp_path: Path) -> None:
    folder = tmp_path / "folder"
    shutil.copytree(packed / "awq", folder)
    torch.save(load_file(folder / "model.safetensors"), folder / "pytorch_model.bin")
    (folder / "model.safetensors").unlink()
    with pytest.raises(ExportError, match="safetensors"):
        accel.export(folder, tmp_path / "out")


Weights = dict[str, torch.Tensor]


def without_scales(weights: Weights) -> None:
    del weights["model.layers.0.mlp.up_proj.scales"]


def without_order(weights: Weights) -> None:
    del weights["model.layers.0.mlp.up_proj.g_idx"]


def without_zero_points(weights: Weights) -> None:
    del weights["model.layers.0.mlp.up_proj.weight_zero_point"]


def with_rotation(weights: Weights) -> None:
    weights["model.layers.0.mlp.up_proj.u_output.weight"] = torch.eye(256)


def with_lookup_table(weights: Weights) -> None:
    weights["model.layers.0.mlp.up_proj.lookup_table"] = torch.zeros(16)


def with_integer_embedding(weights: Weights) -> None:
    weights["model.embed_tokens.weight"] = torch.zeros((128, 128), dtype=torch.int8)
    weights["model.embed_tokens.weight_scale"] = torch.ones((128, 1))


def with_narrow_words(weights: Weights) -> None:
    name = "model.layers.0.mlp.up_proj.qweight"
    weights[name] = weights[name].view(torch.int8)


def with_two_bits(weights: Weights) -> None:
    name = "model.layers.0.mlp.up_proj.qweight"
    weights[name] = weights[name][: len(weights[name]) // 2].contiguous()


def not_quantized(weights: Weights) -> None:
    for name in [name for name in weights if "_proj." in name and not name.endswith("bias")]:
        del weights[name]


@pytest.mark.parametrize(
    ("name", "change", "message"),
    [
        ("awq", without_scales, r"up_proj: scales"),
        ("gptq-order", without_order, r"up_proj: g_idx"),
        ("compressed-zeros", without_zero_points, r"up_proj: weight_zero_point"),
        ("gptq-order", with_rotation, r"does not read: model\.layers\.0\.mlp\.up_proj\.u_output"),
        ("awq", with_lookup_table, r"up_proj has tensors .*: lookup_table"),
        ("compressed-int8", with_integer_embedding, r"not linear layers .*embed_tokens"),
        ("gptq-zeros", with_narrow_words, r"up_proj do not have the layout"),
        ("gptq-zeros", with_two_bits, r"up_proj do not have the layout"),
        ("gptq-zeros", not_quantized, "are not quantized"),
    ],
)
def test_other_tensors_are_refused(
    name: str, change: Callable[[Weights], None], message: str, packed: Path, tmp_path: Path
) -> None:
    folder = tmp_path / "folder"
    shutil.copytree(packed / name, folder)
    weights = load_file(folder / "model.safetensors")
    change(weights)
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ExportError, match=message):
        load(folder)


def test_damaged_and_missing_files_are_named(packed: Path, tmp_path: Path) -> None:
    folder = tmp_path / "folder"
    shutil.copytree(packed / "awq", folder)
    weights = folder / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:1000])
    with pytest.raises(ExportError, match=r"model\.safetensors is damaged"):
        load(folder)
    index = {"weight_map": {"model.norm.weight": "model-00001-of-00002.safetensors"}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index), encoding="utf-8")
    weights.unlink()
    with pytest.raises(ExportError, match="model-00001-of-00002"):
        load(folder)


def test_quantized_output_layer_is_not_tied(packed: Path, tmp_path: Path) -> None:
    folder = tmp_path / "folder"
    shutil.copytree(packed / "gptq-zeros", folder)
    weights = load_file(folder / "model.safetensors")
    for last in ("qweight", "qzeros", "scales", "g_idx"):
        weights[f"lm_head.{last}"] = weights[f"model.layers.0.self_attn.q_proj.{last}"].clone()
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    layers = quantized_layers(load(folder))
    assert torch.equal(layers["lm_head"].dequantized(), layers["model.layers.0.self_attn.q_proj"].dequantized())


def test_layers_whose_model_initializes_weights(packed: Path, tmp_path: Path) -> None:
    folder = tmp_path / "folder"
    sizes = {"d_model": 128, "d_kv": 32, "d_ff": 128, "num_heads": 4, "num_layers": 1, "vocab_size": 128}
    T5ForConditionalGeneration(T5Config(**sizes)).save_pretrained(folder)
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    config["quantization_config"] = json.loads((packed / "gptq-zeros" / "config.json").read_text(encoding="utf-8"))[
        "quantization_config"
    ]
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    weights, others = load_file(folder / "model.safetensors"), load_file(packed / "gptq-zeros" / "model.safetensors")
    for name in [name for name in weights if ".SelfAttention.q." in name]:
        del weights[name]
        for last in ("qweight", "qzeros", "scales", "g_idx"):
            weights[name.replace("weight", last)] = others[f"model.layers.0.self_attn.q_proj.{last}"].clone()
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    location = Location(folder=folder, id="t5")
    source = load_source(location, task="text2text-generation", config=ExportConfig(), hub=HubOptions())
    assert len(quantized_layers(source.model)) == 2


def test_export_can_be_quantized_with_the_same_scheme(packed: Path, tmp_path: Path) -> None:
    exported = accel.export(packed / "awq", tmp_path / "export")
    artifact = accel.quantize(exported, tmp_path / "out", scheme="weight-int4")
    assert artifact.manifest.steps[-1].report["embeddings"]


def test_quantized_experts_are_refused(packed: Path, tmp_path: Path) -> None:
    folder = tmp_path / "folder"
    shutil.copytree(packed / "awq", folder)
    weights = load_file(folder / "model.safetensors")
    for name in [name for name in weights if ".mlp.up_proj." in name]:
        weights[name.replace("up_proj", "experts.0.up_proj")] = weights.pop(name)
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ExportError, match=r"1 of 7 quantized layers .* not linear layers .*experts\.0\.up_proj"):
        accel.export(folder, tmp_path / "out")


def test_model_in_memory_with_weights_of_torchao(
    packed: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    plain = LlamaForCausalLM(LlamaConfig(**SIZES)).eval()
    quantize_(plain.model.layers, Int8WeightOnlyConfig())
    quantize_(plain.lm_head, Float8WeightOnlyConfig())
    with torch.no_grad():
        expected = plain(input_ids=IDS).logits
    artifact = accel.export(plain, tmp_path / "out", task="text-generation")
    assert "float32" in caplog.text
    assert artifact.manifest.quantization is not None
    assert artifact.manifest.quantization.scheme == "weight-int8"
    assert distance(logits(artifact.path, "cpu"), expected) < ROUNDED
    assert all("BlockLinear" not in type(module).__name__ for module in plain.modules())
