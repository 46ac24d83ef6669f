"""Tests of the release of memory pages of a model's weights: which pages return to the system, and which pages stay in
memory.
"""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import onnx_ir
import pytest
import torch
from safetensors.torch import load_file, save_file

from accel.capture import mapped_memory_release as pages
from accel.capture import release_pages
from accel_plugins.ortkit.export.lazy_weights import release_when_written
from tests.memory_pages import TELLS, resident

pytestmark = pytest.mark.skipif(not TELLS, reason="this system does not report which memory pages are resident")


@pytest.fixture
def mapped(tmp_path: Path) -> torch.Tensor:
    """Return a memory-mapped weight of 1 MiB from a safetensors file. All its pages are in memory."""
    file = tmp_path / "model.safetensors"
    save_file({"weight": torch.arange(1 << 18, dtype=torch.float32).reshape(512, 512)}, file)
    weight = load_file(file)["weight"]
    assert float(weight.sum()) > 0
    assert resident(weight) > 200
    return weight


def test_mapped_pages_are_released_and_read_again(mapped: torch.Tensor) -> None:
    release_pages([mapped])
    assert resident(mapped) == 0
    assert torch.equal(mapped.flatten(), torch.arange(1 << 18, dtype=torch.float32))


def test_changed_pages_are_kept(mapped: torch.Tensor) -> None:
    mapped[100, 100] = -1.0
    release_pages([mapped])
    assert resident(mapped) > 200
    assert mapped[100, 100] == -1.0


@pytest.mark.parametrize("array", [False, True])
def test_memory_that_is_not_mapped_is_kept(array: bool) -> None:
    weight = torch.ones(512, 512)
    release_pages([weight.numpy() if array else weight])
    assert resident(weight) > 200
    assert bool((weight == 1).all())


def test_transposed_view_has_the_same_pages(mapped: torch.Tensor) -> None:
    assert pages._span(mapped.numpy().T) == pages._span(mapped)
    release_pages([mapped.numpy().T])
    assert resident(mapped) == 0


def test_tensors_without_memory_are_ignored() -> None:
    sparse = torch.ones(4, 4).to_sparse()
    release_pages([torch.empty(0), torch.ones(4, device="meta"), sparse, np.empty(0, np.float32)])


def test_other_systems_release_nothing(mapped: torch.Tensor, monkeypatch: pytest.MonkeyPatch) -> None:
    pages._give_back.cache_clear()
    monkeypatch.setattr(sys, "platform", "darwin")
    release_pages([mapped])
    pages._give_back.cache_clear()
    assert resident(mapped) > 200


def test_pages_are_released_while_a_weight_is_written(mapped: torch.Tensor, tmp_path: Path) -> None:
    """The pages of a weight are released while the exporter writes the weight to the graph file. This also works if two
    values share the weight, or if the optimizer transposed it.
    """
    tensor = onnx_ir.Tensor(mapped.numpy().T, name="weight")
    values = [onnx_ir.Value(name=name, const_value=tensor) for name in ("weight", "tied")]
    nodes = [onnx_ir.node("Identity", [value]) for value in values]
    outputs = [node.outputs[0] for node in nodes]
    for index, output in enumerate(outputs):
        output.name = f"output.{index}"
    graph = onnx_ir.Graph([], outputs, nodes=nodes, initializers=values, opset_imports={"": 21})
    model = onnx_ir.Model(graph, ir_version=10)
    release_when_written(model)
    assert graph.initializers["weight"].const_value is graph.initializers["tied"].const_value
    onnx_ir.save(model, tmp_path / "model.onnx", external_data="model.onnx.data")
    assert resident(mapped) == 0
    written = onnx_ir.load(tmp_path / "model.onnx").graph.initializers["weight"].const_value
    assert written is not None
    np.testing.assert_array_equal(written.numpy(), mapped.numpy().T)
