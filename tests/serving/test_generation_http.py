"""Tests of text generation over HTTP, in OpenAI's formats and as server-sent events."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from starlette.testclient import TestClient

import accel
from accel.artifact import Artifact
from accel.serving.continuous_batching.running_rows import RunningRows
from accel.serving.http.app import create_app
from accel.serving.http.server_settings import ServerSettings
from tests.serving.conftest import CHAT, post

PROMPT = "where is my card"
MESSAGES = [{"role": "user", "content": PROMPT}]
GREEDY = {"temperature": 0}


@pytest.fixture(scope="module")
def model(generator: Callable[..., Artifact]) -> Any:
    return accel.ORTModelForCausalLM.from_pretrained(generator("llama").path)


@pytest.fixture(scope="module")
def engine(model: Any) -> accel.Engine:
    return accel.Engine({"tiny": model}, max_queue=20)


@pytest.fixture(scope="module")
def client(engine: accel.Engine) -> Iterator[TestClient]:
    with TestClient(create_app(engine, ServerSettings(max_client_batch=3))) as test_client:
        engine.generator().tokenizer.chat_template = CHAT
        yield test_client


def events(client: TestClient, path: str, **body: Any) -> list[Any]:
    """Send a request and return the events of its streamed response, without the final `[DONE]`."""
    with client.stream("POST", path, json=body) as answer:
        assert answer.status_code == 200, answer.read()
        assert answer.headers["content-type"].startswith("text/event-stream")
        lines = [line for line in answer.iter_lines() if line]
    assert all(line.startswith("data: ") for line in lines)
    assert lines[-1] == "data: [DONE]"
    return [json.loads(line.removeprefix("data: ")) for line in lines[:-1]]


def expected(engine: accel.Engine, model: Any, text: str, new: int) -> str:
    tokenizer = engine.generator().tokenizer
    ids = torch.tensor([tokenizer(text)["input_ids"]])
    tokens = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=new)[0, ids.shape[1] :]
    return str(tokenizer.decode(tokens, skip_special_tokens=True))


def test_chat(client: TestClient, engine: accel.Engine, model: Any) -> None:
    answer = post(client, "/v1/chat/completions", model="tiny", messages=MESSAGES, max_tokens=9, **GREEDY)
    (choice,) = answer["choices"]
    prompt = len(engine.generator().encode(MESSAGES))
    ids = torch.tensor([engine.generator().encode(MESSAGES)])
    tokens = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=9)[0, prompt:]
    assert choice["message"]["role"] == "assistant"
    assert choice["message"]["content"] == engine.generator().tokenizer.decode(tokens, skip_special_tokens=True)
    assert choice["finish_reason"] == "length"
    assert answer["usage"] == {"prompt_tokens": prompt, "completion_tokens": 9, "total_tokens": prompt + 9}
    assert (answer["object"], answer["model"]) == ("chat.completion", "tiny")


def test_streamed_chat_equals_the_whole_response(client: TestClient) -> None:
    body = {"messages": MESSAGES, "max_completion_tokens": 9, **GREEDY}
    complete = post(client, "/v1/chat/completions", **body)
    chunks_and_usage = events(
        client, "/v1/chat/completions", stream=True, stream_options={"include_usage": True}, **body
    )
    *chunks, usage = chunks_and_usage
    deltas = [chunk["choices"][0]["delta"] for chunk in chunks]
    assert deltas[0] == {"role": "assistant", "content": ""}
    assert "".join(delta.get("content", "") for delta in deltas) == complete["choices"][0]["message"]["content"]
    assert sum(bool(delta.get("content")) for delta in deltas) > 3
    assert [chunk["choices"][0]["finish_reason"] for chunk in chunks[-2:]] == [None, "length"]
    assert (usage["choices"], usage["usage"]) == ([], complete["usage"])
    assert len({chunk["id"] for chunk in chunks_and_usage}) == 1


def test_unknown_model_is_answered_with_a_suggestion(client: TestClient) -> None:
    answer = client.post("/v1/chat/completions", json={"model": "tny", "messages": MESSAGES})
    assert answer.status_code == 404
    assert "Did you mean 'tiny'?" in answer.json()["error"]["message"]


def test_each_event_can_have_token_counts(client: TestClient) -> None:
    stream_options = {"include_usage": True, "continuous_usage_stats": True}
    chunks = events(
        client, "/v1/completions", prompt="pay", max_tokens=9, stream=True, stream_options=stream_options, **GREEDY
    )
    counts = [chunk["usage"]["completion_tokens"] for chunk in chunks]
    assert counts == sorted(counts)
    assert counts[-1] == 9


def test_message_content_in_parts(client: TestClient) -> None:
    parts = [{"role": "user", "content": [{"type": "text", "text": "where is "}, {"type": "text", "text": "my card"}]}]
    settings = {"max_tokens": 4, **GREEDY}
    answers = [post(client, "/v1/chat/completions", messages=m, **settings)["choices"] for m in (parts, MESSAGES)]
    assert answers[0] == answers[1]


def test_completions_of_texts_and_tokens(client: TestClient, engine: accel.Engine, model: Any) -> None:
    texts = [PROMPT, "help"]
    answer = post(client, "/v1/completions", prompt=texts, max_tokens=6, **GREEDY)
    assert [choice["index"] for choice in answer["choices"]] == [0, 1]
    assert [choice["text"] for choice in answer["choices"]] == [expected(engine, model, text, 6) for text in texts]
    ids = [engine.generator().encode(text) for text in texts]
    assert post(client, "/v1/completions", prompt=ids, max_tokens=6, **GREEDY)["choices"] == answer["choices"]
    assert answer["usage"]["prompt_tokens"] == sum(map(len, ids))


def test_streamed_completions_of_several_prompts(client: TestClient) -> None:
    body = {"prompt": [PROMPT, "help"], "max_tokens": 6, **GREEDY}
    complete = post(client, "/v1/completions", **body)
    texts = ["", ""]
    for chunk in events(client, "/v1/completions", stream=True, **body):
        texts[chunk["choices"][0]["index"]] += chunk["choices"][0]["text"]
    assert texts == [choice["text"] for choice in complete["choices"]]


def test_openai_completions_sample_by_default(client: TestClient) -> None:
    texts = {post(client, "/v1/completions", prompt=PROMPT, seed=seed)["choices"][0]["text"] for seed in range(4)}
    assert len(texts) > 1


@pytest.mark.parametrize("several", [False, True])
def test_stop_strings(client: TestClient, several: bool) -> None:
    body = {"messages": MESSAGES, "max_tokens": 30, **GREEDY}
    text = post(client, "/v1/chat/completions", **body)["choices"][0]["message"]["content"]
    word = text.split()[3]
    stop = ["nothing like it", word] if several else word
    answer = post(client, "/v1/chat/completions", stop=stop, **body)
    assert answer["choices"][0]["message"]["content"] == text[: text.index(word)]
    assert answer["choices"][0]["finish_reason"] == "stop"
    assert answer["usage"]["completion_tokens"] < 30
    chunks = events(client, "/v1/chat/completions", stop=stop, stream=True, **body)
    assert "".join(c["choices"][0]["delta"].get("content", "") for c in chunks) == text[: text.index(word)]


def test_generate_endpoint(client: TestClient, engine: accel.Engine, model: Any) -> None:
    """The endpoint `/generate` uses the model's generation config, so its default is greedy decoding."""
    *pieces, last = events(client, "/generate", inputs=PROMPT, max_new_tokens=7)
    text = "".join(piece["text"] for piece in [*pieces, last])
    assert text == expected(engine, model, PROMPT, 7)
    assert (last["finish_reason"], last["usage"]["completion_tokens"]) == ("length", 7)
    complete = post(client, "/generate", inputs=PROMPT, max_new_tokens=7, stream=False)
    assert complete == {"text": text, "finish_reason": "length", "usage": last["usage"]}


def test_responses_have_timing_headers(client: TestClient) -> None:
    headers = client.post("/generate", json={"inputs": PROMPT, "max_new_tokens": 2, "stream": False}).headers
    assert all(float(headers[f"x-{stage}-ms"]) >= 0 for stage in ("queue", "tokenization", "inference"))


@pytest.mark.parametrize(
    ("path", "body", "words"),
    [
        ("/v1/chat/completions", {"messages": []}, "messages"),
        ("/v1/chat/completions", {"messages": MESSAGES, "temperature": -1}, "temperature"),
        ("/v1/chat/completions", {"messages": MESSAGES, "max_tokens": 100_000}, "asks for 100000 new tokens"),
        ("/v1/chat/completions", {"messages": MESSAGES, "logit_bias": {"121": 1}}, "token id 121"),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": None}]}, "content"),
        ("/v1/completions", {"prompt": [[5], []]}, "no tokens"),
        ("/v1/completions", {"prompt": [[5], [-4]]}, "token id -4"),
        ("/v1/completions", {"prompt": ["a"] * 4}, "at most 3"),
        ("/generate", {"inputs": "card " * 400}, "prompt has"),
    ],
)
def test_invalid_bodies_are_refused(client: TestClient, path: str, body: dict[str, Any], words: str) -> None:
    for stream in (False, True):
        answer = client.post(path, json={**body, "stream": stream})
        assert answer.status_code == 422
        assert words in answer.json()["error"]["message"]


def test_empty_prompt_is_accepted_if_the_tokenizer_adds_tokens(client: TestClient) -> None:
    for path, body in (("/v1/completions", {"prompt": ""}), ("/generate", {"inputs": "", "max_new_tokens": 2})):
        assert client.post(path, json={**body, "stream": False}).status_code == 200


def test_metrics_equal_the_clients_token_counts(client: TestClient) -> None:
    def counted(name: str) -> float:
        lines = client.get("/metrics").text.splitlines()
        return sum(float(line.rpartition(" ")[2]) for line in lines if line.startswith(f"{name}_total{{"))

    before = counted("accel_generated_tokens"), counted("accel_prompt_tokens")
    usages = [
        post(client, "/v1/completions", prompt=[PROMPT, "help"], max_tokens=new, **GREEDY)["usage"]
        for new in range(1, 5)
    ]
    streamed = events(client, "/generate", inputs=PROMPT, max_new_tokens=5)[-1]["usage"]
    read = sum(usage["prompt_tokens"] for usage in [*usages, streamed])
    generated = sum(usage["completion_tokens"] for usage in [*usages, streamed])
    assert (counted("accel_generated_tokens"), counted("accel_prompt_tokens")) == (
        before[0] + generated,
        before[1] + read,
    )


class Slow:
    """Context that delays each decoding step of the running batch."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, seconds: float) -> None:
        step = RunningRows.step

        def slow(batch: RunningRows) -> None:
            time.sleep(seconds)
            step(batch)

        monkeypatch.setattr(RunningRows, "step", slow)


def test_too_many_requests_get_status_429(client: TestClient, monkeypatch: pytest.MonkeyPatch) -> None:
    Slow(monkeypatch, 0.01)
    statuses: list[int] = []

    def ask() -> None:
        answer = client.post("/v1/completions", json={"prompt": ["a", "b", "c"], "max_tokens": 20})
        statuses.append(answer.status_code)
        if answer.status_code == 429:
            assert int(answer.headers["retry-after"]) >= 1

    threads = [threading.Thread(target=ask) for _ in range(24)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert set(statuses) == {200, 429}


def test_no_token_in_time_gives_a_timeout(model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    Slow(monkeypatch, 1.0)
    engine = accel.Engine({"tiny": model}, timeout_s=0.1)
    with TestClient(create_app(engine)) as client:
        answer = client.post("/generate", json={"inputs": PROMPT, "max_new_tokens": 5, "stream": False})
        assert answer.status_code == 504
        with client.stream("POST", "/generate", json={"inputs": PROMPT, "max_new_tokens": 5}) as streamed:
            last = [line for line in streamed.iter_lines() if line][-1]
        assert json.loads(last.removeprefix("data: "))["error"]["type"] == "timeout"
        scheduler = engine.generator().scheduler
    assert scheduler.running == 0
