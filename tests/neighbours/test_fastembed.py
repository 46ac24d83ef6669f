"""Tests of fastembed with graphs that accel exported and quantized, and of `accel.compat.fastembed` without fastembed's runtime."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

import accel
from accel.compat import fastembed as ours
from accel.testing.models import save_tiny

fastembed = pytest.importorskip("fastembed", reason="the package fastembed is not installed")
descriptions = pytest.importorskip("fastembed.common.model_description")

TEXTS = ["where is my card", "the account is not open", "lost"]
# The tolerance is for float32 sums in a different order than in PyTorch.
CLOSE = {"rtol": 0.0, "atol": 1e-5}


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny(tmp_path_factory.mktemp("fastembed") / "bert", "bert", "feature-extraction")


@pytest.fixture(scope="module")
def artifact(source: Path) -> Any:
    out = source.parent / "embedder"
    return accel.export(source, out, task="sentence-similarity", pooling="mean", normalize=True)


def vectors(name: str, folder: Path) -> Any:
    """Return the embeddings that fastembed computes with the graph of an artifact."""
    fastembed.TextEmbedding.add_custom_model(
        model=name,
        pooling=descriptions.PoolingType.DISABLED,
        normalization=False,
        sources=descriptions.ModelSource(url="http://localhost"),
        dim=32,
        model_file="model.onnx",
        output_name="sentence_embedding",
    )
    return np.stack([*fastembed.TextEmbedding(name, specific_model_path=str(folder)).embed(TEXTS)])


def test_fastembed_runs_the_graph_of_an_artifact(artifact: Any) -> None:
    with accel.ORTModelForFeatureExtraction.from_pretrained(artifact) as model:
        np.testing.assert_allclose(vectors("accel/float32", artifact.path), model.encode(TEXTS), **CLOSE)


def test_fastembed_runs_a_quantized_graph(artifact: Any, tmp_path: Path) -> None:
    quantized = accel.quantize(artifact, tmp_path / "int8", scheme="dynamic-int8")
    with accel.ORTModelForFeatureExtraction.from_pretrained(quantized) as model:
        expected = model.encode(TEXTS, batch_size=len(TEXTS))
    np.testing.assert_allclose(vectors("accel/int8", quantized.path), expected, rtol=0.0, atol=1e-2)


@pytest.mark.parametrize("backend", ["cpu", "openvino"])
def test_text_embedding_of_accel_returns_the_vectors_of_fastembed(artifact: Any, source: Path, backend: str) -> None:
    expected = vectors(f"accel/{backend}", artifact.path)
    folder = artifact.path if backend == "cpu" else source.parent / "ir"
    if backend == "openvino":
        accel.export(source, folder, task="sentence-similarity", pooling="mean", normalize=True, backend=backend)
    model = ours.TextEmbedding(str(folder), backend=backend)
    np.testing.assert_allclose([*model.embed(TEXTS)], expected, **CLOSE)
    np.testing.assert_allclose([*model.passage_embed(iter(TEXTS))], expected, **CLOSE)
    np.testing.assert_allclose([*model.query_embed(TEXTS[0])], expected[:1], **CLOSE)
    assert model.embedding_size == 32


def test_sparse_embeddings_have_the_type_of_fastembed() -> None:
    from fastembed.sparse.sparse_embedding_base import SparseEmbedding

    facts = {"values": np.array([0.5, 2.0]), "indices": np.array([3, 7])}
    assert ours.SparseEmbedding(**facts).as_dict() == SparseEmbedding(**facts).as_dict()
    assert set(ours.SparseEmbedding(**facts).as_object()) == set(SparseEmbedding(**facts).as_object())
