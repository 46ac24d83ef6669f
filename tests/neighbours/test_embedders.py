"""Tests of embedders of LangChain, LlamaIndex and Haystack with `ORTModelForFeatureExtraction`, through the backends of
sentence-transformers.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from accel.testing.models import save_tiny

st = pytest.importorskip("sentence_transformers", reason="the package sentence-transformers is not installed")
modules = pytest.importorskip("sentence_transformers.models")
pytest.importorskip(
    "optimum.onnxruntime",
    reason="the package of distributions/sentence-transformers is not installed",
    exc_type=ImportError,
)

TEXTS = ["where is my card", "the account is not open"]
CLOSE = {"rtol": 0.0, "atol": 1e-5}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    base = tmp_path_factory.mktemp("embedder")
    transformer = modules.Transformer(str(save_tiny(base / "bert", "bert", "feature-extraction")))
    pooling = modules.Pooling(transformer.get_embedding_dimension(), "mean")
    st.SentenceTransformer(modules=[transformer, pooling], device="cpu").save(str(base / "saved"))
    return base / "saved"


@pytest.fixture(scope="module")
def expected(folder: Path) -> Any:
    return st.SentenceTransformer(str(folder), device="cpu").encode(TEXTS)


def test_langchain(folder: Path, expected: Any) -> None:
    langchain = pytest.importorskip(
        "langchain_huggingface", reason="the package langchain-huggingface is not installed"
    )
    embedder = langchain.HuggingFaceEmbeddings(
        model_name=str(folder), model_kwargs={"backend": "onnx", "device": "cpu"}
    )
    np.testing.assert_allclose(embedder.embed_documents(TEXTS), expected, **CLOSE)
    np.testing.assert_allclose(embedder.embed_query(TEXTS[0]), expected[0], **CLOSE)


def test_custom_langchain_embedder_with_accel_model(folder: Path, expected: Any) -> None:
    core = pytest.importorskip("langchain_core.embeddings", reason="the package langchain-core is not installed")
    import accel

    class Accelerated(core.Embeddings):
        def __init__(self) -> None:
            self.model = accel.ORTModelForFeatureExtraction.from_pretrained(folder)

        def embed_documents(self, texts: list[str]) -> list[list[float]]:
            return self.model.encode(texts).tolist()

        def embed_query(self, text: str) -> list[float]:
            return self.model.encode(text).tolist()

    stores = pytest.importorskip("langchain_core.vectorstores")
    store = stores.InMemoryVectorStore.from_texts(TEXTS, Accelerated())
    np.testing.assert_allclose(Accelerated().embed_documents(TEXTS), expected, **CLOSE)
    assert store.similarity_search(TEXTS[1], k=1)[0].page_content == TEXTS[1]


def test_llama_index(folder: Path, expected: Any) -> None:
    llama_index = pytest.importorskip(
        "llama_index.embeddings.huggingface", reason="the package llama-index-embeddings-huggingface is not installed"
    )
    embedder = llama_index.HuggingFaceEmbedding(
        model_name=str(folder), device="cpu", normalize=False, backend="openvino"
    )
    np.testing.assert_allclose(embedder.get_text_embedding_batch(TEXTS), expected, **CLOSE)
    np.testing.assert_allclose(embedder.get_query_embedding(TEXTS[0]), expected[0], **CLOSE)


def test_haystack(folder: Path, expected: Any) -> None:
    pytest.importorskip("haystack", reason="the package haystack-ai is not installed")
    try:
        from haystack.components.embedders import (  # newer versions of Haystack have these classes in a separate integration
            SentenceTransformersDocumentEmbedder,
            SentenceTransformersTextEmbedder,
        )
    except ImportError:
        place = "haystack_integrations.components.embedders.sentence_transformers"
        integration = pytest.importorskip(place, reason="the package sentence-transformers-haystack is not installed")
        SentenceTransformersDocumentEmbedder = integration.SentenceTransformersDocumentEmbedder  # noqa: N806
        SentenceTransformersTextEmbedder = integration.SentenceTransformersTextEmbedder  # noqa: N806
    from haystack import Document
    from haystack.utils import ComponentDevice

    settings = {
        "model": str(folder),
        "backend": "onnx",
        "device": ComponentDevice.from_str("cpu"),
        "progress_bar": False,
        "local_files_only": True,
    }
    text = SentenceTransformersTextEmbedder(**settings)
    text.warm_up()
    np.testing.assert_allclose(text.run(text=TEXTS[0])["embedding"], expected[0], **CLOSE)
    documents = SentenceTransformersDocumentEmbedder(**settings)
    documents.warm_up()
    embedded = documents.run(documents=[Document(content=document) for document in TEXTS])["documents"]
    np.testing.assert_allclose([document.embedding for document in embedded], expected, **CLOSE)
