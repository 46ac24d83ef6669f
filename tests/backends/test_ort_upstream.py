"""Tests of `accel_plugins.ortkit.upstream`, which calls private functions of ONNX Runtime, with the installed version."""

from __future__ import annotations

import numpy as np
import onnx_ir as ir
import onnxruntime as ort
import pytest
import torch

from accel_plugins.ortkit import upstream


@pytest.fixture(scope="module")
def session() -> ort.InferenceSession:
    """Return a session whose graph doubles `x: (rows, 2) float32`."""
    x = ir.Value(name="x", type=ir.TensorType(ir.DataType.FLOAT), shape=ir.Shape(["rows", 2]))
    node = ir.node("Add", [x, x])
    y = node.outputs[0]
    y.name, y.type, y.shape = "y", x.type, x.shape
    model = ir.Model(ir.Graph([x], [y], nodes=[node], opset_imports={"": 20}), ir_version=10)
    return ort.InferenceSession(ir.to_proto(model).SerializeToString(), providers=["CPUExecutionProvider"])


def test_native_run_equals_the_public_run(session: ort.InferenceSession) -> None:
    feeds = {"x": np.ones((3, 2), np.float32)}
    (private,), (public,) = upstream.native_run(session)(["y"], feeds, None), session.run(["y"], feeds)
    assert np.array_equal(private, public)


def test_binding_reads_and_writes_tensor_memory(session: ort.InferenceSession) -> None:
    binding, run = upstream.native_binding(session)
    x, y = torch.arange(4.0).reshape(2, 2), torch.empty(2, 2)
    binding.bind_ortvalue_input("x", upstream.native_value(x))
    binding.bind_ortvalue_output("y", upstream.native_value(y))
    run(binding, None)
    assert torch.equal(y, 2 * x)
    binding.bind_output("y", upstream.native_device(torch.device("cpu")))
    run(binding, None)
    assert torch.equal(upstream.native_as_tensor(binding.get_outputs()[0]), 2 * x)


@pytest.mark.parametrize("dtype", [torch.float32, torch.int64, torch.bool])
def test_native_value_shares_tensor_memory(dtype: torch.dtype) -> None:
    tensor = torch.tensor([[0, 1], [1, 1]]).to(dtype)
    value = ort.OrtValue(upstream.native_value(tensor))
    assert value.data_ptr() == tensor.data_ptr()
    again = upstream.ort_value_as_tensor(value)
    assert again.dtype == dtype
    assert torch.equal(again, tensor)


def test_error_types_are_those_that_sessions_raise(session: ort.InferenceSession) -> None:
    with pytest.raises(upstream.INVALID_GRAPH_ERRORS):
        ort.InferenceSession(b"no graph", providers=["CPUExecutionProvider"])
    with pytest.raises(upstream.RUN_ERRORS):
        upstream.native_run(session)(["y"], {"x": np.ones((3, 5), np.float32)}, None)


def test_cpu_build_has_no_cuda_version() -> None:
    assert (upstream.cuda_of_build() is None) == ("CUDAExecutionProvider" not in ort.get_available_providers())
