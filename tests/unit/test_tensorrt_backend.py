"""Tests of the `tensorrt` backend without TensorRT: profiles, options, cache keys, refusals, and availability on
simulated machines.

Engines are built by TensorRT for RTX, whose builder needs no GPU and has the same Python interface.
"""

from __future__ import annotations

import importlib.util
import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import onnx_ir as ir
import pytest
import torch

from accel.artifact import Artifact, Component, Manifest, TensorSpec
from accel.backends import registry
from accel.backends.plan import SelectionRequest, select
from accel.backends.stage_backend_selection import plan_stage
from accel.config import ExportConfig, SessionOptions
from accel.errors import (
    BackendUnavailableError,
    ConfigError,
    ExportError,
    InputError,
    SessionError,
    TargetMismatchError,
)
from accel.interfaces.protocols import OpenRequest
from accel.interfaces.session_contract import InputValueCheck
from accel.interfaces.shape_profiles import AxisSizes, read_profile, shapes_of
from accel.interfaces.specs import DeviceSpec, Probe
from accel.stages.export import export
from accel.stages.optimize import optimize
from accel.testing.models import tiny_model
from accel_plugins.ortkit.engines import session as engine_sessions
from accel_plugins.ortkit.engines.libraries import TENSORRT as TENSORRT_LIBRARY
from accel_plugins.ortkit.engines.libraries import TENSORRT_RTX, EngineLibrary
from accel_plugins.ortkit.engines.plans import build_plan, parse
from accel_plugins.ortkit.engines.product_types import check_products
from accel_plugins.ortkit.engines.profiles import complete, provider_options
from accel_plugins.ortkit.engines.session import EngineSession, check_precisions, computed_types
from accel_plugins.ortkit.graph.editing import MICROSOFT, load_graphs
from accel_plugins.ortkit.runtime.nvidia import TENSORRT, NvidiaFacts, judge
from accel_plugins.tensorrt import FORMAT, SPEC, building
from accel_plugins.tensorrt import backend as backend_module
from accel_plugins.tensorrt.backend import TensorrtBackend
from accel_plugins.tensorrt.building import EngineExporter, build
from accel_plugins.tensorrt.caches import EngineMachine, engine_cache, timing_cache
from accel_plugins.tensorrt.options import precision_flags, precisions, read_options

needs_builder = pytest.mark.skipif(
    importlib.util.find_spec("tensorrt_rtx_bindings") is None,
    reason="needs the packages tensorrt-rtx-cu13-bindings and tensorrt-rtx-cu13-libs",
)
GPU = DeviceSpec("cuda", 0, name="NVIDIA H200", arch="sm_90", memory_bytes=150 << 30)
HERE = EngineMachine(gpu="NVIDIA H200", arch="sm_90", tensorrt="10.13.0", driver="580.159")
IDS = TensorSpec("input_ids", "int64", ("batch", "sequence"))
PAST = TensorSpec("past.0.key", "float32", ("batch", 12, "past_sequence", 64), role="cache")
COMPONENT = Component(
    name="model",
    file="model.onnx",
    files=(),
    inputs=(IDS, TensorSpec("attention_mask", "int64", ("batch", "sequence"), role="mask")),
    outputs=(TensorSpec("logits", "float32", ("batch", 3)),),
    max_sizes={"sequence": 384},
)
HEALTHY: dict[str, Any] = {
    "provider": TENSORRT,
    "providers": (TENSORRT, "CUDAExecutionProvider", "CPUExecutionProvider"),
    "distributions": {"onnxruntime-gpu": "1.31.1"},
    "build_cuda": "13.0",
    "driver": "580.159",
    "driver_cuda": (13, 0),
    "gpus": (GPU,),
    "torch_cuda": "13.0",
}


# The tests below check optimization profiles.


def test_profiles_are_parsed() -> None:
    profile = read_profile("batch=1:8:32, sequence=128")
    assert profile == {"batch": AxisSizes(1, 8, 32), "sequence": AxisSizes(128, 128, 128)}
    assert read_profile("") == {}


@pytest.mark.parametrize("text", ["batch", "batch=8:1:32", "batch=1:2", "batch=0", "batch=-1:2:3", "batch=1:8:32;x=1"])
def test_invalid_profiles_are_refused(text: str) -> None:
    with pytest.raises(ConfigError):
        read_profile(text)


def test_profile_covers_every_axis() -> None:
    assert complete(COMPONENT, {}) == {"batch": AxisSizes(1, 8, 32), "sequence": AxisSizes(1, 128, 384)}
    assert complete(COMPONENT, {"batch": AxisSizes(1, 1, 1)}, {"sequence": 64, "batch": 9}) == {
        "batch": AxisSizes(1, 1, 1),
        "sequence": AxisSizes(64, 64, 64),
    }
    cached = replace(COMPONENT, inputs=(IDS, PAST))
    assert complete(cached, {})["past_sequence"] == AxisSizes(0, 128, 512)


def test_profile_must_fit_the_graph() -> None:
    with pytest.raises(ConfigError, match="no axis 'length'"):
        complete(COMPONENT, {"length": AxisSizes(1, 1, 1)})
    with pytest.raises(ConfigError, match="the model supports at most 384"):
        complete(COMPONENT, {"sequence": AxisSizes(1, 128, 512)})


def test_profiles_become_provider_options() -> None:
    cached = replace(COMPONENT, inputs=(IDS, PAST))
    options = provider_options(cached, complete(cached, {}), "trt")
    assert options == {
        "trt_profile_min_shapes": "input_ids:1x1,past.0.key:1x12x0x64",
        "trt_profile_opt_shapes": "input_ids:8x128,past.0.key:8x12x128x64",
        "trt_profile_max_shapes": "input_ids:32x384,past.0.key:32x12x512x64",
    }


def test_graphs_with_fixed_shapes_need_no_profile() -> None:
    fixed = replace(COMPONENT, inputs=(TensorSpec("x", "float32", (1, 3)),))
    assert provider_options(fixed, complete(fixed, {}), "trt") == {}


# The tests below check options and precision.


def test_options_are_read() -> None:
    options = read_options({"trt_max_workspace_size": 1 << 30, "trt_sparsity_enable": True, "profile": "batch=4"}, GPU)
    assert options.profile == {"batch": AxisSizes(4, 4, 4)}
    assert options.provider == {"trt_max_workspace_size": "1073741824", "trt_sparsity_enable": "1", "device_id": "0"}


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"trt_fp16_enable": True}, "precision comes from the graph"),
        ({"trt_int8_enable": True}, "precision comes from the graph"),
        ({"trt_engine_cache_path": "x"}, "ACCEL_HOME"),
        ({"trt_profile_min_shapes": "x"}, "profile="),
        ({"user_compute_stream": 1}, "current stream"),
        ({"trt_max_workspace": 1}, "Did you mean 'trt_max_workspace_size'"),
        ({"device_id": 1}, "contradicts the device cuda:0"),
        ({"profile": "batch"}, "of the shape profile is invalid"),
    ],
)
def test_invalid_options_are_named(options: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError) as raised:
        read_options(options, GPU)
    assert message in str(raised.value)


@pytest.fixture(scope="module")
def portable(tiny_artifact: Callable[..., Artifact], tmp_path_factory: pytest.TempPathFactory) -> Artifact:
    out = tmp_path_factory.mktemp("portable") / "o4"
    return optimize(tiny_artifact("bert"), out, backend="tensorrt", level="O4")


def test_optimizer_uses_only_onnx_operators(portable: Artifact) -> None:
    """The optimizer writes a float16 graph in which some operators stay in float32. The graph contains no operators of
    ONNX Runtime's own domain.
    """
    model = load_graphs(portable)["model"]
    assert not [node.op_type for node in model.graph if node.domain == MICROSOFT]
    assert portable.dtype == "float16"
    islands = [node for node in model.graph if node.op_type == "ReduceSum"]
    assert all(value.dtype != ir.DataType.FLOAT16 for node in islands for value in node.inputs if value is not None)
    with pytest.raises(ConfigError, match="attention"):
        optimize(portable, portable.path.parent / "never", backend="tensorrt", enable=("attention",))


def test_precision_is_read_from_the_graph(tiny_artifact: Callable[..., Artifact], portable: Artifact) -> None:
    assert precisions(load_graphs(tiny_artifact("bert"))["model"]) == ()
    assert precisions(load_graphs(portable)["model"]) == ("float16",)
    assert precision_flags(("float16", "int8")) == {"trt_fp16_enable": "1", "trt_int8_enable": "1"}
    assert precision_flags(("float8_e4m3fn",)) == {}


LAYERS_10 = {
    "Layers": [
        {
            "Name": "fc1",
            "Inputs": [{"Name": "x", "Dimensions": [8, 768], "Format/Datatype": "Row major linear FP16 format"}],
            "Outputs": [{"Name": "y", "Dimensions": [8, 3072], "Format/Datatype": "Row major linear FP32"}],
        },
        "a name alone",
    ]
}
LAYERS_11 = {
    "Layers": [{"Name": "fc1", "Inputs": [{"Name": "x", "DataType": "FP8", "Format": "linear"}], "Outputs": []}]
}


def test_precision_of_an_engine() -> None:
    assert sum(computed_types(json.dumps(LAYERS_10)).values()) == 2
    check_precisions(json.dumps(LAYERS_10), ["float16"])
    check_precisions(json.dumps(LAYERS_11), ["float8_e4m3fn"])
    check_precisions(json.dumps(LAYERS_10), [])
    with pytest.raises(
        SessionError, match="uses int8, but the engine that TensorRT built has no tensor of this data type"
    ):
        check_precisions(json.dumps(LAYERS_10), ["float16", "int8"])
    with pytest.raises(SessionError, match="only nothing"):
        check_precisions('{"Layers": []}', ["float16"])


# The tests below check cache folders and target machines.


def test_cache_folders_depend_on_all_settings(portable: Artifact, tiny_artifact: Callable[..., Artifact]) -> None:
    profile = {"batch": AxisSizes(1, 8, 32)}
    base = engine_cache(portable, "model", HERE, profile, "float16")
    assert base == engine_cache(portable, "model", HERE, dict(profile), "float16")
    assert json.loads((base / "engine.json").read_text())["profile"] == {"batch": "1:8:32"}
    others = [
        engine_cache(tiny_artifact("bert"), "model", HERE, profile, "float16"),
        engine_cache(portable, "decoder", HERE, profile, "float16"),
        engine_cache(portable, "model", HERE, {"batch": AxisSizes(1, 8, 33)}, "float16"),
        engine_cache(portable, "model", HERE, profile, "int8"),
    ]
    others += [
        engine_cache(portable, "model", replace(HERE, **{name: "other"}), profile, "float16")
        for name in ("gpu", "arch", "tensorrt", "driver")
    ]
    assert len({base, *others}) == 9


def test_timing_cache_is_shared_by_graphs() -> None:
    assert timing_cache(HERE) == timing_cache(replace(HERE))
    assert (
        len({timing_cache(HERE), *(timing_cache(replace(HERE, **{n: "x"})) for n in ("gpu", "tensorrt", "driver"))})
        == 4
    )


def engine_artifact(path: Path, target: dict[str, str]) -> Artifact:
    path.mkdir()
    manifest = Manifest(format=FORMAT, task="text-classification", components=(COMPONENT,), target=target)
    return Artifact.create(path, manifest)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"gpu": "NVIDIA A10", "arch": "sm_86"},
            "gpu 'NVIDIA A10' (this machine has 'NVIDIA H200'), arch 'sm_86' (this machine has 'sm_90')",
        ),
        ({"tensorrt": "11.4.0"}, "tensorrt '11.4.0' (this machine has '10.13.0')"),
    ],
)
def test_engine_for_another_machine_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, changes: dict[str, str], message: str
) -> None:
    artifact = engine_artifact(tmp_path / "engine", {**HERE.target(), **changes})
    versions = {"tensorrt": "10.13.0", "driver": "580.159"}
    monkeypatch.setattr(TensorrtBackend, "probe", lambda self: Probe(devices=(GPU,), versions=versions))
    with pytest.raises(TargetMismatchError) as raised:
        TensorrtBackend().open(artifact, OpenRequest(device=GPU))
    assert message in str(raised.value)
    assert "--format tensorrt" in str(raised.value)


# The tests below check the availability probe and the selection of a backend.


@pytest.mark.parametrize(
    ("changes", "code", "message", "remedy"),
    [
        (
            {"load_error": "libnvinfer.so.10: cannot open shared object file: No such file or directory"},
            "library",
            "ONNX Runtime cannot load the library of TensorrtExecutionProvider: libnvinfer.so.10 is missing (TensorRT 10)",
            'pip install "tensorrt>=10,<11"',
        ),
        (
            {"load_error": "libcudnn.so.9: cannot open shared object file: No such file or directory"},
            "library",
            "libcudnn.so.9 is missing",
            "onnxruntime-gpu[cuda,cudnn]",
        ),
        ({"providers": ("CPUExecutionProvider",)}, "no-gpu-build", "which has no TensorrtExecutionProvider", "[cuda]"),
        (
            {"driver": "550.54", "driver_cuda": (12, 4)},
            "driver-too-old",
            "needs CUDA 13.0",
            "driver that supports CUDA 13",
        ),
    ],
)
def test_each_missing_requirement_has_reason_and_remedy(
    changes: dict[str, Any], code: str, message: str, remedy: str
) -> None:
    probe = judge(NvidiaFacts(**{**HEALTHY, **changes}))
    assert [reason.code for reason in probe.reasons] == [code]
    assert message in probe.reasons[0].message
    assert remedy in probe.reasons[0].remedy


def test_machine_without_the_tensorrt_package(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(backend_module, "survey", lambda provider: NvidiaFacts(**HEALTHY))
    monkeypatch.setattr(backend_module, "tensorrt_version", lambda: None)
    assert [reason.code for reason in TensorrtBackend().probe().reasons] == ["no-tensorrt"]
    monkeypatch.setattr(backend_module, "tensorrt_version", lambda: "10.13.0")
    probe = TensorrtBackend().probe()
    assert probe.devices == (GPU,)
    assert probe.versions["tensorrt"] == "10.13.0"


def test_probe_never_raises(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(provider: str) -> NvidiaFacts:
        raise OSError("a library in an unknown state")

    monkeypatch.setattr(backend_module, "survey", broken)
    assert "a library in an unknown state" in TensorrtBackend().probe().reasons[0].message


def test_tensorrt_is_selected_only_by_name() -> None:
    cpu = registry.describe("cpu")
    probes = {"cpu": Probe(devices=(DeviceSpec("cpu"),)), "tensorrt": Probe(devices=(GPU,))}
    inventory = registry.Inventory(specs=(cpu, SPEC), probe=lambda spec: probes[spec.name], missing=lambda spec: None)
    question = SelectionRequest("onnx", "text-classification", "float32")
    assert select(question, inventory).backend == "cpu"
    assert select(question, inventory, SPEC).backend == "tensorrt"
    assert registry.describe("TensorrtExecutionProvider") is SPEC
    assert plan_stage("export", "tensorrt").backend.name == "tensorrt"


def test_missing_provider_raises(portable: Artifact) -> None:
    """If the installed ONNX Runtime has no TensorRT provider, opening a model raises an error. ONNX Runtime alone would
    use the CPU without an error.
    """
    import onnxruntime as ort

    if TENSORRT in ort.get_available_providers():
        pytest.skip("this test needs a build of ONNX Runtime without TensorRT")
    with pytest.raises(BackendUnavailableError, match="has no TensorrtExecutionProvider"):
        TensorrtBackend().open(portable, OpenRequest(device=GPU))


def test_compute_dtype_is_refused_with_fix(portable: Artifact) -> None:
    with pytest.raises(ConfigError, match="--level O4"):
        TensorrtBackend().open(portable, OpenRequest(device=GPU, session=SessionOptions(compute_dtype="float32")))


# The tests below build engines with the builder of TensorRT for RTX, which needs no GPU.


@pytest.fixture
def real_builder(monkeypatch: pytest.MonkeyPatch) -> None:
    """Build engines of the backend with TensorRT for RTX, and skip the inspection, for which an engine is loaded on a GPU."""
    monkeypatch.setattr(building, "TENSORRT", TENSORRT_RTX)
    monkeypatch.setattr(building, "_inspect", lambda plan, model, device: None)


@needs_builder
@pytest.mark.filterwarnings("ignore:.*Timing cache operations are no-ops:DeprecationWarning")
def test_engine_is_built_with_a_timing_cache(portable: Artifact, tmp_path: Path) -> None:
    times = tmp_path / "times.bin"
    component = portable.component()
    shapes = {spec.name: shapes_of(spec, complete(component, {})) for spec in component.inputs}
    library = replace(TENSORRT_RTX, times_kernels=True)
    plan = build_plan(portable.path / component.file, shapes, library=library, times=times)
    assert len(plan.data) > 10_000
    assert plan.products == {"float16": 18}, "strongly typed: the graph decides the precision"
    first = times.read_bytes()
    build_plan(portable.path / component.file, shapes, library=library, times=times)
    assert len(times.read_bytes()) >= len(first)


@needs_builder
def test_profiles_that_do_not_fit_are_reported(portable: Artifact) -> None:
    with pytest.raises(SessionError, match=r"(?s)cannot build an engine.*profile"):
        build_plan(portable.path / portable.component().file, {}, library=TENSORRT_RTX)


@needs_builder
def test_operators_of_onnx_runtime_are_reported_by_the_parser(
    tiny_artifact: Callable[..., Artifact], tmp_path: Path
) -> None:
    fused = optimize(tiny_artifact("bert"), tmp_path / "fused", backend="cuda", level="O2")
    with pytest.raises(SessionError, match="cannot read the ONNX graph model.onnx: .*(?:Attention|EmbedLayerNorm)"):
        parse(fused.path / "model.onnx", TENSORRT_RTX)


def test_engines_require_standard_onnx(
    portable: Artifact, tiny_artifact: Callable[..., Artifact], tmp_path: Path
) -> None:
    fused = optimize(tiny_artifact("bert"), tmp_path / "fused", backend="cuda", level="O2")
    (tmp_path / "out").mkdir()
    with pytest.raises(ExportError, match=r"(?s)Attention.*--backend tensorrt"):
        build(fused, tmp_path / "out", device=GPU, machine=HERE)
    with pytest.raises(ConfigError, match="from ONNX"):
        build(engine_artifact(tmp_path / "engine", HERE.target()), tmp_path / "out", device=GPU, machine=HERE)


@needs_builder
def test_artifact_with_an_engine(real_builder: None, portable: Artifact, tmp_path: Path) -> None:
    out = tmp_path / "engine"
    out.mkdir()
    built = build(portable, out, device=GPU, machine=HERE, profile={"batch": AxisSizes(1, 2, 4)})
    loaded = Artifact.load(out)
    assert loaded.format == FORMAT
    assert loaded.manifest.target == {"gpu": "NVIDIA H200", "arch": "sm_90", "tensorrt": "10.13.0"}
    assert loaded.digest == built.digest != portable.digest
    assert loaded.manifest.steps[-1].config["profile"] == {"model": {"batch": "1:2:4", "sequence": "1:96:96"}}
    assert loaded.manifest.steps[-1].report["products"] == {"model": {"float16": 18}}


@needs_builder
def test_engine_without_the_requested_precision_is_not_kept(
    real_builder: None, portable: Artifact, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "out").mkdir()

    def inspect(plan: bytes, model: ir.Model, device: DeviceSpec) -> None:
        check_precisions(
            json.dumps({"Layers": [{"Inputs": [{"DataType": "Float"}], "Outputs": []}]}), precisions(model)
        )

    monkeypatch.setattr(building, "_inspect", inspect)
    with pytest.raises(SessionError, match="uses float16.*only float"):
        build(portable, tmp_path / "out", device=GPU, machine=HERE)
    assert not list((tmp_path / "out").iterdir())


def test_each_quantized_product_must_be_in_the_network() -> None:
    check_products({"int8": 12, "float16": 3}, {"int8": 12}, graph="model.onnx")
    with pytest.raises(
        SessionError, match=r"has 12 products whose inputs are quantized to int8, .* has 11: 11 in int8"
    ):
        check_products({"int8": 11, "float16": 4}, {"int8": 12}, graph="model.onnx")


# The tests below run an engine with a fake library, because TensorRT loads an engine only on a GPU. The fake library has the
# signatures of the TensorRT 11.4 bindings. The tests check the order of calls, but not that TensorRT accepts the calls.


class Journal(list[tuple[Any, ...]]):
    """List of recorded calls in their order."""

    def record(self, name: str, result: Any = None) -> Callable[..., Any]:
        def call(*arguments: Any) -> Any:
            self.append((name, *arguments))
            return result(*arguments) if callable(result) else result

        return call


def runtime_stand_in(journal: Journal) -> Any:
    """Return a fake module with the names of `tensorrt` that run an engine."""
    shapes = {"input_ids": (-1, -1), "attention_mask": (-1, -1), "logits": (-1, 3)}
    kind = SimpleNamespace(INPUT="input", OUTPUT="output")
    shapes_set: dict[str, tuple[int, ...]] = {}

    def fits(name: str, shape: tuple[int, ...]) -> bool:
        shapes_set[name] = shape
        return shape[0] <= 32 and shape[1] <= 384

    context = SimpleNamespace(
        set_input_shape=journal.record("set_input_shape", fits),
        set_tensor_address=journal.record("set_tensor_address", True),
        get_tensor_shape=lambda name: (shapes_set["input_ids"][0], 3),
        execute_async_v3=journal.record("execute_async_v3", True),
    )
    engine = SimpleNamespace(
        num_io_tensors=3,
        get_tensor_name=lambda i: list(shapes)[i],
        get_tensor_mode=lambda name: kind.OUTPUT if name == "logits" else kind.INPUT,
        get_tensor_dtype=lambda name: "DataType.FLOAT" if name == "logits" else "DataType.INT64",
        get_tensor_shape=lambda name: shapes[name],
        get_tensor_profile_shape=lambda name, profile: [(1, 1), (8, 128), (32, 384)],
        create_execution_context=lambda: context,
    )
    return SimpleNamespace(
        Logger=type("Logger", (), {"ERROR": 1, "__init__": lambda self, severity: None}),
        Runtime=lambda logger: SimpleNamespace(
            deserialize_cuda_engine=lambda data: engine if data == b"plan" else None
        ),
        TensorIOMode=kind,
    )


@pytest.fixture
def journal(monkeypatch: pytest.MonkeyPatch) -> Journal:
    calls = Journal()
    monkeypatch.setattr(EngineLibrary, "load", lambda library: runtime_stand_in(calls))
    return calls


@pytest.fixture
def on_the_host(monkeypatch: pytest.MonkeyPatch) -> None:
    """Run the engine of the fake module in CPU memory."""
    monkeypatch.setattr(engine_sessions, "torch_device", lambda device: torch.device("cpu"))
    monkeypatch.setattr(torch.cuda, "device", lambda device: _Nothing())
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: SimpleNamespace(cuda_stream=7))
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: None)


class _Nothing:
    def __enter__(self) -> None: ...

    def __exit__(self, *_: object) -> None: ...


def test_engine_session_runs(journal: Journal, on_the_host: None) -> None:
    engine = EngineSession(b"plan", GPU)
    assert engine.inputs[0].shape == ("input_ids_0", "input_ids_1")
    assert engine.inputs[0].dtype == "int64"
    assert engine.outputs == (TensorSpec("logits", "float32", ("logits_0", 3)),)
    feeds = {name: torch.ones(2, 5, dtype=torch.int32) for name in ("input_ids", "attention_mask")}
    outputs = engine.run(feeds)
    assert outputs["logits"].shape == (2, 3)
    assert journal[-1] == ("execute_async_v3", 7)
    assert ("set_input_shape", "input_ids", (2, 5)) in journal
    addresses = {call[1]: call[2] for call in journal if call[0] == "set_tensor_address"}
    assert addresses["logits"] == outputs["logits"].data_ptr()
    with pytest.raises(InputError, match=r"built for \(1, 1\) to \(32, 384\)"):
        engine.run({name: tensor.expand(2, 5).repeat(1, 100) for name, tensor in feeds.items()})
    with pytest.raises(InputError, match="attention_mask"):
        engine.run({"input_ids": feeds["input_ids"]})
    with pytest.raises(InputError, match="not convert|convert the tensor"):
        engine.run({name: tensor.float() for name, tensor in feeds.items()})
    with pytest.raises(InputError, match="Did you mean 'logits'"):
        engine.run(feeds, outputs=["logit"])
    engine.close()
    engine.close()
    with pytest.raises(SessionError, match="closed"):
        engine.run(feeds)


def test_engine_session_checks_its_inputs(
    journal: Journal, on_the_host: None, portable: Artifact, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "engine").mkdir()
    (tmp_path / "engine" / "model.plan").write_bytes(b"plan")
    # Keep only the inputs that the fake engine has.
    component = portable.component()
    inputs = tuple(spec for spec in component.inputs if spec.name in ("input_ids", "attention_mask"))
    component = replace(component, file="model.plan", files=(), inputs=inputs)
    manifest = replace(portable.manifest, format=FORMAT, components=(component,), target=HERE.target())
    built = Artifact.create(tmp_path / "engine", manifest)
    probe = Probe(devices=(GPU,), versions={"tensorrt": "10.13.0", "driver": "1"})
    monkeypatch.setattr(TensorrtBackend, "probe", lambda self: probe)
    session = TensorrtBackend().open(built, OpenRequest(device=GPU))["model"]
    ids, mask = torch.ones(2, 5, dtype=torch.int64), torch.ones(2, 5, dtype=torch.int64)
    waited: list[bool] = []
    monkeypatch.setattr(InputValueCheck, "waiting", lambda self, feeds: waited.append(True))
    assert session.run({"input_ids": ids, "attention_mask": mask})["logits"].shape == (2, 3)
    assert waited, "ids on the GPU are looked at as well"
    limit = component.max_sizes["sequence"]
    for wrong, message in (
        ({"attention_mask": mask[:, :4]}, "axis 'sequence'"),
        ({"attention_mask": mask[:1]}, "axis 'batch'"),
        ({"input_ids": ids[:, :0], "attention_mask": mask[:, :0]}, "no axis may have the size 0"),
        ({"input_ids": ids + 10**6}, "the model allows only 0 to"),
        ({"input_ids": -ids}, "the model allows only 0 to"),
        ({"attention_mask": mask * 2}, "the model allows only 0 to 1"),
        ({"attention_mask": mask * 0}, "contains only zeros"),
        ({"input_ids": ids.repeat(1, limit), "attention_mask": mask.repeat(1, limit)}, f"positions for only {limit}"),
    ):
        with pytest.raises(InputError, match=message):
            session.run({"input_ids": ids, "attention_mask": mask, **wrong})


def test_engine_that_cannot_be_loaded_raises(journal: Journal, on_the_host: None, tmp_path: Path) -> None:
    (tmp_path / "other.plan").write_bytes(b"other")
    with pytest.raises(SessionError, match="another version of TensorRT or for another GPU"):
        EngineSession.load(tmp_path / "other.plan", GPU)


def test_missing_package_error_gives_the_install_command(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> Any:
        raise ImportError("libnvinfer.so.10: cannot open shared object file")

    monkeypatch.setattr(importlib, "import_module", missing)
    with pytest.raises(BackendUnavailableError, match=r"libnvinfer.*\n.*\[tensorrt\]"):
        TENSORRT_LIBRARY.load()


def test_export_without_gpu_is_refused_with_a_reason(tmp_path: Path) -> None:
    with pytest.raises(ExportError, match="export the model to ONNX on this machine"):
        export(tiny_model("bert"), tmp_path / "out", task="text-classification", format="tensorrt")
    assert not (tmp_path / "out").exists()


def test_profile_of_an_export(monkeypatch: pytest.MonkeyPatch) -> None:
    settings_passed: dict[str, Any] = {}
    monkeypatch.setattr(
        building, "OnnxExporter", lambda backend, attention: SimpleNamespace(export=lambda *a, **k: "onnx")
    )
    monkeypatch.setattr(
        building, "build", lambda artifact, out, **settings: settings_passed.update(settings) or artifact
    )
    probe = Probe(devices=(GPU,), versions={"tensorrt": "10.13.0", "driver": "1"})
    config = ExportConfig(options={"profile": "batch=1:4:16"})
    EngineExporter(lambda: probe).export(None, task="x", config=config, out=Path("out"))  # type: ignore[arg-type]
    assert settings_passed["profile"] == {"batch": AxisSizes(1, 4, 16)}
    assert settings_passed["machine"].target() == HERE.target()
