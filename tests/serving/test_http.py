"""Tests of the protocols of the HTTP server, and of its error responses in the format of each protocol."""

from __future__ import annotations

import asyncio
import gzip
import json
import random
import re
import struct
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from starlette.responses import Response
from starlette.testclient import TestClient

import accel
from accel.serving.http.app import create_app
from accel.serving.http.endpoints import Endpoint, HttpCall
from accel.serving.http.server_settings import ServerSettings
from tests.serving.conftest import Gate, close, post, send_binary

Served = Callable[[str], accel.ORTModel]

CONTEXT = "wolfgang is in london and the card is in paris"
TASKS = {
    "labels": "text-classification",
    "tags": "token-classification",
    "answers": "question-answering",
    "masks": "fill-mask",
    "vectors": "sentence-similarity",
    "scores": "rank",
    "judge": "zero-shot-classification",
}
FEEDS = {"input_ids": [[2, 9, 11, 3]], "attention_mask": [[1, 1, 1, 1]]}


@pytest.fixture(scope="module")
def client(served: Served) -> Iterator[TestClient]:
    settings = ServerSettings(max_body_bytes=20_000, max_client_batch=8)
    with TestClient(
        create_app(accel.Engine({name: served(task) for name, task in TASKS.items()}), settings)
    ) as test_client:
        yield test_client


TASK_CALLS = [
    ("/classify", "labels", {"inputs": "where is my card"}),
    ("/classify", "labels", {"inputs": ["help", "the bank"], "top_k": 2}),
    ("/classify", "labels", {"inputs": "help", "top_k": None}),
    ("/classify", "labels", {"inputs": {"text": "help", "text_pair": "the bank"}}),
    ("/ner", "tags", {"inputs": CONTEXT, "aggregation_strategy": "simple"}),
    ("/fill-mask", "masks", {"inputs": "the [MASK] is lost", "top_k": 2}),
    ("/zero-shot", "judge", {"inputs": "help", "candidate_labels": ["bank", "phone"]}),
    ("/qa", "answers", {"question": "where is wolfgang", "context": CONTEXT, "top_k": 2}),
]  # fmt: skip


@pytest.mark.parametrize(("path", "model", "body"), TASK_CALLS)
def test_endpoints_return_pipeline_results(
    path: str, model: str, body: dict[str, Any], client: TestClient, served: Served
) -> None:
    pipe = accel.pipeline(TASKS[model], model=served(TASKS[model]))
    options = {name: value for name, value in body.items() if name not in ("inputs", "question", "context")}
    inputs = body["inputs"] if "inputs" in body else {"question": body["question"], "context": body["context"]}
    expected = json.loads(json.dumps(pipe(inputs, **options), default=float))
    assert close(post(client, path, model=model, **body), expected)


@pytest.mark.parametrize(
    ("path", "model", "name"),
    [
        ("/ner", "tags", "inputs"),
        ("/embed", "vectors", "inputs"),
        ("/v1/embeddings", "vectors", "input"),
        ("/tokenize", "labels", "inputs"),
    ],
)
def test_text_may_be_empty_but_a_list_of_texts_may_not(path: str, model: str, name: str, client: TestClient) -> None:
    for value, status in (("", 200), ([""], 200), ([], 422)):
        assert client.post(path, json={"model": model, name: value}).status_code == status


def test_rerank(client: TestClient, served: Served) -> None:
    documents = ["the bank", "i lost my card", "help"]
    answer = post(client, "/rerank", query="where is my card", documents=documents, top_n=2, return_documents=True)
    model: Any = served("rank")
    expected = model.rank("where is my card", documents, top_k=2)
    assert [result["index"] for result in answer["results"]] == [result["corpus_id"] for result in expected]
    assert close(
        [result["relevance_score"] for result in answer["results"]], [float(result["score"]) for result in expected]
    )
    assert answer["results"][0]["document"] == documents[answer["results"][0]["index"]]


def test_tokenize(client: TestClient) -> None:
    (tokens,) = post(client, "/tokenize", model="labels", inputs="my card")
    assert [token["text"] for token in tokens] == ["[CLS]", "my", "card", "[SEP]"]
    assert tokens[2] == {"id": tokens[2]["id"], "text": "card", "start": 3, "stop": 7, "special": False}


def test_openai_embeddings(client: TestClient, served: Served) -> None:
    texts = ["my card", "the bank is closed"]
    answer = post(client, "/v1/embeddings", model="vectors", input=texts)
    rows = [item["embedding"] for item in answer["data"]]
    model: Any = served("sentence-similarity")
    assert np.allclose(rows, model.encode(texts, normalize_embeddings=True), atol=1e-5)
    assert [item["index"] for item in answer["data"]] == [0, 1]
    assert answer["usage"]["prompt_tokens"] == 4 + 6


def test_list_of_models(client: TestClient) -> None:
    models = client.get("/v1/models").json()["data"]
    assert [model["id"] for model in models] == list(TASKS)
    assert client.get("/v1/models/labels").json()["task"] == "text-classification"


def infer_json(name: str = "labels") -> dict[str, Any]:
    inputs = [{"name": key, "datatype": "INT64", "shape": [1, 4], "data": values} for key, values in FEEDS.items()]
    return {"id": "7", "inputs": inputs}


def expected_logits(served: Served) -> Any:
    return served("text-classification")(**{name: torch.tensor(values) for name, values in FEEDS.items()}).logits


def test_inference_protocol_json(client: TestClient, served: Served) -> None:
    answer = post(client, "/v2/models/labels/infer", **infer_json())
    assert (answer["model_name"], answer["id"]) == ("labels", "7")
    (output,) = answer["outputs"]
    assert (output["name"], output["datatype"], output["shape"]) == ("logits", "FP32", [1, 3])
    assert np.allclose(output["data"], expected_logits(served).reshape(-1), atol=1e-5)


def test_inference_protocol_binary(client: TestClient, served: Served) -> None:
    tensors = [(name, "INT64", [1, 4], np.array(values, dtype=np.int64).tobytes()) for name, values in FEEDS.items()]
    path = "/v2/models/labels/versions/1/infer"
    answer = send_binary(client, path, *tensors, parameters={"binary_data_output": True})
    assert answer.status_code == 200
    length = int(answer.headers["inference-header-content-length"])
    (output,) = json.loads(answer.content[:length])["outputs"]
    values = struct.unpack("<3f", answer.content[length : length + output["parameters"]["binary_data_size"]])
    assert np.allclose(values, expected_logits(served).reshape(-1), atol=1e-5)


def test_inference_protocol_metadata_and_health(client: TestClient) -> None:
    assert client.get("/v2").json()["extensions"] == ["binary_tensor_data"]
    metadata = client.get("/v2/models/labels").json()
    assert {"name": "input_ids", "datatype": "INT64", "shape": [-1, -1]} in metadata["inputs"]
    for path in ("/v2/health/live", "/v2/health/ready", "/v2/models/labels/ready", "/health", "/ready", "/ping"):
        assert client.get(path).status_code == 200, path


def test_sagemaker_invocations_use_the_models_endpoint(served: Served) -> None:
    with TestClient(create_app(accel.Engine({"answers": served("question-answering")}))) as client:
        body = {"question": "where is wolfgang", "context": CONTEXT}
        assert post(client, "/invocations", inputs=body, parameters={"top_k": 2}) == post(
            client, "/qa", top_k=2, **body
        )


BAD = [
    ("/classify", b"{", 400, "not valid JSON"),
    ("/classify", b"", 400, "not valid JSON"),
    ("/classify", {"inputs": 3, "model": "labels"}, 422, "inputs"),
    ("/classify", {"inputs": "help", "model": "labels", "colour": 1}, 422, "colour"),
    ("/classify", {"inputs": "help", "model": "nope"}, 404, "no model 'nope'"),
    ("/classify", {"inputs": "help", "model": "tags"}, 422, "does not support the operation 'text-classification'"),
    ("/classify", {"inputs": "help"}, 422, "Several models"),
    ("/classify", {"inputs": 3}, 422, "inputs"),
    ("/classify", {"inputs": ["help"] * 9, "model": "labels"}, 422, "at most 8"),
    ("/classify", {"inputs": "card " * 500, "model": "labels"}, 422, "at most 96"),
    ("/classify", {"inputs": "card " * 5000, "model": "labels"}, 413, "20000 bytes"),
    ("/fill-mask", {"inputs": "no mask here"}, 422, "does not accept the inputs"),
    ("/v1/embeddings", {"input": "help", "model": "vectors", "dimensions": 4000}, 422, "32 dimensions"),
    ("/v1/embeddings", {"input": [[1, 2]], "model": "vectors"}, 422, "token ids of input 0"),
    ("/v2/models/nope/infer", infer_json(), 404, "no model"),
    ("/v2/models/labels/infer", {"inputs": []}, 422, "inputs"),
    ("/v2/models/labels/infer", {"inputs": [{"name": "x", "datatype": "INT64", "shape": [1], "data": [1]}]}, 422, "x"),
    ("/v2/models/labels/infer", {"inputs": [{"name": "x", "datatype": "COW", "shape": [1], "data": [1]}]}, 422, "COW"),
    ("/v2/models/labels/infer", {"inputs": [{"name": "x", "datatype": "INT64", "shape": [9], "data": [1]}]}, 422, "1 values"),
    ("/v2/models/labels/infer", {**infer_json(), "parameters": {"sequence_id": 3}}, 422, "sequence_id"),
    ("/invocations", {"inputs": "help"}, 422, "parameters.model"),
    ("/nowhere", {}, 404, "Not Found"),
]  # fmt: skip


@pytest.mark.parametrize(("path", "body", "status", "words"), BAD)
def test_errors_name_the_reason(path: str, body: Any, status: int, words: str, client: TestClient) -> None:
    content = body if isinstance(body, bytes) else json.dumps(body).encode()
    answer = client.post(path, content=content)
    assert answer.status_code == status, answer.text
    error = answer.json()["error"]
    assert words in (error if isinstance(error, str) else error["message"])
    assert "Traceback" not in answer.text
    assert "site-packages" not in answer.text


def test_body_without_length_is_limited(client: TestClient) -> None:
    def endless() -> Iterator[bytes]:
        for _ in range(100):
            yield b" " * 1000

    assert client.post("/classify", content=endless()).status_code == 413


@pytest.mark.parametrize("path", ["/classify", "/v1/embeddings", "/v2/models/labels/infer"])
def test_compressed_body_is_refused_by_name(path: str, client: TestClient) -> None:
    answer = client.post(path, content=gzip.compress(b'{"inputs": "help"}'), headers={"content-encoding": "gzip"})
    assert answer.status_code == 415
    assert "The request body is compressed" in answer.text


def test_responses_have_request_ids_and_timing_headers(client: TestClient) -> None:
    answer = client.post("/classify", json={"inputs": "help", "model": "labels"}, headers={"X-Request-Id": "mine-1"})
    assert answer.headers["x-request-id"] == "mine-1"
    for step in ("queue", "tokenization", "inference"):
        assert float(answer.headers[f"x-{step}-ms"]) >= 0
    bad = client.get("/health", headers={"X-Request-Id": "a b\tc"}).headers["x-request-id"]
    assert len(bad) == 16


def test_access_log_contains_the_request_id(client: TestClient, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level("INFO", logger="accel.serving.access"):
        client.get("/health", headers={"X-Request-Id": "abc"})
    assert "abc GET /health 200" in caplog.text


def test_api_keys(served: Served) -> None:
    engine = accel.Engine({"labels": served("text-classification")})
    with TestClient(create_app(engine, ServerSettings(api_keys=("one", "two")))) as client:
        body = {"inputs": "help"}
        assert client.get("/health").status_code == 200
        for headers in (
            {},
            {"Authorization": "Bearer three"},
            {"Authorization": "Basic one"},
            {"Authorization": "Bearer"},
        ):
            answer = client.post("/classify", json=body, headers=headers)
            assert answer.status_code == 401
            assert answer.headers["www-authenticate"] == "Bearer"
        for key in ("one", "two"):
            assert client.post("/classify", json=body, headers={"Authorization": f"Bearer {key}"}).status_code == 200
        assert client.get("/metrics").status_code == 401


def test_full_queue_gives_status_429_with_retry_after(gated: tuple[accel.ORTModel, Gate]) -> None:
    model, gate = gated
    engine = accel.Engine({"labels": model}, max_queue=1).start()
    with TestClient(create_app(engine)) as client:
        waiting = engine.submit("help")
        answer = client.post("/classify", json={"inputs": "help"})
        assert answer.status_code == 429
        assert int(answer.headers["retry-after"]) >= 1
        gate.open()
        waiting.future.result(30)
        assert client.post("/classify", json={"inputs": "help"}).status_code == 200
        assert 'accel_refused_total{model="labels"} 1.0' in client.get("/metrics").text
    engine.close()


def test_late_event_loop_refuses_requests(served: Served) -> None:
    begun = threading.Event()

    async def slow(call: HttpCall, body: Any) -> Response:
        begun.set()
        time.sleep(0.3)  # block the event loop, as a heavy load would
        await asyncio.sleep(0.2)
        return Response(status_code=200)

    engine = accel.Engine({"labels": served("text-classification")}, max_wait_s=0.2)
    with TestClient(create_app(engine, more=[Endpoint(path="/slow", answer=slow, summary="", tag="")])) as client:
        with ThreadPoolExecutor(1) as pool:
            other = pool.submit(client.post, "/slow", json={})
            assert begun.wait(10)
            answer = client.post("/classify", json={"inputs": "help"})
            assert answer.status_code == 429
            assert "retry-after" in answer.headers
            assert client.get("/health").status_code == 200
            assert other.result(10).status_code == 200
        assert 'accel_refused_total{model="labels"} 1.0' in client.get("/metrics").text
        assert client.post("/slow", json={}).status_code == 200
        assert client.post("/classify", json={"inputs": "help"}).status_code == 200


def test_timeout_gives_status_504(gated: tuple[accel.ORTModel, Gate]) -> None:
    model, gate = gated
    with TestClient(create_app(accel.Engine({"labels": model}, timeout_s=0.1))) as client:
        assert client.post("/classify", json={"inputs": "help"}).status_code == 504
        gate.open()


def test_internal_errors_hide_their_text(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    model = served("text-classification")
    with TestClient(create_app(accel.Engine({"labels": model}))) as client:
        monkeypatch.setattr(model, "_session", None)
        answer = client.post("/classify", json={"inputs": "help"})
        assert answer.status_code == 500
        assert "NoneType" not in answer.text
        assert answer.json()["error"]["request_id"] in answer.text


def test_metrics_equal_the_clients_counts(served: Served) -> None:
    with TestClient(create_app(accel.Engine({"labels": served("text-classification")}))) as client:
        for _ in range(7):
            client.post("/classify", json={"inputs": ["help", "the bank"]})
        client.post("/classify", json={"inputs": 1})
        text = client.get("/metrics").text
    assert 'accel_requests_total{method="POST",path="/classify",status="200"} 7.0' in text
    assert 'accel_requests_total{method="POST",path="/classify",status="422"} 1.0' in text
    assert 'accel_inputs_total{model="labels",outcome="answered"} 14.0' in text
    # Each of the 7 requests has one text of 3 tokens and one text of 4 tokens.
    assert 'accel_tokens_total{model="labels"} 49.0' in text


def test_api_page_and_openapi_description(client: TestClient) -> None:
    page = client.get("/docs")
    assert "default-src 'none'" in page.headers["content-security-policy"]
    assert "//cdn" not in page.text
    description = client.get("/openapi.json").json()
    examples = {
        path: methods["post"]["requestBody"]["content"]["application/json"]["example"]
        for path, methods in description["paths"].items()
        if "post" in methods and "multipart/form-data" not in methods["post"]["requestBody"]["content"]
    }
    assert {"/classify", "/rerank", "/v1/embeddings", "/invocations"} <= set(examples)
    assert "NerBody" in description["components"]["schemas"]


def test_calls_in_the_guide_work(client: TestClient) -> None:
    guide = (Path(__file__).parents[2] / "docs/guides/serve.md").read_text(encoding="utf-8")
    calls = re.findall(r"^curl -s localhost:8000(\S+) -d '(.+)'$", guide, re.MULTILINE)
    assert len(calls) >= 5
    for path, body in calls:
        assert client.post(path, content=body).status_code == 200, path


def broken(chance: random.Random, value: Any) -> Any:
    """Return a copy of a request body with a random error in it."""
    strange: list[Any] = [
        None, True, -1, 1e308, 10**30, "", "\u0000", "é" * 50, "[MASK]" * 40, [], {}, [[]], [None], {"a": []}, ["x"] * 9,
    ]  # fmt: skip
    if isinstance(value, dict) and value and chance.random() < 0.8:
        changed = dict(value)
        name = chance.choice(list(changed))
        if chance.random() < 0.2:
            del changed[name]
        else:
            changed[name] = broken(chance, changed[name])
        if chance.random() < 0.1:
            changed[chance.choice(["model", "top_k", "parameters", "x"])] = chance.choice(strange)
        return changed
    if isinstance(value, list) and value and chance.random() < 0.6:
        made_list = list(value)
        made_list[chance.randrange(len(made_list))] = broken(chance, made_list[0])
        return made_list
    return chance.choice(strange)


def fuzz(client: TestClient, rounds: int) -> dict[int, int]:
    chance = random.Random(0)
    description = client.get("/openapi.json").json()
    targets = [
        (
            path.replace("{model}", "labels").replace("{version}", "1"),
            methods["post"]["requestBody"]["content"]["application/json"],
        )
        for path, methods in description["paths"].items()
        if "application/json" in methods.get("post", {}).get("requestBody", {}).get("content", {})
    ]
    statuses: dict[int, int] = {}
    for _ in range(rounds):
        path, content = chance.choice(targets)
        body = json.dumps(broken(chance, content["example"])).encode()
        if chance.random() < 0.3:
            at = chance.randrange(len(body))
            body = body[:at] + chance.randbytes(chance.randrange(4)) + body[at + chance.randrange(3) :]
        headers = {}
        if chance.random() < 0.1:
            headers["Inference-Header-Content-Length"] = chance.choice(["-1", "0", "5", "9" * 30, "a", str(len(body))])
        answer = client.post(path, content=body, headers=headers)
        assert answer.status_code < 500, (path, body, answer.text)
        answer.json()
        statuses[answer.status_code] = statuses.get(answer.status_code, 0) + 1
    return statuses


def test_malformed_bodies_cause_no_server_error(client: TestClient) -> None:
    statuses = fuzz(client, 400)
    assert {200, 400, 422} <= set(statuses)
    assert post(client, "/classify", model="labels", inputs="help")
