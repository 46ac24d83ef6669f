"""Tests of the `tensorrt-rtx` backend. The builder of TensorRT for RTX needs no GPU, so these tests build real engines. Running an
engine needs an RTX GPU; `make rtx-test` runs the conformance tests on such a machine.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir
import onnxruntime
import pytest
from typer.testing import CliRunner

from accel import capture, progress
from accel.artifact import Artifact
from accel.backends import registry
from accel.cli import app
from accel.deploying.triton.repository import deploy
from accel.errors import ConfigError, SessionError, TargetMismatchError, TaskError
from accel.interfaces.protocols import CompilingExporter
from accel.interfaces.shape_profiles import read_profile, shapes_of
from accel.interfaces.specs import DeviceSpec
from accel.stages.export import export
from accel.stages.optimize import optimize
from accel.stages.quantize import quantize
from accel.testing.conformance import BackendConformance
from accel.testing.copies_without_manifest import as_foreign
from accel_plugins.ortkit.engines.libraries import TENSORRT_RTX
from accel_plugins.ortkit.engines.plans import build_plan, parse
from accel_plugins.ortkit.engines.product_types import quantized_products
from accel_plugins.ortkit.engines.profiles import complete
from accel_plugins.ortkit.export.scatter_sums import expand_scatter_sums
from accel_plugins.ortkit.graph.editing import load_graphs, serialized
from accel_plugins.ortkit.runtime import nvidia
from accel_plugins.tensorrt_rtx import FORMAT
from accel_plugins.tensorrt_rtx.backend import TensorrtRtxBackend
from accel_plugins.tensorrt_rtx.exporter import EngineExporter, check_target
from tests.sweep.building import build
from tests.sweep.cases import pairs

needs_builder = pytest.mark.skipif(
    importlib.util.find_spec("tensorrt_rtx_bindings") is None,
    reason="needs the packages tensorrt-rtx-cu13-bindings and tensorrt-rtx-cu13-libs",
)
ALL = ["8.0", "8.6", "8.9", "12.0", "12.1"]
ADA = DeviceSpec("cuda", 0, name="NVIDIA GeForce RTX 4090", arch="sm_89")
HOPPER = DeviceSpec("cuda", 0, name="NVIDIA H200", arch="sm_90")


@needs_builder
class TestTensorrtRtx(BackendConformance):
    backend = "tensorrt-rtx"


# The tests below check which reason the probe gives on simulated machines.


def machine(
    monkeypatch: pytest.MonkeyPatch, driver: str | None, cuda: tuple[int, int] | None, *gpus: DeviceSpec
) -> None:
    monkeypatch.setattr(nvidia, "_nvml", lambda: (driver, cuda, gpus))


@needs_builder
@pytest.mark.parametrize(
    ("facts", "code", "message"),
    [
        ((None, None), "no-driver", "there is no NVIDIA driver"),
        (("580.159", (13, 0)), "no-gpu", "finds no GPU"),
        (("550.54", (12, 4), ADA), "driver-too-old", "needs CUDA 13.0"),
        (
            ("580.159", (13, 0), HOPPER),
            "compute-capability",
            "TensorRT for RTX does not support this GPU: NVIDIA H200 with the compute capability 9.0. It supports 8.0, 8.6, "
            "8.9, 12.0, 12.1",
        ),
    ],
)
def test_probe_names_the_reason(monkeypatch: pytest.MonkeyPatch, facts: Any, code: str, message: str) -> None:
    machine(monkeypatch, *facts)
    reason, *others = TensorrtRtxBackend().probe().reasons
    assert reason.code == code
    assert message in reason.message
    assert "pip install" not in reason.remedy
    missing = importlib.util.find_spec("onnxruntime_ep_nv_tensorrt_rtx") is None
    assert [other.code for other in others] == (["library"] if missing else [])


@needs_builder
def test_probe_asks_onnx_runtime_for_supported_gpus(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """With a supported GPU, the provider's library decides. A second GPU that is not supported does not matter."""
    machine(monkeypatch, "580.159", (13, 0), ADA, HOPPER)
    monkeypatch.setattr(TensorrtRtxBackend, "library", lambda self: tmp_path / "missing.so")
    probe = TensorrtRtxBackend().probe()
    (reason,) = probe.reasons
    assert reason.code == "library"
    assert "tensorrt-rtx]" in reason.remedy
    assert probe.versions["driver"] == "580.159"


def test_provider_without_driver_is_not_registered() -> None:
    """The library of the provider does not load without the NVIDIA driver, so the probe must not try."""
    if nvidia.survey_gpus("x", "13.0").driver is not None:
        pytest.skip("this test needs a machine without an NVIDIA driver")
    assert "libcuda" not in str(registry.probe(registry.describe("tensorrt-rtx")).reasons)


def test_names_of_the_provider_select_the_backend() -> None:
    assert registry.describe("NvTensorRTRTXExecutionProvider").name == "tensorrt-rtx"


# The tests below build engines.


@pytest.fixture(scope="module")
def half(tiny_artifact: Callable[..., Artifact], tmp_path_factory: pytest.TempPathFactory) -> Artifact:
    return optimize(tiny_artifact("bert"), tmp_path_factory.mktemp("rtx") / "o4", backend="tensorrt-rtx", level="O4")


@needs_builder
def test_model_becomes_an_engine_for_all_capabilities(
    tiny_folder: Callable[..., Path], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    steps: list[tuple[str, int, int | None]] = []
    with progress.listening(lambda *step: steps.append(step)):
        built = export(tiny_folder("bert", "text-classification"), tmp_path / "engine", format=FORMAT)
    loaded = Artifact.load(tmp_path / "engine")
    assert loaded.format == FORMAT
    assert loaded.digest == built.digest
    assert loaded.manifest.target is not None
    assert loaded.manifest.target["capabilities"] == ALL
    step, compiled = loaded.manifest.steps
    assert step.validation, "the ONNX graph was compared with PyTorch"
    assert compiled.report["products"] == {"model": {"float32": 18}}
    assert {"config.json", "model.plan", "tokenizer.json"} <= {path.name for path in loaded.path.iterdir()}
    builds = [step for step in steps if step[0] == "building the engine"]
    assert builds
    assert builds[-1][1] == builds[-1][2]
    if not registry.probe(registry.describe("tensorrt-rtx")).available:
        assert compiled.validation == {"executed": False}
        assert "accel validate FOLDER --backend tensorrt-rtx" in caplog.text


@needs_builder
def test_options_of_an_engine(half: Artifact, tmp_path: Path) -> None:
    options = {"capabilities": "8.6, 12.0", "profile": "batch=1:2:4,sequence=16"}
    built = export(half.path, tmp_path / "engine", format=FORMAT, options=options)
    assert built.dtype == "float16"
    assert built.manifest.target is not None
    assert built.manifest.target["capabilities"] == ["8.6", "12.0"]
    step = built.manifest.steps[-1]
    assert step.config["profile"] == {"model": {"batch": "1:2:4", "sequence": "16:16:16"}}
    assert step.report["products"] == {"model": {"float16": 18}}


@needs_builder
@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"capabilities": "9.0"}, "does not build engines for the compute capability 9.0"),
        ({"profile": "length=1"}, "no axis 'length'"),
        ({"profile": "batch=1,batch=2"}, "the axis has two entries"),
        ({"profile": "batch=1:8:99999999999"}, "the largest size is 2147483647"),
        ({"precision": "fp16"}, "no option 'precision'"),
    ],
)
def test_invalid_options_write_nothing(half: Artifact, tmp_path: Path, options: dict[str, str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        export(half, tmp_path / "engine", format=FORMAT, options=options)
    assert not (tmp_path / "engine").exists()


@needs_builder
def test_folder_of_another_tool_becomes_an_engine(tiny_artifact: Callable[..., Artifact], tmp_path: Path) -> None:
    as_foreign(tiny_artifact("bert").path, tmp_path / "foreign")
    built = export(str(tmp_path / "foreign"), tmp_path / "engine", format=FORMAT, options={"capabilities": "8.9"})
    assert built.manifest.steps[-1].report["products"] == {"model": {"float32": 18}}


@needs_builder
def test_settings_without_effect_are_refused(half: Artifact, tmp_path: Path) -> None:
    for settings in ({"pooling": "mean"}, {"task": "fill-mask"}, {"opset": 18}, {"quantize": "weight-int8"}):
        with pytest.raises(ConfigError, match=f"{next(iter(settings))} would have no effect"):
            export(half, tmp_path / "engine", format=FORMAT, **settings)
    assert not (tmp_path / "engine").exists()


@needs_builder
@pytest.mark.parametrize("flags", [(), ("--json",)])
def test_command_line_builds_engines(half: Artifact, tmp_path: Path, flags: tuple[str, ...]) -> None:
    command = ["export", str(half.path), str(tmp_path / "engine"), "--format", FORMAT, "--option", "capabilities=8.9"]
    result = CliRunner().invoke(app, [*command, *flags])
    assert result.exit_code == 0, result.output
    assert (tmp_path / "engine" / "model.plan").is_file()
    if not flags and not registry.probe(registry.describe("tensorrt-rtx")).available:
        assert "accel validate engine --backend tensorrt-rtx" in result.output


@needs_builder
def test_limits_of_decoders_hold_for_their_caches(generator: Callable[..., Artifact]) -> None:
    (decoder,) = generator("gpt2", "tensorrt-rtx").components
    assert decoder.most_tokens
    profile = complete(decoder, {})
    past = next(spec for spec in decoder.inputs if spec.name.startswith("past"))
    assert profile["sequence"].most == profile[str(past.shape[2])].most == decoder.most_tokens
    with pytest.raises(ConfigError, match="the model supports at most"):
        complete(decoder, read_profile(f"sequence=1:8:{decoder.most_tokens + 1}"))


@needs_builder
def test_compilation_does_not_change_the_data_type(
    half: Artifact, tmp_path: Path, tiny_ir: Callable[..., Artifact]
) -> None:
    with pytest.raises(
        ConfigError, match="has the data type float16, and a compilation does not change it to bfloat16"
    ):
        export(half, tmp_path / "engine", format=FORMAT, dtype="bfloat16")
    with pytest.raises(ConfigError, match="compiles graphs of the format onnx"):
        export(tiny_ir("bert"), tmp_path / "engine", format=FORMAT)


@needs_builder
def test_decoders_run_as_onnx_graphs(generator: Callable[..., Artifact], tmp_path: Path) -> None:
    decoder = generator("llama", "tensorrt-rtx")
    assert decoder.domains == ("",)
    with pytest.raises(TaskError, match=r"(?s)does not compile.*backend='tensorrt-rtx'"):
        export(decoder, tmp_path / "engine", format=FORMAT)


def engines_of(artifact: Artifact, *capabilities: str) -> dict[str, dict[str, int]]:
    """Build an engine for every graph, and return the types of their products."""
    products = {}
    for component in artifact.components:
        profile = complete(component, {}, capture.usual_sizes_in(artifact.path, component.inputs))
        shapes = {spec.name: shapes_of(spec, profile) for spec in component.inputs}
        file = artifact.path / component.file
        plan = build_plan(file, shapes, library=TENSORRT_RTX, capabilities=capabilities or ("8.9", "12.0"))
        assert plan.data.startswith(b"vtrt") or len(plan.data) > 1000
        products[component.name] = dict(plan.products)
    return products


@needs_builder
@pytest.mark.parametrize("family", ["llama", pytest.param("t5", marks=pytest.mark.thorough)])
def test_decoders_are_built_with_their_cache(generator: Callable[..., Artifact], family: str) -> None:
    artifact = generator(family, "tensorrt-rtx")
    products = engines_of(artifact)
    assert all(set(types) == {"float32"} for types in products.values())
    decoder = next(component for component in artifact.components if component.stateful)
    profile = complete(decoder, {})
    past = next(spec for spec in decoder.inputs if spec.role == "cache" and spec.name.startswith("past"))
    mask = next(spec for spec in decoder.inputs if spec.name == "attention_mask")
    assert shapes_of(past, profile)[0][2] == 0, "the first call has an empty cache"
    for cache, total in zip(shapes_of(past, profile), shapes_of(mask, profile), strict=True):
        assert total[1] == cache[2] + getattr(
            profile["sequence"], ("least", "usual", "most")[shapes_of(past, profile).index(cache)]
        )


@needs_builder
@pytest.mark.parametrize("scheme", ["static-int8", "static-fp8"])
@pytest.mark.parametrize("operators", [(), ("MatMul", "Gemm", "Attention")])
def test_quantized_products_stay_quantized(
    half: Artifact, tmp_path: Path, scheme: str, operators: tuple[str, ...]
) -> None:
    """The engine inspector needs a GPU, so the types are those of the parsed network, which is strongly typed."""
    inputs = half.components[0].inputs
    feeds = [
        capture.feeds_for(inputs, {"batch": 4, "sequence": 20 + seed}, seed=seed, folder=half.path) for seed in (0, 1)
    ]
    settings: dict[str, Any] = {"operators": operators} if operators else {}
    quantized = quantize(half, tmp_path / "q", backend="tensorrt-rtx", scheme=scheme, calibration=feeds, **settings)
    expected = quantized_products(load_graphs(quantized)["model"])
    word = "int8" if scheme == "static-int8" else "float8_e4m3fn"
    assert expected == {word: 18 if operators else 14}
    built = export(quantized, tmp_path / "engine", format=FORMAT)
    products = built.manifest.steps[-1].report["products"]["model"]
    assert products == expected if operators else products == {**expected, "float16": 4}
    assert built.manifest.target is not None
    assert built.manifest.target["capabilities"] == (ALL if scheme == "static-int8" else ALL[2:])
    if scheme == "static-fp8":
        with pytest.raises(ConfigError, match=r"8\.6 have no float8 arithmetic"):
            export(quantized, tmp_path / "ampere", format=FORMAT, options={"capabilities": "8.6"})


@needs_builder
def test_mixtures_of_experts_are_built(tmp_path: Path) -> None:
    """The router counts the tokens of each expert; TensorRT has no `ScatterElements` with an addition."""
    (pair,) = pairs(only=["mixtral/text-classification"])
    graph = export(build(pair), tmp_path / "graph", task=pair.task, backend="tensorrt-rtx")
    assert set(engines_of(graph)["model"]) == {"float32"}


@pytest.mark.parametrize("dtype", ["float32", "int64"])
def test_additions_into_a_vector_are_expanded(dtype: str) -> None:
    types = {"float32": ir.DataType.FLOAT, "int64": ir.DataType.INT64}
    data, updates = (
        ir.Value(name=name, shape=ir.Shape([size]), type=ir.TensorType(types[dtype]))
        for name, size in (("data", 4), ("updates", "n"))
    )
    indices = ir.Value(name="indices", shape=ir.Shape(["n"]), type=ir.TensorType(ir.DataType.INT64))
    node = ir.node("ScatterElements", [data, indices, updates], {"reduction": "add"}, name="sum")
    node.outputs[0].name, node.outputs[0].type, node.outputs[0].shape = "sums", data.type, data.shape
    graph = ir.Graph([data, indices, updates], node.outputs, nodes=[node], opset_imports={"": 20}, name="graph")
    model = ir.Model(graph, ir_version=10)
    assert expand_scatter_sums(model) == 1
    session = onnxruntime.InferenceSession(serialized(model))
    feeds = {"data": [1, 2, 3, 4], "indices": [-1, 0, 3, 3, 1], "updates": [10, 20, 30, 40, 50]}
    arrays = {name: np.array(values, "int64" if name == "indices" else dtype) for name, values in feeds.items()}
    (sums,) = session.run(None, arrays)
    assert sums.tolist() == [21, 52, 3, 84]
    assert sums.dtype == dtype


@needs_builder
def test_engines_are_not_deployed_to_triton(half: Artifact, tmp_path: Path) -> None:
    """Triton's TensorRT backend does not read engines of TensorRT for RTX."""
    built = export(half, tmp_path / "engine", format=FORMAT, options={"capabilities": "8.9"})
    with pytest.raises(ConfigError, match="no backend that can run artifacts of the format 'tensorrt_rtx'"):
        deploy(built, tmp_path / "repository")
    assert not (tmp_path / "repository").exists()


@needs_builder
def test_the_parser_names_the_operator(tmp_path: Path) -> None:
    (pair,) = pairs(only=["fnet/text-classification"])
    graph = export(build(pair), tmp_path / "graph", task=pair.task, backend="tensorrt-rtx")
    with pytest.raises(SessionError, match=r"cannot read the ONNX graph model\.onnx: DFT .*Plugin not found"):
        export(graph, tmp_path / "engine", format=FORMAT)
    assert not (tmp_path / "engine").exists()


def test_engines_are_checked_against_the_gpu(half: Artifact, monkeypatch: pytest.MonkeyPatch) -> None:
    target = {"capabilities": ["8.6", "8.9"], "tensorrt_rtx": "1.7.1.116"}
    built = replace(half, manifest=replace(half.manifest, format=FORMAT, target=target))
    monkeypatch.setattr("accel_plugins.tensorrt_rtx.exporter.rtx_version", lambda: "1.7.1.116")
    check_target(built, ADA)
    with pytest.raises(TargetMismatchError, match=r"8\.6, 8\.9 \(cuda:0 has 12\.0\)"):
        check_target(built, replace(ADA, arch="sm_120"))
    monkeypatch.setattr("accel_plugins.tensorrt_rtx.exporter.rtx_version", lambda: "1.8.0.1")
    with pytest.raises(TargetMismatchError, match=r"1\.7\.1\.116 \(version 1\.8\.0\.1 is installed\)"):
        check_target(built, ADA)


def test_provider_options(half: Artifact) -> None:
    options = TensorrtRtxBackend().provider_options(
        half, half.component(), ADA, {"enable_cuda_graph": True, "profile": "batch=1:2:4,sequence=8", "device_id": 0}
    )
    names = [spec.name for spec in half.component().inputs]
    assert options["nv_profile_max_shapes"] == ",".join(f"{name}:4x8" for name in names)
    assert options["enable_cuda_graph"] == "1"
    assert Path(str(options["nv_runtime_cache_path"])).is_dir()
    assert "device_id" not in options
    assert "profile" not in options


def test_exporter_compiles() -> None:
    assert isinstance(EngineExporter(), CompilingExporter)


# One architecture or more for each task that the backend builds engines for, in float32, float16, int8 and float8. The parser refuses
# the only architecture for table-question-answering, TAPAS, which adds into vectors of dynamic size.
ARCHITECTURES = (
    "albert/fill-mask", "bert/question-answering", "big_bird/text-classification", "bloom/text-classification",
    "camembert/feature-extraction", "convbert/fill-mask", "roformer/multiple-choice",
    "convnext/image-classification", "data2vec-audio/audio-frame-classification",
    "data2vec-vision/image-classification", "deberta/fill-mask", "deberta-v2/text-classification",
    "deit/image-classification", "detr/object-detection", "dinov2/image-classification",
    "distilbert/token-classification", "dpt/depth-estimation", "electra/multiple-choice",
    "ernie/text-classification", "eurobert/fill-mask", "falcon/text-classification", "gemma/text-classification",
    "gpt2/text-classification", "gpt_neox/token-classification", "hubert/ctc",
    "layoutlm/document-question-answering", "llama/text-classification", "mobilebert/text-classification",
    "modernbert/feature-extraction", "mpnet/fill-mask", "nystromformer/token-classification",
    "opt/text-classification", "phi/text-classification", "qwen3/text-classification", "rembert/multiple-choice",
    "resnet/image-classification", "roberta/fill-mask", "segformer/image-segmentation",
    "siglip/zero-shot-image-classification", "squeezebert/question-answering", "swin2sr/image-to-image",
    "timesformer/video-classification", "vit/image-classification",
    "wav2vec2/audio-classification", "wav2vec2/audio-xvector", "xlnet/text-classification",
    "yolos/object-detection",
)  # fmt: skip


@needs_builder
@pytest.mark.thorough
@pytest.mark.parametrize("name", ARCHITECTURES)
def test_architectures_are_built_in_every_precision(name: str, tmp_path: Path) -> None:
    (pair,) = pairs(only=[name])
    graph = export(build(pair), tmp_path / "float32", task=pair.task, backend="tensorrt-rtx")
    assert set(engines_of(graph)["model"]) == {"float32"}
    half = optimize(graph, tmp_path / "float16", backend="tensorrt-rtx", level="O4")
    assert "float16" in engines_of(half)["model"]
    sizes = {"batch": 2, "sequence": 20}
    feeds = [capture.feeds_for(half.components[0].inputs, sizes, seed=seed, folder=half.path) for seed in (0, 1)]
    for scheme in ("static-int8", "static-fp8"):
        quantized = quantize(half, tmp_path / scheme, backend="tensorrt-rtx", scheme=scheme, calibration=feeds)
        expected = quantized_products(load_graphs(quantized)["model"])
        assert expected
        assert expected.items() <= parse(quantized.file(), TENSORRT_RTX).items()
        assert expected.items() <= engines_of(quantized)["model"].items()
