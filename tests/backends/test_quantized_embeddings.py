"""Check quantized embedding tables: tied tables are stored once, lookups return the dequantized rows, and exclusions apply."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir
import onnxruntime as ort
import pytest
import torch
import transformers

import accel
from accel.artifact import Artifact
from accel.config import QuantizeConfig
from accel.errors import ConfigError
from accel.testing.models import tiny_tokenizer
from accel_plugins.ortkit.graph.editing import add_initializer, load_graph, nodes, save_graph
from accel_plugins.ortkit.quantization.layers import find_layers, find_lookups
from accel_plugins.ortkit.quantization.lookups import quantize_lookups
from accel_plugins.ortkit.quantization.weight_only import quantize_blocks, quantize_weights

_ROWS = 40
_TIED = """
    <ir_version: 10, opset_import: ["" : 20]>
    graph (int64[b,n] input_ids, float[40,W] table) => (float[b,n,W] rows, float[b,n,40] logits) {
        rows = Gather(table, input_ids)
        weight = Transpose <perm = [1, 0]> (table)
        logits = MatMul(rows, weight)
    }"""
_LOOKUP = """
    <ir_version: 10, opset_import: ["" : 20]>
    graph (int64[b,n] input_ids, float[40,W] table) => (float[b,n,W] rows) {
        INDICES
        rows = Gather(table, ids)
    }"""


def graph(text: str, table: np.ndarray) -> ir.Model:
    """Return the graph of a text with `table` as a constant."""
    model = ir.from_onnx_text(text.replace("W", str(table.shape[1])))
    value = next(value for value in model.graph.inputs if value.name == "table")
    value.replace_all_uses_with(add_initializer(model.graph, "table_constant", table))
    model.graph.inputs.remove(value)
    for node in nodes(model, "Transpose"):
        node.outputs[0].shape = ir.Shape(table.shape[::-1])
    return model


def table_of(width: int) -> np.ndarray:
    return np.random.default_rng(0).standard_normal((_ROWS, width)).astype(np.float32)


def quantized(model: ir.Model, folder: Path, bits: int = 4, **settings: Any) -> Mapping[str, np.ndarray]:
    """Quantize a graph, write it to `folder`, and return its outputs for some ids, by name."""
    config = QuantizeConfig(scheme=f"weight-int{bits}", **settings)
    layers = find_layers(model)
    lookups = find_lookups({"model": model}, {"model": layers}, config.block_size)["model"]
    symmetric = config.symmetric if config.symmetric is not None else config.algorithm == "rtn"
    matrices = quantize_weights(
        layers, bits=[bits] * len(layers), block_size=config.block_size, symmetric=symmetric, algorithm=config.algorithm
    )  # type: ignore[arg-type]
    by_layer = {id(layer): matrix for layer, matrix in zip(layers, matrices, strict=True)}
    quantize_lookups({"model": model}, lookups, by_layer, config)
    folder.mkdir(exist_ok=True)
    save_graph(model, folder / "model.onnx")
    session = ort.InferenceSession(str(folder / "model.onnx"))
    names = [output.name for output in session.get_outputs()]
    return dict(zip(names, session.run(None, {"input_ids": _IDS}), strict=True))


_IDS = np.array([[0, 3, 39], [7, 7, 20]])


@pytest.mark.parametrize("width", [128, 100])
@pytest.mark.parametrize(
    ("bits", "settings"),
    [
        (4, {}), (4, {"symmetric": False}), (4, {"algorithm": "hqq"}), (4, {"block_size": 16, "symmetric": False}),
        (8, {}), (8, {"symmetric": False}), (8, {"block_size": 64}),
    ],
)  # fmt: skip
def test_tied_tables_are_stored_once(bits: int, settings: dict[str, Any], width: int, tmp_path: Path) -> None:
    table = table_of(width)
    outputs = quantized(graph(_TIED, table), tmp_path, bits, **settings)
    symmetric = settings.get("symmetric", "algorithm" not in settings)
    blocks = quantize_blocks(
        table.T,
        bits=bits,
        block_size=settings.get("block_size", 32),
        symmetric=symmetric,
        algorithm=settings.get("algorithm", "rtn"),
    )
    expected = blocks.dequantized(width).T[_IDS]
    assert np.abs(outputs["rows"] - expected).max() < 1e-6
    assert outputs["rows"].shape == (*_IDS.shape, width)
    stored = blocks.packed.nbytes + blocks.scales.nbytes * (3 if "algorithm" in settings else 1)
    # Zero points and the padding between weights need some more space.
    assert stored <= (tmp_path / "model.onnx.data").stat().st_size < stored + 400


def test_transposed_copies_of_a_table_are_recognized(tmp_path: Path) -> None:
    """The tracer stores a transposed copy of a small table."""
    table = table_of(64)
    model = graph(_TIED, table)
    product = next(nodes(model, "MatMul"))
    product.replace_input_with(1, add_initializer(model.graph, "copy", table.T))
    quantized(model, tmp_path)
    assert (tmp_path / "model.onnx.data").stat().st_size < table.nbytes / 4


def test_tables_of_other_layers_are_not_tied(tmp_path: Path) -> None:
    table = table_of(64)
    model = graph(_TIED, table)
    product = next(nodes(model, "MatMul"))
    transpose = product.inputs[1].producer()
    product.replace_input_with(1, add_initializer(model.graph, "other", table.T + 1))
    model.graph.remove(transpose, safe=True)
    outputs = quantized(model, tmp_path)
    [lookup] = nodes(model, "GatherBlockQuantized", domain="com.microsoft")
    assert lookup.attributes.get_int("bits") == 8
    assert np.abs(outputs["rows"] - table[_IDS]).max() < 0.02


@pytest.mark.parametrize(
    ("indices", "is_quantized"),
    [
        ("ids = Identity(input_ids)", True),
        ("zero = Constant<value_int = 0>() limit = Constant<value_int = 20>() ids = Clip(input_ids, zero, limit)", True),
        ("axis = Constant<value_int = 1>() ids = CumSum(input_ids, axis)", False),
    ],
)  # fmt: skip
def test_only_lookups_of_token_ids_are_quantized(indices: str, is_quantized: bool) -> None:
    model = graph(_LOOKUP.replace("INDICES", indices), table_of(64))
    lookups = find_lookups({"model": model}, {"model": []}, 32)["model"]
    assert bool(lookups) == is_quantized


def saved(folder: Path, tied: bool) -> Path:
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=2048, hidden_size=128, intermediate_size=160, num_hidden_layers=1, num_attention_heads=4,
        num_key_value_heads=2, tie_word_embeddings=tied, pad_token_id=0, bos_token_id=1, eos_token_id=2,
    )  # fmt: skip
    transformers.LlamaForCausalLM(config).save_pretrained(folder)
    tiny_tokenizer().save_pretrained(folder)
    return folder


def operators(artifact: Artifact) -> set[str]:
    return {node.op_type for node in load_graph(artifact, artifact.component()).graph}


@pytest.mark.parametrize(
    ("tied", "exclude", "bits", "names", "share"),
    [
        (True, (), 4, [], 0.16),
        (True, ("model.embed_tokens",), None, ["model.embed_tokens"], 1.16),
        (True, ("lm_head",), None, ["lm_head", "model.embed_tokens"], 1.0),
        (False, (), 8, [], 0.16 + 0.29),
        (False, ("model.embed_tokens",), None, ["model.embed_tokens"], 1.16),
        (False, ("lm_head",), 8, ["lm_head"], 1.29),
    ],
)
def test_embeddings_of_decoders(
    tied: bool, exclude: tuple[str, ...], bits: int | None, names: list[str], share: float, tmp_path: Path
) -> None:
    """Quantize a decoder. `share` is the size of the table and the output layer, relative to a table in float32."""
    exported = accel.export(saved(tmp_path / "model", tied), tmp_path / "exported")
    artifact = accel.quantize(exported, tmp_path / "out", scheme="weight-int4", exclude=exclude)
    assert isinstance(artifact, Artifact)
    report = artifact.manifest.steps[-1].report
    assert sorted(report["excluded"]) == names
    assert report["embeddings"] == ({} if bits is None else {"model.embed_tokens": bits})
    assert ("GatherBlockQuantized" in operators(artifact)) == (bits is not None)
    table = 2048 * 128 * 4
    layers = 0.15625 * 4 * (128 * (128 + 64 + 64 + 128) + 3 * 128 * 160)
    assert (artifact.path / "model.onnx.data").stat().st_size == pytest.approx(share * table + layers, rel=0.06)


def test_operators_setting_applies_to_embeddings(tmp_path: Path) -> None:
    exported = accel.export(saved(tmp_path / "model", True), tmp_path / "exported")
    artifact = accel.quantize(exported, tmp_path / "out", scheme="weight-int4", operators=("MatMul",))
    assert isinstance(artifact, Artifact)
    assert "GatherBlockQuantized" not in operators(artifact)
    artifact = accel.quantize(exported, tmp_path / "other", scheme="weight-int4", operators=("MatMul", "Gather"))
    assert isinstance(artifact, Artifact)
    assert "GatherBlockQuantized" in operators(artifact)
    with pytest.raises(ConfigError, match="'Gather' cannot be quantized"):
        accel.quantize(exported, tmp_path / "third", scheme="dynamic-int8", operators=("Gather",))
