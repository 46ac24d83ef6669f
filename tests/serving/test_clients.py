"""Tests of requests from clients of other servers: each request is accepted with the same meaning, or refused in the
format of that server.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
from starlette.testclient import TestClient

import accel
from accel.errors import ConfigError
from accel.serving.http.app import create_app
from accel.serving.http.server_settings import ServerSettings
from tests.serving.conftest import post, send_binary

Served = Callable[[str], accel.ORTModel]


@pytest.fixture(scope="module")
def client(served: Served) -> Iterator[TestClient]:
    models = {"scores": served("rank"), "judge": served("zero-shot-classification"), "chat": served("chat")}
    settings = ServerSettings(max_client_batch=8, max_text_chars=2000, cors_origins=("https://a.example",))
    with TestClient(create_app(accel.Engine(models), settings)) as test_client:
        yield test_client


def test_rerank_format_of_text_embeddings_inference(client: TestClient) -> None:
    texts = ["the bank", "i lost my card", "help"]
    results = post(client, "/rerank", query="where is my card", texts=texts, return_text=True, raw_scores=True)
    usual = post(client, "/rerank", query="where is my card", documents=texts, raw_scores=True)["results"]
    assert [(result["index"], result["text"]) for result in results] == [
        (result["index"], texts[result["index"]]) for result in usual
    ]
    assert np.allclose(
        [result["score"] for result in results], [result["relevance_score"] for result in usual], atol=1e-5
    )


@pytest.mark.parametrize(
    "body", [{}, {"documents": ["a"], "texts": ["a"]}, {"texts": ["a"], "top_n": 1}, {"documents": ["a"], "return_text": True},
             ]
)  # fmt: skip
def test_mixed_rerank_formats_are_refused(body: dict[str, Any], client: TestClient) -> None:
    assert client.post("/rerank", json={"query": "help", **body}).status_code == 422


@pytest.mark.parametrize(
    ("model", "inputs", "parameters", "path"),
    [
        ("judge", "help", {}, "/classify"),
        ("judge", "help", {"candidate_labels": ["bank", "card"]}, "/zero-shot"),
        ("scores", {"query": "help", "documents": ["the bank", "card"]}, {}, "/rerank"),
        ("chat", "where is my", {"max_new_tokens": 4}, "/generate"),
    ],
)
def test_invocations_select_the_endpoint_by_inputs(
    model: str, inputs: Any, parameters: dict[str, Any], path: str, client: TestClient
) -> None:
    answer = post(client, "/invocations", inputs=inputs, parameters={"model": model, **parameters})
    body = inputs if isinstance(inputs, dict) else {"inputs": inputs}
    more = {"stream": False} if path == "/generate" else {}
    assert answer == post(client, path, model=model, **body, **parameters, **more)


def test_assistant_message_can_be_sent_back(client: TestClient) -> None:
    messages = [{"role": "user", "content": "where is my card"}]
    message = post(client, "/v1/chat/completions", messages=messages, max_tokens=3)["choices"][0]["message"]
    # OpenAI's client sends its message object with these fields.
    message = {**message, "annotations": None, "audio": None, "function_call": None, "tool_calls": None}
    assert (
        post(client, "/v1/chat/completions", messages=[*messages, message, *messages], max_tokens=3)["usage"][
            "prompt_tokens"
        ]
        > 8
    )


NOTHING = {
    "/v1/chat/completions": {"logprobs": False, "top_logprobs": 0, "tools": [], "tool_choice": "none", "store": False, "n": 1,
                             "response_format": {"type": "text"}, "service_tier": "auto", "metadata": {}},
    "/v1/completions": {"logprobs": None, "echo": False, "best_of": 1, "suffix": None},
}  # fmt: skip
GIVEN = {
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "help"}]},
    "/v1/completions": {"prompt": "help"},
}


@pytest.mark.parametrize("path", GIVEN)
def test_fields_without_effect_are_accepted(path: str, client: TestClient) -> None:
    """Field values that have no effect are accepted. `test_api_fields` sends all other values."""
    post(client, path, **GIVEN[path], **NOTHING[path], max_tokens=2)


@pytest.mark.parametrize("method", ["GET", "POST"])
def test_unknown_inference_protocol_paths_have_text_errors(method: str, client: TestClient) -> None:
    answer = client.request(method, "/v2/repository/index")
    assert (answer.status_code, type(answer.json()["error"])) == (404, str)


def test_only_configured_origins_may_call(client: TestClient) -> None:
    request_headers = {"Access-Control-Request-Method": "POST", "Access-Control-Request-Headers": "authorization"}
    answer = client.options("/classify", headers={"Origin": "https://a.example", **request_headers})
    assert (answer.status_code, answer.headers["access-control-allow-origin"]) == (200, "https://a.example")
    assert client.options("/classify", headers={"Origin": "https://b.example", **request_headers}).status_code == 400
    mine = client.get("/health", headers={"Origin": "https://a.example"})
    assert "x-request-id" in mine.headers["access-control-expose-headers"]
    assert "access-control-allow-origin" not in client.get("/health", headers={"Origin": "https://b.example"}).headers


@pytest.mark.parametrize(
    "setting",
    [{"api_keys": ("",)}, {"cors_origins": ("a.example",)}, {"cors_origins": ("https://a.example/x",)}, {"api_keys": ("schlüssel",)},
     {"api_keys": ("two words ",)}, {"max_text_chars": 0}, {"body_timeout_s": float("nan")}],
)  # fmt: skip
def test_invalid_settings_are_refused(setting: dict[str, Any]) -> None:
    with pytest.raises(ConfigError):
        ServerSettings(**setting)


@pytest.mark.parametrize("template", ["{:999999999}", "{0}", "{.__class__}", "{} {}", "none", "{", "{{}}"])
def test_hypothesis_template_requires_one_placeholder(template: str, client: TestClient) -> None:
    body = {"model": "judge", "inputs": "help", "candidate_labels": ["bank"], "hypothesis_template": template}
    answer = client.post("/zero-shot", json=body)
    assert (answer.status_code, "hypothesis_template" in answer.text) == (422, True)


LONG = [
    ("/classify", {"model": "judge", "inputs": ["help", "a " * 1000]}),
    ("/tokenize", {"model": "judge", "inputs": "a " * 1001}),
    ("/rerank", {"query": "help", "documents": ["a " * 1000]}),
    ("/rerank", {"query": "a " * 200, "documents": ["a"] * 6}),
    ("/zero-shot", {"inputs": "a " * 200, "candidate_labels": ["a"] * 6}),
    ("/zero-shot", {"inputs": "help", "candidate_labels": ["a " * 1001]}),
    ("/generate", {"inputs": "a " * 1001}),
    ("/v1/chat/completions", {"messages": [{"role": "user", "content": "a " * 1001}]}),
]


@pytest.mark.parametrize(("path", "body"), LONG)
def test_long_texts_are_refused_before_tokenization(path: str, body: dict[str, Any], client: TestClient) -> None:
    answer = client.post(path, json=body)
    assert (answer.status_code, "2000 characters" in answer.text) == (413, True)


def test_errors_stay_short_for_long_values(client: TestClient) -> None:
    for body in ({"inputs": "help", "model": "x" * 100_000}, {"inputs": "help", "x" * 100_000: 1}):
        assert len(client.post("/classify", json=body).content) < 3000


def test_too_many_tensor_rows_are_refused(client: TestClient) -> None:
    inputs = [
        {"name": name, "datatype": "INT64", "shape": [9, 2], "data": [1] * 18}
        for name in ("input_ids", "attention_mask")
    ]
    answer = client.post("/v2/models/judge/infer", json={"inputs": inputs})
    assert (answer.status_code, "at most 8" in answer.text) == (422, True)


# The tests below send texts over the Open Inference Protocol.


def infer(client: TestClient, model: str, binary: bool = False, **inputs: list[list[str]]) -> dict[str, Any]:
    """Send texts over the Open Inference Protocol, as JSON or as binary data. Return the outputs as arrays by name."""
    path = f"/v2/models/{model}/infer"
    shapes = {name: [len(rows), len(rows[0])] for name, rows in inputs.items()}
    if binary:
        encoded = {name: [text.encode() for row in rows for text in row] for name, rows in inputs.items()}
        packed = {name: b"".join(struct.pack("<I", len(t)) + t for t in texts) for name, texts in encoded.items()}
        tensors = [(name, "BYTES", shapes[name], part) for name, part in packed.items()]
        answer = send_binary(client, path, *tensors, parameters={"binary_data_output": True})
    else:
        json_tensors = [
            {"name": n, "datatype": "BYTES", "shape": shapes[n], "data": rows} for n, rows in inputs.items()
        ]
        answer = client.post(path, json={"inputs": json_tensors})
    assert answer.status_code == 200, answer.text
    length = int(answer.headers.get("inference-header-content-length", len(answer.content)))
    outputs: dict[str, Any] = {}
    rest = answer.content[length:]
    for output in json.loads(answer.content[:length])["outputs"]:
        values = output.get("data")
        if binary:
            size = output["parameters"]["binary_data_size"]
            part, rest = rest[:size], rest[size:]
            values = (
                unpacked(part) if output["datatype"] == "BYTES" else np.frombuffer(part, _TYPES[output["datatype"]])
            )
        dtype = object if output["datatype"] == "BYTES" else None
        outputs[output["name"]] = np.array(values, dtype=dtype).reshape(output["shape"])
    assert not rest
    return outputs


_TYPES = {"FP32": "<f4", "INT64": "<i8"}


def unpacked(part: bytes) -> list[str]:
    texts = []
    while part:
        (size,) = struct.unpack("<I", part[:4])
        texts.append(part[4 : 4 + size].decode())
        part = part[4 + size :]
    return texts


@pytest.fixture(scope="module")
def text_client(served: Served) -> Iterator[TestClient]:
    tasks = {"labels": "text-classification", "tags": "token-classification", "answers": "question-answering",
             "vectors": "sentence-similarity", "scores": "rank", "masks": "fill-mask"}  # fmt: skip
    with TestClient(create_app(accel.Engine({name: served(task) for name, task in tasks.items()}))) as test_client:
        yield test_client


WORDS = ["where is my card", "the bäñk 👩 is closed"]


@pytest.mark.parametrize("binary", [False, True])
@pytest.mark.parametrize("count", [1, 2])
def test_texts_as_tensors_are_classified(binary: bool, count: int, text_client: TestClient) -> None:
    outputs = infer(text_client, "labels.text", binary, TEXT=[[text] for text in WORDS[:count]])
    expected = post(text_client, "/classify", model="labels", inputs=WORDS[:count], top_k=3)
    for i, labels in enumerate(expected):
        assert outputs["LABEL"][i, 0] == labels[0]["label"]
        assert outputs["SCORE"][i, 0] == pytest.approx(labels[0]["score"], abs=1e-5)
        by_label = {label["label"]: label["score"] for label in labels}
        assert np.allclose(outputs["SCORES"][i], [by_label[f"LABEL_{j}"] for j in range(3)], atol=1e-5)


@pytest.mark.parametrize("binary", [False, True])
def test_other_text_tasks_as_tensors(binary: bool, text_client: TestClient) -> None:
    vectors = infer(text_client, "vectors.text", binary, TEXT=[[text] for text in WORDS])["EMBEDDING"]
    assert np.allclose(vectors, post(text_client, "/embed", inputs=WORDS, normalize=False), atol=1e-5)
    (tags,) = infer(text_client, "tags.text", binary, TEXT=[[WORDS[0]]])["ENTITIES"][0]
    assert json.loads(tags) == post(text_client, "/ner", inputs=WORDS[0], aggregation_strategy="none")
    question = {"question": "where is my card", "context": "the card is in london and not in paris"}
    answer = infer(
        text_client, "answers.text", binary, QUESTION=[[question["question"]]], CONTEXT=[[question["context"]]]
    )
    expected = post(text_client, "/qa", **question)
    assert [answer[name][0, 0] for name in ("ANSWER", "START", "END")] == [
        expected[name] for name in ("answer", "start", "end")
    ]
    documents = [["the bank", "i lost my card", "help"], ["help", "card", "the phone"]]
    ranked = infer(text_client, "scores.text", binary, QUERY=[["my card"], ["help"]], DOCUMENTS=documents)
    for i, query in enumerate(("my card", "help")):
        usual = post(text_client, "/rerank", query=query, documents=documents[i])["results"]
        assert list(ranked["RANKING"][i]) == [result["index"] for result in usual]
        assert np.allclose(
            ranked["SCORES"][i][ranked["RANKING"][i]], [result["relevance_score"] for result in usual], atol=1e-5
        )


def test_metadata_describe_text_tensors(text_client: TestClient) -> None:
    metadata = text_client.get("/v2/models/labels.text").json()
    assert metadata["inputs"] == [{"name": "TEXT", "datatype": "BYTES", "shape": [-1, 1]}]
    assert {"name": "SCORES", "datatype": "FP32", "shape": [-1, 3]} in metadata["outputs"]
    assert text_client.get("/v2/models/labels.text/versions/1/ready").status_code == 200
    for name in ("masks.text", "nobody.text", ".text", "labels.text.text"):
        assert text_client.get(f"/v2/models/{name}").status_code == 404


WRONG = [
    {"inputs": [{"name": "TEXT", "datatype": "BYTES", "shape": [2, 1], "data": ["a"]}]},
    {"inputs": [{"name": "TEXT", "datatype": "BYTES", "shape": [1, 1], "data": [3]}]},
    {"inputs": [{"name": "TEXT", "datatype": "BYTES", "shape": [1, 2], "data": ["a", "b"]}]},
    {"inputs": [{"name": "TEXT", "datatype": "BYTES", "shape": [0, 1], "data": []}]},
    {"inputs": [{"name": "TEXT", "datatype": "INT64", "shape": [1, 1], "data": [3]}]},
    {"inputs": [{"name": "QUERY", "datatype": "BYTES", "shape": [1, 1], "data": ["a"]}]},
    {"inputs": [{"name": "TEXT", "datatype": "BYTES", "shape": [1, 1], "data": ["a"]}], "outputs": [{"name": "logits"}]},
    {"inputs": [{"name": "TEXT", "datatype": "BYTES", "shape": [1, 1], "parameters": {"binary_data_size": 9}}]},
    {"inputs": [{"name": "TEXT", "datatype": "BYTES", "shape": [300, 1], "data": ["a"] * 300}]},
]  # fmt: skip


@pytest.mark.parametrize("body", WRONG)
def test_invalid_text_tensors_are_refused(body: dict[str, Any], text_client: TestClient) -> None:
    answer = text_client.post("/v2/models/labels.text/infer", json=body)
    assert (answer.status_code, type(answer.json()["error"])) == (422, str), answer.text


def test_query_counts_once_for_each_document(client: TestClient) -> None:
    inputs = [{"name": "QUERY", "datatype": "BYTES", "shape": [1, 1], "data": ["a " * 200]},
              {"name": "DOCUMENTS", "datatype": "BYTES", "shape": [1, 6], "data": ["a"] * 6}]  # fmt: skip
    assert client.post("/v2/models/scores.text/infer", json={"inputs": inputs}).status_code == 413


@pytest.mark.parametrize("content", [b"", b"\x01", b"\x05\0\0\0ab", b"\x02\0\0\0\xff\xff", b"\xff\xff\xff\xffab"])
def test_invalid_bytes_are_refused(content: bytes, text_client: TestClient) -> None:
    answer = send_binary(text_client, "/v2/models/labels.text/infer", ("TEXT", "BYTES", [1, 1], content))
    assert answer.status_code == 422
