"""Weights that several layers share are stored once in an artifact, after every stage (export, optimization and
quantization).
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
import torch

import accel
from accel.artifact import Artifact
from accel.stages.export import export
from accel.stages.graph_comparison import warn_of_size
from accel.stages.optimize import optimize
from accel.stages.quantize import quantize

Get = Callable[..., Artifact]
SCHEMES: dict[str, dict[str, Any]] = {
    "dynamic-int8": {"scheme": "dynamic-int8"},
    "static-int8": {"scheme": "static-int8"},
    "static-int8 of integer operators": {"scheme": "static-int8", "format": "qoperator"},
    "weight-int8": {"scheme": "weight-int8"},
    "weight-int4": {"scheme": "weight-int4"},
    "weight-int4 with hqq": {"scheme": "weight-int4", "algorithm": "hqq"},
}
GPU_SCHEMES: dict[str, dict[str, Any]] = {
    "static-int8 for GPUs": {"scheme": "static-int8", "backend": "tensorrt"},
    "static-fp8 for GPUs": {"scheme": "static-fp8", "backend": "tensorrt"},
}
# Weights have at least this number of bytes. Smaller tensors are scales and biases, which are stored in the graph.
LARGE = 256


class Universal(torch.nn.Module):
    """Model that applies the same block several times (Dehghani et al., 2018, Universal Transformers)."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.block = torch.nn.Sequential(torch.nn.Linear(64, 128), torch.nn.GELU(), torch.nn.Linear(128, 64))
        self.norm = torch.nn.LayerNorm(64)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        for _ in range(4):
            hidden = self.norm(hidden + self.block(hidden))
        return hidden


@pytest.fixture(scope="module")
def universal(tmp_path_factory: pytest.TempPathFactory) -> Artifact:
    out = tmp_path_factory.mktemp("universal") / "model"
    sample = {"hidden": torch.randn(2, 5, 64, generator=torch.Generator().manual_seed(0))}
    return export(Universal().eval(), out, task="custom", sample=sample, axes={"hidden": {0: "batch", 1: "sequence"}})


@pytest.fixture
def parent(tiny_artifact: Get, generator: Get, universal: Artifact) -> Get:
    """Return a function that returns an artifact for each kind of shared weights."""
    builders: dict[str, Callable[[], Artifact]] = {
        "layers (ALBERT)": lambda: tiny_artifact("albert"),
        "layers (Universal)": lambda: universal,
        "embeddings and head (BERT)": lambda: tiny_artifact("bert", "fill-mask"),
        "embeddings and head (GPT-2)": lambda: generator("gpt2"),
        "embeddings, head and encoder (T5)": lambda: generator("t5"),
    }
    return lambda kind: builders[kind]()


KINDS = (
    "layers (ALBERT)",
    "layers (Universal)",
    "embeddings and head (BERT)",
    "embeddings and head (GPT-2)",
    "embeddings, head and encoder (T5)",
)


def stored(artifact: Artifact) -> list[str]:
    """Return a hash of the contents of each large weight in an artifact's files. A weight that is stored twice has two
    entries.
    """
    contents: dict[tuple[str, int], str] = {}
    for component in artifact.components:
        model = onnx.load(artifact.path / component.file, load_external_data=False)
        for number, tensor in enumerate(model.graph.initializer):
            place = {entry.key: entry.value for entry in tensor.external_data}
            if not place:
                if len(tensor.raw_data) >= LARGE:
                    contents[component.file, -number - 1] = hashlib.sha256(tensor.raw_data).hexdigest()
                continue
            start = int(place.get("offset", 0))
            raw = np.fromfile(artifact.path / place["location"], np.uint8, int(place["length"]), offset=start)
            contents[place["location"], start] = hashlib.sha256(raw.tobytes()).hexdigest()
    return list(contents.values())


def size_of(artifact: Artifact) -> int:
    return sum(record.bytes for record in {f.name: f for c in artifact.components for f in c.files}.values())


def calibration(artifact: Artifact) -> list[dict[str, torch.Tensor]]:
    random = torch.Generator().manual_seed(0)
    names = {spec.name for spec in artifact.components[0].inputs if spec.pair is None}
    ids = torch.randint(5, 60, (2, 9), generator=random)
    inputs = {"hidden": torch.randn(2, 9, 64, generator=random), "input_ids": ids, "attention_mask": torch.ones_like(ids),
            "token_type_ids": torch.zeros_like(ids)}  # fmt: skip
    return [{name: value for name, value in inputs.items() if name in names}]


THOROUGH = ("static-int8 of integer operators", "weight-int8", "weight-int4 with hqq", "static-fp8 for GPUs")


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    "scheme",
    [pytest.param(name, marks=pytest.mark.thorough if name in THOROUGH else ()) for name in (*SCHEMES, *GPU_SCHEMES)],
)
def test_quantized_artifact_stores_each_weight_once(kind: str, scheme: str, parent: Get, tmp_path: Path) -> None:
    artifact, settings = parent(kind), {**SCHEMES, **GPU_SCHEMES}[scheme]
    data = calibration(artifact) if settings["scheme"].startswith("static") else None
    quantized = accel.quantize(artifact, tmp_path / "out", calibration=data, **settings)
    contents = stored(quantized)
    assert sorted(contents) == sorted(set(contents))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("level", ["O2", pytest.param("O4", id="float16")])
def test_optimized_artifact_stores_each_weight_once(kind: str, level: str, parent: Get, tmp_path: Path) -> None:
    # With random weights, T5 leaves the range of float16. The large `atol` accepts its outputs, because this test
    # checks only the stored weights.
    contents = stored(optimize(parent(kind), tmp_path / "out", level=level, atol=1e3))
    assert sorted(contents) == sorted(set(contents))


@pytest.mark.parametrize("kind", KINDS)
def test_exported_artifact_stores_each_weight_once(kind: str, parent: Get) -> None:
    contents = stored(parent(kind))
    assert sorted(contents) == sorted(set(contents))


@pytest.mark.parametrize("scheme", SCHEMES)
def test_integers_of_shared_layers_need_a_quarter_of_the_bytes(
    scheme: str, universal: Artifact, tmp_path: Path
) -> None:
    data = calibration(universal) if scheme.startswith("static") else None
    quantized = accel.quantize(universal, tmp_path / "out", calibration=data, **SCHEMES[scheme])
    weights = sum(path.stat().st_size for path in quantized.path.glob("*.data"))
    # The file contains 16,384 weights of at most one byte each. 12,000 bytes are enough for the scales and biases of 192
    # channels, and in 4-bit schemes for one scale per block of 32 weights.
    assert weights < 16_384 + 12_000


@pytest.mark.parametrize("scheme", SCHEMES)
def test_shared_weight_is_one_initializer(scheme: str, universal: Artifact, tmp_path: Path) -> None:
    data = calibration(universal) if scheme.startswith("static") else None
    quantized = quantize(universal, tmp_path / "out", calibration=data, **SCHEMES[scheme])
    graph = onnx.load(quantized.file(), load_external_data=False).graph
    kinds = (onnx.TensorProto.INT8, onnx.TensorProto.UINT8)
    assert sum(t.data_type in kinds and np.prod(t.dims) >= LARGE for t in graph.initializer) == 2


def test_openvino_stores_shared_weights_once(tiny_folder: Get, tmp_path: Path) -> None:
    floats = export(tiny_folder("albert"), tmp_path / "float", task="text-classification", backend="openvino")
    quantized = quantize(floats, tmp_path / "out", scheme="weight-int8")
    sizes = [sum(path.stat().st_size for path in variant.path.glob("*.bin")) for variant in (floats, quantized)]
    assert sizes[1] < 0.6 * sizes[0]


def test_result_larger_than_its_input_is_warned(
    tiny_artifact: Get, universal: Artifact, caplog: pytest.LogCaptureFixture
) -> None:
    small, large = sorted((tiny_artifact("bert"), universal), key=lambda artifact: artifact.bytes)
    warn_of_size(small, large, "keep the input.")
    assert f"{large.bytes:,} bytes instead of {small.bytes:,} bytes. keep the input." in caplog.text


def test_result_smaller_than_its_input_is_not_warned(
    universal: Artifact, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    quantize(universal, tmp_path / "out", scheme="dynamic-int8")
    assert "larger" not in caplog.text
