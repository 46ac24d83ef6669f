"""Tests of axes of size 1. OpenVINO's compiler removes repeats along these axes, and its int8 layers compute reductions
over these axes wrongly.
"""

# ruff: noqa: E402

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
import torch
import transformers
from onnx import TensorProto, helper

ov = pytest.importorskip("openvino")

import openvino.opset13 as ops

from accel import (
    ORTModelForCustomTasks,
    ORTModelForImageClassification,
    ORTModelForSequenceClassification,
    export,
    quantize,
)
from accel_plugins.openvino.unit_axes import drop_reductions, keep_repeats, tile_one_axis_each


@pytest.mark.thorough
def test_repeats_along_an_unsqueezed_axis(tmp_path: Path) -> None:
    """YOSO's attention mask, which is repeated for each head, gives correct outputs. OpenVINO's compiler would remove
    the repeats if the sizes are dynamic.
    """
    config = transformers.YosoConfig(
        hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=24, vocab_size=99,
        max_position_embeddings=40, num_labels=3, initializer_range=0.3,
    )  # fmt: skip
    torch.manual_seed(0)
    original = transformers.YosoForSequenceClassification(config).eval()
    artifact = export(original, tmp_path / "ir", task="text-classification", backend="openvino")
    ids = torch.randint(6, 99, (3, 11), generator=torch.Generator().manual_seed(0))
    feeds = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
    feeds["attention_mask"][-1, 6:] = 0
    with torch.no_grad():
        expected = original(**feeds).logits
    logits = ORTModelForSequenceClassification.from_pretrained(artifact.path, backend="openvino")(**feeds).logits
    assert (logits - expected).abs().max() <= 1e-4


@pytest.mark.parametrize("indices", [[0], [0, 0, 0], [-1, 0], [[0, 0], [0, 0]]], ids=str)
@pytest.mark.parametrize("axis", [0, 1, -1])
def test_gather_repeats_along_any_axis(axis: int, indices: list[Any]) -> None:
    parameter = ops.parameter(ov.PartialShape([-1, -1]), ov.Type.f32)
    gathered = ops.gather(ops.unsqueeze(parameter, np.array([axis])), np.array(indices), np.array(axis))
    model = ov.Model([gathered], [parameter], "repeats")
    keep_repeats(model)
    numbers = np.arange(12, dtype=np.float32).reshape(3, 4)
    output = ov.compile_model(model, "CPU", {"INFERENCE_PRECISION_HINT": "f32"})(numbers)[0]
    assert np.array_equal(output, np.take(np.expand_dims(numbers, axis), indices, axis=axis))


def test_gather_without_repeats_is_unchanged() -> None:
    """The rewrite does not change a Gather with a single index or a Gather from a table with one row."""
    parameter = ops.parameter(ov.PartialShape([-1, -1]), ov.Type.i64)
    single = ops.gather(ops.unsqueeze(parameter, np.array([1])), np.array(0), np.array(1))
    rows = ops.gather(np.ones((1, 5), np.float32), parameter, np.array(0))
    model = ov.Model([single, rows], [parameter], "no repeats")
    before = [node.get_type_name() for node in model.get_ordered_ops()]
    keep_repeats(model)
    assert [node.get_type_name() for node in model.get_ordered_ops()] == before


@pytest.mark.parametrize("constant", [True, False], ids=["numbers", "sizes"])
@pytest.mark.parametrize(
    ("shape", "times"),
    [((3, 1, 1, 5), (1, 4, 8, 1)), ((3, 1, 7, 5), (1, 4, 2, 1)), ((3, 2, 5), (2, 3, 1)), ((3, 1, 5), (1, 4, 1))],
    ids=str,
)
def test_tile_repeats_of_any_shape(shape: tuple[int, ...], times: tuple[int, ...], constant: bool) -> None:
    """A Tile that repeats two axes gives correct values; a mask for heads and queries uses such a Tile. Without the
    rewrite, OpenVINO would mix up the rows.
    """
    parameter = ops.parameter(ov.PartialShape([size if size == 1 else -1 for size in shape]), ov.Type.f32)
    repeats = ops.parameter(ov.PartialShape([len(times)]), ov.Type.i64)
    tiled = ops.tile(parameter, np.array(times) if constant else repeats)
    model = ov.Model([tiled], [parameter] if constant else [parameter, repeats], "tiles")
    tile_one_axis_each(model)
    numbers = np.arange(np.prod(shape), dtype=np.float32).reshape(shape)
    compiled = ov.compile_model(model, "CPU", {"INFERENCE_PRECISION_HINT": "f32"})
    output = compiled([numbers] if constant else [numbers, np.array(times)])[0]
    assert np.array_equal(output, np.tile(numbers, times))


def test_repeats_in_onnx_graphs(tmp_path: Path) -> None:
    """Repeats in ONNX graphs from other tools are kept when OpenVINO runs the graph."""
    nodes = [
        helper.make_node("Unsqueeze", ["x", "axes"], ["made"]),
        helper.make_node("Gather", ["made", "indices"], ["y"], axis=1),
    ]
    ints = [
        helper.make_tensor(name, TensorProto.INT64, [len(row)], row)
        for name, row in (("axes", [1]), ("indices", [0, 0, 0]))
    ]
    ends = [
        [helper.make_tensor_value_info(name, TensorProto.FLOAT, shape)]
        for name, shape in (("x", ["batch", "sequence"]), ("y", ["batch", 3, "sequence"]))
    ]
    graph = helper.make_graph(nodes, "repeats", *ends, ints)
    onnx.save(
        helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=9), tmp_path / "model.onnx"
    )
    tensor = torch.arange(8.0).reshape(2, 4)
    model = ORTModelForCustomTasks.from_pretrained(tmp_path, backend="openvino")
    assert torch.equal(model(x=tensor)["y"], tensor.unsqueeze(1).repeat(1, 3, 1))


@pytest.mark.parametrize("keep", [False, True])
@pytest.mark.parametrize("kind", ["reduce_mean", "reduce_sum", "reduce_max", "reduce_prod"])
def test_reduction_of_unit_axis_removes_the_axis(kind: str, keep: bool) -> None:
    parameter = ops.parameter(ov.PartialShape([-1, 4, 1]), ov.Type.f32)
    parameter.output(0).get_tensor().set_names({"x"})
    reduced = getattr(ops, kind)(parameter, np.array([-1]), keep)
    reduced.output(0).get_tensor().set_names({"reduced"})
    several = getattr(ops, kind)(parameter, np.array([1, 2]), keep)
    model = ov.Model([reduced, several], [parameter], "reductions")
    expected = ov.compile_model(model, "CPU")
    drop_reductions(model)
    assert [node.get_type_name().startswith("Reduce") for node in model.get_ops()].count(True) == 1, (
        "of several entries"
    )
    numbers = np.arange(12, dtype=np.float32).reshape(3, 4, 1)
    outputs = ov.compile_model(model, "CPU")(numbers)
    assert np.array_equal(outputs["reduced"], expected(numbers)["reduced"])
    assert np.array_equal(outputs[1], expected(numbers)[1])


@pytest.mark.thorough
def test_int8_batch_rows_equal_single_rows(tmp_path: Path) -> None:
    """In a batch, a row gives the same output as the row alone. SwiftFormer pools over one position for an image of
    size 32; OpenVINO's int8 layers then had errors of half the largest value in batches.
    """
    config = transformers.SwiftFormerConfig(
        image_size=32, depths=[1, 1, 1, 1], embed_dims=[16, 24, 32, 80], num_labels=3, drop_path_rate=0.0
    )
    torch.manual_seed(0)
    model = transformers.SwiftFormerForImageClassification(config).eval()
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.7 / max(1, parameter[0].numel()) ** 0.5 if parameter.ndim > 1 else 0.3)
    images = torch.randn((3, 3, 32, 32), generator=torch.Generator().manual_seed(0))
    exported = export(model, tmp_path / "ir", task="image-classification", backend="openvino")
    small = quantize(
        exported, tmp_path / "int8", backend="openvino", scheme="static-int8", calibration=[{"pixel_values": images}]
    )
    opened = ORTModelForImageClassification.from_pretrained(small.path, backend="openvino")
    together = opened(pixel_values=images).logits
    alone = torch.cat([opened(pixel_values=image[None]).logits for image in images])
    assert (together - alone).abs().max() <= 0.05 * together.abs().max()
