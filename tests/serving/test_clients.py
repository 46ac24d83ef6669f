"""What other servers' clients send is taken as they mean it, or refused in their words."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from starlette.testclient import TestClient

import accel
from accel.errors import ConfigError
from accel.serving.http.app import create_app
from accel.serving.http.settings import ServerSettings
from accel.testing.generators import save_generator

Served = Callable[[str], accel.ORTModel]
CHAT = "{% for message in messages %}{{ message['content'] }} {% endfor %}"


@pytest.fixture(scope="module")
def client(served: Served, shared: Callable[..., Path]) -> Iterator[TestClient]:
    def chat(folder: Path) -> None:
        save_generator(folder, "qwen3")
        tokenizer = json.loads((folder / "tokenizer_config.json").read_text())
        (folder / "tokenizer_config.json").write_text(json.dumps({**tokenizer, "chat_template": CHAT}))

    models = {
        "scores": served("rank"),
        "judge": served("zero-shot-classification"),
        "chat": accel.ORTModel.from_pretrained(shared("served-chat", chat), backend="pytorch"),
    }
    settings = ServerSettings(max_client_batch=8, max_text_chars=2000, cors_origins=("https://a.example",))
    with TestClient(create_app(accel.Engine(models), settings)) as made:
        yield made


def post(client: TestClient, path: str, **body: Any) -> Any:
    answer = client.post(path, json=body)
    assert answer.status_code == 200, answer.text
    return answer.json()


def test_rerank_as_text_embeddings_inference_is_asked_and_answers(client: TestClient) -> None:
    texts = ["the bank", "i lost my card", "help"]
    found = post(client, "/rerank", query="where is my card", texts=texts, return_text=True, raw_scores=True)
    usual = post(client, "/rerank", query="where is my card", documents=texts, raw_scores=True)["results"]
    assert [(one["index"], one["text"]) for one in found] == [(one["index"], texts[one["index"]]) for one in usual]
    assert np.allclose([one["score"] for one in found], [one["relevance_score"] for one in usual], atol=1e-5)


@pytest.mark.parametrize(
    "body", [{}, {"documents": ["a"], "texts": ["a"]}, {"texts": ["a"], "top_n": 1}, {"documents": ["a"], "return_text": True},
             {"texts": ["a"], "truncate": False}]
)  # fmt: skip
def test_a_mixture_of_two_shapes_is_refused(body: dict[str, Any], client: TestClient) -> None:
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
def test_sagemakers_invocation_goes_where_its_inputs_belong(
    model: str, inputs: Any, parameters: dict[str, Any], path: str, client: TestClient
) -> None:
    found = post(client, "/invocations", inputs=inputs, parameters={"model": model, **parameters})
    body = inputs if isinstance(inputs, dict) else {"inputs": inputs}
    more = {"stream": False} if path == "/generate" else {}
    assert found == post(client, path, model=model, **body, **parameters, **more)


def test_an_answers_message_can_be_sent_back(client: TestClient) -> None:
    asked = [{"role": "user", "content": "where is my card"}]
    made = post(client, "/v1/chat/completions", messages=asked, max_tokens=3)["choices"][0]["message"]
    # As OpenAI's client writes its own object.
    made = {**made, "annotations": None, "audio": None, "function_call": None, "tool_calls": None}
    assert (
        post(client, "/v1/chat/completions", messages=[*asked, made, *asked], max_tokens=3)["usage"]["prompt_tokens"]
        > 8
    )


NOTHING = {
    "/v1/chat/completions": {"logprobs": False, "top_logprobs": 0, "tools": [], "tool_choice": "none", "store": False, "n": 1,
                             "response_format": {"type": "text"}, "service_tier": "auto", "metadata": {}},
    "/v1/completions": {"logprobs": None, "echo": False, "best_of": 1, "suffix": None},
}  # fmt: skip
SOMETHING = {
    "/v1/chat/completions": {"logprobs": True, "top_logprobs": 2, "tools": [{"type": "function"}], "n": 2, "store": True,
                             "response_format": {"type": "json_object"}},
    "/v1/completions": {"logprobs": 1, "echo": True, "best_of": 2, "suffix": "x"},
}  # fmt: skip
GIVEN = {
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "help"}]},
    "/v1/completions": {"prompt": "help"},
}


@pytest.mark.parametrize("path", GIVEN)
def test_fields_that_ask_for_nothing_are_taken_and_no_others(path: str, client: TestClient) -> None:
    post(client, path, **GIVEN[path], **NOTHING[path], max_tokens=2)
    for name, value in SOMETHING[path].items():
        answer = client.post(path, json={**GIVEN[path], name: value})
        assert (answer.status_code, name in answer.text) == (422, True)


@pytest.mark.parametrize("method", ["GET", "POST"])
def test_what_is_not_there_is_told_the_inference_protocols_clients_as_a_text(method: str, client: TestClient) -> None:
    found = client.request(method, "/v2/repository/index")
    assert (found.status_code, type(found.json()["error"])) == (404, str)


def test_pages_of_an_origin_that_was_named_may_call_and_others_may_not(client: TestClient) -> None:
    asks = {"Access-Control-Request-Method": "POST", "Access-Control-Request-Headers": "authorization"}
    found = client.options("/classify", headers={"Origin": "https://a.example", **asks})
    assert (found.status_code, found.headers["access-control-allow-origin"]) == (200, "https://a.example")
    assert client.options("/classify", headers={"Origin": "https://b.example", **asks}).status_code == 400
    mine = client.get("/health", headers={"Origin": "https://a.example"})
    assert "x-request-id" in mine.headers["access-control-expose-headers"]
    assert "access-control-allow-origin" not in client.get("/health", headers={"Origin": "https://b.example"}).headers


@pytest.mark.parametrize(
    "setting",
    [{"cors_origins": ("a.example",)}, {"cors_origins": ("https://a.example/x",)}, {"api_keys": ("schlüssel",)},
     {"api_keys": ("two words ",)}, {"max_text_chars": 0}, {"body_timeout_s": float("nan")}],
)  # fmt: skip
def test_settings_that_cannot_work_are_refused(setting: dict[str, Any]) -> None:
    with pytest.raises(ConfigError):
        ServerSettings(**setting)


@pytest.mark.parametrize("template", ["{:999999999}", "{0}", "{.__class__}", "{} {}", "none", "{", "{{}}"])
def test_a_template_of_hypotheses_holds_the_label_and_nothing_else(template: str, client: TestClient) -> None:
    body = {"model": "judge", "inputs": "help", "candidate_labels": ["bank"], "hypothesis_template": template}
    answer = client.post("/zero-shot", json=body)
    assert (answer.status_code, "hypothesis_template" in answer.text) == (422, True)


LONG = [
    ("/classify", {"model": "judge", "inputs": ["help", "a " * 1000]}),
    ("/tokenize", {"model": "judge", "inputs": "a " * 1001}),
    ("/rerank", {"query": "help", "documents": ["a " * 1000]}),
    ("/generate", {"inputs": "a " * 1001}),
    ("/v1/chat/completions", {"messages": [{"role": "user", "content": "a " * 1001}]}),
]


@pytest.mark.parametrize(("path", "body"), LONG)
def test_texts_that_a_tokenizer_would_read_for_seconds_are_refused_before(
    path: str, body: dict[str, Any], client: TestClient
) -> None:
    answer = client.post(path, json=body)
    assert (answer.status_code, "2000 letters" in answer.text) == (413, True)


def test_errors_are_short_whatever_they_quote(client: TestClient) -> None:
    for body in ({"inputs": "help", "model": "x" * 100_000}, {"inputs": "help", "x" * 100_000: 1}):
        assert len(client.post("/classify", json=body).content) < 3000


def test_more_rows_of_tensors_than_a_client_may_send_are_refused(client: TestClient) -> None:
    inputs = [
        {"name": name, "datatype": "INT64", "shape": [9, 2], "data": [1] * 18}
        for name in ("input_ids", "attention_mask")
    ]
    answer = client.post("/v2/models/judge/infer", json={"inputs": inputs})
    assert (answer.status_code, "at most 8" in answer.text) == (422, True)
