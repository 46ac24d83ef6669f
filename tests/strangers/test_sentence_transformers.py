"""Tests that folders of sentence-transformers 3 to 6 give the library's own outputs through every entry point, from
weights and from graphs.

The folders and the library's outputs are in `tests/fixtures/foreign/sentence_transformers.tar.xz`. The README in that
folder describes the archive.
"""

from __future__ import annotations

import json
import shutil
import tarfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
import torch
from pyarrow import parquet

import accel
from accel.artifact import Artifact
from accel.artifact.sentence_fields import FIELDS, GENERAL
from accel.artifact.sentence_settings import sentence_settings
from accel.errors import AccelError, ConfigError, TaskError
from accel.serving.batch.batch_run import batch
from accel.serving.engine import Engine
from accel.stages.export import export

PACKED = Path(__file__).parents[1] / "fixtures" / "foreign" / "sentence_transformers.tar.xz"
THOROUGH = pytest.mark.thorough
# The oldest and the newest version write every format of every file. The versions between them write a mixture of these
# formats, so they run only in thorough tests.
VERSIONS: list[Any] = ["3", pytest.param("4", marks=THOROUGH), pytest.param("5", marks=THOROUGH), "6"]
WITH_GRAPH = (
    "mean-normalize", "cls", "lasttoken", "two-poolings", "dense", "prompts", "prompt-excluded", "truncated", "lower", "short",
)  # fmt: skip
EMBEDDERS = (
    *WITH_GRAPH, "max", "weightedmean", "mean_sqrt_len_tokens", "dense-identity", "prompt-excluded-weighted", "dot",
)  # fmt: skip
CROSS = ("cross", "cross-identity", "cross-labels", "cross-labels-sigmoid")
# The tolerance is for float32 values of up to 3 that other kernels compute. The stored outputs have six decimals.
CLOSE = {"rtol": 0.0, "atol": 1e-5}

Folder = Callable[[str, str], Path]


@pytest.fixture(scope="session")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("sentence-transformers")
    with tarfile.open(PACKED) as packed:
        packed.extractall(folder, filter="data")
    return folder / "sentence_transformers"


@pytest.fixture(scope="session")
def answers(root: Path) -> Callable[[str, str], dict[str, Any]]:
    """Return a function that returns the library's own outputs for a version and a folder."""
    read = {path.parent.name: json.loads(path.read_text())["folders"] for path in root.glob("*/answers.json")}
    return lambda version, name: read[version][name]


@pytest.fixture
def graph_alone(root: Path, tmp_path: Path) -> Folder:
    """Return a function that copies a folder without its weights, so that only the graph in the subfolder `onnx`
    remains.
    """

    def make(version: str, name: str) -> Path:
        target = tmp_path / f"{version}-{name}"
        shutil.copytree(root / version / name, target)
        (target / "model.safetensors").unlink()
        return target

    return make


def embedder(folder: Path, **settings: Any) -> accel.ORTModelForFeatureExtraction:
    return accel.ORTModelForFeatureExtraction.from_pretrained(folder, **settings)


def scorer(folder: Path, **settings: Any) -> accel.ORTModelForSequenceClassification:
    return accel.ORTModelForSequenceClassification.from_pretrained(folder, **settings)


def check_embeddings(model: accel.ORTModelForFeatureExtraction, expected: dict[str, Any], version: str = "6") -> None:
    embeddings = model.encode(expected["texts"])
    assert embeddings.dtype == np.float32
    np.testing.assert_allclose(embeddings, expected["embeddings"], **CLOSE)
    # If the prompt is empty, versions 3 and 4 exclude the first special token from pooling, as if the token belonged to
    # the prompt.
    if "passages" in expected and (model.sentence_vectors.settings.include_prompt or version in ("5", "6")):
        passages = model.encode(expected["texts"], prompt_name="passage")
        np.testing.assert_allclose(passages, expected["passages"], **CLOSE)


@pytest.mark.parametrize("name", EMBEDDERS)
@pytest.mark.parametrize("version", VERSIONS)
def test_weights_give_the_librarys_embeddings(root: Path, answers: Any, version: str, name: str) -> None:
    with embedder(root / version / name, export=True, backend="pytorch") as model:
        check_embeddings(model, answers(version, name), version)


@pytest.mark.parametrize("name", WITH_GRAPH)
@pytest.mark.parametrize("version", VERSIONS)
def test_graph_next_to_weights_gives_the_librarys_embeddings(root: Path, answers: Any, version: str, name: str) -> None:
    with embedder(root / version / name) as model:
        assert model.artifact.components[0].file == "onnx/model.onnx"
        check_embeddings(model, answers(version, name), version)


@pytest.mark.parametrize(
    "name", ["prompt-excluded", "dense-identity", "two-poolings", *(pytest.param(name, marks=THOROUGH) for name in EMBEDDERS)]
)  # fmt: skip
def test_export_gives_the_librarys_embeddings(root: Path, answers: Any, tmp_path: Path, name: str) -> None:
    export(root / "6" / name, tmp_path / "out")
    with embedder(tmp_path / "out") as model:
        check_embeddings(model, answers("6", name))


@pytest.mark.parametrize(("name", "settings"), [("lasttoken", {"subfolder": "openvino"}), ("prompt-excluded", {})])
def test_openvino_layout_gives_the_librarys_embeddings(
    answers: Any, graph_alone: Folder, name: str, settings: dict[str, str]
) -> None:
    openvino = pytest.importorskip("openvino", reason="the extra openvino is not installed")
    folder = graph_alone("6", name)
    (folder / "openvino").mkdir()
    model = openvino.convert_model(folder / "onnx" / "model.onnx")
    openvino.save_model(model, folder / "openvino" / "openvino_model.xml", compress_to_fp16=False)
    shutil.rmtree(folder / "onnx")
    with embedder(folder, **settings) as opened:
        check_embeddings(opened, answers("6", name))


def test_modules_after_the_graph_are_kept_by_other_stages(graph_alone: Folder, answers: Any, tmp_path: Path) -> None:
    """A graph without pooling gives the same embeddings after it is saved, optimized or quantized."""
    folder, expected = graph_alone("6", "dense"), answers("6", "dense")
    with embedder(folder) as model:
        model.save_pretrained(tmp_path / "saved")
    accel.optimize(folder, tmp_path / "optimized", level="O1")
    for stage in ("saved", "optimized"):
        with embedder(tmp_path / stage) as model:
            check_embeddings(model, expected)
    accel.quantize(folder, tmp_path / "quantized", scheme="dynamic-int8")
    with embedder(tmp_path / "quantized") as model:
        # The tolerance is for 8-bit quantization of embeddings of length 1.
        np.testing.assert_allclose(model.encode(expected["texts"]), expected["embeddings"], rtol=0, atol=0.05)


@pytest.mark.parametrize("name", ["token_embeddings", "output_0"])
def test_hidden_states_with_another_output_name(graph_alone: Folder, answers: Any, name: str) -> None:
    folder = graph_alone("6", "cls")
    graph = onnx.load(folder / "onnx" / "model.onnx")
    renamed(graph, name)
    onnx.save(graph, folder / "onnx" / "model.onnx")
    with embedder(folder) as model:
        check_embeddings(model, answers("6", "cls"))
        output = model(**inputs(model))
        assert output.last_hidden_state.dim() == 3


def test_sentence_embedding_with_another_output_name(graph_alone: Folder, answers: Any) -> None:
    """A graph with a 2-D output counts as pooled, for every name of the output."""
    folder = graph_alone("6", "cls")
    graph = onnx.load(folder / "onnx" / "model.onnx")
    renamed(graph, "hidden")
    first = onnx.helper.make_tensor("first", onnx.TensorProto.INT64, [], [0])
    graph.graph.initializer.append(first)
    graph.graph.node.append(onnx.helper.make_node("Gather", ["hidden", "first"], ["embeddings"], axis=1))
    del graph.graph.output[:]
    graph.graph.output.append(onnx.helper.make_tensor_value_info("embeddings", onnx.TensorProto.FLOAT, ["batch", 8]))
    onnx.save(graph, folder / "onnx" / "model.onnx")
    with embedder(folder) as model:
        check_embeddings(model, answers("6", "cls"))


def renamed(graph: onnx.ModelProto, name: str) -> None:
    """Rename the only output of a graph."""
    (output,) = graph.graph.output
    for node in graph.graph.node:
        for part in (node.input, node.output):
            part[:] = [name if old_name == output.name else old_name for old_name in part]
    output.name = name


def inputs(model: Any) -> dict[str, torch.Tensor]:
    ids = torch.tensor([[2, 5, 6, 3], [2, 7, 3, 0]])
    return {"input_ids": ids, "attention_mask": (ids != 0).long(), "token_type_ids": torch.zeros_like(ids)}


def test_float16_states_are_pooled_in_float32(graph_alone: Folder) -> None:
    """The sum of 30 tokens with the value 3,000 exceeds 65,504, the largest float16 number."""
    folder = graph_alone("6", "mean-normalize")
    (folder / "1_Pooling" / "config.json").write_text(
        '{"word_embedding_dimension": 8, "pooling_mode_mean_tokens": true}'
    )
    graph = onnx.load(folder / "onnx" / "model.onnx")
    renamed(graph, "small")
    graph.graph.initializer.append(onnx.helper.make_tensor("scale", onnx.TensorProto.FLOAT16, [], [3000.0]))
    graph.graph.initializer.append(onnx.helper.make_tensor("one", onnx.TensorProto.FLOAT16, [], [1.0]))
    graph.graph.node.extend([
        onnx.helper.make_node("Cast", ["small"], ["half"], to=onnx.TensorProto.FLOAT16),
        onnx.helper.make_node("Clip", ["half", "one", "one"], ["ones"]),
        onnx.helper.make_node("Mul", ["ones", "scale"], ["last_hidden_state"]),
    ])  # fmt: skip
    del graph.graph.output[:]
    graph.graph.output.append(
        onnx.helper.make_tensor_value_info("last_hidden_state", onnx.TensorProto.FLOAT16, ["batch", "sequence", 8])
    )
    onnx.save(graph, folder / "onnx" / "model.onnx")
    with embedder(folder) as model:
        embeddings = model.encode(["card " * 40])
        assert embeddings.dtype == np.float32
        np.testing.assert_allclose(embeddings, np.full((1, 8), 8**-0.5), rtol=1e-5)


@pytest.mark.parametrize("name", CROSS)
@pytest.mark.parametrize("version", VERSIONS)
def test_cross_encoders_give_the_librarys_scores(root: Path, answers: Any, version: str, name: str) -> None:
    expected = answers(version, name)
    for settings in ({"export": True, "backend": "pytorch"}, {}):
        if not settings and not (root / version / name / "onnx").is_dir():
            continue
        with scorer(root / version / name, **settings) as model:
            np.testing.assert_allclose(model.predict(expected["pairs"]), expected["scores"], **CLOSE)


@pytest.mark.parametrize("version", ["4", "5", "6"])
def test_cross_encoder_keeps_its_head_without_a_task(root: Path, answers: Any, version: str) -> None:
    expected = answers(version, "cross-identity")
    with accel.ORTModel.from_pretrained(root / version / "cross-identity", backend="pytorch", export=True) as model:
        assert model.artifact.task == "text-ranking"
        np.testing.assert_allclose(model.predict(expected["pairs"]), expected["scores"], **CLOSE)


def test_prompts_of_a_cross_encoder(root: Path, answers: Any) -> None:
    expected = answers("6", "cross-prompt")
    query, documents = expected["pairs"][0][0], [pair[1] for pair in expected["pairs"][:2]]
    with scorer(root / "6" / "cross-prompt") as model:
        np.testing.assert_allclose(model.predict(expected["pairs"]), expected["scores"], **CLOSE)
        ranked = {entry["corpus_id"]: entry["score"] for entry in model.rank(query, documents)}
        np.testing.assert_allclose([ranked[0], ranked[1]], expected["scores"][:2], **CLOSE)
        named = model.predict(expected["pairs"], prompt_name="other")
        np.testing.assert_allclose(model.predict(expected["pairs"], prompt="please "), named, **CLOSE)
        assert np.abs(named - expected["scores"]).max() > 1e-3
        with pytest.raises(ConfigError, match="Did you mean 'query'"):
            model.predict(expected["pairs"], prompt_name="querry")


# The tests below check entry points. Each test uses a folder with a graph, and only files next to the graph define how
# its outputs are processed.

SETTINGS_OUTSIDE_THE_GRAPH = ["prompt-excluded", "two-poolings", "truncated"]


@pytest.mark.parametrize("version", ["3", "6"])
@pytest.mark.parametrize("name", SETTINGS_OUTSIDE_THE_GRAPH)
def test_server_gives_the_librarys_embeddings(root: Path, answers: Any, version: str, name: str) -> None:
    starlette = pytest.importorskip("starlette.testclient", reason="the extra serving is not installed")
    from accel.serving.http.app import create_app
    from accel.serving.http.server_settings import ServerSettings

    expected = answers(version, name)
    with accel.ORTModel.from_pretrained(root / version / name) as model:
        app = create_app(accel.Engine({"embedder": model}), ServerSettings())
        with starlette.TestClient(app) as client:
            answer = client.post("/embed", json={"inputs": expected["texts"], "normalize": False}).json()
            np.testing.assert_allclose(answer, expected["embeddings"], **CLOSE)
            answer = client.post("/v1/embeddings", json={"input": expected["texts"], "model": "embedder"}).json()
            vectors = np.array(expected["embeddings"])
            vectors_of_api = np.array([item["embedding"] for item in answer["data"]])
            cosines = (
                (vectors_of_api * vectors).sum(1)
                / np.linalg.norm(vectors_of_api, axis=1)
                / np.linalg.norm(vectors, axis=1)
            )
            np.testing.assert_allclose(cosines, 1, **CLOSE)


def test_server_gives_the_librarys_ranking(root: Path, answers: Any) -> None:
    expected = answers("6", "cross-prompt")
    query, documents = expected["pairs"][0][0], [pair[1] for pair in expected["pairs"][:2]]
    with accel.ORTModel.from_pretrained(root / "6" / "cross-prompt") as model, Engine(model) as engine:
        scores = {entry["corpus_id"]: entry["score"] for entry in engine.run((query, documents), operation="rank")}
    np.testing.assert_allclose([scores[0], scores[1]], expected["scores"][:2], **CLOSE)


@pytest.mark.parametrize("name", SETTINGS_OUTSIDE_THE_GRAPH)
def test_offline_batches_give_the_librarys_embeddings(root: Path, answers: Any, tmp_path: Path, name: str) -> None:
    expected = answers("6", name)
    rows = tmp_path / "rows.jsonl"
    rows.write_text("".join(json.dumps({"text": text}) + "\n" for text in expected["texts"]))
    with accel.ORTModel.from_pretrained(root / "6" / name) as model:
        batch(model, rows, tmp_path / "out", operation="embed")
    embeddings = parquet.read_table(tmp_path / "out").to_pydict()["embedding"]
    np.testing.assert_allclose(np.array(embeddings), expected["embeddings"], **CLOSE)


@pytest.mark.parametrize("version", ["3", "6"])
@pytest.mark.parametrize("name", [*SETTINGS_OUTSIDE_THE_GRAPH, "dot"])
def test_evaluation_compares_the_librarys_embeddings(root: Path, answers: Any, version: str, name: str) -> None:
    expected = answers(version, name)
    texts, vectors = expected["texts"], np.array(expected["embeddings"])
    rows = [{"sentence1": texts[i], "sentence2": texts[i - 1], "score": float(i)} for i in range(len(texts))]
    pairs = [(vectors[i], vectors[i - 1]) for i in range(len(texts))]
    products = [float(first @ second) for first, second in pairs]
    lengths = [1.0 if name == "dot" else float(np.linalg.norm(a) * np.linalg.norm(b)) for a, b in pairs]
    settings = {} if (root / version / name / "onnx").is_dir() else {"backend": "pytorch"}
    evaluation = accel.evaluate(root / version / name, rows, **settings)
    np.testing.assert_allclose(evaluation.predictions, np.array(products) / lengths, rtol=0, atol=1e-4)


def test_evaluation_ranks_with_the_prompt(root: Path, answers: Any) -> None:
    expected = answers("6", "cross-prompt")
    (query, good), (_, bad) = expected["pairs"][:2]
    evaluation = accel.evaluate(root / "6" / "cross-prompt", [{"query": query, "positive": [good], "negative": [bad]}])
    (logits,) = evaluation.predictions
    np.testing.assert_allclose(1 / (1 + np.exp(-np.array(logits))), expected["scores"][:2], **CLOSE)


def test_original_model_is_compared_with_the_same_prompt(root: Path, answers: Any, tmp_path: Path) -> None:
    texts = answers("6", "prompt-excluded")["texts"]
    rows = [{"sentence1": texts[i], "sentence2": texts[i - 1], "score": float(i)} for i in range(len(texts))]
    evaluation = accel.evaluate(root / "6" / "prompt-excluded", rows, against=root / "6" / "prompt-excluded")
    assert evaluation.comparison is not None
    assert evaluation.value == pytest.approx(evaluation.comparison.value, abs=1e-6)


def test_graph_is_compared_with_the_weights_next_to_it(root: Path, caplog: pytest.LogCaptureFixture) -> None:
    """The graph returns hidden states, which accel pools after the graph, and no `pooler_output`."""
    folder = root / "3" / "mean-normalize"
    assert accel.validate(folder, against=folder).passed
    assert "does not return pooler_output" in caplog.text


def test_pipelines_are_equal_with_weights_and_graph(root: Path, answers: Any) -> None:
    """Pipelines return hidden states, as transformers' own pipeline does. The model's output also contains the
    embeddings.
    """
    folder, expected = root / "6" / "two-poolings", answers("6", "two-poolings")
    pipes = [
        accel.pipeline("feature-extraction", str(folder), **settings)
        for settings in ({}, {"export": True, "backend": "pytorch"})
    ]
    for text, vector in zip(expected["texts"], expected["embeddings"], strict=True):
        np.testing.assert_allclose(pipes[0](text), pipes[1](text), **CLOSE)
        for pipe in pipes:
            output = pipe.model(**pipe.tokenizer(text, return_tensors="pt"))
            np.testing.assert_allclose(output.sentence_embedding[0], vector, **CLOSE)


@pytest.mark.parametrize("version", ["3", "6"])
@pytest.mark.parametrize("name", [*SETTINGS_OUTSIDE_THE_GRAPH, "lasttoken", "lower", "short"])
def test_triton_front_models_give_the_librarys_embeddings(
    graph_alone: Folder, answers: Any, tmp_path: Path, version: str, name: str
) -> None:
    answer = triton_front(graph_alone(version, name), tmp_path, "sentence-similarity")
    expected = answers(version, name)
    for text, vector in zip(expected["texts"], expected["embeddings"], strict=True):
        np.testing.assert_allclose(answer({"TEXT": [text]})["EMBEDDING"][0], vector, **CLOSE)


@pytest.mark.parametrize("name", ["cross-identity", "cross-prompt"])
def test_triton_front_models_give_the_librarys_ranking(
    graph_alone: Folder, answers: Any, tmp_path: Path, name: str
) -> None:
    answer = triton_front(graph_alone("6", name), tmp_path, "text-ranking")
    expected = answers("6", name)
    for (query, document), score in zip(expected["pairs"], expected["scores"], strict=True):
        np.testing.assert_allclose(answer({"QUERY": [query], "DOCUMENTS": [document]})["SCORES"], [[score]], **CLOSE)


def triton_front(folder: Path, out: Path, task: str) -> Callable[[dict[str, list[str]]], dict[str, Any]]:
    """Create a Triton front model (the model that accepts texts), and run it in this process. Return a function that
    computes its outputs for texts.
    """
    pytest.importorskip("tritonclient.grpc", reason="the extra triton is not installed")
    import onnxruntime

    from accel.deploying.triton import deploy
    from accel.deploying.triton.served.text_batches import Request, TextRequestHandler

    with accel.ORTModel.from_pretrained(folder) as model:
        artifact = model.artifact
    repository = deploy(artifact, out / "repository", task=task, name="front")
    batches = TextRequestHandler(repository.path / "front" / "1")
    session = onnxruntime.InferenceSession(
        str(artifact.path / artifact.components[0].file), providers=["CPUExecutionProvider"]
    )
    names = list(batches.settings["outputs"])

    def answer(texts: dict[str, list[str]]) -> dict[str, Any]:
        inputs = {
            name: np.array([[value.encode() for value in values]], dtype=object) for name, values in texts.items()
        }
        (outputs,) = batches.answer(
            [Request(inputs, {})], lambda feeds: dict(zip(names, session.run(names, dict(feeds)), strict=True))
        )
        if isinstance(outputs, Exception):
            raise outputs
        return dict(outputs)

    return answer


# The tests below use folders that must raise an error.


@pytest.mark.parametrize("version", ["5", "6"])
def test_router_with_two_transformers_is_refused_everywhere(root: Path, tmp_path: Path, version: str) -> None:
    folder = root / version / "router"
    rows = [{"sentence1": "card", "sentence2": "lost", "score": float(i)} for i in range(2)]
    calls: list[Callable[[], Any]] = [
        lambda: export(folder, tmp_path / "out"),
        lambda: accel.evaluate(folder, rows),
        lambda: accel.ORTModel.from_pretrained(folder, backend="pytorch"),
        lambda: embedder(folder, backend="pytorch").encode(["card"]),
        lambda: export(folder, tmp_path / "similar", task="sentence-similarity"),
    ]
    for call in calls:
        with pytest.raises(TaskError, match="the paths of its router have different transformers"):
            call()
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("version", "name"), [("5", "sparse"), ("6", "sparse"), ("6", "multi-vector"), ("3", "router")]
)
def test_folders_of_other_versions_are_exported(root: Path, version: str, name: str) -> None:
    """`test_retrieval.py` compares the embeddings of such models with those of the library."""
    with embedder(root / version / name, backend="pytorch", export=True) as model:
        queries, documents = model.encode_query(["card"]), model.encode_document(["card"])
        assert model.similarity(queries, documents).shape == (1, 1)


def test_model_with_unsupported_settings_returns_hidden_states_only(root: Path, tmp_path: Path) -> None:
    """The model returns hidden states, to which sentence-transformers applies its own modules. The model's method
    `encode` raises an error that names the unsupported setting.
    """
    folder = tmp_path / "folder"
    shutil.copytree(root / "6" / "cls", folder)
    path = folder / "sentence_bert_config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "processing_kwargs": {"text": {"max_length": 4}}}))
    for settings in ({}, {"export": True, "backend": "pytorch"}):
        with embedder(folder, **settings) as model:
            assert model(**inputs(model)).last_hidden_state.shape == (2, 4, 8)
            with pytest.raises(ConfigError, match="processing_kwargs"):
                model.encode(["card"])
    with pytest.raises(ConfigError, match="processing_kwargs"):
        export(folder, tmp_path / "out", task="sentence-similarity")


def test_triton_front_model_without_dense_module_is_refused(graph_alone: Folder, tmp_path: Path) -> None:
    with pytest.raises(TaskError, match="modules Dense.* which are not part of its graph"):
        triton_front(graph_alone("6", "dense"), tmp_path, "sentence-similarity")


def test_cross_encoder_cannot_embed(root: Path) -> None:
    with pytest.raises(TaskError, match="cross-encoder"):
        embedder(root / "6" / "cross", export=True, backend="pytorch").encode(["card"])


def test_every_field_that_the_library_writes_is_known(root: Path) -> None:
    for modules in root.glob("*/*/modules.json"):
        assert sentence_settings(modules.parent).kind != ""


FILES = {
    "Pooling": "1_Pooling/config.json",
    "Dense": "2_Dense/config.json",
    "LayerNorm": "3_LayerNorm/config.json",
    "Dropout": "4_Dropout/config.json",
    "Transformer": "sentence_bert_config.json",
    GENERAL: GENERAL,
}


@pytest.mark.parametrize("kind", list(FILES))
def test_unknown_fields_are_refused(root: Path, tmp_path: Path, kind: str) -> None:
    folder = tmp_path / "folder"
    shutil.copytree(root / "6" / "dense-identity", folder)
    path = folder / FILES[kind]
    values = json.loads(path.read_text())
    for name, value in [("new_setting", 7), *_refused_values(kind)]:
        path.write_text(json.dumps({**values, name: value}))
        with pytest.raises(ConfigError, match=f"{name} is .* in .*{path.name}"):
            sentence_settings(folder)


def _refused_values(kind: str) -> list[tuple[str, Any]]:
    """Return settings fields with values that accel does not support."""
    accepted = {name: use for name, use in FIELDS[kind].items() if isinstance(use, tuple)}
    return [(name, {"other": 1}) for name in accepted]


@pytest.mark.parametrize(
    ("file", "field", "value"),
    [
        ("sentence_bert_config.json", "transformer_task", "text-generation"),
        ("sentence_bert_config.json", "model_args", {"some_option": 3}),
        ("sentence_bert_config.json", "processor_kwargs", {"padding_side": "left"}),
        ("sentence_bert_config.json", "modality_config", {"message": {"method": "forward"}}),
        ("1_Pooling/config.json", "pooling_mode", "attention"),
        (GENERAL, "similarity_fn_name", "hamming"),
        (GENERAL, "default_prompt_name", "absent"),
        (GENERAL, "truncate_dim", -3),
        (GENERAL, "model_type", "OtherEncoder"),
    ],
)
def test_unsupported_values_are_refused(root: Path, tmp_path: Path, file: str, field: str, value: Any) -> None:
    folder = tmp_path / "folder"
    shutil.copytree(root / "6" / "dense-identity", folder)
    values = json.loads((folder / file).read_text())
    (folder / file).write_text(json.dumps({**values, field: value}))
    with pytest.raises(AccelError) as caught:
        embedder(folder, backend="pytorch", export=True).encode(["card"])
    assert str(value if not isinstance(value, dict) else next(iter(value))) in caught.value.message


def test_left_padding_does_not_change_the_first_token(root: Path, answers: Any, tmp_path: Path) -> None:
    """The first token of a row is the first token of its text, even if padding tokens come before it."""
    for name in ("cls", "weightedmean"):
        folder = tmp_path / name
        shutil.copytree(root / "6" / name, folder)
        tokenizer = json.loads((folder / "tokenizer_config.json").read_text())
        (folder / "tokenizer_config.json").write_text(json.dumps({**tokenizer, "padding_side": "left"}))
        with embedder(folder, backend="pytorch", export=True) as model:
            texts = answers("6", name)["texts"]
            alone = np.stack([model.encode(text) for text in texts])
            # BERT's position ids count padding tokens on the left. Therefore only texts of the maximum length give the
            # same outputs in a batch as alone.
            rows = [
                i
                for i, text in enumerate(texts)
                if len(text.split()) == max(len(other_text.split()) for other_text in texts)
            ]
            np.testing.assert_allclose(model.encode(texts)[rows], alone[rows], **CLOSE)


def test_export_contains_the_settings_of_its_source(root: Path, tmp_path: Path) -> None:
    """An export contains the settings files of its source, so accel reads the settings from the export."""
    export(root / "6" / "prompts", tmp_path / "out")
    assert Artifact.load(tmp_path / "out").task == "sentence-similarity"
    assert sentence_settings(tmp_path / "out").prompt() == sentence_settings(root / "6" / "prompts").prompt() != ""
