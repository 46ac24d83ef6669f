"""Tests that sparse encoders, multi-vector models, models with a router, rerankers that are language models, and the outputs of BGE-M3
give the results of the libraries that saved them.

The folders and the results are in `tests/fixtures/foreign/retrieval.tar.xz`. The README in that folder describes the archive.
"""

from __future__ import annotations

import json
import shutil
import sys
import tarfile
import types
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
import torch
import transformers
from pyarrow import parquet

import accel
from accel.artifact.sentence_settings import sentence_settings
from accel.compat import fastembed
from accel.errors import AccelError, ConfigError, InputError, IntegrityError, TaskError, ValidationError
from accel.serving.batch.batch_run import batch
from accel.stages import sentence_comparison

PACKED = Path(__file__).parents[1] / "fixtures" / "foreign" / "retrieval.tar.xz"
BACKENDS = ("cpu", "openvino")
SPARSE = ("splade", "splade-sum", "sparse-auto-encoder", "inference-free")
LATE = ("late", "late-min", "pylate", "stanford")
STATIC = ("static", "static-model2vec")
RERANKERS = ("reranker-flat", "reranker-structured", "reranker-plain")
# The tolerance is for float32 values that other kernels compute, relative to the largest value. The stored results have six decimals.
TOLERANCE = 1e-5
METHODS = ("encode", "encode_query", "encode_document")

Opened = Callable[..., Any]


@pytest.fixture(scope="session")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("retrieval")
    with tarfile.open(PACKED) as packed:
        packed.extractall(folder, filter="data")
    return folder / "retrieval"


@pytest.fixture(scope="session")
def results(root: Path) -> dict[str, Any]:
    folders: dict[str, Any] = json.loads((root / "answers.json").read_text())["folders"]
    return folders


@pytest.fixture(scope="session")
def opened(root: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Opened]:
    """Return a function that exports a folder once for each backend and opens the export."""
    models: dict[tuple[str, str], Any] = {}
    out = tmp_path_factory.mktemp("exports")

    def open_model(name: str, backend: str = "cpu") -> Any:
        if backend == "openvino":
            pytest.importorskip("openvino", reason="the extra openvino is not installed")
        if backend == "pytorch" and (name, backend) not in models:
            models[name, backend] = accel.ORTModel.from_pretrained(root / name, backend=backend)
        if (name, backend) not in models:
            accel.export(root / name, out / backend / name, backend=backend)
            models[name, backend] = accel.ORTModel.from_pretrained(out / backend / name, backend=backend)
        return models[name, backend]

    yield open_model
    for model in models.values():
        model.close()


def close(actual: Any, expected: Any) -> None:
    actual, expected = np.asarray(actual, np.float64), np.asarray(expected, np.float64)
    assert actual.shape == expected.shape
    np.testing.assert_allclose(actual, expected, rtol=0, atol=TOLERANCE * max(1.0, np.abs(expected).max(initial=0)))


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("name", SPARSE)
def test_sparse_embeddings(opened: Opened, results: dict[str, Any], name: str, backend: str, method: str) -> None:
    model, expected = opened(name, backend), results[name]
    embeddings = getattr(model, method)(expected["texts"])
    assert embeddings.is_sparse
    close(embeddings.to_dense(), expected[method])
    alone = torch.stack([getattr(model, method)(text) for text in expected["texts"]]).to_dense()
    close(alone, expected[method])


@pytest.mark.parametrize("name", ["splade", "splade-sum"])
def test_largest_dimensions_of_sparse_embeddings(opened: Opened, results: dict[str, Any], name: str) -> None:
    embeddings = opened(name).encode(results[name]["texts"], max_active_dims=5)
    close(embeddings.to_dense(), results[name]["encode-max_active_dims"])


@pytest.mark.parametrize("name", [*SPARSE, "router", *LATE])
def test_similarity(opened: Opened, results: dict[str, Any], name: str) -> None:
    model, texts = opened(name), results[name]["texts"]
    close(model.similarity(model.encode_query(texts), model.encode_document(texts)), results[name]["similarity"])


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("name", LATE)
def test_multi_vector_embeddings(opened: Opened, results: dict[str, Any], name: str, backend: str, method: str) -> None:
    model, expected = opened(name, backend), results[name]
    embeddings = getattr(model, method)(expected["texts"])
    assert isinstance(embeddings, list)
    for text, vectors, right in zip(expected["texts"], embeddings, expected[method], strict=True):
        assert isinstance(vectors, torch.Tensor)
        close(vectors.reshape(-1, vectors.shape[1]), np.array(right).reshape(-1, vectors.shape[1]))
        close(getattr(model, method)(text), vectors)


@pytest.mark.parametrize("backend", BACKENDS)
def test_embeddings_of_fastembed_classes(opened: Opened, results: dict[str, Any], backend: str) -> None:
    folders = {name: str(opened(name, backend).artifact.path) for name in ("splade", "late", "router")}
    texts = results["splade"]["texts"]
    sparse = fastembed.SparseTextEmbedding(folders["splade"], backend=backend)
    for embedding, row in zip(sparse.query_embed(texts), results["splade"]["encode_query"], strict=True):
        assert embedding.indices.tolist() == list(np.flatnonzero(row))
        close(embedding.values, np.array(row)[embedding.indices])
    late = fastembed.LateInteractionTextEmbedding(folders["late"], backend=backend)
    for method, embed in (("encode_query", late.query_embed), ("encode_document", late.embed)):
        for vectors, expected in zip(embed(texts, batch_size=2), results["late"][method], strict=True):
            close(vectors, np.array(expected).reshape(vectors.shape))
    dense = fastembed.TextEmbedding(folders["router"], backend=backend, threads=1)
    close(np.stack([*dense.passage_embed(iter(texts))]), results["router"]["encode_document"])
    assert dense.embedding_size == len(results["router"]["encode_document"][0])


def test_fastembed_classes_refuse_other_models_and_processes(opened: Opened) -> None:
    folder = str(opened("late").artifact.path)
    with pytest.raises(TaskError, match="does not compute sparse embeddings"):
        next(fastembed.SparseTextEmbedding(folder).embed("lost"))
    with pytest.raises(ConfigError, match="parallel is 2"):
        next(fastembed.LateInteractionTextEmbedding(folder).embed("lost", parallel=2))


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("backend", BACKENDS)
def test_router(opened: Opened, results: dict[str, Any], backend: str, method: str) -> None:
    model, expected = opened("router", backend), results["router"]
    close(getattr(model, method)(expected["texts"]), expected[method])
    close(getattr(model, method)(expected["texts"], truncate_dim=3), expected[f"{method}-truncate_dim"])


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("backend", [*BACKENDS, "pytorch"])
@pytest.mark.parametrize("name", STATIC)
def test_static_embeddings(opened: Opened, results: dict[str, Any], name: str, backend: str, method: str) -> None:
    model, expected = opened(name, backend), results[name]
    close(getattr(model, method)(expected["texts"]), expected[method])
    close([getattr(model, method)(text) for text in expected["texts"]], expected[method])


def test_text_without_tokens_in_a_static_model(opened: Opened, root: Path) -> None:
    model = opened("static")
    alone, together = model.encode(""), model.encode(["card", "", " "])
    close(together[1:], [alone, alone])
    assert not np.allclose(together[0], alone)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("name", RERANKERS)
def test_language_models_rerank(opened: Opened, results: dict[str, Any], name: str, backend: str) -> None:
    model, expected = opened(name, backend), results[name]
    close(model.predict(expected["pairs"]), expected["scores"])
    close(model.predict(expected["pairs"], prompt_name="query"), expected["prompted"])
    close([model.predict(pair) for pair in expected["pairs"]], expected["scores"])
    query, document = expected["pairs"][0]
    (first,) = model.rank(query, [document])
    close(first["score"], expected["scores"][0])


@pytest.mark.parametrize("backend", BACKENDS)
def test_three_outputs_of_m3_in_one_pass(opened: Opened, results: dict[str, Any], backend: str) -> None:
    model, expected = opened("m3", backend), results["m3"]
    embeddings = model.encode(expected["texts"], outputs=["dense", "sparse", "multi_vector"])
    close(embeddings["dense"], expected["dense"])
    for row, weights in zip(embeddings["sparse"], expected["lexical"], strict=True):
        row = row.coalesce()
        assert row.indices()[0].tolist() == sorted(map(int, weights))
        close(row.values(), [weights[key] for key in sorted(weights, key=int)])
    for vectors, right in zip(embeddings["multi_vector"], expected["colbert"], strict=True):
        close(vectors, right)
    for name, values in embeddings.items():
        (alone,) = model.encode(expected["texts"], outputs=[name]).values()
        for one_row, row in zip(alone, values, strict=True):
            close(torch.as_tensor(one_row).to_dense(), torch.as_tensor(row).to_dense())


def test_m3_returns_dense_embeddings_by_default(opened: Opened, results: dict[str, Any]) -> None:
    close(opened("m3").encode(results["m3"]["texts"]), results["m3"]["dense"])


def test_options_of_dense_embeddings(opened: Opened, results: dict[str, Any]) -> None:
    model, expected = opened("options"), results["options"]
    texts = expected["texts"]
    for precision in ("float32", "int8", "uint8", "binary", "ubinary"):
        embeddings = model.encode(texts, precision=precision)
        assert str(embeddings.dtype) == {"binary": "int8", "ubinary": "uint8"}.get(precision, precision)
        # A value next to the border of a step may be in the next step, because kernels round differently.
        atol = 1 if precision in ("int8", "uint8") else TOLERANCE
        np.testing.assert_allclose(embeddings.astype(float), expected[precision], rtol=0, atol=atol)
    for precision in ("int8", "uint8"):
        embeddings = model.encode(texts, precision=precision, ranges=np.array(expected["ranges"]))
        np.testing.assert_allclose(embeddings.astype(float), expected[f"{precision}-ranges"], rtol=0, atol=1)
    short = model.encode(texts, truncate_dim=5, normalize_embeddings=True)
    close(short, expected["short"])
    close(np.linalg.norm(short, axis=1), np.ones(len(texts)))
    for method in ("encode_query", "encode_document"):
        close(getattr(model, method)(texts), expected[method])


@pytest.mark.parametrize("name", ["cosine", "dot", "euclidean", "manhattan"])
def test_similarity_functions(results: dict[str, Any], name: str) -> None:
    from accel.models.vector_functions import similarity

    embeddings = torch.tensor(results["options"]["float32"])
    close(similarity(name, embeddings, embeddings[:3]), results["options"][name])
    sparse = embeddings.to_sparse()
    close(similarity(name, sparse, sparse.to_dense()[:3].to_sparse()), results["options"][name])


@pytest.mark.parametrize("name", ["late", "late-min"])
def test_padding_on_the_left_gives_the_same_documents(
    root: Path, results: dict[str, Any], tmp_path: Path, name: str
) -> None:
    """Each text alone has no padding, so its vectors do not depend on the side of the padding. The position ids of ModernBERT do not
    depend on padding at all.
    """
    folder = tmp_path / "left"
    shutil.copytree(root / name, folder)
    settings = folder / "tokenizer_config.json"
    settings.write_text(json.dumps({**json.loads(settings.read_text()), "padding_side": "left"}))
    with accel.ORTModelForFeatureExtraction.from_pretrained(folder, export=True, backend="pytorch") as model:
        texts = results[name]["texts"] if name == "late-min" else results[name]["texts"][:1]
        for vectors, right in zip(model.encode_document(texts), results[name]["encode_document"], strict=False):
            close(vectors.reshape(-1, vectors.shape[1]), np.array(right).reshape(-1, vectors.shape[1]))


@pytest.mark.parametrize("name", ["splade", "late", "router", "m3", "inference-free"])
def test_other_stages_keep_the_outputs(opened: Opened, results: dict[str, Any], tmp_path: Path, name: str) -> None:
    model = opened(name)
    model.save_pretrained(tmp_path / "saved")
    accel.optimize(tmp_path / "saved", tmp_path / "optimized", level="O2")
    texts = results[name]["texts"]
    with accel.ORTModelForFeatureExtraction.from_pretrained(tmp_path / "optimized") as optimized:
        for method in ("encode_query", "encode_document"):
            for row, right in zip(getattr(optimized, method)(texts), getattr(model, method)(texts), strict=True):
                close(torch.as_tensor(row).to_dense(), torch.as_tensor(right).to_dense())


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("name", ["splade", "splade-sum", "sparse-auto-encoder"])
def test_graphs_without_the_modules_of_sparse_encoders(
    root: Path, results: dict[str, Any], tmp_path: Path, name: str, method: str
) -> None:
    """sentence-transformers exports only the transformer."""
    task = "feature-extraction" if name == "sparse-auto-encoder" else "fill-mask"
    accel.export(root / name, tmp_path / "graph", task=task)
    folder = tmp_path / "folder"
    shutil.copytree(root / name, folder)
    (folder / "model.safetensors").unlink()
    (folder / "onnx").mkdir()
    graph = onnx.load(tmp_path / "graph" / "model.onnx")
    del graph.metadata_props[:]
    onnx.save(graph, folder / "onnx" / "model.onnx")
    with accel.ORTModelForFeatureExtraction.from_pretrained(folder) as model:
        close(getattr(model, method)(results[name]["texts"]).to_dense(), results[name][method])


# The tests below pass invalid arguments or folders.


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"truncate_dim": 0}, "truncate_dim is 0"),
        ({"truncate_dim": 2.5}, "truncate_dim is 2.5"),
        ({"truncate_dim": True}, "truncate_dim is True"),
        ({"precision": "int4"}, "precision is 'int4'"),
        ({"outputs": "dense"}, "outputs is 'dense'"),
        ({"outputs": []}, r"outputs is \[\]"),
        ({"max_active_dims": 0}, "max_active_dims is 0"),
        ({"truncate": 3}, "no option 'truncate'.*Did you mean 'truncate_dim'"),
        ({"prompt_name": "querry"}, "no prompt named 'querry'"),
        ({"ranges": np.zeros((2, 3)), "precision": "int8"}, r"ranges has the shape \(2, 3\)"),
    ],
)
def test_invalid_options(opened: Opened, options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        opened("options").encode(["card", "lost"], **options)


def test_too_many_dimensions(opened: Opened) -> None:
    with pytest.raises(InputError, match="have only 8 dimensions"):
        opened("options").encode(["card"], truncate_dim=9)


def test_ranges_of_a_single_text(opened: Opened) -> None:
    with pytest.raises(InputError, match="single embedding"):
        opened("options").encode("card", precision="int8")


def test_outputs_that_a_model_does_not_compute(opened: Opened) -> None:
    with pytest.raises(TaskError, match="does not compute sparse embeddings"):
        opened("options").encode(["card"], outputs=["dense", "sparse"])
    with pytest.raises(ConfigError, match="precision"):
        opened("late").encode(["card"], precision="int8")
    with pytest.raises(ConfigError, match="sparse torch tensors"):
        opened("splade").encode(["card"], convert_to_numpy=True)


def test_pooling_of_a_sparse_model_cannot_be_chosen(root: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="sparse encoder"):
        accel.export(root / "splade", tmp_path / "out", pooling="mean")


def changed(root: Path, tmp_path: Path, name: str, file: str, **values: Any) -> Path:
    folder = tmp_path / "changed"
    shutil.copytree(root / name, folder)
    (path,) = folder.glob(file)
    path.write_text(json.dumps({**json.loads(path.read_text()), **values}))
    return folder


@pytest.mark.parametrize(
    ("name", "file", "values", "message"),
    [
        ("splade", "1_SpladePooling/config.json", {"activation_function": "gelu"}, "activation_function is 'gelu'"),
        (
            "late",
            "sentence_bert_config.json",
            {"query_expansion": {"strategy": "max", "length": 4}},
            "strategy .* 'max'",
        ),
        ("late", "sentence_bert_config.json", {"query_expansion": {"strategy": "fixed"}}, "query_expansion is"),
        ("late", "sentence_bert_config.json", {"transformer_task": "retrieval"}, "transformer_task is 'retrieval'"),
        ("splade", "1_SpladePooling/config.json", {"new": 1}, "new is 1"),
        ("sparse-auto-encoder", "2_SparseAutoEncoder/config.json", {"new": 1}, "new is 1"),
        ("inference-free", "query_0_*/config.json", {"new": 1}, "new is 1"),
        ("late", "2_MultiVectorMask/config.json", {"new": 1}, "new is 1"),
        ("reranker-flat", "1_LogitScore/config.json", {"new": 1}, "new is 1"),
        ("router", "2_Router/router_config.json", {"structure": {"query": ["x"]}}, "'x' without a valid type"),
        ("late", "1_Dense/config.json", {"module_input_name": "sentence_embedding"}, "module_input_name"),
        ("reranker-flat", "1_LogitScore/config.json", {"true_token_id": "yes"}, "must be token ids"),
        ("reranker-flat", "1_LogitScore/config.json", {"true_token_id": 900}, "no linear language model head"),
    ],
)
def test_unsupported_values(
    root: Path, tmp_path: Path, name: str, file: str, values: dict[str, Any], message: str
) -> None:
    folder = changed(root, tmp_path, name, file, **values)
    with pytest.raises(AccelError, match=message):
        accel.export(folder, tmp_path / "out")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("kind", "reason"),
    [
        ("TokenPooling", "clustering"),
        ("WordWeights", "vocabulary"),
        ("NewModule", "its module NewModule is not supported"),
    ],
)
def test_modules_are_refused_by_name(root: Path, tmp_path: Path, kind: str, reason: str) -> None:
    folder = tmp_path / "folder"
    shutil.copytree(root / "late", folder)
    entries = json.loads((folder / "modules.json").read_text())
    entries.append({"idx": 9, "name": "9", "path": "9_New", "type": f"sentence_transformers.models.{kind}"})
    (folder / "modules.json").write_text(json.dumps(entries))
    with pytest.raises(TaskError, match=f"{kind}.*{reason}|{reason}"):
        accel.export(folder, tmp_path / "out")


def test_damaged_heads_of_m3(root: Path, tmp_path: Path) -> None:
    folder = tmp_path / "folder"
    shutil.copytree(root / "m3", folder)
    (folder / "sparse_linear.pt").write_bytes(b"damaged")
    with pytest.raises(IntegrityError, match="sparse_linear.pt cannot be read"):
        accel.export(folder, tmp_path / "out")


def test_settings_of_an_export_equal_those_of_its_source(root: Path, opened: Opened) -> None:
    for name in (*LATE, "inference-free"):
        source, export = sentence_settings(root / name), sentence_settings(opened(name).artifact.path)
        for field in (
            "kind",
            "prompts",
            "lengths",
            "expansion",
            "skipped_words",
            "skipped_sides",
            "max_length",
            "side",
        ):
            assert getattr(source, field) == getattr(export, field), field


# The tests below compare exports with sentence-transformers. A small module with the same interface takes its place.


class Reader:
    """The interface of sentence-transformers' classes, for a folder with mean pooling and Normalize."""

    scale = 1.0

    def __init__(self, folder: str, **options: Any) -> None:
        self.tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
        self.model = transformers.AutoModel.from_pretrained(folder).eval()

    def preprocess(self, texts: list[str]) -> dict[str, torch.Tensor]:
        return dict(self.tokenizer(texts, return_tensors="pt"))

    def __call__(self, features: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        pooled = self.model(**features).last_hidden_state.mean(1)
        return {"sentence_embedding": torch.nn.functional.normalize(pooled, dim=-1) * self.scale}


def install(monkeypatch: pytest.MonkeyPatch, kind: type[Reader] | None, version: str = "6.2.0") -> None:
    library = types.ModuleType("sentence_transformers")
    library.SentenceTransformer = kind  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "sentence_transformers", library)
    monkeypatch.setattr(sentence_comparison, "version", lambda name: version)


def test_exports_are_compared_with_sentence_transformers(
    root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    install(monkeypatch, Reader)
    artifact = accel.export(root / "options", tmp_path / "out")
    record = artifact.manifest.steps[-1].validation["sentence_transformers"]
    assert isinstance(record, dict)
    assert record["version"] == "6.2.0"
    assert 0 <= record["max_abs_difference"] < TOLERANCE


def test_results_that_differ_from_sentence_transformers(
    root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    install(monkeypatch, type("Other", (Reader,), {"scale": 1.01}))
    with pytest.raises(ValidationError, match="differs from sentence-transformers 6.2.0"):
        accel.export(root / "options", tmp_path / "out")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(("name", "version"), [("options", "5.4.0"), ("m3", "6.2.0"), ("static", "6.2.0")])
def test_exports_that_are_not_compared(
    root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, version: str
) -> None:
    install(monkeypatch, None, version)
    assert "sentence_transformers" not in accel.export(root / name, tmp_path / "out").manifest.steps[-1].validation


def test_models_that_sentence_transformers_cannot_load(
    root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    install(monkeypatch, None)
    artifact = accel.export(root / "options", tmp_path / "out")
    assert "sentence_transformers" not in artifact.manifest.steps[-1].validation
    assert "its results were not compared" in caplog.text


# The tests below send requests to the server's engine.


def test_server_gives_the_same_sparse_embeddings(opened: Opened, results: dict[str, Any]) -> None:
    client = served_by(opened("splade"))
    answer = client.post("/embed_sparse", json={"inputs": results["splade"]["texts"]}).json()
    assert isinstance(answer, list), answer
    for row, right in zip(answer, results["splade"]["encode"], strict=True):
        weights = dict.fromkeys(range(len(right)), 0.0) | {entry["index"]: entry["value"] for entry in row}
        close([weights[i] for i in range(len(right))], right)
    assert client.post("/embed", json={"inputs": "card"}).status_code == 404


def test_server_looks_up_sparse_queries(opened: Opened, results: dict[str, Any]) -> None:
    with accel.Engine(opened("inference-free")) as engine:
        for side in ("query", "document"):
            rows = engine.run(results["inference-free"]["texts"], operation="embed_sparse", side=side)
            for row, right in zip(rows, results["inference-free"][f"encode_{side}"], strict=True):
                expected = np.array(right)
                close(row["values"], expected[expected != 0])


def test_server_gives_the_same_token_vectors(opened: Opened, results: dict[str, Any]) -> None:
    client = served_by(opened("late"))
    for side in ("query", "document"):
        body = {"inputs": results["late"]["texts"], "prompt_name": side}
        answer = client.post("/embed_all", json=body).json()
        for vectors, right in zip(answer, results["late"][f"encode_{side}"], strict=True):
            close(np.array(vectors).reshape(-1, 6), np.array(right).reshape(-1, 6))


def test_server_selects_the_side_of_a_router(opened: Opened, results: dict[str, Any]) -> None:
    client = served_by(opened("router"))
    for input_type, side in (("query", "query"), ("passage", "document")):
        body = {"input": results["router"]["texts"], "input_type": input_type}
        answer = client.post("/v1/embeddings", json=body).json()
        close([entry["embedding"] for entry in answer["data"]], results["router"][f"encode_{side}"])
        body = {
            "texts": results["router"]["texts"],
            "input_type": f"search_{side}",
            "embedding_types": ["float", "ubinary"],
        }
        embeddings = client.post("/v2/embed", json=body).json()["embeddings"]
        close(embeddings["float"], results["router"][f"encode_{side}"])
        assert embeddings["ubinary"] == np.packbits(np.array(embeddings["float"]) > 0, axis=-1).tolist()


@pytest.fixture
def ranged(opened: Opened, tmp_path: Path) -> Iterator[Any]:
    """A model with the ranges of its embeddings."""
    opened("options").save_pretrained(tmp_path / "ranged")
    with accel.ORTModel.from_pretrained(tmp_path / "ranged") as model:
        yield model


def test_server_converts_embeddings_to_integers(ranged: Any, results: dict[str, Any]) -> None:
    texts = results["options"]["texts"]
    vectors = ranged.encode(texts, normalize_embeddings=True)
    ranges = np.stack([vectors.min(axis=0), vectors.max(axis=0)])
    values = dict(zip(("minimum", "maximum"), ranges.tolist(), strict=True))
    (ranged.artifact.path / "embedding_ranges.json").write_text(json.dumps(values))
    client = served_by(ranged)
    for kind in ("int8", "uint8"):
        # The integers of a text do not depend on the other texts of the request.
        for part in (texts, texts[:1]):
            answer = client.post("/v2/embed", json={"texts": part, "embedding_types": [kind]}).json()
            expected = accel.quantize_embeddings(vectors[: len(part)], kind, ranges=ranges)
            np.testing.assert_allclose(answer["embeddings"][kind], expected, rtol=0, atol=1)
    answer = client.post("/v2/embed", json={"texts": texts, "embedding_types": ["int8"], "output_dimension": 4})
    assert answer.status_code == 422
    assert "belong to 8 dimensions" in answer.json()["message"]


@pytest.mark.parametrize(
    "values", [{"minimum": [0.0]}, {"minimum": [0.0], "maximum": [1.0, 2.0]}, {"minimum": ["a"], "maximum": [1]}]
)
def test_damaged_ranges(ranged: Any, values: dict[str, Any]) -> None:
    from accel.artifact.embedding_ranges import embedding_ranges

    assert embedding_ranges(ranged.artifact.path) is None
    (ranged.artifact.path / "embedding_ranges.json").write_text(json.dumps(values))
    with pytest.raises(IntegrityError, match="minimum and maximum"):
        embedding_ranges(ranged.artifact.path)


def test_server_needs_ranges_for_integers(opened: Opened) -> None:
    answer = served_by(opened("options")).post("/v2/embed", json={"texts": ["card"], "embedding_types": ["int8"]})
    assert answer.status_code == 422
    assert "has no file embedding_ranges.json" in answer.json()["message"]


def test_server_reranks_with_a_language_model(opened: Opened, results: dict[str, Any]) -> None:
    expected = results["reranker-structured"]
    client = served_by(opened("reranker-structured"))
    for (query, document), score in zip(expected["pairs"], expected["scores"], strict=True):
        answer = client.post("/rerank", json={"query": query, "texts": [document]}).json()
        close(answer[0]["score"], score)


def served_by(model: Any) -> Any:
    starlette = pytest.importorskip("starlette.testclient", reason="the extra serving is not installed")
    from accel.serving.http.app import create_app
    from accel.serving.http.server_settings import ServerSettings

    client = starlette.TestClient(create_app(accel.Engine({"model": model}), ServerSettings()))
    # The models are shared by tests, so the server runs until the end of the session.
    client.__enter__()
    return client


# The tests below run `accel batch` on a table.


def written(
    model: Any, tmp_path: Path, rows: list[dict[str, Any]], format: str, operation: str, **options: Any
) -> list[dict[str, Any]]:
    """Return the rows that `accel batch` writes."""
    table = tmp_path / f"{operation}.jsonl"
    table.write_text("".join(json.dumps(row) + "\n" for row in rows))
    out = tmp_path / f"{operation}-{format}"
    batch(model, table, out, operation=operation, options=options, format=format)
    if format == "parquet":
        read: list[dict[str, Any]] = parquet.read_table(out).to_pylist()
        return read
    files = sorted(out.glob("rows-*.jsonl"))
    assert files
    return [json.loads(line) for file in files for line in file.read_text().splitlines()]


@pytest.mark.parametrize("format", ["parquet", "jsonl"])
@pytest.mark.parametrize("name", ["splade", "inference-free"])
@pytest.mark.parametrize("side", ["query", "document"])
def test_table_of_sparse_embeddings(
    opened: Opened, results: dict[str, Any], tmp_path: Path, name: str, side: str, format: str
) -> None:
    rows = [{"text": text} for text in results[name]["texts"]]
    for row, right in zip(
        written(opened(name), tmp_path, rows, format, "embed_sparse", side=side),
        results[name][f"encode_{side}"],
        strict=True,
    ):
        dense = np.zeros(len(right))
        dense[row["indices"]] = row["values"]
        close(dense, right)


@pytest.mark.parametrize("format", ["parquet", "jsonl"])
@pytest.mark.parametrize("side", ["query", "document"])
def test_table_of_token_vectors(
    opened: Opened, results: dict[str, Any], tmp_path: Path, side: str, format: str
) -> None:
    rows = [{"text": text} for text in results["stanford"]["texts"]]
    options = {"side": side, "prompt_name": side}
    for row, right in zip(
        written(opened("stanford"), tmp_path, rows, format, "embed_all", **options),
        results["stanford"][f"encode_{side}"],
        strict=True,
    ):
        close(np.array(row["vectors"]).reshape(-1, 5), np.array(right).reshape(-1, 5))


@pytest.mark.parametrize("format", ["parquet", "jsonl"])
def test_table_of_dense_embeddings_and_scores(
    opened: Opened, results: dict[str, Any], tmp_path: Path, format: str
) -> None:
    rows = [{"text": text} for text in results["static"]["texts"]]
    answer = written(opened("static"), tmp_path, rows, format, "embed")
    close([row["embedding"] for row in answer], results["static"]["encode"])
    expected = results["reranker-flat"]
    pairs = [{"query": query, "documents": [document]} for query, document in expected["pairs"]]
    answer = written(opened("reranker-flat"), tmp_path, pairs, format, "rank")
    close([row["scores"][0] for row in answer], expected["scores"])


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"truncate_dim": 0}, "truncate_dim is 0"),
        ({"truncate_dim": True}, "truncate_dim is True"),
        ({"truncation": "x"}, "truncation is 'x'"),
        ({"truncation_side": "top"}, "truncation_side is 'top'"),
        ({"side": "answer"}, "side is 'answer'"),
        ({"normalize_embeddings": 1}, "normalize_embeddings is 1"),
    ],
)
def test_invalid_options_of_requests(opened: Opened, options: dict[str, Any], message: str) -> None:
    with accel.Engine(opened("options")) as engine, pytest.raises(InputError, match=message):
        engine.run(["card"], operation="embed", **options)
