"""Tests of Q/DQ pairs for GPUs. The tests use ONNX Runtime's CPU provider.

Q/DQ pairs are standard ONNX operators, so every provider computes the same result.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir
import pytest
import torch

from accel import capture
from accel.artifact import Artifact
from accel.backends import registry
from accel.config import QuantizeConfig
from accel.errors import ConfigError, QuantizeError
from accel.interfaces.protocols import OpenRequest, Session
from accel.interfaces.specs import DeviceSpec
from accel.stages.optimize import optimize
from accel.stages.quantize import quantize
from accel_plugins.ortkit.graph.editing import load_graphs
from accel_plugins.ortkit.quantization.gpu_quantizer import STEPS

Feeds = Mapping[str, torch.Tensor]
# Largest accepted relative errors for a tiny model with two layers and random weights. Float8 errors are larger because
# float8 has 3 bits of mantissa.
ACCEPTED = {"static-int8": 0.06, "static-fp8": 0.25}


def feeds_of(artifact: Artifact, seed: int) -> dict[str, torch.Tensor]:
    # Use a different sequence length for each seed, so that an error is detected if the last axis of a softmax output
    # is treated as channels.
    sizes = {"batch": 4, "sequence": 20 + seed}
    return capture.feeds_for(artifact.components[0].inputs, sizes, seed=seed, folder=artifact.path)


@pytest.fixture(scope="module")
def portable(tiny_artifact: Callable[..., Artifact], tmp_path_factory: pytest.TempPathFactory) -> Artifact:
    out = tmp_path_factory.mktemp("portable") / "o4"
    return optimize(tiny_artifact("bert"), out, backend="tensorrt", level="O4")


def session_of(artifact: Artifact) -> Session:
    backend = registry.load(registry.describe("cpu"))
    return backend.open(artifact, OpenRequest(device=DeviceSpec("cpu")))["model"]


def operators(artifact: Artifact) -> Counter[str]:
    return Counter(node.op_type for node in load_graphs(artifact)["model"].graph)


@pytest.mark.parametrize("scheme", STEPS)
@pytest.mark.parametrize("start", ["float32", "float16"])
@pytest.mark.parametrize(
    ("settings", "layers", "products"),
    [
        ({}, 14, 0),
        ({"exclude": ("re:attention",)}, 6, 0),
        ({"operators": ("MatMul", "Gemm", "Attention")}, 14, 4),
    ],
)
def test_every_scheme_has_small_error(
    tiny_artifact: Callable[..., Artifact],
    portable: Artifact,
    tmp_path: Path,
    scheme: str,
    start: str,
    settings: dict[str, Any],
    layers: int,
    products: int,
) -> None:
    original = tiny_artifact("bert")
    parent = original if start == "float32" else portable
    calibration = [feeds_of(original, seed) for seed in range(4)]
    quantized = quantize(parent, tmp_path / "q", backend="tensorrt", scheme=scheme, calibration=calibration, **settings)
    report = quantized.manifest.steps[-1].report
    assert (len(report["layers"]), report["attention"]) == (layers, products)
    assert quantized.dtype == start
    assert quantized.manifest.quantization is not None
    assert quantized.manifest.quantization.scheme == scheme
    feeds = feeds_of(original, 9)
    expected, logits = session_of(original).run(feeds)["logits"], session_of(quantized).run(feeds)["logits"]
    error = float((logits - expected).norm() / expected.norm())
    assert 1e-4 < error < ACCEPTED[scheme]


def test_pairs_in_graph_fused_for_cuda(tiny_artifact: Callable[..., Artifact], tmp_path: Path) -> None:
    """In a graph fused for CUDA, attention keeps its packed float weights, and the matrix products before and after
    attention get Q/DQ pairs.
    """
    fused = optimize(tiny_artifact("bert"), tmp_path / "o2", backend="cuda", level="O2")
    calibration = [feeds_of(fused, seed) for seed in range(4)]
    quantized = quantize(fused, tmp_path / "q", backend="cuda", scheme="static-int8", calibration=calibration)
    assert quantized.manifest.steps[-1].backend == "cuda"
    assert operators(quantized)["Attention"] == operators(fused)["Attention"] > 0
    assert operators(quantized)["DequantizeLinear"] > 0
    feeds = feeds_of(fused, 9)
    expected, logits = session_of(fused).run(feeds)["logits"], session_of(quantized).run(feeds)["logits"]
    assert (logits - expected).norm() / expected.norm() < ACCEPTED["static-int8"]


@pytest.mark.parametrize("scheme", STEPS)
def test_pairs_are_symmetric_and_per_channel(portable: Artifact, tmp_path: Path, scheme: str) -> None:
    quantized = quantize(
        portable, tmp_path / "q", backend="tensorrt", scheme=scheme, calibration=[feeds_of(portable, 0)]
    )
    model = load_graphs(quantized)["model"]
    expected_dtype = STEPS[scheme].dtype
    weights = activations = 0
    for node in (n for n in model.graph if n.op_type == "DequantizeLinear"):
        values, scale, zero = node.inputs
        assert values is not None
        assert scale is not None
        assert zero is not None
        assert zero.const_value is not None
        assert zero.dtype == values.dtype == expected_dtype
        assert scale.dtype == ir.DataType.FLOAT16
        assert not zero.const_value.numpy().astype(np.float32).any(), "symmetric"
        if values.is_initializer():
            weights += 1
            assert scale.shape == (values.shape or ())[1:]
            assert node.attributes.get_int("axis", 0) == 1
        else:
            activations += 1
            assert scale.shape == ()
    assert weights == 14
    assert activations == operators(quantized)["QuantizeLinear"] == 10, "what layers share is rounded once"


def test_float8_compute_dtype_is_not_int8(portable: Artifact, tmp_path: Path) -> None:
    feeds = [feeds_of(portable, 0)]
    quantized = {s: quantize(portable, tmp_path / s, backend="tensorrt", scheme=s, calibration=feeds) for s in STEPS}
    assert session_of(quantized["static-fp8"]).compute_dtype == "float32"
    assert session_of(quantized["static-int8"]).compute_dtype == "int8"


def test_rounding_to_int8_and_float8() -> None:
    int8, fp8 = STEPS["static-int8"], STEPS["static-fp8"]
    assert int8.rounded(np.array([-3.0, 0.0, 1.49, 900.0]), np.array(1.0)).tolist() == [-3, 0, 1, 127]
    assert fp8.rounded(np.array([-900.0, 0.0, 1.06, 500.0]), np.array(1.0)).astype(float).tolist() == [-448, 0, 1, 448]
    assert int8.scale(np.array([254.0, 0.0])).tolist() == [2, 1]


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({"symmetric": False}, "symmetric=False"),
        ({"format": "qoperator"}, "format='qoperator'"),
        ({"smooth_quant": 0.5}, "smooth_quant=0.5"),
        ({"preset": "avx512"}, "preset='avx512'"),
        ({"operators": ("Conv",)}, "'Conv' cannot be quantized"),
    ],
)
def test_unsupported_settings_raise(portable: Artifact, tmp_path: Path, settings: dict[str, Any], says: str) -> None:
    config = QuantizeConfig(**{"scheme": "static-int8", **settings})
    with pytest.raises(ConfigError) as raised:
        quantize(portable, tmp_path / "q", backend="tensorrt", config=config, calibration=[feeds_of(portable, 0)])
    assert says in str(raised.value)


def test_missing_calibration_data_raises(portable: Artifact, tmp_path: Path) -> None:
    with pytest.raises(QuantizeError, match="needs calibration data"):
        quantize(portable, tmp_path / "q", backend="tensorrt", scheme="static-fp8")


def test_old_opsets_are_refused(portable: Artifact, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from accel_plugins.ortkit.quantization import gpu_quantizer

    monkeypatch.setattr(gpu_quantizer, "_FIRST_OPSET", 99)
    with pytest.raises(QuantizeError, match="opset=99"):
        quantize(
            portable, tmp_path / "q", backend="tensorrt", scheme="static-int8", calibration=[feeds_of(portable, 0)]
        )
