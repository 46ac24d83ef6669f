"""Tests of quantization for OpenVINO with NNCF."""

# ruff: noqa: E402

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers

ov = pytest.importorskip("openvino")
pytest.importorskip("nncf")

from openvino import opset13 as operators

from accel import ORTModelForSeq2SeqLM, ORTModelForSequenceClassification, export
from accel.artifact import Artifact
from accel.backends.plan import make_plan
from accel.backends.sessions import open_plan
from accel.errors import ConfigError, OptimizeError, QuantizeError
from accel.stages.optimize import optimize
from accel.stages.quantize import quantize
from accel.testing.models import rescale
from accel_plugins.openvino import backend, int8_float_fallback, quantizer


@pytest.fixture(scope="session")
def ir(tiny_ir: Callable[..., Artifact]) -> Artifact:
    return tiny_ir("bert")


def rows(count: int = 24, seed: int = 0) -> list[dict[str, torch.Tensor]]:
    generator = torch.Generator().manual_seed(seed)
    batches = []
    for index in range(count):
        ids = torch.randint(6, 100, (1, 4 + index % 12), generator=generator)
        batches.append(
            {"input_ids": ids, "attention_mask": torch.ones_like(ids), "token_type_ids": torch.zeros_like(ids)}
        )
    return batches


@pytest.fixture(scope="session")
def static(ir: Artifact, tmp_path_factory: pytest.TempPathFactory) -> Artifact:
    return quantize(ir, tmp_path_factory.mktemp("static") / "int8", scheme="static-int8", calibration=rows())


def difference(quantized: Artifact, original: Artifact) -> float:
    a, b = (open_plan(make_plan(artifact)).sessions["model"] for artifact in (quantized, original))
    return max(float((a.run(case)["logits"] - b.run(case)["logits"]).abs().max()) for case in rows(8, seed=9))


def count(artifact: Artifact, operator: str) -> int:
    return sum(node.get_type_name() == operator for node in ov.Core().read_model(str(artifact.file())).get_ops())


def read_by(artifact: Artifact, operator: str) -> set[str]:
    """Return the operator types that compute the first input of the nodes of type `operator`."""
    nodes = ov.Core().read_model(str(artifact.file())).get_ops()
    return {n.input_value(0).get_node().get_type_name() for n in nodes if n.get_type_name() == operator}


def constants(artifact: Artifact) -> set[str]:
    nodes = ov.Core().read_model(str(artifact.file())).get_ops()
    return {n.get_output_element_type(0).get_type_name() for n in nodes if n.get_type_name() == "Constant"}


def test_static_int8_computes_in_int8(static: Artifact, ir: Artifact) -> None:
    model = ORTModelForSequenceClassification.from_pretrained(static.path)
    assert (model.backend, model.compute_dtype) == ("openvino", "int8")
    # The logits are of order 1, and the difference shows that the model is quantized: it would be below 1e-5 in
    # float32.
    assert 1e-4 < difference(static, ir) < 0.5


@pytest.mark.parametrize(
    ("flags", "most"), [(("avx2",), 64), pytest.param(("avx2", "avx512_vnni"), 127, marks=pytest.mark.thorough)]
)
def test_weights_have_7_bits_if_cpu_accumulates_in_16_bits(
    flags: tuple[str, ...], most: int, ir: Artifact, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On processors that add int8 products in 16 bits, the quantizer uses 7 bits for weights. With 8-bit weights,
    OpenVINO's sums saturate without an error.
    """
    monkeypatch.setattr(quantizer, "cpu_flags", lambda: flags)
    quantized = quantize(ir, tmp_path / "int8", scheme="static-int8", calibration=rows(4))
    read = [
        n.input_value(1).get_node()
        for n in ov.Core().read_model(str(quantized.file())).get_ops()
        if n.get_type_name() == "MatMul"
    ]
    largest = []
    for node in read:
        while node.get_type_name() in ("Multiply", "Subtract", "Convert"):
            node = node.input_value(0).get_node()
        if node.get_type_name() == "Constant" and node.get_output_element_type(0) == ov.Type.i8:
            largest.append(int(abs(node.get_data().astype(int)).max()))
    assert largest
    assert max(largest) == most


@pytest.mark.parametrize(
    ("flags", "quantized"), [(("avx2",), 0), pytest.param(("avx2", "avx512_vnni"), 2, marks=pytest.mark.thorough)]
)
def test_activation_products_stay_in_float_if_cpu_accumulates_in_16_bits(
    flags: tuple[str, ...],
    quantized: int,
    tiny_artifact: Callable[..., Artifact],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """On processors that add int8 products in 16 bits, the quantizer does not quantize products of two activations.

    The graph from ONNX has two attention layers. On other processors, NNCF quantizes the first of the two activation
    products of each layer.
    """
    monkeypatch.setattr(quantizer, "cpu_flags", lambda: flags)
    int8 = quantize(tiny_artifact(), tmp_path / "int8", backend="openvino", scheme="static-int8", calibration=rows(4))
    products = [
        node
        for node in ov.Core().read_model(str(int8.file())).get_ops()
        if node.get_type_name() == "MatMul" and not any(quantizer._is_constant(node, side) for side in (0, 1))
    ]
    read = [{value.get_node().get_type_name() for value in node.input_values()} for node in products]
    assert len(read) == 4
    assert sum("FakeQuantize" in types for types in read) == quantized


@pytest.mark.parametrize("made_from", ["openvino_ir", pytest.param("onnx", marks=pytest.mark.thorough)])
def test_model_quantized_for_another_cpu_does_not_saturate(
    made_from: str,
    ir: Artifact,
    tiny_artifact: Callable[..., Artifact],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """A processor with only AVX2 computes a graph in floating point if the graph was quantized for a processor with
    VNNI.

    The largest error is 0.04. With int8 products, it was 0.15 and 0.34 for the two graph formats.
    """
    artifact = ir if made_from == "openvino_ir" else tiny_artifact()
    monkeypatch.setattr(quantizer, "cpu_flags", lambda: ("avx2", "avx512_vnni"))
    quantized = quantize(artifact, tmp_path / "int8", backend="openvino", scheme="static-int8", calibration=rows(8))
    monkeypatch.setattr(backend, "cpu_flags", lambda: ("avx2",))
    with caplog.at_level(logging.WARNING):
        assert difference(quantized, ir) < 0.1
    assert "was quantized for a different processor" in caplog.text


def test_model_quantized_for_this_cpu_stays_int8(
    ir: Artifact, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A graph that was quantized for this processor stays in int8. The token embeddings use all 8 bits, but no product
    reads the embedding table, so they cannot saturate a sum.
    """
    monkeypatch.setattr(quantizer, "cpu_flags", lambda: ("avx2",))
    quantized = quantize(ir, tmp_path / "int8", backend="openvino", scheme="static-int8", calibration=rows(8))
    model = ov.Core().read_model(str(quantized.file()))
    before = [node.get_type_name() for node in model.get_ops()]
    tables = [
        np.ptp(node.get_data().astype(int))
        for node in model.get_ops()
        if node.get_type_name() == "Constant" and node.get_output_element_type(0) == ov.Type.i8
    ]
    assert max(tables) > 128
    with caplog.at_level(logging.WARNING):
        int8_float_fallback.compute_in_float(model, "a model")
    assert [node.get_type_name() for node in model.get_ops()] == before
    assert not caplog.text


@pytest.mark.parametrize("through_integers", [False, True])
def test_scaling_product_is_kept(through_integers: bool) -> None:
    """If the int8 products of a graph are converted to floating point, a multiplication that scales the quantized keys
    is kept. Attention in graphs from ONNX contains this multiplication.
    """

    def rounded(value: ov.Output) -> ov.Node:
        if not through_integers:
            return operators.fake_quantize(value, -1.0, 1.0, -1.0, 1.0, levels=256)
        integers = operators.convert(operators.fake_quantize(value, -1.0, 1.0, 0.0, 255.0, levels=256), "u8")
        return operators.multiply(
            operators.subtract(operators.convert(integers, "f32"), np.float32(128)), np.float32(1 / 128)
        )

    left, right = (operators.parameter([4, 4], ov.Type.f32) for _ in range(2))
    wide = operators.constant(np.array([[-128, 127]] * 4, np.int8))
    product = operators.matmul(rounded(left), operators.multiply(rounded(right), np.float32(0.5)), False, True)
    outcome = operators.matmul(product, operators.convert(wide, "f32"), False, False)
    model = ov.Model([outcome], [left, right])
    values = np.random.default_rng(0).uniform(-1, 1, (2, 4, 4)).astype(np.float32)
    expected = (values[0] @ (0.5 * values[1]).T) @ np.array([[-128, 127]] * 4, np.float32)
    int8_float_fallback.compute_in_float(model, "a model")
    assert sum(node.get_type_name() == "FakeQuantize" for node in model.get_ops()) == 1
    output = ov.Core().compile_model(model, "CPU", {"INFERENCE_PRECISION_HINT": "f32"})(list(values))[0]
    assert np.abs(output - expected).max() < 0.05 * np.abs(expected).max()


def test_static_int8_manifest(static: Artifact, ir: Artifact) -> None:
    loaded = Artifact.load(static.path)
    quantization = loaded.manifest.quantization
    assert quantization is not None
    assert quantization.scheme == "static-int8"
    assert quantization.calibration == {"rows": 24, "seed": 0}
    assert [step.stage for step in loaded.manifest.steps] == ["export", "quantize"]
    assert loaded.manifest.steps[-1].parent == ir.digest
    assert "nncf" in loaded.manifest.steps[-1].versions
    assert (static.path / "config.json").is_file()


def test_static_int8_requires_calibration_data(ir: Artifact, tmp_path: Path) -> None:
    with pytest.raises(QuantizeError, match="calibration data"):
        quantize(ir, tmp_path / "out", scheme="static-int8")
    with pytest.raises(QuantizeError, match="empty"):
        quantize(ir, tmp_path / "out", scheme="static-int8", calibration=[])
    with pytest.raises(QuantizeError, match="input_ids"):
        quantize(ir, tmp_path / "out", scheme="static-int8", calibration=[{"attention_mask": torch.ones(1, 4).long()}])
    assert not (tmp_path / "out").exists()


@pytest.mark.thorough
def test_calibration_rows_are_limited(ir: Artifact, tmp_path: Path) -> None:
    quantized = quantize(ir, tmp_path / "out", scheme="static-int8", calibration=rows(), samples=5)
    assert quantized.manifest.quantization is not None
    assert quantized.manifest.quantization.calibration == {"rows": 5, "seed": 0}


def test_exclude_keeps_layers_in_float(ir: Artifact, static: Artifact, tmp_path: Path) -> None:
    """The quantization report contains layer names in the form that `exclude` accepts. The search with an accuracy
    budget uses these names to keep layers in floating point.
    """
    first, *others = static.manifest.steps[-1].report["layers"]
    quantized = quantize(ir, tmp_path / "out", scheme="static-int8", calibration=rows(), exclude=(first,))
    assert quantized.manifest.steps[-1].report["layers"] == others
    none = quantize(ir, tmp_path / "none", scheme="static-int8", calibration=rows(), exclude=("re:.*linear.*",))
    assert not none.manifest.steps[-1].report["layers"]
    assert count(none, "FakeQuantize") < count(static, "FakeQuantize")


def test_unknown_node_in_exclude_raises(ir: Artifact, tmp_path: Path) -> None:
    with pytest.raises(QuantizeError, match="no_such_node"):
        quantize(ir, tmp_path / "out", scheme="static-int8", calibration=rows(4), exclude=("no_such_node",))


@pytest.mark.thorough
def test_grouped_convolutions_stay_in_float(tmp_path: Path) -> None:
    """Grouped convolutions after a transpose stay in floating point, because NNCF would measure the ranges of their
    inputs along the wrong axis.
    """
    sizes = {"vocab_size": 100, "hidden_size": 16, "intermediate_size": 16, "embedding_size": 16}
    config = transformers.ConvBertConfig(**sizes, num_hidden_layers=1, num_attention_heads=2, conv_kernel_size=3)
    model = rescale(transformers.ConvBertForSequenceClassification(config)).eval()
    ir = export(model, tmp_path / "ir", task="text-classification", backend="openvino")
    quantized = quantize(ir, tmp_path / "int8", scheme="static-int8", calibration=rows())
    assert read_by(quantized, "GroupConvolution")
    assert "FakeQuantize" not in read_by(quantized, "GroupConvolution")
    assert count(quantized, "FakeQuantize")
    assert 1e-4 < difference(quantized, ir) < 0.5


@pytest.mark.thorough
def test_patch_convolutions_stay_in_float(tiny_ir: Callable[..., Artifact], tmp_path: Path) -> None:
    pixels = torch.randn(4, 3, 32, 32, generator=torch.Generator().manual_seed(0))
    images = [{"pixel_values": pixels}]
    ir = tiny_ir("vit", "image-classification")
    quantized = quantize(ir, tmp_path / "int8", scheme="static-int8", calibration=images)
    assert "FakeQuantize" not in read_by(quantized, "Convolution")
    named = quantize(
        ir, tmp_path / "named", scheme="static-int8", calibration=images, operators=("Convolution", "MatMul")
    )
    assert read_by(named, "Convolution") == {"FakeQuantize"}


@pytest.mark.thorough
def test_operators_setting_limits_quantization(ir: Artifact, tmp_path: Path) -> None:
    assert count(
        quantize(ir, tmp_path / "out", scheme="static-int8", calibration=rows(4), operators=("MatMul",)), "FakeQuantize"
    )
    with pytest.raises(QuantizeError, match="static-int8 quantized no operator"):
        quantize(ir, tmp_path / "none", scheme="static-int8", calibration=rows(4), operators=("Gather",))


def test_unknown_operator_raises(ir: Artifact, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="MatMul"):
        quantize(ir, tmp_path / "wrong", scheme="static-int8", calibration=rows(4), operators=("MatMull",))


@pytest.mark.parametrize(
    "settings",
    [
        {"smooth_quant": 0.9},
        *(
            pytest.param(setting, marks=pytest.mark.thorough)
            for setting in (
                {"preset": "performance"},
                {"calibration": "percentile", "percentile": 99.9},
                {"calibration": "moving_average"},
                {"per_channel": False},
            )
        ),
    ],
    ids=lambda settings: next(iter(settings)),
)
def test_settings_change_the_result(settings: dict[str, Any], ir: Artifact, static: Artifact, tmp_path: Path) -> None:
    from accel import QuantizeConfig

    config = QuantizeConfig(scheme="static-int8", **settings)
    quantized = quantize(ir, tmp_path / "out", config=config, calibration=rows())
    assert quantized.component().files != static.component().files
    assert difference(quantized, ir) < 0.7


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"preset": "performence"}, "performance"),
        ({"format": "qoperator"}, "does not use the setting format='qoperator'"),
        ({"scheme": "weight-int4", "algorithm": "hqq"}, "hqq"),
    ],
)
def test_settings_without_counterpart_raise(
    settings: dict[str, Any], message: str, ir: Artifact, tmp_path: Path
) -> None:
    with pytest.raises(ConfigError, match=message):
        quantize(ir, tmp_path / "out", **{"scheme": "static-int8", **settings}, calibration=rows(2))


# The tests below check weight-only quantization.


def test_weight_int8(ir: Artifact, tmp_path: Path) -> None:
    quantized = quantize(ir, tmp_path / "out", scheme="weight-int8")
    assert "u8" in constants(quantized)
    weights = [next(f.bytes for f in a.component().files if f.name.endswith(".bin")) for a in (quantized, ir)]
    assert weights[0] < 0.4 * weights[1]
    assert open_plan(make_plan(quantized)).sessions["model"].compute_dtype == "float32", (
        "only the weights are in 8 bits"
    )
    assert 1e-6 < difference(quantized, ir) < 0.1


@pytest.mark.parametrize(
    ("settings", "needs_data"),
    [
        ({}, False),
        pytest.param({"symmetric": True}, False, marks=pytest.mark.thorough),
        pytest.param({"ratio": 0.5}, False, marks=pytest.mark.thorough),
        ({"algorithm": "awq"}, True),
        pytest.param({"scale_estimation": True}, True, marks=pytest.mark.thorough),
        pytest.param({"algorithm": "gptq"}, True, marks=pytest.mark.thorough),
    ],
    ids=["plain", "symmetric", "ratio", "awq", "scale_estimation", "gptq"],
)
def test_weight_int4(settings: dict[str, Any], needs_data: bool, ir: Artifact, tmp_path: Path) -> None:
    data = rows(8) if needs_data else None
    quantized = quantize(ir, tmp_path / "out", scheme="weight-int4", block_size=16, calibration=data, **settings)
    assert constants(quantized) & {"i4", "u4"}
    assert ("i4" in constants(quantized)) == bool(settings.get("symmetric"))
    assert 1e-6 < difference(quantized, ir) < 1.5
    loaded = ORTModelForSequenceClassification.from_pretrained(quantized.path)
    assert loaded.artifact.manifest.quantization is not None


@pytest.mark.parametrize("settings", [{"algorithm": "gptq"}, {"scale_estimation": True}])
def test_weight_int4_requires_calibration_data_for_some_settings(
    settings: dict[str, Any], ir: Artifact, tmp_path: Path
) -> None:
    with pytest.raises(QuantizeError, match="needs calibration data"):
        quantize(ir, tmp_path / "out", scheme="weight-int4", **settings)


def test_block_size_that_does_not_divide_the_width_raises(ir: Artifact, tmp_path: Path) -> None:
    with pytest.raises(QuantizeError, match="block size") as error:
        quantize(ir, tmp_path / "out", scheme="weight-int4", block_size=64)
    assert "use block_size=32" in str(error.value.fix)


def test_tables_that_are_not_weights_are_not_compressed(tmp_path: Path) -> None:
    """GPT-J's sine and cosine tables are not compressed. A row of these tables has fewer channels than a quantization
    block.
    """
    config = transformers.GPTJConfig(
        vocab_size=64, n_embd=32, n_layer=1, n_head=2, rotary_dim=8, n_positions=48, bos_token_id=1, eos_token_id=2
    )
    exported = export(transformers.GPTJForCausalLM(config), tmp_path / "ir", format="openvino_ir")
    compressed = quantize(exported, tmp_path / "out", scheme="weight-int4", block_size=32)
    model = ov.Core().read_model(str(compressed.path / compressed.component().file))
    floats = [op for op in model.get_ops() if op.get_type_name() == "Constant" and op.get_element_type().is_real()]
    assert [48, 8] in [list(op.shape) for op in floats]


def test_exclude_of_all_weights_raises(ir: Artifact, tmp_path: Path) -> None:
    with pytest.raises(QuantizeError, match=r"compressed no weights, because exclude=") as error:
        quantize(ir, tmp_path / "out", scheme="weight-int8", exclude=("re:.*",))
    assert "constant" in str(error.value.fix)


def test_model_without_weights_raises(tmp_path: Path) -> None:
    class Doubler(torch.nn.Module):
        def forward(self, values: torch.Tensor) -> torch.Tensor:
            return torch.tanh(values) * 2

    sample, axes = {"values": torch.randn(3, 4)}, {"values": {0: "batch"}}
    artifact = export(Doubler(), tmp_path / "ir", task="custom", backend="openvino", sample=sample, axes=axes)
    for scheme in ("weight-int4", "weight-int8"):
        with pytest.raises(QuantizeError, match="no weights") as error:
            quantize(artifact, tmp_path / "out", scheme=scheme)
        assert error.value.fix
    with pytest.raises(QuantizeError, match="static-int8 quantized no operator"):
        quantize(artifact, tmp_path / "out", scheme="static-int8", calibration=[{"values": torch.randn(3, 4)}])
    assert not (tmp_path / "out").exists()


@pytest.mark.thorough
def test_every_graph_of_an_encoder_decoder_is_quantized(generator: Callable[..., Artifact], tmp_path: Path) -> None:
    original = generator("bart", "openvino")
    quantized = quantize(original, tmp_path / "int8", scheme="weight-int8")
    assert [c.name for c in quantized.components] == [c.name for c in original.components]
    assert len({c.file for c in quantized.components}) == len(quantized.components) > 1
    assert quantized.bytes < 0.7 * original.bytes
    ids = torch.tensor([[5, 6, 7, 8, 3]])
    tokens = ORTModelForSeq2SeqLM.from_pretrained(quantized.path).generate(input_ids=ids, max_new_tokens=8)
    assert tokens.shape[0] == 1
    with pytest.raises(QuantizeError, match="the graphs encoder.* needs calibration data for each graph"):
        quantize(original, tmp_path / "static", scheme="static-int8", calibration=rows())


def test_onnx_decoders_are_refused(generator: Callable[..., Artifact], tmp_path: Path) -> None:
    onnx = generator("llama")
    with pytest.raises(OptimizeError, match="have the KV cache as inputs and outputs"):
        quantize(onnx, tmp_path / "int8", scheme="weight-int8", backend="openvino")
    with pytest.raises(OptimizeError, match="have the KV cache as inputs and outputs"):
        optimize(onnx, tmp_path / "ir", backend="openvino", level="O1")
