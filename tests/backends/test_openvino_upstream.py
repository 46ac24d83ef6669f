"""Tests of `accel_plugins.openvino.upstream`, which calls private functions of OpenVINO, with the installed version."""

from __future__ import annotations

import numpy as np
import openvino as ov
import pytest
from openvino import opset13 as ops

from accel_plugins.openvino import upstream


def _sum() -> ov.Model:
    """Return a graph that computes `present = past + x`; all tensors are `(2,) float32`."""
    past, x = ops.parameter([2], ov.Type.f32, name="past"), ops.parameter([2], ov.Type.f32, name="x")
    total = ops.add(past, x)
    for value, name in ((past, "past"), (x, "x"), (total, "present")):
        value.output(0).get_tensor().set_names({name})
    return ov.Model([total], [past, x], "sum")


def test_native_infer_runs_a_request() -> None:
    request = ov.Core().compile_model(_sum(), "CPU").create_infer_request()
    for run in (
        lambda: upstream.native_infer(request)({}, share_outputs=True, decode_strings=True),
        lambda: (upstream.native_start(request)({}, None), request.wait()),
    ):
        request.set_input_tensor(0, ov.Tensor(np.array([1, 2], np.float32)))
        request.set_input_tensor(1, ov.Tensor(np.array([3, 5], np.float32)))
        request.get_output_tensor(0).data[:] = 0
        run()
        assert request.get_output_tensor(0).data.tolist() == [4, 7]


def test_make_stateful_turns_input_and_output_into_a_variable() -> None:
    model = _sum()
    upstream.make_stateful(model, {"past": "present"})
    assert [port.any_name for port in model.inputs] == ["x"]
    request = ov.Core().compile_model(model, "CPU").create_infer_request()
    for _ in range(2):
        request.infer({0: np.array([1, 2], np.float32)})
    (variable,) = request.query_state()
    assert variable.name == "pastpresent"
    assert variable.state.data.tolist() == [2, 4]


def test_nncf_parameters_exist_by_name() -> None:
    pytest.importorskip("nncf")
    advanced, estimators = upstream.nncf_parameters()
    collector = estimators.StatisticsCollectorParameters(
        statistics_type=estimators.StatisticsType.QUANTILE, aggregator_type=estimators.AggregatorType.MEAN
    )
    ranges = estimators.RangeEstimatorParameters(min=collector, max=collector)
    parameters = advanced.AdvancedQuantizationParameters(activations_range_estimator_params=ranges)
    assert parameters.activations_range_estimator_params == ranges
    assert upstream.nncf_library().CompressWeightsMode.INT4_SYM


def test_nncf_compiles_once_for_weights_of_a_shape(monkeypatch: pytest.MonkeyPatch) -> None:
    nncf = upstream.nncf_library()
    compiled: list[ov.Model] = []
    compile_model = ov.compile_model

    def counted(model: ov.Model, *args: object, **settings: object) -> ov.CompiledModel:
        compiled.append(model)
        return compile_model(model, *args, **settings)

    def graph() -> ov.Model:
        x = ops.parameter([1, 256], ov.Type.f32)
        random = np.random.default_rng(0)
        total = x
        for _ in range(4):
            weight = ops.constant(random.standard_normal((256, 256)).astype(np.float32))
            total = ops.matmul(total, weight, transpose_a=False, transpose_b=True)
        return ov.Model([total], [x], "layers")

    def compress() -> ov.Model:
        return nncf.compress_weights(graph(), mode=nncf.CompressWeightsMode.INT4_SYM, group_size=32, all_layers=True)

    monkeypatch.setattr(ov, "compile_model", counted)
    expected = compress()
    often = len(compiled)
    compiled.clear()
    with upstream.nncf_compiles_once():
        actual = compress()
    assert len(compiled) < often

    def constants(model: ov.Model) -> list[bytes]:
        nodes = [node for node in model.get_ordered_ops() if node.get_type_name() == "Constant"]
        return [node.get_tensor_view().data.tobytes() for node in nodes]

    assert constants(actual) == constants(expected)
