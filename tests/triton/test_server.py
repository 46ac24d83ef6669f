"""Tests with a real Triton server: it loads the repositories, returns the same results as the local pipelines, and
batches requests.

`make test-triton` creates an environment with the server of the package nvidia-pytriton, whose Python backend runs the
shadow of each repository (a copy in which Python runs the graphs).
"""

from __future__ import annotations

import functools
import json
import os
import queue
import runpy
import shutil
import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import accel
from accel.artifact import Artifact
from accel.deploying.triton import check, deploy
from accel.errors import SessionError
from accel.testing.models import save_tiny

from .server import VARIABLE, Installation, TritonServer, find_server, shadow
from .small_artifacts import make_artifact

grpc_client = pytest.importorskip("tritonclient.grpc", reason="the extra triton is not installed")
http_client = pytest.importorskip("tritonclient.http", reason="tritonclient[http] is not installed")

ATOL = 1e-4
"""Tolerance against the local pipelines; the server's ONNX Runtime may have a different version."""
TEXTS = [
    "Where is my new card?",
    "wolfgang is not here",
    "pay",
    "How can I transfer cash from my account to the bank in Paris, please?",
    "the fee is zzz",
    "paga 😀 カード ö",
]
ENCODERS = ("text-classification", "token-classification", "question-answering", "sentence-similarity")

pytestmark = pytest.mark.slow


@pytest.fixture(scope="session")
def installation() -> Installation:
    server = find_server()
    if server is None:
        pytest.skip(
            f"tritonserver is not installed, and the environment variable {VARIABLE} is not set: run `make test-triton`"
        )
    return server


@pytest.fixture(scope="session")
def artifacts(
    installation: Installation, tiny_artifact: Callable[..., Artifact], tmp_path_factory: pytest.TempPathFactory
) -> dict[str, Path]:
    """Return tiny artifacts for each task, exported as a user would export them."""
    root = tmp_path_factory.mktemp("artifacts")
    save_tiny(root / "ranker", "bert", "text-ranking", num_labels=1)
    ranker = accel.export(root / "ranker", root / "ranker-onnx", task="text-ranking")
    zero_shot = make_artifact(root / "zero-shot", "text-classification")
    encoders = {task: tiny_artifact("bert", task).path for task in ENCODERS}
    return {**encoders, "text-ranking": ranker.path, "zero-shot-classification": zero_shot.path}


@pytest.fixture(scope="session")
def repository(
    artifacts: dict[str, Path], generator: Callable[..., Artifact], tmp_path_factory: pytest.TempPathFactory
) -> Path:
    """Deploy every task into one repository. Write the shadow (a copy in which Python runs the graphs) next to the
    repository.
    """
    root = tmp_path_factory.mktemp("triton")
    merged = root / "repository"
    deployed = [
        *((path, {"task": task}) for task, path in artifacts.items()),
        (artifacts["text-classification"], {"layout": "ensemble", "name": "ensemble"}),
        (artifacts["token-classification"], {"layout": "ensemble", "name": "tags_ensemble", "buckets": (16, 32)}),
        (artifacts["text-classification"], {"name": "waiting", "queue_delay_us": 2000}),
        (generator("llama").path, {"max_batch_size": 4}),
    ]
    for number, (path, settings) in enumerate(deployed):
        written = deploy(path, root / str(number), **settings)
        assert check(written.path) == ()
        for name in written.models:
            shutil.move(written.path / name, merged / name) if merged.is_dir() else shutil.copytree(
                written.path / name, merged / name
            )
    assert check(merged) == ()
    assert shadow(merged, root / "shadow") == []
    return merged


@pytest.fixture(scope="session")
def server(repository: Path, installation: Installation) -> Iterator[TritonServer]:
    with TritonServer(repository.parent / "shadow", installation) as running:
        yield running


@pytest.fixture(scope="session", params=["http", "grpc"])
def ask(request: pytest.FixtureRequest, server: TritonServer) -> Iterator[Callable[..., dict[str, Any]]]:
    """Yield a function that sends a request with Triton's own client."""
    module = http_client if request.param == "http" else grpc_client
    port = server.http if request.param == "http" else server.grpc
    client = module.InferenceServerClient(f"127.0.0.1:{port}")

    def call(name: str, inputs: dict[str, Sequence[str]], **options: Any) -> dict[str, Any]:
        tensors = []
        for key, values in inputs.items():
            tensor = module.InferInput(key, [1, len(values)], "BYTES")
            tensor.set_data_from_numpy(np.array([[value.encode() for value in values]], dtype=object))
            tensors.append(tensor)
        answer = client.infer(name, tensors, parameters=options or None)
        response = answer.get_response()
        names = (
            [o["name"] for o in response["outputs"]]
            if isinstance(response, dict)
            else [o.name for o in response.outputs]
        )
        return {key: answer.as_numpy(key)[0] for key in names}

    yield call
    client.close()


@pytest.fixture(scope="session")
def local(artifacts: dict[str, Path]) -> Callable[[str], Any]:
    """Return a function that creates the local pipeline of a task from the same artifact."""
    return functools.cache(lambda task: accel.pipeline(task, str(artifacts[task])))


@pytest.mark.parametrize("name", ["text_classification", "ensemble"])
def test_labels(ask: Callable[..., Any], local: Callable[[str], Any], name: str) -> None:
    for text in TEXTS:
        answer, expected = ask(name, {"TEXT": [text]}), local("text-classification")(text)[0]
        assert answer["LABEL"].tolist() == [expected["label"].encode()]
        np.testing.assert_allclose(answer["SCORE"], [expected["score"]], atol=ATOL)


@pytest.mark.parametrize("name", ["token_classification", "tags_ensemble"])
@pytest.mark.parametrize("strategy", ["none", "simple"])
def test_entities(ask: Callable[..., Any], local: Callable[[str], Any], strategy: str, name: str) -> None:
    for text in TEXTS:
        entities = json.loads(ask(name, {"TEXT": [text]}, aggregation_strategy=strategy)["ENTITIES"][0])
        expected = local("token-classification")(text, aggregation_strategy=strategy)
        assert [{**entity, "score": 0} for entity in entities] == [{**entity, "score": 0} for entity in expected]
        np.testing.assert_allclose(
            [entity["score"] for entity in entities], [entity["score"] for entity in expected], atol=ATOL
        )


def test_answers(ask: Callable[..., Any], local: Callable[[str], Any]) -> None:
    context = " ".join(TEXTS * 4)
    answer = ask("question_answering", {"QUESTION": ["where?"], "CONTEXT": [context]}, top_k=3)
    expected = local("question-answering")(question="where?", context=context, top_k=3)
    assert [text.decode() for text in answer["ANSWER"]] == [item["answer"] for item in expected]
    assert answer["START"].tolist() == [item["start"] for item in expected]
    np.testing.assert_allclose(answer["SCORE"], [item["score"] for item in expected], atol=ATOL)


def test_embeddings(ask: Callable[..., Any], artifacts: dict[str, Path]) -> None:
    model = accel.ORTModelForFeatureExtraction.from_pretrained(artifacts["sentence-similarity"])
    embeddings = np.stack([ask("sentence_similarity", {"TEXT": [text]})["EMBEDDING"] for text in TEXTS])
    np.testing.assert_allclose(embeddings, model.encode(TEXTS), atol=ATOL)


def test_candidate_labels(ask: Callable[..., Any], local: Callable[[str], Any]) -> None:
    labels = ["bank", "phone", "fee"]
    answer = ask("zero_shot_classification", {"TEXT": [TEXTS[0]], "CANDIDATE_LABELS": labels})
    expected = local("zero-shot-classification")(TEXTS[0], labels)
    assert [label.decode() for label in answer["LABELS"]] == expected["labels"]
    np.testing.assert_allclose(answer["SCORES"], expected["scores"], atol=ATOL)


def test_ranking(ask: Callable[..., Any], artifacts: dict[str, Path]) -> None:
    model = accel.ORTModelForSequenceClassification.from_pretrained(artifacts["text-ranking"])
    answer, expected = ask("text_ranking", {"QUERY": [TEXTS[0]], "DOCUMENTS": TEXTS}), model.rank(TEXTS[0], TEXTS)
    assert answer["RANKING"].tolist() == [entry["corpus_id"] for entry in expected]
    np.testing.assert_allclose(answer["SCORES"][answer["RANKING"]], [entry["score"] for entry in expected], atol=ATOL)


def test_too_long_text_is_refused(ask: Callable[..., Any]) -> None:
    with pytest.raises(Exception, match="202 tokens, but the model supports at most 94"):
        ask("text_classification", {"TEXT": ["pay " * 200]})


def test_example_client_sends_several_rows(server: TritonServer, local: Callable[[str], Any]) -> None:
    example = runpy.run_path(str(Path(__file__).parents[2] / "examples" / "triton_client" / "client.py"))
    rows = example["classify"](f"127.0.0.1:{server.http}", "text_classification", TEXTS)
    expected = [local("text-classification")(text)[0] for text in TEXTS]
    assert [label for label, _ in rows] == [label_and_score["label"] for label_and_score in expected]
    np.testing.assert_allclose(
        [score for _, score in rows], [label_and_score["score"] for label_and_score in expected], atol=ATOL
    )


def test_requests_with_several_sizes_share_a_batch(server: TritonServer) -> None:
    """Requests with different numbers of labels or documents share a batch."""
    calls = [("text_ranking", {"QUERY": ["card"], "DOCUMENTS": TEXTS[: 1 + i % 5]}, {}) for i in range(32)]
    before = server.statistics("text_ranking")
    callers(server, calls, 16)
    after = server.statistics("text_ranking")
    assert after["inference_count"] - before["inference_count"] == 32
    assert after["execution_count"] - before["execution_count"] < 32


def callers(
    server: TritonServer, calls: Sequence[tuple[str, dict[str, list[str]], dict[str, Any]]], count: int
) -> None:
    """Send requests from many concurrent clients. Each client sends its next request when it has received a response."""
    waiting: queue.SimpleQueue[Any] = queue.SimpleQueue()
    for item in calls:
        waiting.put(item)
    failed: list[Exception] = []

    def work() -> None:
        client = http_client.InferenceServerClient(f"127.0.0.1:{server.http}")
        while True:
            try:
                name, inputs, options = waiting.get_nowait()
            except queue.Empty:
                client.close()
                return
            tensors = []
            for key, values in inputs.items():
                tensor = http_client.InferInput(key, [1, len(values)], "BYTES")
                tensor.set_data_from_numpy(np.array([[value.encode() for value in values]], dtype=object))
                tensors.append(tensor)
            try:
                client.infer(name, tensors, parameters=options or None)
            except Exception as error:  # noqa: BLE001  # the test reports any error
                failed.append(error)

    threads = [threading.Thread(target=work) for _ in range(count)]
    for item in threads:
        item.start()
    for item in threads:
        item.join()
    assert not failed


def test_sixteen_clients_with_different_lengths_share_batches(server: TritonServer) -> None:
    ragged = [" ".join(TEXTS)[: 5 + 7 * i % 150] for i in range(320)]
    callers(server, [("waiting", {"TEXT": [text]}, {}) for text in ragged], 16)
    counted = server.statistics("waiting")
    assert counted["inference_count"] / counted["execution_count"] > 4
    # The graph model counts the rows of all requests.
    assert server.statistics("waiting_graph")["inference_count"] >= 320


def test_streamed_text_equals_the_local_pipelines(server: TritonServer, generator: Callable[..., Artifact]) -> None:
    prompts = ["the card", "where is my new bank account in paris", "pay", "i can not transfer cash", "the fee", "a"]
    pipe = accel.pipeline("text-generation", str(generator("llama").path))
    pieces: dict[str, list[str]] = {}

    def stream(prompt: str) -> None:
        body = {"PROMPT": prompt, "parameters": {"max_new_tokens": 12, "do_sample": False}}
        pieces[prompt] = [piece["TEXT"] for piece in server.stream("text_generation", body)]

    threads = [threading.Thread(target=stream, args=(prompt,)) for prompt in prompts]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for prompt in prompts:
        expected = pipe(prompt, max_new_tokens=12, do_sample=False, return_full_text=False)[0]["generated_text"]
        assert "".join(pieces[prompt]) == expected
        assert len(pieces[prompt]) > 1


def test_streamed_text_over_grpc(server: TritonServer) -> None:
    client = grpc_client.InferenceServerClient(f"127.0.0.1:{server.grpc}")
    pieces: queue.SimpleQueue[Any] = queue.SimpleQueue()
    client.start_stream(callback=lambda result, error: pieces.put(error or result))
    tensor = grpc_client.InferInput("PROMPT", [1], "BYTES")
    tensor.set_data_from_numpy(np.array([b"the card"], dtype=object))
    client.async_stream_infer(
        "text_generation", [tensor], parameters={"max_new_tokens": 6}, enable_empty_final_response=True
    )
    text = ""
    while True:
        piece = pieces.get(timeout=60)
        assert not isinstance(piece, Exception), piece
        if piece.as_numpy("TEXT") is not None:
            text += piece.as_numpy("TEXT")[0].decode()
        if piece.get_response().parameters["triton_final_response"].bool_param:
            break
    client.stop_stream()
    client.close()
    assert len(text.split()) >= 5


def test_model_loading_errors_are_reported(
    artifacts: dict[str, Path], installation: Installation, tmp_path: Path
) -> None:
    repository = deploy(artifacts["text-classification"], tmp_path / "out", backend="python")
    code = repository.path / repository.name / "1" / "model.py"
    code.write_text(code.read_text(encoding="utf-8") + "\nraise RuntimeError('broken on purpose')\n", encoding="utf-8")
    shadow(repository.path, tmp_path / "shadow")
    with pytest.raises(SessionError, match="broken on purpose"), TritonServer(tmp_path / "shadow", installation):
        pass
    assert os.environ.get("LD_LIBRARY_PATH", "").find("nvidia_pytriton") == -1
