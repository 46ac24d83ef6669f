"""Tests of OpenAI's Responses API and of transcriptions over HTTP."""

from __future__ import annotations

import io
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import soundfile
from starlette.testclient import TestClient

import accel
from accel.artifact import Artifact
from accel.serving.http.app import create_app
from accel.serving.http.openai_transcriptions import form_fields
from accel.serving.http.replies import HttpError
from tests.serving.conftest import post
from tests.serving.test_openai_chat import MESSAGES, PAY, SCHEMA, check, grammars  # noqa: F401
from tests.serving.test_openai_chat import client as client  # the same server

PATH = "/v1/responses"
TOOL = {"type": "function", **PAY["function"]}  # type: ignore[dict-item]


def events(client: TestClient, **body: Any) -> list[Any]:
    answer = client.post(PATH, json={"stream": True, **body})
    assert answer.status_code == 200, answer.text
    lines = answer.text.split("\n\n")[:-1]
    parsed = [json.loads(line.split("\ndata: ")[1]) for line in lines]
    assert [line.split("\n")[0] for line in lines] == [f"event: {event['type']}" for event in parsed]
    assert [event["sequence_number"] for event in parsed] == list(range(len(parsed)))
    return parsed


def text_of(response: Any) -> str:
    (item,) = response["output"]
    (part,) = item["content"]
    assert part["type"] == "output_text"
    return str(part["text"])


def test_response_equals_the_chat(client: TestClient) -> None:
    settings = {"temperature": 0}
    chat = post(client, "/v1/chat/completions", messages=MESSAGES, max_tokens=6, **settings)
    forms = (
        "where is my card",
        MESSAGES,
        [{"role": "user", "content": [{"type": "input_text", "text": "where is my card"}]}],
    )
    for form in forms:
        response = post(client, PATH, input=form, max_output_tokens=6, **settings)
        assert text_of(response) == chat["choices"][0]["message"]["content"]
        assert (response["object"], response["status"]) == ("response", "incomplete")
        assert response["incomplete_details"] == {"reason": "max_output_tokens"}
        assert response["usage"]["input_tokens"] == chat["usage"]["prompt_tokens"]


def test_instructions_are_the_system_message(client: TestClient) -> None:
    messages = [{"role": "system", "content": "Be kind"}, *MESSAGES]
    chat = post(client, "/v1/chat/completions", messages=messages, max_tokens=6, temperature=0)
    body = {"input": "where is my card", "instructions": "Be kind", "max_output_tokens": 6, "temperature": 0}
    assert text_of(post(client, PATH, **body)) == chat["choices"][0]["message"]["content"]


def test_streamed_response_equals_the_complete_response(client: TestClient) -> None:
    body = {"input": "where is my card", "max_output_tokens": 6, "temperature": 0}
    complete, streamed = post(client, PATH, **body), events(client, **body)
    assert [event["type"] for event in streamed[:4]] == [
        "response.created", "response.in_progress", "response.output_item.added", "response.content_part.added",
    ]  # fmt: skip
    assert [event["type"] for event in streamed[-4:]] == [
        "response.output_text.done", "response.content_part.done", "response.output_item.done", "response.incomplete",
    ]  # fmt: skip
    text = "".join(event["delta"] for event in streamed if event["type"] == "response.output_text.delta")
    assert text == text_of(complete) == text_of(streamed[-1]["response"])
    assert streamed[-1]["response"]["usage"] == complete["usage"]


@pytest.mark.usefixtures("grammars")
def test_json_and_calls(client: TestClient) -> None:
    wanted_format = {"format": {"type": "json_schema", "name": "answer", "strict": True, "schema": SCHEMA}}
    response = post(client, PATH, input="help", text=wanted_format, max_output_tokens=400)
    assert response["status"] == "completed"
    check(json.loads(text_of(response)))
    body = {"input": "help", "tools": [TOOL], "tool_choice": "required", "max_output_tokens": 200, "temperature": 0}
    (call,) = post(client, PATH, **body)["output"]
    assert (call["type"], call["name"], list(json.loads(call["arguments"]))) == ("function_call", "pay", ["to", "sum"])
    streamed = events(client, **body)
    (item,) = streamed[-1]["response"]["output"]
    assert item["arguments"] == call["arguments"]
    history = [*MESSAGES, call, {"type": "function_call_output", "call_id": call["call_id"], "output": "paid"}]
    assert post(client, PATH, input=history, tools=[TOOL], max_output_tokens=3)["output"]


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"previous_response_id": "resp_1"}, "`previous_response_id` is not supported"),
        ({"reasoning": {"effort": "low"}}, "`reasoning` is not supported"),
        ({"input": [{"type": "function_call", "call_id": "1"}]}, "cannot be converted"),
    ],
)
def test_unsupported_fields_are_refused(client: TestClient, fields: Any, message: str) -> None:
    answer = client.post(PATH, json={"input": "help", **fields})
    assert answer.status_code == 422
    assert message in answer.json()["error"]["message"]


# Transcriptions.


def recording(seconds: float = 0.5, rate: int = 16000) -> bytes:
    file = io.BytesIO()
    samples = np.random.default_rng(0).normal(0, 0.1, int(seconds * rate)).astype(np.float32)
    soundfile.write(file, samples, rate, format="WAV")
    return file.getvalue()


@pytest.fixture(scope="module", params=["moonshine", "wav2vec2"])
def speech(
    request: pytest.FixtureRequest, generator: Callable[..., Artifact], tiny_folder: Callable[..., Path]
) -> Iterator[TestClient]:
    if request.param == "moonshine":
        model: Any = accel.ORTModel.from_pretrained(generator("moonshine").path)
    else:
        model = accel.ORTModel.from_pretrained(tiny_folder("wav2vec2", "ctc"), backend="pytorch", task="ctc")
    with TestClient(create_app(accel.Engine({"speech": model}))) as test_client:
        yield test_client


def test_transcriptions(speech: TestClient) -> None:
    path, file = "/v1/audio/transcriptions", {"file": ("a.wav", recording())}
    answer = speech.post(path, files=file, data={"model": "speech"})
    assert answer.status_code == 200, answer.text
    text = answer.json()["text"]
    assert speech.post(path, files=file, data={"response_format": "text"}).text == text + "\n"
    timed = {"file": ("b.wav", recording(0.5, 8000))}
    answer = speech.post(path, files=timed, data={"response_format": "verbose_json"})
    if speech.get("/v1/models").json()["data"][0]["task"] != "ctc":
        # Only Whisper and CTC models return times.
        assert "returns no times" in answer.text
        return
    assert answer.status_code == 200, answer.text
    assert answer.json()["duration"] == 0.5
    answer = speech.post(path, files=file, data={"response_format": "vtt"})
    assert answer.text.startswith("WEBVTT\n")


def test_invalid_transcriptions_are_refused(speech: TestClient) -> None:
    path, file = "/v1/audio/transcriptions", {"file": ("a.wav", recording())}
    cases = [
        ({"files": file, "data": {"prompt": "Hello"}}, 422, "`prompt` is not supported"),
        ({"files": file, "data": {"response_format": "pdf"}}, 422, "`response_format` is"),
        ({"files": {"file": ("a.wav", b"no sound")}}, 422, "cannot be read"),
        ({"files": {"other": ("a.wav", b"no sound")}}, 422, "`file` is missing"),
        ({"json": {}}, 400, "not a form"),
    ]
    for sent, status, message in cases:
        answer = speech.post(path, **sent)  # type: ignore[arg-type]
        assert (answer.status_code, message in answer.json()["error"]["message"]) == (status, True), answer.text


def test_form_with_any_bytes() -> None:
    random = np.random.default_rng(0)
    for size in range(0, 400, 7):
        content = bytes(random.choice([13, 10, 45, 66, 0, 255], size).astype(np.uint8))
        body = (
            b'--B0\r\nContent-Disposition: form-data; name="file"; filename="a"\r\nContent-Type: audio/wav\r\n\r\n'
            + content
        )
        body += b'\r\n--B0\r\nContent-Disposition: form-data; name="model"\r\n\r\nm\r\n--B0--\r\n'
        if b"\r\n--B0" not in content:
            assert form_fields("multipart/form-data; boundary=B0", body) == {"file": content, "model": b"m"}
        for cut in (0, 3, 40, len(body) - 9):
            with pytest.raises(HttpError):
                form_fields("multipart/form-data; boundary=B0", body[:cut])
