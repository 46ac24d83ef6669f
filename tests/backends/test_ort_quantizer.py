"""Tests of the ONNX quantizer: schemes, presets, calibration, exclusion, errors."""

from __future__ import annotations

import logging
import tracemalloc
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir
import onnxruntime as ort
import pytest
import torch

from accel.artifact import Artifact
from accel.backends.plan import make_plan
from accel.backends.sessions import open_plan
from accel.config import QuantizeConfig, SessionOptions
from accel.errors import ConfigError, QuantizeError
from accel.stages.optimize import optimize
from accel.stages.quantize import quantize
from accel.testing.models import VOCABULARY
from accel_plugins.ortkit.graph.editing import add_initializer, constant, load_graph, save_graph
from accel_plugins.ortkit.quantization import layers, presets, weight_only
from accel_plugins.ortkit.quantization.calibrators import Calibrator, entropy_range, percentile_range
from accel_plugins.ortkit.quantization.integer import IntegerRewriter, activation_scale
from accel_plugins.ortkit.quantization.integer_weights import quantize_int8
from accel_plugins.ortkit.quantization.layers import find_layers
from accel_plugins.ortkit.quantization.presets import PRESETS, choose_preset
from accel_plugins.ortkit.quantization.weight_only import pack, quantize_blocks

Get = Callable[..., Artifact]
Batches = list[dict[str, torch.Tensor]]
LAYER = "bert.encoder.layer.1.output.dense"
SCHEMES: dict[str, dict[str, Any]] = {
    "dynamic": {"scheme": "dynamic-int8"},
    "static": {"scheme": "static-int8"},
    "static-operators": {"scheme": "static-int8", "format": "qoperator"},
    "static-smooth": {"scheme": "static-int8", "smooth_quant": 0.5},
    "weight-int8": {"scheme": "weight-int8"},
}


def batches(count: int = 4, rows: int = 4, sequence: int = 12) -> Batches:
    generator = torch.Generator().manual_seed(0)
    feeds = []
    for _ in range(count):
        mask = torch.ones(rows, sequence, dtype=torch.int64)
        mask[1::2, sequence // 2 :] = 0
        ids = torch.randint(5, VOCABULARY, (rows, sequence), generator=generator)
        feeds.append({"input_ids": ids, "attention_mask": mask, "token_type_ids": torch.zeros_like(ids)})
    return feeds


def logits(artifact: Artifact, feeds: dict[str, torch.Tensor]) -> torch.Tensor:
    session = open_plan(make_plan(artifact)).sessions["model"]
    try:
        return session.run({spec.name: feeds[spec.name] for spec in session.inputs})["logits"]
    finally:
        session.close()


def exact_session(path: Path) -> ort.InferenceSession:
    """Return a session that computes products with 8-bit weights exactly on every processor. `CpuBackend.open` sets the
    same option.
    """
    options = ort.SessionOptions()
    options.add_session_config_entry("session.x64quantprecision", "1")
    return ort.InferenceSession(str(path), options)


def fix_input(model: ir.Model, name: str, array: np.ndarray) -> None:
    """Replace the graph input `name` by a constant."""
    value = next(value for value in model.graph.inputs if value.name == name)
    value.replace_all_uses_with(add_initializer(model.graph, f"{name}_constant", array))
    model.graph.inputs.remove(value)


def make(parent: Artifact, out: Path, **settings: Any) -> Artifact:
    data = batches() if settings.get("scheme") == "static-int8" else None
    return quantize(parent, out, calibration=data, config=QuantizeConfig(**settings))


@pytest.fixture(scope="module")
def optimized(tiny_artifact: Get, tmp_path_factory: pytest.TempPathFactory) -> Get:
    """Return a function that returns the tiny BERT artifact at a given optimization level."""
    folder = tmp_path_factory.mktemp("optimized")
    artifacts: dict[str, Artifact] = {}

    def get(level: str) -> Artifact:
        if level not in artifacts:
            artifacts[level] = (
                tiny_artifact("bert")
                if level == "plain"
                else optimize(tiny_artifact("bert"), folder / level, level=level)
            )
        return artifacts[level]

    return get


@pytest.mark.parametrize(
    "level", ["plain", *(pytest.param(name, marks=pytest.mark.thorough) for name in ("O1", "O2")), "O3"]
)
@pytest.mark.parametrize("scheme", SCHEMES)
def test_every_scheme_at_every_level(optimized: Get, tmp_path: Path, scheme: str, level: str) -> None:
    parent = optimized(level)
    quantized = Artifact.load(make(parent, tmp_path / "out", **SCHEMES[scheme]).path)
    feeds = batches(1)[0]
    difference = (logits(quantized, feeds) - logits(parent, feeds)).abs().max()
    # The tolerance allows for 8-bit rounding of the tiny model, whose logits are about 1.
    assert 0 < difference <= 0.1
    step, record = quantized.manifest.steps[-1], quantized.manifest.quantization
    assert (step.stage, step.parent) == ("quantize", parent.digest)
    assert record is not None
    assert record.scheme == SCHEMES[scheme]["scheme"]
    assert len(step.report["layers"]) == 14 + len(step.report.get("embeddings", ()))
    assert LAYER in step.report["layers"]
    assert quantized.component().inputs == parent.component().inputs
    if record.scheme == "static-int8":
        assert record.calibration == {"method": "minmax", "n": 16, "seed": 0}


def test_quantized_products_are_integer_after_loading(tiny_artifact: Get, tmp_path: Path) -> None:
    """After ONNX Runtime optimizes a quantized graph at loading, no floating-point product with a constant weight is
    left.
    """
    for name, settings in SCHEMES.items():
        quantized = make(tiny_artifact("bert"), tmp_path / name, **settings)
        options = ort.SessionOptions()
        options.optimized_model_filepath = str(tmp_path / f"{name}.onnx")
        options.log_severity_level = 3
        ort.InferenceSession(str(quantized.file()), options, providers=["CPUExecutionProvider"])
        graph = ir.load(tmp_path / f"{name}.onnx").graph
        left = [
            node.name
            for node in graph
            if node.op_type in ("MatMul", "Gemm", "FusedGemm") and constant(node.inputs[1]) is not None
        ]
        assert not left, name
        integer = ("DynamicQuantizeMatMul", "MatMulIntegerToFloat", "QGemm", "MatMulNBits")
        assert sum(node.op_type in integer for node in graph) == 14, name


def test_quantized_files_are_smaller(tiny_artifact: Get, tmp_path: Path) -> None:
    parent = tiny_artifact("bert")
    for scheme, limit in (("dynamic-int8", 0.3), ("weight-int4", 0.2)):
        quantized = quantize(parent, tmp_path / scheme, scheme=scheme)
        layers = find_layers(load_graph(parent, parent.component()))
        before = sum(layer.weight().nbytes for layer in layers)
        graph = load_graph(quantized, quantized.component()).graph
        names = ("weight_quantized", "weight_blocks")
        after = sum(v.const_value.nbytes for n, v in graph.initializers.items() if n.endswith(names) and v.const_value)
        if scheme == "dynamic-int8":
            assert after == before / 4
        assert after < limit * before
        assert (quantized.path / "model.onnx.data").is_file()


@pytest.mark.parametrize(("algorithm", "symmetric"), [("rtn", None), ("rtn", True), ("hqq", None)])
def test_weight_int4_has_small_error(
    tiny_artifact: Get, tmp_path: Path, algorithm: str, symmetric: bool | None
) -> None:
    parent, feeds = tiny_artifact("bert"), batches(1)[0]
    settings = {"scheme": "weight-int4", "block_size": 16, "algorithm": algorithm, "symmetric": symmetric}
    quantized = make(parent, tmp_path / "out", **settings)
    assert 0 < (logits(quantized, feeds) - logits(parent, feeds)).abs().max() <= 0.6
    assert quantized.manifest.steps[-1].report["bits"] == {"4": 14}


def test_ratio_keeps_the_worst_layers_in_8_bits(tiny_artifact: Get, tmp_path: Path) -> None:
    parent, feeds = tiny_artifact("bert"), batches(1)[0]
    mixed = make(parent, tmp_path / "mixed", scheme="weight-int4", ratio=0.5)
    assert mixed.manifest.steps[-1].report["bits"] == {"4": 7, "8": 7}
    four = make(parent, tmp_path / "four", scheme="weight-int4")
    reference = logits(parent, feeds)
    assert (logits(mixed, feeds) - reference).norm() < (logits(four, feeds) - reference).norm()


# The tests below check the `exclude` and `operators` settings.


@pytest.mark.parametrize(("pattern", "count"), [(LAYER, 1), ("re:layer[.]1[.].*dense", 3), ("node_linear_12", 1)])
def test_exclude_keeps_layers_in_float(tiny_artifact: Get, tmp_path: Path, pattern: str, count: int) -> None:
    quantized = quantize(tiny_artifact("bert"), tmp_path / "out", exclude=(pattern,))
    assert quantized.manifest.quantization is not None
    assert len(quantized.manifest.quantization.excluded) == count
    left = [layer.name for layer in find_layers(load_graph(quantized, quantized.component()))]
    assert len(left) == count
    assert left == quantized.manifest.steps[-1].report["excluded"]


def test_operators_setting_limits_quantization(tiny_artifact: Get, tmp_path: Path) -> None:
    quantized = quantize(tiny_artifact("bert"), tmp_path / "out", operators=("MatMul",))
    assert [layer.node.op_type for layer in find_layers(load_graph(quantized, quantized.component()))] == [
        "Gemm",
        "Gemm",
    ]


# The tests below check errors.


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"exclude": ("bert.encoder.layer.1.output.dens",)}, "Did you mean 'bert.encoder.layer.1.output.dense'"),
        ({"exclude": ("re:(",)}, "not a valid regular expression"),
        ({"operators": ("Matmul",)}, "Did you mean 'MatMul'"),
        ({"preset": "avx512-vnni"}, "Did you mean 'avx512_vnni'"),
        ({"preset": "tensorrt"}, "does not support the scheme 'dynamic-int8'"),
        ({"scheme": "static-int8", "preset": "tensorrt", "format": "qoperator"}, "reads only Q/DQ pairs"),
        ({"scheme": "static-int8", "preset": "tensorrt", "symmetric": False}, "reads only symmetric weights"),
        ({"smooth_quant": 0.5}, "smooth_quant"),
        ({"format": "qoperator"}, "qoperator"),
        ({"scheme": "weight-int4", "per_channel": True}, "does not use the setting per_channel=True"),
        ({"scheme": "weight-int4", "algorithm": "gptq"}, "is not available in this backend"),
        ({"scheme": "weight-int4", "algorithm": "hqq", "symmetric": True}, "zero points"),
        ({"scheme": "weight-int8", "ratio": 0.5}, "does not use the setting ratio=0.5"),
        ({"algorithm": "hqq"}, "does not use the setting algorithm='hqq'"),
    ],
)
def test_invalid_settings_raise(tiny_artifact: Get, tmp_path: Path, settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message.replace("(", "[(]")):
        make(tiny_artifact("bert"), tmp_path / "out", **settings)
    assert not (tmp_path / "out").exists()


@pytest.mark.thorough
def test_exclude_accepts_a_layer_of_one_graph(generator: Get, tmp_path: Path) -> None:
    original = generator("t5")
    names = {
        component.name: {layer.name for layer in find_layers(load_graph(original, original.component(component.name)))}
        for component in original.components
    }
    name = min(names["decoder"] - names["encoder"] - names["cross_attention"])
    quantized = quantize(original, tmp_path / "out", scheme="dynamic-int8", exclude=(name,))
    assert [layer.name for layer in find_layers(load_graph(quantized, quantized.component("decoder")))] == [name]


@pytest.mark.thorough
def test_embedding_graph_is_not_quantized(generator: Get, tmp_path: Path) -> None:
    quantized = quantize(generator("llava"), tmp_path / "out", scheme="dynamic-int8")
    graphs = {component.name: load_graph(quantized, component) for component in quantized.components}
    assert {name for name, graph in graphs.items() if "MatMulInteger" in {node.op_type for node in graph.graph}} == {
        "vision",
        "model",
    }
    assert [node.op_type for node in graphs["embedding"].graph] == ["Gather"]


def test_exclude_of_all_layers_raises(tiny_artifact: Get, tmp_path: Path) -> None:
    with pytest.raises(QuantizeError, match="exclude=... matches all 14"):
        quantize(tiny_artifact("bert"), tmp_path / "out", exclude=("re:.",))


def test_quantizing_twice_raises(tiny_artifact: Get, tmp_path: Path) -> None:
    quantized = quantize(tiny_artifact("bert"), tmp_path / "once")
    with pytest.raises(QuantizeError, match="already quantized"):
        quantize(quantized, tmp_path / "twice")


def test_half_precision_is_refused(tiny_artifact: Get, tmp_path: Path) -> None:
    half = optimize(tiny_artifact("bert"), tmp_path / "half", level="O4")
    with pytest.raises(QuantizeError, match="float16"):
        quantize(half, tmp_path / "out")


@pytest.mark.parametrize(
    ("data", "method", "message"),
    [
        (None, "minmax", "needs calibration data"),
        ([], "minmax", "empty"),
        ([{"attention_mask": batches(1)[0]["attention_mask"]}], "minmax", "input_ids"),
        ((batch for batch in batches()), "percentile", "iterated only once"),
        ([{k: v[:, :, None] for k, v in batches(1)[0].items()}], "minmax", "does not run"),
    ],
)
def test_invalid_calibration_data_raises(
    tiny_artifact: Get, tmp_path: Path, data: Any, method: Any, message: str
) -> None:
    config = QuantizeConfig(scheme="static-int8", calibration=method)
    with pytest.raises(QuantizeError, match=message):
        quantize(tiny_artifact("bert"), tmp_path / "out", calibration=data, config=config)
    assert not (tmp_path / "out").exists()


def test_non_finite_calibration_data_raises(tiny_artifact: Get, tmp_path: Path) -> None:
    parent = tiny_artifact("vit", "image-classification")
    pixels = torch.randn(2, 3, 32, 32)
    quantize(parent, tmp_path / "good", calibration=[{"pixel_values": pixels}], scheme="static-int8")
    for value in (float("nan"), float("inf")):
        pixels[1, 0, 0, 0] = value
        with pytest.raises(QuantizeError, match="NaN or infinite|infinite or NaN"):
            quantize(parent, tmp_path / "bad", calibration=[{"pixel_values": pixels}], scheme="static-int8")


# The tests below check presets.


@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        (("avx2", "avx512f", "avx512_vnni", "amx_int8"), "amx"),
        (("avx2", "avx512f", "avx512_vnni"), "avx512_vnni"),
        (("avx2", "avx_vnni"), "avx512_vnni"),
        (("avx2", "avx512f"), "avx512"),
        (("avx2",), "avx2"),
        (("asimd", "asimddp"), "arm64"),
        (("ppc64le",), "ppc64le"),
        ((), "avx2"),
    ],
)
def test_auto_preset_depends_on_cpu_flags(flags: tuple[str, ...], expected: str) -> None:
    preset, why = choose_preset("auto", flags)
    assert preset.name == expected
    assert all(flag in why for flag in preset.requires if flag in flags)


def test_auto_preset_is_logged_with_its_reason(
    tiny_artifact: Get, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO, "accel_plugins.ortkit.quantization.quantizer"):
        quantized = quantize(tiny_artifact("bert"), tmp_path / "out")
    report = quantized.manifest.steps[-1].report
    assert quantized.manifest.quantization is not None
    assert report["preset"] == quantized.manifest.quantization.preset in PRESETS
    lines = [record.message for record in caplog.records if report["why"] in record.message]
    assert len(lines) == 1


@pytest.mark.parametrize(
    ("flags", "preset", "exact"),
    [
        (("avx2",), "avx512_vnni", True),
        (("avx2", "avx512f"), "arm64", True),
        (("avx2",), "avx2", False),
        (("avx2", "avx_vnni"), "avx512_vnni", False),
        (("asimd",), "arm64", False),
    ],
)
def test_full_range_weights_do_not_saturate_on_older_cpus(
    tiny_artifact: Get,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    flags: tuple[str, ...],
    preset: str,
    exact: bool,
) -> None:
    from accel_plugins.cpu import backend

    quantized = make(tiny_artifact("bert"), tmp_path / "q", scheme="dynamic-int8", preset=preset)
    monkeypatch.setattr(backend, "cpu_flags", lambda: flags)
    native = backend.with_exact_sums(SessionOptions(), quantized).native
    assert native == ({"session.x64quantprecision": "1"} if exact else {})
    options = SessionOptions(native={"session.x64quantprecision": "0"})
    assert backend.with_exact_sums(options, quantized).native == options.native


def test_preset_without_cpu_support_warns(monkeypatch: pytest.MonkeyPatch) -> None:
    warnings: list[str] = []
    monkeypatch.setattr(presets.logger, "warning", lambda text, *values: warnings.append(text % values))
    preset, _ = choose_preset("amx", ("avx2",))
    assert preset.name == "amx"
    assert "does not have the instructions amx_int8" in warnings[0]
    assert "slower kernels" in warnings[0]


@pytest.mark.parametrize("name", sorted(PRESETS))
def test_presets_select_weight_types(tiny_artifact: Get, tmp_path: Path, name: str) -> None:
    quantized = make(tiny_artifact("bert"), tmp_path / "out", scheme="static-int8", preset=name)
    graph = load_graph(quantized, quantized.component()).graph
    activations = {n.outputs[0].dtype for n in graph if n.op_type == "QuantizeLinear"}
    assert activations == {ir.DataType.INT8 if name in ("arm64", "tensorrt") else ir.DataType.UINT8}
    largest = max(
        int(np.abs(v.const_value.numpy().astype(int)).max())
        for n, v in graph.initializers.items()
        if n.endswith("weight_quantized") and v.const_value
    )
    assert largest == (63 if name in ("avx2", "avx512") else 127)


# The tests below check the rounding of weights.


@pytest.mark.parametrize("per_channel", [True, False])
@pytest.mark.parametrize("symmetric", [True, False])
def test_int8_weight_rounding(per_channel: bool, symmetric: bool) -> None:
    weight = np.random.default_rng(0).normal(0.3, 1, (40, 6)).astype(np.float32)
    weight[:, 2] *= 50
    quantized = quantize_int8(weight, per_channel=per_channel, symmetric=symmetric, reduce_range=False)
    back = (quantized.values.astype(np.float32) - quantized.zero_point) * quantized.scale
    assert (np.abs(back - weight) <= 0.51 * quantized.scale).all()
    assert quantized.scale.shape == ((6,) if per_channel else ())
    assert quantized.zero_point.any() != symmetric


def test_hqq_has_smaller_error_for_most_values() -> None:
    weight = np.random.default_rng(0).standard_t(2, (256, 16)).astype(np.float32)

    def loss(algorithm: Any) -> float:
        quantized = quantize_blocks(weight, bits=4, block_size=64, symmetric=False, algorithm=algorithm)
        return float((np.abs(quantized.dequantized(256) - weight) ** 0.7).sum())

    assert loss("hqq") < loss("rtn")


@pytest.mark.parametrize("value", [np.nan, np.inf])
@pytest.mark.parametrize("scheme", ["weight-int4", "weight-int8", "dynamic-int8"])
def test_non_finite_weights_are_refused(
    tiny_artifact: Get, tmp_path: Path, scheme: str, value: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    read = layers.constant

    def broken(weight: ir.Value | None) -> np.ndarray | None:
        matrix = read(weight)
        if matrix is not None and matrix.shape == read(weight_of_one).shape:  # type: ignore[union-attr]
            matrix = matrix.copy()
            matrix[2, 2] = value
        return matrix

    parent = tiny_artifact("bert")
    weight_of_one = find_layers(load_graph(parent, parent.component()))[3].node.inputs[1]
    monkeypatch.setattr(layers, "constant", broken)
    with pytest.raises(QuantizeError, match="infinite or NaN values"):
        make(parent, tmp_path / "out", scheme=scheme)
    assert not (tmp_path / "out").exists() or not list((tmp_path / "out").iterdir())


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize("transposed", [True, False])
def test_blocks_do_not_depend_on_threads(
    bits: int, symmetric: bool, transposed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    # The weight has several parts, and its last block is incomplete.
    monkeypatch.setattr(weight_only, "_TOGETHER", 2**12)
    weight = np.random.default_rng(0).standard_normal((100, 333)).astype(np.float32)
    if transposed:
        weight = np.ascontiguousarray(weight.T).T
    results = []
    for threads in (1, 3):
        monkeypatch.setattr(torch, "get_num_threads", lambda count=threads: count)
        results.append(quantize_blocks(weight, bits=bits, block_size=32, symmetric=symmetric))
    for field in ("packed", "scales", "zero_points"):
        np.testing.assert_array_equal(*(getattr(result, field) for result in results))
    # The largest error is half a step, except for clipped values: up to 9 steps are clipped to 7 for symmetric 4-bit
    # blocks, and 128 steps to 127 for 8 bits. The fit of the scale adds a little.
    most = (2.2 if bits == 4 else 1.01) if symmetric else 0.51
    error = np.abs(results[0].dequantized(100) - weight).T
    steps = np.repeat(results[0].scales, 32, axis=1)[:, :100]
    assert (error <= np.abs(steps) * most).all()


@pytest.mark.parametrize("block_size", [32, 128])
def test_symmetric_blocks_have_error_of_reference(block_size: int) -> None:
    weight = np.random.default_rng(0).standard_normal((300, 200)).astype(np.float32)
    expected = 0.0
    for column in np.pad(weight, ((0, -300 % block_size), (0, 0))).T.astype(np.float64):
        for block in column.reshape(-1, block_size):
            extreme = block[np.abs(block).argmax()]
            errors = []
            for steps in np.linspace(7, 9, 9):
                values = np.clip(np.rint(block / extreme * -steps), -8, 7)
                scale = (values @ block) / (values @ values)
                # The fitted scale can round other values to the nearest step, which reduces the error.
                errors.append((((values * scale - block) ** 2).sum(), scale))
            scale = min(errors)[1]
            expected += ((np.clip(np.rint(block / scale), -8, 7) * scale - block) ** 2).sum()
    quantized = quantize_blocks(weight, bits=4, block_size=block_size, symmetric=True)
    error = ((quantized.dequantized(300).astype(np.float64) - weight) ** 2).sum()
    # The reference uses float64, so a few ties differ.
    assert error == pytest.approx(expected, rel=1e-3)


@pytest.mark.parametrize("block_size", [32, 128])
def test_symmetric_blocks_have_error_close_to_asymmetric_blocks(block_size: int) -> None:
    weight = np.random.default_rng(0).standard_normal((256, 300)).astype(np.float32)
    # The columns contain a block of zeros, numbers near the lower limit of float32, and numbers whose squares
    # underflow.
    weight[:128, 0], weight[:, 1], weight[:, 2] = 0, weight[:, 1] * 1e-38, 1e-45
    for size in (1e-25, 1e25):
        scaled, plain = (
            quantize_blocks(weight * np.float32(s), bits=4, block_size=block_size, symmetric=True) for s in (size, 1)
        )
        assert (scaled.values[3:] == plain.values[3:]).mean() > 0.999

    def loss(**more: Any) -> float:
        quantized = quantize_blocks(weight, bits=4, block_size=block_size, **more)
        assert np.isfinite(quantized.scales).all()
        return float(((quantized.dequantized(256) - weight) ** 2).sum())

    blocks = weight.T.reshape(300, -1, block_size).astype(np.float64)
    extreme = np.abs(blocks).max(axis=-1, keepdims=True)
    step = np.where(extreme > 0, extreme, 1) / 7
    nearest = float(((np.rint(blocks / step) * step - blocks) ** 2).sum())
    lost = loss(symmetric=True)
    assert lost < 0.85 * nearest
    assert lost < 1.05 * loss(symmetric=False)


def test_pack_puts_two_4_bit_values_into_a_byte() -> None:
    assert pack(np.array([[1, 2, 3]], np.uint8), 4).tolist() == [[0x21, 0x03]]


# The tests below check calibration.


def test_percentile_range_cuts_tails() -> None:
    counts = np.ones(1000, np.int64)
    low, high = percentile_range(counts, -1, 1, 90)
    assert low == pytest.approx(-0.9, abs=0.01)
    assert high == pytest.approx(0.9, abs=0.01)
    assert percentile_range(counts, -1, 1, 100) == (-1, 1)


def test_entropy_range_cuts_an_outlier() -> None:
    values = np.concatenate([np.random.default_rng(0).normal(0, 1, 100_000), [60.0]])
    counts = np.histogram(values, bins=2048, range=(values.min(), 60))[0]
    low, high = entropy_range(counts, float(values.min()), 60.0)
    assert 3 < high < 20
    assert -5 < low < -3


def test_activation_scale() -> None:
    scale, zero = activation_scale(-1.0, 3.0, signed=False)
    assert (float(scale), int(zero)) == (pytest.approx(4 / 255), 64)
    scale, zero = activation_scale(-1.0, 3.0, signed=True)
    assert (float(scale), int(zero), zero.dtype) == (pytest.approx(3 / 127), 0, np.int8)


def _watch(artifact: Artifact, data: Any, samples: int = 10_000) -> Calibrator:
    model = load_graph(artifact, artifact.component())
    names = list({str(layer.activation.name): None for layer in find_layers(model)})
    return Calibrator(model, artifact.component(), names, data, samples)


def test_calibration_methods_give_ordered_ranges(tiny_artifact: Get) -> None:
    data = batches(6)
    widths = {}
    with _watch(tiny_artifact("bert"), data) as calibrator:
        channels = calibrator.channel_ranges()
        for method in ("minmax", "moving_average", "percentile"):
            ranges = calibrator.ranges(channels, method, percentile=99.0, divisors={})  # type: ignore[arg-type]
            widths[method] = sum(high - low for low, high in ranges.values())
    assert widths["percentile"] < widths["moving_average"] < widths["minmax"]


def test_samples_setting_limits_rows(tiny_artifact: Get) -> None:
    with _watch(tiny_artifact("bert"), batches(4, rows=4), samples=6) as calibrator:
        calibrator.channel_ranges()
        assert calibrator.rows == 6


def test_calibration_memory_is_constant(tiny_artifact: Get) -> None:
    class Lazy:
        def __init__(self, count: int) -> None:
            self.count = count

        def __iter__(self) -> Iterator[dict[str, torch.Tensor]]:
            return iter(batches(1, rows=16, sequence=40) * self.count)

    def peak(count: int) -> int:
        with _watch(tiny_artifact("bert"), Lazy(count)) as calibrator:
            tracemalloc.start()
            channels = calibrator.channel_ranges()
            calibrator.ranges(channels, "percentile", percentile=99.9, divisors={})
            size = tracemalloc.get_traced_memory()[1]
            tracemalloc.stop()
        return size

    peak(1)
    assert peak(30) < 1.1 * peak(3)


def test_smoothing_reduces_error_of_outlier_channels(tmp_path: Path) -> None:
    """SmoothQuant smoothing keeps the error small if one activation channel is 200 times larger than the other
    channels.
    """
    generator = np.random.default_rng(0)
    weight = generator.normal(size=(16, 16)).astype(np.float32)
    weight[3] /= 200
    x = generator.normal(size=(64, 16)).astype(np.float32)
    x[:, 3] *= 200
    from accel_plugins.ortkit.quantization.calibrators import ChannelRange
    from accel_plugins.ortkit.quantization.smoothing import smooth, smoothing_divisors

    def error(exponent: float | None) -> float:
        model = _one_product(weight)
        layers = find_layers(model)
        name = str(layers[0].activation.name)
        channels = {name: ChannelRange(x.min(axis=0), x.max(axis=0))}
        divisors = smoothing_divisors(layers, channels, exponent) if exponent is not None else {}
        report = smooth(layers, divisors)
        assert report == {"folded": 0, "inserted": int(exponent is not None)}
        divisor = divisors.get(name, np.float32(1))
        limits = (float((x / divisor).min()), float((x / divisor).max()))
        ranges = {name: limits, f"{name}.smoothed": limits}
        IntegerRewriter(per_channel=True, symmetric=True, reduce_range=False).static(layers, ranges, signed=False)
        save_graph(model, tmp_path / "model.onnx")
        output = exact_session(tmp_path / "model.onnx").run(None, {"x": x})[0]
        return float(np.abs(output - x @ weight).max())

    assert error(0.5) < 0.2 * error(None)


def _one_product(weight: np.ndarray) -> ir.Model:
    model = ir.from_onnx_text("""
        <ir_version: 10, opset_import: ["" : 20]>
        graph (float[n,16] x, float[16,16] w) => (float[n,16] y) { y = MatMul(x, w) }""")
    fix_input(model, "w", weight)
    return model


def test_products_in_subgraphs_are_quantized(tmp_path: Path) -> None:
    """A matrix product in a branch of an `If` is quantized. Its activation and its weight are values of the outer
    graph.
    """
    text = """
        <ir_version: 10, opset_import: ["" : 20]>
        graph (float[n,16] x, float[16,16] w, bool c) => (float[n,16] y) {
            y = If(c) <
                then_branch = one () => (float[n,16] a) { a = MatMul(x, w) },
                else_branch = two () => (float[n,16] b) { b = Identity(x) }
            >
        }"""
    model = ir.from_onnx_text(text)
    weight = np.random.default_rng(0).normal(size=(16, 16)).astype(np.float32)
    fix_input(model, "w", weight)
    layers = find_layers(model)
    assert len(layers) == 1
    IntegerRewriter(per_channel=True, symmetric=True, reduce_range=False).dynamic(layers)
    save_graph(model, tmp_path / "model.onnx")
    session = exact_session(tmp_path / "model.onnx")
    x = np.random.default_rng(1).normal(size=(3, 16)).astype(np.float32)
    assert np.abs(session.run(None, {"x": x, "c": np.array(True)})[0] - x @ weight).max() < 0.2
    assert np.array_equal(session.run(None, {"x": x, "c": np.array(False)})[0], x)
