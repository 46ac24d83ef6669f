"""Tests of every request field of OpenAI, Cohere and text-embeddings-inference: a field has an effect, or is refused by
name with a fix.
"""

from __future__ import annotations

import base64
import json
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from starlette.testclient import TestClient

import accel
from accel.serving.http.app import create_app, endpoints
from accel.serving.http.unserved_paths import UNSUPPORTED
from accel.testing.models import save_tiny

STORED = json.loads((Path(__file__).parents[1] / "fixtures/api_fields/fields.json").read_text(encoding="utf-8"))
FIELDS: Mapping[str, list[str]] = {
    path: fields
    for api in ("openai", "cohere", "text-embeddings-inference")
    for path, fields in STORED[api]["paths"].items()
    if path not in UNSUPPORTED
}
ELSEWHERE = {
    ("/v1/chat/completions", field) for field in ("parallel_tool_calls", "response_format", "tool_choice", "tools")
}
"""Fields with their own tests in `test_openai_chat.py`."""
CASES = [(path, field) for path, fields in FIELDS.items() for field in fields if (path, field) not in ELSEWHERE]
BODIES = {endpoint.path: endpoint.body for endpoint in endpoints() if endpoint.body is not None}
LONG = "card " * 120 + "bank"
"""A text with more than the 94 tokens that the models accept; its last word differs from the other words."""

BASE: dict[str, dict[str, Any]] = {
    "/v1/embeddings": {"input": "my card"},
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "help"}], "temperature": 0, "max_tokens": 6},
    "/v1/completions": {"prompt": "help", "temperature": 0, "max_tokens": 6},
    "/v2/embed": {"texts": ["my card"]},
    "/embed_sparse": {"inputs": "my card"},
    "/embed_all": {"inputs": "my card"},
    "/v2/rerank": {"query": "help", "documents": ["bank", "card"]},
    "/embed": {"inputs": "my card"},
    "/rerank": {"query": "help", "texts": ["bank", LONG]},
    "/similarity": {"inputs": {"source_sentence": "my card", "sentences": ["help", "my card", LONG]}},
    "/tokenize": {"inputs": "my card"},
}
"""A valid request body for each path."""

TOOL = {"type": "function", "function": {"name": "pay", "parameters": {}}}
SENT: dict[str, Any] = {
    "audio": {"voice": "alloy", "format": "wav"},
    "best_of": 2,
    "echo": True,
    "frequency_penalty": 2,
    "function_call": "auto",
    "functions": [TOOL["function"]],
    "images": ["data:image/png;base64,AA=="],
    "inputs /similarity": {"source_sentence": "help", "sentences": ["help"]},
    "parameters": {"prompt_name": "query"},
    "inputs /v2/embed": [{"content": [{"type": "text", "text": "help"}]}],
    "logit_bias": {"9": 100},
    "logprobs": True,
    "logprobs /v1/completions": 1,
    "max_tokens": 2,
    "max_tokens /v2/embed": 2,
    "max_completion_tokens": 2,
    "max_tokens_per_doc": 10,
    "metadata": {"team": "cards"},
    "modalities": ["text", "audio"],
    "moderation": {"model": "omni"},
    "n": 2,
    "parallel_tool_calls": False,
    "prediction": {"type": "content", "content": "help"},
    "presence_penalty": 2,
    "priority": 3,
    "prompt_cache_key": "k",
    "prompt_cache_options": {"mode": "explicit"},
    "prompt_cache_retention": "24h",
    "reasoning_effort": "high",
    "relevant_spans": True,
    "response_format": {"type": "json_object"},
    "safety_identifier": "u",
    "seed": 3,
    "service_tier": "flex",
    "stop": "a",
    "store": True,
    "stream": True,
    "stream_options": {"include_usage": True},
    "suffix": "end",
    "temperature": 0.5,
    "tool_choice": "required",
    "tools": [TOOL],
    "top_logprobs": 2,
    "top_p": 0.1,
    "user": "u",
    "verbosity": "low",
    "web_search_options": {},
    "dimensions": 8,
    "encoding_format": "base64",
    "output_dimension": 8,
    "embedding_types": ["float", "base64"],
    "input_type": "search_query",
    "truncate": True,
    "truncate /v2/embed": "START",
    "truncation_direction": "Left",
    "normalize": False,
    "prompt_name": "query",
    "raw_scores": True,
    "return_text": True,
    "add_special_tokens": False,
    "top_n": 1,
    "input": [[2, 9, 11, 3]],
    "messages": [{"role": "user", "content": "card"}],
    "prompt": "card",
    "texts": ["bank"],
    "texts /rerank": ["bank"],
    "documents": ["bank"],
    "inputs": ["bank"],
    "query": "where is my card",
}
"""A plausible value for each field. A key `FIELD PATH` is a value only for this path."""
ALONG: dict[tuple[str, str], dict[str, Any]] = {
    ("/v1/chat/completions", "seed"): {"temperature": 1},
    ("/v1/completions", "seed"): {"temperature": 1},
    ("/v1/chat/completions", "top_logprobs"): {"logprobs": True},
    ("/v1/chat/completions", "stop"): {"logit_bias": {"9": 100}},
    ("/v1/chat/completions", "top_p"): {"temperature": 1, "seed": 1},
    ("/v1/completions", "top_p"): {"temperature": 1, "seed": 1},
    ("/v1/chat/completions", "temperature"): {"seed": 5},
    ("/v1/completions", "temperature"): {"seed": 5},
    ("/v1/chat/completions", "stream_options"): {"stream": True},
    ("/v1/completions", "stream_options"): {"stream": True},
    ("/embed", "truncation_direction"): {"inputs": LONG},
    ("/embed", "truncate"): {"inputs": LONG},
    ("/v2/embed", "truncate"): {"texts": [LONG]},
    ("/embed_sparse", "truncation_direction"): {"inputs": LONG},
    ("/embed_all", "truncation_direction"): {"inputs": LONG},
}
"""For each path and field, the other fields that are also sent, because the field alone has no effect."""


@pytest.fixture(scope="module")
def client(shared: Callable[..., Path], served: Callable[[str], accel.ORTModel]) -> Iterator[TestClient]:
    def vectors(folder: Path) -> None:
        save_tiny(folder, "bert", "sentence-similarity")
        # With these files, the model also computes the sparse and multi-vector embeddings of BGE-M3.
        generator = torch.Generator().manual_seed(0)
        for name, size in (("sparse_linear", 1), ("colbert_linear", 4)):
            weight = torch.randn(size, 32, generator=generator)
            torch.save({"weight": weight, "bias": torch.zeros(size)}, folder / f"{name}.pt")
        kinds = ("Transformer", "Pooling")
        entries = [
            {"path": f"{i}_{kind}" if i else "", "type": f"sentence_transformers.models.{kind}"}
            for i, kind in enumerate(kinds)
        ]
        (folder / "modules.json").write_text(json.dumps(entries))
        (folder / "1_Pooling").mkdir()
        (folder / "1_Pooling" / "config.json").write_text('{"pooling_mode_mean_tokens": true}')
        prompts = {"prompts": {"query": "where is ", "passage": "the "}, "default_prompt_name": None}
        (folder / "config_sentence_transformers.json").write_text(json.dumps(prompts))

    embedder = accel.ORTModel.from_pretrained(
        shared("fields-vectors", vectors), backend="pytorch", task="sentence-similarity"
    )
    models = {"vectors": embedder, "scores": served("rank"), "chat": served("chat")}
    with TestClient(create_app(accel.Engine(models))) as test_client:
        yield test_client


def model_of(path: str) -> str:
    return "scores" if "rerank" in path else "chat" if "completions" in path else "vectors"


def ask(client: TestClient, path: str, **body: Any) -> Any:
    answer = client.post(path, json={"model": model_of(path), **BASE[path], **body})
    assert answer.status_code == 200, answer.text
    if body.get("stream"):
        return [json.loads(line[6:]) for line in answer.text.splitlines() if line.startswith("data: {")]
    return plain(answer.json())


def plain(answer: Any) -> Any:
    """Return a JSON response without the fields that differ in every response."""
    return {k: v for k, v in answer.items() if k not in ("id", "created")} if isinstance(answer, dict) else answer


def error_text(answer: Any) -> str:
    """Return the error text of a response, as a client of the API shows it."""
    values = answer.json()
    error = values.get("error", values.get("message"))
    return error if isinstance(error, str) else f"{error['message']} Fix: {error['fix']}"


@pytest.mark.parametrize(("path", "field"), CASES)
def test_each_field_changes_the_response_or_is_refused(path: str, field: str, client: TestClient) -> None:
    if field == "model":
        ask(client, path)
        answer = client.post(path, json={**BASE[path], "model": "other"})
        assert (answer.status_code, "'other'" in error_text(answer)) == (404, True)
        return
    value = SENT.get(f"{field} {path}", SENT.get(field))
    along = ALONG.get((path, field), {})
    body = {"model": model_of(path), **BASE[path], **along, field: value}
    declared = BODIES[path]
    if field in getattr(declared, "ignored", {}):
        assert ask(client, path, **along, **{field: value}) == ask(client, path, **along)
        return
    answer = client.post(path, json=body)
    if answer.status_code != 200:
        assert 400 <= answer.status_code < 500
        text = error_text(answer)
        assert f"`{field}`" in text or f"`{field}[" in text or f"`{field}." in text
        remedy = {**declared.remedies, **declared.refused}[field]  # type: ignore[attr-defined, union-attr]
        assert text.endswith(f"Fix: {remedy}")
        return
    if (path, field) in CHECKS:
        CHECKS[path, field](client)
        return
    assert ask(client, path, **along, **{field: value}) != ask(client, path, **along)


def vector(client: TestClient, path: str, **body: Any) -> Any:
    answer = ask(client, path, **body)
    if path == "/embed":
        return np.array(answer[0])
    return np.array(answer["data"][0]["embedding"] if path == "/v1/embeddings" else answer["embeddings"]["float"][0])


def reduced(client: TestClient, path: str, field: str) -> None:
    full, part = vector(client, path), vector(client, path, **{field: 8})
    assert part.shape == (8,)
    assert np.allclose(part, full[:8] / np.linalg.norm(full[:8]), atol=1e-5)


def prompted(client: TestClient, path: str, **body: Any) -> None:
    name = "texts" if path == "/v2/embed" else "inputs"
    text = "where is my card"
    assert np.allclose(
        vector(client, path, **body), vector(client, path, **{name: [text] if name == "texts" else text}), atol=1e-5
    )


def cut(client: TestClient, path: str, cut_at_left: Any, refused: Any) -> None:
    name = "texts" if path == "/v2/embed" else "inputs"

    def body(text: str) -> dict[str, Any]:
        return {name: [text] if name == "texts" else text}

    assert np.allclose(vector(client, path, **body(LONG)), vector(client, path, **body("card " * 92)), atol=1e-5)
    assert np.allclose(
        vector(client, path, **body(LONG), **cut_at_left),
        vector(client, path, **body("card " * 91 + "bank")),
        atol=1e-5,
    )
    answer = client.post(path, json={**BASE[path], **body(LONG), **refused})
    assert answer.status_code == 422
    assert "123 tokens, but the model accepts at most 94" in error_text(answer)


def tokens_as_texts(client: TestClient) -> None:
    (row,) = client.post("/tokenize", json={"model": "vectors", "inputs": "my card"}).json()
    ids = [token["id"] for token in row]
    for tokens in (ids, [ids]):
        assert np.allclose(
            vector(client, "/v1/embeddings", input=tokens), vector(client, "/v1/embeddings", input="my card"), atol=1e-5
        )


def encoded(client: TestClient) -> None:
    text = ask(client, "/v1/embeddings", encoding_format="base64")["data"][0]["embedding"]
    assert np.allclose(np.frombuffer(base64.b64decode(text), "<f4"), vector(client, "/v1/embeddings"), atol=1e-6)


def encoded_twice(client: TestClient) -> None:
    embeddings = ask(client, "/v2/embed", embedding_types=["float", "base64"])["embeddings"]
    assert np.allclose(
        np.frombuffer(base64.b64decode(embeddings["base64"][0]), "<f4"), embeddings["float"][0], atol=1e-6
    )


def not_normalized(client: TestClient) -> None:
    embedding = vector(client, "/embed", normalize=False)
    assert abs(np.linalg.norm(embedding) - 1) > 0.1
    assert np.allclose(embedding / np.linalg.norm(embedding), vector(client, "/embed"), atol=1e-5)


def cosines(client: TestClient) -> None:
    first, *others = (vector(client, "/embed", inputs=text) for text in ("my card", "help", "my card", LONG))
    assert np.allclose(ask(client, "/similarity"), [first @ other for other in others], atol=1e-5)


def prompted_cosines(client: TestClient) -> None:
    texts = {"source_sentence": "my card", "sentences": ["help"]}
    first, second = (vector(client, "/embed", inputs=f"where is {text}") for text in ("my card", "help"))
    answer = ask(client, "/similarity", inputs=texts, parameters={"prompt_name": "query"})
    assert np.allclose(answer, [first @ second], atol=1e-5)
    answer = client.post("/similarity", json={**BASE["/similarity"], "parameters": {"truncate": False}})
    assert "tokens, but the model accepts at most 94" in error_text(answer)


def test_scores_of_pairs_equal_those_of_rerank(client: TestClient) -> None:
    texts = ["bank", "card", "paris"]

    def score(**body: Any) -> list[float]:
        data = client.post("/score", json={"model": "scores", **body}).json()["data"]
        assert [entry["index"] for entry in data] == list(range(len(data)))
        return [entry["score"] for entry in data]

    expected = {
        query: {entry["index"]: entry["score"] for entry in ask(client, "/rerank", query=query, texts=texts)}
        for query in ("help", "my card")
    }
    assert np.allclose(score(text_1="help", text_2=texts), [expected["help"][i] for i in range(3)], atol=1e-6)
    pairs = score(text_1=["help", "my card", "help"], text_2=texts)
    assert np.allclose(pairs, [expected["help"][0], expected["my card"][1], expected["help"][2]], atol=1e-6)
    assert np.allclose(score(text_1=["my card"], text_2="bank"), [expected["my card"][0]], atol=1e-6)
    answer = client.post("/score", json={"model": "scores", "text_1": ["a", "b"], "text_2": texts})
    assert (answer.status_code, "they have 2 and 3 texts" in error_text(answer)) == (422, True)


def scores_of_pairs(client: TestClient) -> None:
    raw = {entry["index"]: entry["score"] for entry in ask(client, "/rerank", raw_scores=True)}
    for entry in ask(client, "/rerank"):
        assert torch.tensor(raw[entry["index"]]).sigmoid().item() == pytest.approx(entry["score"], abs=1e-5)


def documents_not_cut(client: TestClient) -> None:
    answer = client.post("/rerank", json={**BASE["/rerank"], "truncate": False})
    assert "Text 1 has 125 tokens, but the model accepts at most 94" in error_text(answer)
    assert ask(client, "/rerank", truncate=True) == ask(client, "/rerank")


def text_not_cut(client: TestClient, path: str) -> None:
    answer = client.post(path, json={**BASE[path], "model": model_of(path), "inputs": LONG, "truncate": False})
    assert "tokens, but the model accepts at most 94" in error_text(answer)
    assert ask(client, path, inputs=LONG, truncate=True) == ask(client, path, inputs=LONG)


CHECKS: dict[tuple[str, str], Callable[[TestClient], None]] = {
    ("/embed_sparse", "truncate"): lambda client: text_not_cut(client, "/embed_sparse"),
    ("/embed_all", "truncate"): lambda client: text_not_cut(client, "/embed_all"),
    ("/v1/embeddings", "dimensions"): lambda client: reduced(client, "/v1/embeddings", "dimensions"),
    ("/embed", "dimensions"): lambda client: reduced(client, "/embed", "dimensions"),
    ("/v2/embed", "output_dimension"): lambda client: reduced(client, "/v2/embed", "output_dimension"),
    ("/embed", "prompt_name"): lambda client: prompted(client, "/embed", prompt_name="query"),
    ("/v2/embed", "input_type"): lambda client: prompted(client, "/v2/embed", input_type="search_query"),
    ("/embed", "truncate"): lambda client: cut(client, "/embed", {"truncation_direction": "Left"}, {"truncate": False}),
    ("/v2/embed", "truncate"): lambda client: cut(client, "/v2/embed", {"truncate": "START"}, {"truncate": "NONE"}),
    ("/v1/embeddings", "input"): tokens_as_texts,
    ("/v1/embeddings", "encoding_format"): encoded,
    ("/v2/embed", "embedding_types"): encoded_twice,
    ("/embed", "normalize"): not_normalized,
    ("/rerank", "raw_scores"): scores_of_pairs,
    ("/similarity", "inputs"): cosines,
    ("/similarity", "parameters"): prompted_cosines,
    ("/rerank", "truncate"): documents_not_cut,
}  # fmt: skip
"""Functions that check the effect of a field. Used if a different response is not enough to prove the effect."""


def test_every_test_value_belongs_to_a_field() -> None:
    names = {field for _, field in (*CASES, *ELSEWHERE)}
    assert {name.split()[0] for name in SENT} <= names
    assert names - {"model"} <= {name.split()[0] for name in SENT}


@pytest.mark.parametrize("path", UNSUPPORTED)
def test_unserved_paths_name_a_replacement(path: str, client: TestClient) -> None:
    answer = client.request("GET" if path == "/info" else "POST", path, json={})
    assert answer.status_code == 501
    assert error_text(answer) == f"This server does not support the path {path}. Fix: {UNSUPPORTED[path]}"


@pytest.mark.parametrize("path", ["/v1/images/generations", "/v1/audio/speech", "/v1/rerank", "/embedd", "/v2/parse"])
def test_unknown_paths_list_known_paths(path: str, client: TestClient) -> None:
    answer = client.post(path, json={})
    assert answer.status_code == 404
    assert (
        "/embed" in error_text(answer) or "/v1/embeddings" in error_text(answer) or "/v2/rerank" in error_text(answer)
    )
    assert "/ner" not in error_text(answer), "no model of the server supports this path"
    assert "/qa" not in error_text(answer)


@pytest.mark.parametrize(
    ("tokens", "words"),
    [
        ([9, 11], "The token ids of input 0 do not begin with [2]"),
        ([2, 9, 500, 3], "token id 500"),
        ([2, *[9] * 200, 3], "202 tokens, but the model accepts at most 94"),
        ([2, -1, 3], "`input[1]` is -1"),
        ([[2, 9, 3], "help"], '`input` is [[2, 9, 3], "help"]'),
        ([[]], "`input[0]` is []"),
    ],
)
def test_invalid_token_ids_are_refused(tokens: Any, words: str, client: TestClient) -> None:
    answer = client.post("/v1/embeddings", json={"input": tokens})
    assert answer.status_code == 422
    assert words in error_text(answer)


def test_errors_have_the_format_of_each_api(client: TestClient) -> None:
    openai = client.post("/v1/embeddings", json={"input": 3}).json()["error"]
    assert openai["message"].endswith(f"Fix: {openai['fix']}")
    assert (openai["param"], openai["type"], openai["code"]) == ("input", "invalid_request", "invalid_request")
    tei = client.post("/embed", json={"inputs": 3}).json()
    assert (type(tei["error"]), tei["error_type"]) == (str, "Validation")
    cohere = client.post("/v2/embed", json={"texts": 3}).json()
    assert set(cohere) == {"id", "message"}


def test_unknown_prompt_name_lists_known_names(client: TestClient) -> None:
    answer = client.post("/embed", json={"inputs": "card", "prompt_name": "qery"})
    assert "'qery'" in error_text(answer)
    assert "query, passage" in error_text(answer)


@pytest.mark.parametrize(
    ("path", "body", "sentence"),
    [
        ("/classify", {"inputs": 3}, "`inputs` is 3; expected a text or an object with text, text_pair or a list of texts"),
        ("/classify", {"inputs": ["a", 3]}, "`inputs[1]` is 3; expected a text or an object with text, text_pair."),
        ("/classify", {}, "`inputs` is missing: expected a text"),
        ("/classify", {"inputs": "a", "top_k": 0}, "`top_k` is 0; expected a whole number from 1 or null."),
        ("/classify", {"inputs": "a", "tpo_k": 1}, "`tpo_k` is unknown. Did you mean 'top_k'?"),
        ("/v1/chat/completions", {"messages": "help"}, '`messages` is "help"; expected a list that is not empty of objects'),
        ("/v1/chat/completions", {"messages": [{"content": "a"}]}, "`messages[0].role` is missing"),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": [{"type": "x"}]}]}, '`messages[0].content[0].type` is "x"'),
        ("/v1/completions", {"prompt": "a", "stop": 1}, "`stop` is 1; expected a text or a list of texts or null."),
        ("/v1/embeddings", {"input": {"a": 1}}, '`input` is {"a": 1}; expected a text'),
        ("/zero-shot", {"inputs": "a", "candidate_labels": "x"}, '`candidate_labels` is "x"; expected a list that is not empty of texts.'),
        ("/rerank", {"query": "a"}, "The body must contain either documents or texts, and not both."),
        ("/v2/models/scores/infer", {"inputs": [{"name": "x"}]}, "`inputs[0].datatype` is missing: expected a text."),
        ("/invocations", {"inputs": 3, "parameters": {"model": "vectors"}}, "`inputs` is 3; expected"),
        ("/classify", [], "The body is []; expected an object"),
    ],
)  # fmt: skip
def test_invalid_body_is_described_in_one_sentence(path: str, body: Any, sentence: str, client: TestClient) -> None:
    answer = client.post(path, json=body)
    assert answer.status_code == 422
    assert error_text(answer).startswith(sentence), error_text(answer)


WRONG = (3, -1.5, True, "", "x", [], [3], [[]], [None], {}, {"a": [1]}, None)
_OURS = ("Input should", "pydantic", "constrained", "function-", "str]", "list[", "valid string", "type=")


@pytest.mark.parametrize("path", sorted({item.path for item in endpoints() if item.body is not None}))
def test_errors_do_not_quote_pydantic(path: str, client: TestClient) -> None:
    (endpoint,) = (item for item in endpoints() if item.path == path)
    url = path.replace("{model}", "scores").replace("{version}", "1")
    assert endpoint.body is not None
    for field in endpoint.body.model_fields:
        for value in WRONG:
            answer = client.post(url, json={**endpoint.example, field: value})
            assert answer.status_code < 500, (field, value, answer.text)
            if answer.status_code == 422:
                text = error_text(answer)
                assert not any(word in text for word in _OURS), (field, value, text)
