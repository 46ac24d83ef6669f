"""Tests of the backends "onnx" and "openvino" of sentence-transformers, which `distributions/sentence-transformers`
provides.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import accel
from accel.testing.models import save_tiny

st = pytest.importorskip("sentence_transformers", reason="the package sentence-transformers is not installed")
modules = pytest.importorskip("sentence_transformers.models")
pytest.importorskip(
    "optimum.onnxruntime",
    reason="the package of distributions/sentence-transformers is not installed",
    exc_type=ImportError,
)

TEXTS = ["where is my card", "the account is not open, can you help me please", "lost"]
PAIRS = [("where is my card", "my card is lost"), ("where is my card", "open an account in london please")]
BACKENDS = ["onnx", "openvino"]
# The tolerance is for float32 sums in a different order than in PyTorch.
CLOSE = {"rtol": 0.0, "atol": 1e-5}
QUANTIZED = 0.2  # tolerance of 8-bit quantization, for vectors of length 1 of a model with random weights


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder of a bi-encoder that sentence-transformers saved. Its embeddings are mean-pooled and normalized
    to length 1.
    """
    base = tmp_path_factory.mktemp("bi-encoder")
    source = save_tiny(base / "bert", "bert", "feature-extraction")
    transformer = modules.Transformer(str(source))
    pooling = modules.Pooling(transformer.get_embedding_dimension(), "mean")
    st.SentenceTransformer(modules=[transformer, pooling, modules.Normalize()], device="cpu").save(str(base / "saved"))
    return base / "saved"


@pytest.fixture(scope="module")
def expected(folder: Path) -> Any:
    return st.SentenceTransformer(str(folder), device="cpu").encode(TEXTS)


@pytest.mark.parametrize("backend", BACKENDS)
def test_bi_encoder(folder: Path, expected: Any, backend: str) -> None:
    model = st.SentenceTransformer(str(folder), backend=backend, device="cpu")
    assert type(model.transformers_model).__module__.startswith("accel.")
    np.testing.assert_allclose(model.encode(TEXTS), expected, **CLOSE)


@pytest.mark.parametrize("backend", BACKENDS)
def test_saved_model_is_loaded_without_another_export(
    folder: Path, expected: Any, backend: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    st.SentenceTransformer(str(folder), backend=backend, device="cpu").save_pretrained(str(tmp_path / "saved"))
    monkeypatch.setenv("ACCEL_HOME", str(tmp_path / "home"))
    model = st.SentenceTransformer(str(tmp_path / "saved"), backend=backend, device="cpu")
    np.testing.assert_allclose(model.encode(TEXTS), expected, **CLOSE)
    assert not (tmp_path / "home").exists()
    assert (tmp_path / "saved" / backend / ("model.onnx" if backend == "onnx" else "openvino_model.xml")).is_file()


@pytest.mark.parametrize("backend", BACKENDS)
def test_cross_encoder(tmp_path_factory: pytest.TempPathFactory, backend: str) -> None:
    source = save_tiny(tmp_path_factory.mktemp("cross") / "bert", "bert", num_labels=1)
    expected = st.CrossEncoder(str(source), device="cpu").predict(PAIRS)
    scores = st.CrossEncoder(str(source), backend=backend, device="cpu").predict(PAIRS)
    np.testing.assert_allclose(scores, expected, **CLOSE)


@pytest.mark.parametrize("backend", BACKENDS)
def test_sparse_encoder(tmp_path_factory: pytest.TempPathFactory, backend: str) -> None:
    source = save_tiny(tmp_path_factory.mktemp("sparse") / "bert", "bert", "fill-mask")

    def encode(**settings: Any) -> Any:
        return st.SparseEncoder(str(source), device="cpu", **settings).encode(TEXTS).to_dense().numpy()

    expected = encode()
    assert expected.any()
    np.testing.assert_allclose(encode(backend=backend), expected, **CLOSE)


@pytest.fixture(scope="module")
def late(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder of a multi-vector model with a projection, query expansion and a skiplist."""
    base = pytest.importorskip("sentence_transformers.base.modules", reason="sentence-transformers is older than 6")
    masks = pytest.importorskip("sentence_transformers.multi_vector_encoder.modules")
    folder = tmp_path_factory.mktemp("late")
    expansion = {"strategy": "fixed", "attend": True, "length": 12}
    source = save_tiny(folder / "bert", "bert", "feature-extraction")
    transformer = base.Transformer(str(source), query_expansion=expansion)
    size, tokens = transformer.get_embedding_dimension(), {"module_input_name": "token_embeddings"}
    projection = base.Dense(size, 8, bias=False, activation_function=torch.nn.Identity(), **tokens)
    mask = masks.MultiVectorMask(skiplist_words=["my"])
    st.MultiVectorEncoder(modules=[transformer, projection, mask, base.Normalize(**tokens)], device="cpu").save(
        str(folder / "saved")
    )
    return folder / "saved"


def late_vectors(folder: Path, **settings: Any) -> tuple[list[Any], list[Any]]:
    model = st.MultiVectorEncoder(str(folder), device="cpu", **settings)
    sides = model.encode_query(TEXTS), model.encode_document(TEXTS)
    first, second = ([torch.as_tensor(vectors).numpy() for vectors in side] for side in sides)
    return first, second


@pytest.mark.parametrize("backend", BACKENDS)
def test_multi_vector_encoder(late: Path, backend: str) -> None:
    expected = late_vectors(late)
    assert {len(vectors) for vectors in expected[0]} == {12}
    for side, expected_side in zip(late_vectors(late, backend=backend), expected, strict=True):
        for vectors, expected_vectors in zip(side, expected_side, strict=True):
            np.testing.assert_allclose(vectors, expected_vectors, **CLOSE)


@pytest.mark.parametrize("backend", BACKENDS)
def test_multi_vector_encoder_equals_encode_of_accel(late: Path, backend: str) -> None:
    expected = late_vectors(late)
    with accel.ORTModelForFeatureExtraction.from_pretrained(
        late, backend={"onnx": "cpu"}.get(backend, backend)
    ) as model:
        computed = model.encode_query(TEXTS), model.encode_document(TEXTS)
    for side, expected_side in zip(computed, expected, strict=True):
        for vectors, expected_vectors in zip(side, expected_side, strict=True):
            np.testing.assert_allclose(vectors.numpy(), expected_vectors, **CLOSE)


def test_optimized_and_quantized_graphs_of_a_multi_vector_encoder(late: Path) -> None:
    model = st.MultiVectorEncoder(str(late), backend="onnx", device="cpu")
    st.export_optimized_onnx_model(model, "O1", str(late))
    st.export_dynamic_quantized_onnx_model(model, "avx512_vnni", str(late))
    expected = late_vectors(late)
    for name, atol in (("onnx/model_O1.onnx", 1e-5), ("onnx/model_qint8_avx512_vnni.onnx", QUANTIZED)):
        computed = late_vectors(late, backend="onnx", model_kwargs={"file_name": name})
        for side, expected_side in zip(computed, expected, strict=True):
            for vectors, expected_vectors in zip(side, expected_side, strict=True):
                np.testing.assert_allclose(vectors, expected_vectors, rtol=0.0, atol=atol)


@pytest.mark.parametrize("level", ["O1", "O3"])
def test_export_optimized_onnx_model(folder: Path, expected: Any, level: str) -> None:
    model = st.SentenceTransformer(str(folder), backend="onnx", device="cpu")
    st.export_optimized_onnx_model(model, level, str(folder))
    kwargs = {"file_name": f"model_{level}.onnx"}
    again = st.SentenceTransformer(str(folder), backend="onnx", device="cpu", model_kwargs=kwargs)
    assert again.transformers_model.path.name == f"model_{level}.onnx"
    # Level O3 approximates GELU, so it needs a larger tolerance.
    atol = 1e-5 if level == "O1" else 1e-2
    np.testing.assert_allclose(again.encode(TEXTS), expected, rtol=0.0, atol=atol)


def test_export_dynamic_quantized_onnx_model(folder: Path, expected: Any) -> None:
    model = st.SentenceTransformer(str(folder), backend="onnx", device="cpu")
    st.export_dynamic_quantized_onnx_model(model, "avx512_vnni", str(folder))
    kwargs = {"file_name": "onnx/model_qint8_avx512_vnni.onnx"}
    again = st.SentenceTransformer(str(folder), backend="onnx", device="cpu", model_kwargs=kwargs)
    assert again.transformers_model.artifact.manifest.quantization.scheme == "int8"
    embeddings = again.encode(TEXTS)
    assert not np.allclose(embeddings, expected, **CLOSE)
    np.testing.assert_allclose(embeddings, expected, rtol=0.0, atol=QUANTIZED)


def test_export_static_quantized_openvino_model(folder: Path, expected: Any, tmp_path: Path) -> None:
    # The helper function of sentence-transformers loads a data set by its name. Use a local data set, with rows that
    # fit into the model's 96 positions.
    (tmp_path / "data").mkdir()
    rows = "\n".join(["text", *(f'"{text}"' for text in TEXTS)])
    (tmp_path / "data" / "train.csv").write_text(rows + "\n", encoding="utf-8")
    model = st.SentenceTransformer(str(folder), backend="openvino", device="cpu")
    tokenizer = model.tokenizer

    class Short:
        """Tokenizer that truncates texts to 32 tokens. The helper function of sentence-transformers requests 384
        tokens, and this model has 96 positions.
        """

        def __call__(self, texts: Any, **settings: Any) -> Any:
            return tokenizer(texts, **{**settings, "max_length": 32})

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(type(model), "tokenizer", property(lambda self: Short()))
        st.export_static_quantized_openvino_model(
            model,
            None,
            str(folder),
            dataset_name=str(tmp_path / "data"),
            dataset_config_name="default",
            dataset_split="train",
            column_name="text",
        )
    kwargs = {"file_name": "openvino/openvino_model_qint8_quantized.xml"}
    again = st.SentenceTransformer(str(folder), backend="openvino", device="cpu", model_kwargs=kwargs)
    assert again.transformers_model.artifact.manifest.quantization.scheme == "static-int8"
    np.testing.assert_allclose(again.encode(TEXTS), expected, rtol=0.0, atol=QUANTIZED)


def test_exported_names_equal_the_names_that_sentence_transformers_imports() -> None:
    import ast
    import importlib

    imported: dict[str, set[str]] = {}
    for path in (Path(st.__file__).parent / "backend").glob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("optimum."):
                imported.setdefault(str(node.module), set()).update(alias.name for alias in node.names)
    assert imported
    assert {name: set(importlib.import_module(name).__all__) for name in imported} == imported
