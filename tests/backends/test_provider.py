"""Tests of the base class of execution provider backends, of the assignment of graph nodes to providers, and of
providers in separate libraries.

ONNX Runtime's CPU wheel has two providers: the CPU provider, and the Azure provider, which always loads and supports no
node of the tested graphs.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import onnxruntime as ort
import pytest
import torch
from onnxruntime.capi import onnxruntime_pybind11_state as ort_errors

from accel import capture
from accel.artifact import Artifact
from accel.config import SessionOptions
from accel.errors import BackendUnavailableError, ConfigError, SessionError
from accel.interfaces.protocols import Backend, OpenRequest
from accel.interfaces.specs import BackendSpec, Capability, DeviceSpec
from accel_plugins.cpu.backend import CpuBackend
from accel_plugins.ortkit import provider
from accel_plugins.ortkit.provider import ProviderBackend
from accel_plugins.ortkit.runtime import plugin_providers, provider_assignment
from accel_plugins.ortkit.runtime.provider_assignment import CPU, ProviderAssignment
from accel_plugins.ortkit.runtime.session import native_options

AZURE = "AzureExecutionProvider"
HOST = DeviceSpec("cpu")
SPEC = BackendSpec(
    name="probe",
    summary="for tests",
    extra="probe",
    impl="probe:Backend",
    capabilities=(Capability(stage="run", consumes="onnx", dtypes=("float32",), options=("color", "size")),),
)


class Azure(ProviderBackend):
    spec = SPEC
    provider = AZURE
    install = "pip install azure"


class FromLibrary(Azure):
    """Backend for tests that treats the CPU provider as a provider from a separate library."""

    provider = CPU
    path = Path("/nowhere/libprovider.so")

    def library(self) -> Path:
        return self.path


@pytest.fixture
def open_with(tiny_artifact: Callable[..., Artifact]) -> Callable[..., Any]:
    def open_(backend: ProviderBackend, options: dict[str, object] | None = None, **session: Any) -> Any:
        session_options = SessionOptions(**session)
        return backend.open(tiny_artifact(), OpenRequest(device=HOST, options=options or {}, session=session_options))[
            "model"
        ]

    return open_


@pytest.fixture
def loaded(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[tuple[str, str]]:
    """Make ONNX Runtime accept a fake provider library. Return the list of calls that register the library."""
    calls: list[tuple[str, str]] = []
    monkeypatch.setattr(FromLibrary, "path", tmp_path / "libprovider.so")
    FromLibrary.path.write_bytes(b"")
    monkeypatch.setattr(plugin_providers, "_registered", {})
    monkeypatch.setattr(ort, "register_execution_provider_library", lambda *args: calls.append(args))
    return calls


# The tests below check the base class.


@pytest.mark.parametrize("few", [False, True])
def test_weights_are_not_prepacked_for_few_calls(
    few: bool, tiny_artifact: Callable[..., Artifact], monkeypatch: pytest.MonkeyPatch
) -> None:
    artifact = tiny_artifact()
    entry = "session.disable_prepacking"

    def native() -> ort.SessionOptions:
        session = CpuBackend().open(artifact, OpenRequest(device=HOST, few_calls=few))["model"]
        return session.runtime.get_session_options()

    assert native().enable_cpu_mem_arena
    monkeypatch.setattr(provider, "_LARGE_BYTES", artifact.bytes)
    options = native()
    assert options.enable_cpu_mem_arena is not few
    if few:
        assert options.get_session_config_entry(entry) == "1"
    else:
        with pytest.raises(RuntimeError):
            options.get_session_config_entry(entry)


def test_provider_backend_implements_the_protocol() -> None:
    assert isinstance(Azure(), Backend)


def test_stages_are_declared_by_the_spec() -> None:
    assert (Azure().exporter(), Azure().optimizer(), Azure().quantizer()) == (None, None, None)
    assert CpuBackend().exporter() is not None
    assert CpuBackend().optimizer() is not None
    assert CpuBackend().quantizer() is not None


def test_missing_provider_is_reported_with_remedy() -> None:
    class Missing(Azure):
        provider = "NoSuchExecutionProvider"

    probe = Missing().probe()
    assert not probe.available
    assert str(probe.reasons[0]) == "this ONNX Runtime build has no NoSuchExecutionProvider (pip install azure)"
    assert probe.versions == {"onnxruntime": ort.__version__}


def test_failing_probe_is_reported_as_reason() -> None:
    class Failing(Azure):
        def devices(self) -> tuple[DeviceSpec, ...]:
            raise OSError("the driver says no")

    reason = Failing().probe().reasons[0]
    assert "the driver says no" in reason.message
    assert reason.remedy == "pip install azure"


def test_options_not_in_the_spec_raise(open_with: Callable[..., Any]) -> None:
    with pytest.raises(ConfigError, match=r"has no option 'colour'\. Did you mean 'color'\?") as info:
        open_with(Azure(), {"colour": 1})
    assert "use one of color, size" in str(info.value)
    with pytest.raises(
        ConfigError, match=r"CPUExecutionProvider accepts no provider options, but the call passes \['colour'\]"
    ):
        open_with(CpuBackend(), {"colour": 1})


def test_compute_dtype_is_limited_to_the_kernels_type(open_with: Callable[..., Any]) -> None:
    with pytest.raises(ConfigError, match="ONNX Runtime's CPU kernels compute in float32, not in bfloat16"):
        open_with(CpuBackend(), compute_dtype="bfloat16")
    assert open_with(CpuBackend(), compute_dtype="float32").compute_dtype == "float32"


def test_options_reach_the_provider(monkeypatch: pytest.MonkeyPatch, open_with: Callable[..., Any]) -> None:
    all_providers: list[Any] = []

    def session(path: str, options: ort.SessionOptions, *, providers: Any, **_: Any) -> Any:
        all_providers.extend(providers)
        return real(path, options, providers=[CPU])

    real = ort.InferenceSession
    monkeypatch.setattr(ort, "InferenceSession", session)
    with pytest.raises(BackendUnavailableError, match="with CPUExecutionProvider instead of the requested Azure"):
        open_with(Azure(), {"color": 3})
    assert all_providers == [(AZURE, {"color": "3"})]


@pytest.mark.parametrize(
    ("raised", "expected", "message"),
    [
        (
            RuntimeError("/src/a.cc:71 virtual void F(const A&, const B&) no driver"),
            BackendUnavailableError,
            f"cannot start {AZURE} for model.onnx: no driver",
        ),
        (ort_errors.EPFail("out of memory"), SessionError, f"{AZURE} cannot compile .*: out of memory"),
    ],
)
def test_provider_errors_are_raised(
    raised: Exception,
    expected: type[Exception],
    message: str,
    open_with: Callable[..., Any],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """An error of the execution provider is raised. The backend disables ONNX Runtime's fallback, which would print the
    error and use the CPU.
    """
    fallbacks: list[object] = []

    def session(*_: Any, **settings: Any) -> Any:
        fallbacks.append(settings["enable_fallback"])
        raise raised

    monkeypatch.setattr(ort, "InferenceSession", session)
    with pytest.raises(expected, match=message):
        open_with(Azure())
    assert fallbacks == [0]


# The tests below check the assignment of nodes to providers.


def test_provider_without_any_node_raises(open_with: Callable[..., Any]) -> None:
    assert AZURE in ort.get_available_providers(), "a wheel without it: use another provider here"
    with pytest.raises(
        BackendUnavailableError,
        match=f"{AZURE} can run only 0 of the .* would run these nodes with CPUExecutionProvider",
    ) as info:
        open_with(Azure())
    assert "Fix: " in str(info.value)


def test_cpu_session_has_no_assignment(open_with: Callable[..., Any]) -> None:
    session = open_with(CpuBackend())
    assert session.assignment is None
    assert session.left_to_cpu == 0


def assigned(**operators: dict[str, int]) -> ProviderAssignment:
    names = {"npu": "NpuExecutionProvider", "cpu": CPU, "cuda": "CUDAExecutionProvider"}
    return ProviderAssignment("NpuExecutionProvider", {names[key]: counts for key, counts in operators.items()})


@pytest.mark.parametrize(("name", "mode"), [(CPU, "ORT_PARALLEL"), (AZURE, "ORT_SEQUENTIAL")])
def test_only_the_cpu_provider_runs_operators_in_parallel(name: str, mode: str) -> None:
    """CUDA's current device belongs to a thread, so operators of a session on the second GPU fail in other threads."""
    options, _ = native_options(SessionOptions(inter_op_threads=2), name)
    assert options.execution_mode == getattr(ort.ExecutionMode, mode)


def test_assignment_counts_nodes() -> None:
    assignment = assigned(
        npu={"MatMul": 3, "Add": 2}, cpu={"Shape": 4, "com.microsoft.MatMulNBits": 1}, cuda={"Gemm": 1}
    )
    assert (assignment.nodes, assignment.on_provider, assignment.left_to_cpu) == (11, 5, 5)
    assert assignment.material_on_cpu == {"com.microsoft.MatMulNBits": 1}
    assert not assignment.useless


@pytest.mark.parametrize(
    ("operators", "useless"),
    [
        ({"npu": {"MatMul": 1}, "cpu": {"MatMul": 9}}, False),
        ({"npu": {"Cast": 5, "Reshape": 3}, "cpu": {"MatMul": 1}}, True),
        ({"npu": {"Cast": 5}, "cuda": {"com.microsoft.Attention": 1}}, True),
        ({"npu": {"Relu": 1}, "cpu": {"Add": 1}}, False),
        ({"cpu": {"Relu": 1}}, True),
        ({}, False),
    ],
)
def test_only_arithmetic_operators_make_a_provider_useful(operators: dict[str, dict[str, int]], useless: bool) -> None:
    assert assigned(**operators).useless is useless


class Recorded:
    """Fake session that reports a given assignment of nodes to providers."""

    def __init__(self, **operators: list[str]) -> None:
        self._operators = operators

    def get_providers(self) -> list[str]:
        return ["NpuExecutionProvider", CPU]

    def get_provider_graph_assignment_info(self) -> list[Any]:
        names = {"npu": "NpuExecutionProvider", "cpu": CPU}
        return [
            SimpleNamespace(
                ep_name=names[key],
                get_nodes=lambda types=types: [SimpleNamespace(domain="", op_type=op_type) for op_type in types],
            )
            for key, types in self._operators.items()
        ]


def test_arithmetic_on_cpu_is_warned_once(caplog: pytest.LogCaptureFixture) -> None:
    provider_assignment._warn.cache_clear()
    session = Recorded(npu=["MatMul", "Add"], cpu=["Conv", "Conv", "Shape"])
    with caplog.at_level(logging.INFO):
        provider_assignment.check_assignment(session, "NpuExecutionProvider", "model.onnx")
        provider_assignment.check_assignment(session, "NpuExecutionProvider", "model.onnx")
    warnings = [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]
    assert len(warnings) == 1
    assert (
        "NpuExecutionProvider has no kernels for some nodes of model.onnx. The nodes 2 Conv run on the CPU"
        in warnings[0]
    )
    assert "runs 2 of 5 nodes; 3 nodes run on the CPU" in caplog.text


def test_shape_operators_on_cpu_do_not_warn(caplog: pytest.LogCaptureFixture) -> None:
    provider_assignment.check_assignment(Recorded(npu=["MatMul"], cpu=["Shape"]), "NpuExecutionProvider", "model.onnx")
    assert not caplog.records


# The tests below check providers in separate libraries.


def test_missing_library_is_reported_with_remedy(open_with: Callable[..., Any]) -> None:
    reason = FromLibrary().probe().reasons[0]
    assert "there is no file /nowhere/libprovider.so" in reason.message
    assert reason.remedy == "pip install azure"
    with pytest.raises(BackendUnavailableError, match="there is no file") as info:
        open_with(FromLibrary())
    assert info.value.fix == "pip install azure"


def test_invalid_library_file_is_reported(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(FromLibrary, "path", tmp_path / "libprovider.so")
    FromLibrary.path.write_bytes(b"not a library")
    reason = FromLibrary().probe().reasons[0]
    assert f"ONNX Runtime cannot load {FromLibrary.path}" in reason.message
    assert "although the file exists" in reason.message
    assert FromLibrary.install not in reason.remedy


def test_missing_package_is_reported() -> None:
    class Unfound(Azure):
        def library(self) -> Path:
            import no_such_provider_package

            return Path(no_such_provider_package.__file__)

    reason = Unfound().probe().reasons[0]
    assert "no_such_provider_package" in reason.message
    assert reason.remedy == "pip install azure"


def test_library_lists_devices_and_is_loaded_once(
    loaded: list[tuple[str, str]], open_with: Callable[..., Any], tiny_artifact: Callable[..., Artifact]
) -> None:
    backend = FromLibrary()
    probe = backend.probe()
    assert [(device.type, device.index) for device in probe.devices] == [("cpu", 0)]
    session, expected = open_with(backend), open_with(CpuBackend())
    feeds = capture.feeds_for(session.inputs, {"batch": 2, "sequence": 5}, seed=0, folder=tiny_artifact().path)
    assert torch.allclose(session.run(feeds)["logits"], expected.run(feeds)["logits"], atol=1e-5)
    backend.probe()
    assert loaded == [(CPU, str(FromLibrary.path))]


def test_library_without_the_device(loaded: list[tuple[str, str]], tiny_artifact: Callable[..., Artifact]) -> None:
    class Npu(FromLibrary):
        spec = replace(SPEC, capabilities=(replace(SPEC.capabilities[0], devices=("npu",)),))

    reason = Npu().probe().reasons[0]
    assert "found no device of type npu for CPUExecutionProvider (its devices: cpu)" in reason.message
    assert reason.remedy
    with pytest.raises(BackendUnavailableError, match="has no device npu:0, only cpu"):
        Npu().open(tiny_artifact(), OpenRequest(device=DeviceSpec("npu")))


def test_two_libraries_for_one_provider_are_reported(
    loaded: list[tuple[str, str]], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    FromLibrary().probe()
    monkeypatch.setattr(FromLibrary, "path", tmp_path / "other.so")
    reason = FromLibrary().probe().reasons[0]
    assert "cannot load a second library" in reason.message
    assert reason.remedy == "uninstall one of the two packages that contain these libraries, and restart the process."
    assert len(loaded) == 1


def test_native_session_options_are_refused_with_a_library(
    loaded: list[tuple[str, str]], open_with: Callable[..., Any]
) -> None:
    with pytest.raises(ConfigError, match="cannot use your onnxruntime.SessionOptions object"):
        open_with(FromLibrary(), native={"onnxruntime.SessionOptions": ort.SessionOptions()})


def test_qualcomm_library_gives_correct_results(tmp_path: Path) -> None:
    """Qualcomm's provider with its NPU simulator gives the same results as the CPU. The test is skipped if the package
    `onnxruntime_qnn` is not installed.
    """
    package = pytest.importorskip("onnxruntime_qnn")
    import numpy as np
    import onnx
    from onnx import TensorProto, helper

    from accel.stages.foreign_folders import adopt

    run = Capability(stage="run", consumes="onnx", options=("backend_type",))

    class Qnn(ProviderBackend):
        spec = replace(SPEC, name="qnn", capabilities=(run,))
        provider = "QNNExecutionProvider"
        install = "pip install onnxruntime-qnn"

        def library(self) -> Path:
            return Path(package.get_library_path())

    weight = np.random.default_rng(0).standard_normal((64, 32)).astype(np.float32)
    nodes = [helper.make_node("MatMul", ["x", "w"], ["product"]), helper.make_node("Relu", ["product"], ["y"])]
    ends = [helper.make_tensor_value_info(n, TensorProto.FLOAT, ["batch", s]) for n, s in (("x", 64), ("y", 32))]
    graph = helper.make_graph(nodes, "g", ends[:1], ends[1:], [onnx.numpy_helper.from_array(weight, "w")])
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=9)
    onnx.save(model, tmp_path / "model.onnx")
    artifact = adopt(tmp_path, task="custom")
    backend = Qnn()
    where = backend.probe().devices[0]
    htp = {"backend_type": "htp"}
    with pytest.raises(BackendUnavailableError, match="took 0 of the 2 nodes"):
        backend.open(artifact, OpenRequest(device=where, options=htp))
    session = backend.open(artifact, OpenRequest(device=where, options=htp, shapes={"batch": 2}))["model"]
    assert session.assignment is not None
    assert (session.assignment.on_provider, session.left_to_cpu) == (2, 0)
    x = torch.randn(2, 64, generator=torch.Generator().manual_seed(0))
    # The simulator computes in single precision, so results differ slightly.
    assert (session.run({"x": x})["y"] - torch.relu(x @ torch.from_numpy(weight))).abs().max() < 1e-4


def test_wrong_provider_name_lists_the_librarys_names(
    monkeypatch: pytest.MonkeyPatch, loaded: list[tuple[str, str]]
) -> None:
    before = [SimpleNamespace(ep_name=CPU)]
    after = [*before, SimpleNamespace(ep_name="VendorExecutionProvider"), SimpleNamespace(ep_name="VendorNpuProvider")]
    monkeypatch.setattr(ort, "get_ep_devices", lambda: after if loaded else before)
    monkeypatch.setattr(FromLibrary, "provider", "VendorProvider")
    reason = FromLibrary().probe().reasons[0]
    assert "registers VendorExecutionProvider, VendorNpuProvider, but not VendorProvider" in reason.message
    assert "plugin's backend class to 'VendorExecutionProvider' or 'VendorNpuProvider'" in reason.remedy
