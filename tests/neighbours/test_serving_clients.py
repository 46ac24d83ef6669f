"""Tests of accel's server with OpenAI's client, with Triton's client, and with a fuzzer that reads the server's OpenAPI
description.
"""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
import uvicorn

import accel
from accel.serving.http.app import create_app
from accel.serving.http.server_settings import ServerSettings

TEXTS = ["where is my card", "the bank is closed"]


@pytest.fixture(scope="module")
def models(tiny_folder: Callable[..., Path]) -> dict[str, accel.ORTModel]:
    tasks = {"labels": "text-classification", "vectors": "sentence-similarity", "tags": "token-classification"}
    return {
        name: accel.ORTModel.from_pretrained(tiny_folder("bert", task), backend="pytorch", task=task)
        for name, task in tasks.items()
    }


@pytest.fixture(scope="module")
def address(models: dict[str, accel.ORTModel]) -> Iterator[str]:
    """Yield the host and port of a server that runs in a thread and requires an API key."""
    app = create_app(accel.Engine(models), ServerSettings(api_keys=("secret",), max_body_bytes=100_000))
    with socket.create_server(("127.0.0.1", 0)) as door:
        server = uvicorn.Server(uvicorn.Config(app, log_config=None, lifespan="on"))
        thread = threading.Thread(target=server.run, kwargs={"sockets": [door]})
        thread.start()
        while not server.started:
            assert thread.is_alive()
            time.sleep(0.01)
        host, port = door.getsockname()
        yield f"{host}:{port}"
        server.should_exit = True
        thread.join(30)


@pytest.mark.parametrize("encoding", [None, "float"])
def test_openai(encoding: str | None, address: str, models: dict[str, accel.ORTModel]) -> None:
    openai = pytest.importorskip("openai")
    with openai.OpenAI(base_url=f"http://{address}/v1", api_key="secret") as client:
        assert [item.id for item in client.models.list().data] == list(models)
        chosen = {} if encoding is None else {"encoding_format": encoding}
        response = client.embeddings.create(model="vectors", input=TEXTS, **chosen)
        expected = models["vectors"].encode(TEXTS, normalize_embeddings=True)  # type: ignore[attr-defined]
        assert np.allclose([item.embedding for item in response.data], expected, atol=1e-5)
        with pytest.raises(openai.NotFoundError, match="no model 'nope'"):
            client.embeddings.create(model="nope", input="help")
    stranger = openai.OpenAI(base_url=f"http://{address}/v1", api_key="wrong", max_retries=0)
    with stranger as client, pytest.raises(openai.AuthenticationError):
        client.models.list()


@pytest.mark.parametrize("binary", [True, False])
def test_triton(binary: bool, address: str, models: dict[str, accel.ORTModel]) -> None:
    http = pytest.importorskip("tritonclient.http")
    headers = {"Authorization": "Bearer secret"}
    with http.InferenceServerClient(address) as client:
        assert client.is_server_live()
        assert client.is_server_ready()
        assert client.is_model_ready("labels", headers=headers)
        metadata = client.get_model_metadata("labels", headers=headers)
        assert {tensor["name"] for tensor in metadata["inputs"]} >= {"input_ids", "attention_mask"}
        feeds = {
            "input_ids": np.array([[2, 9, 11, 3], [2, 12, 3, 0]]),
            "attention_mask": np.array([[1] * 4, [1, 1, 1, 0]]),
        }
        inputs = []
        for name, values in feeds.items():
            tensor = http.InferInput(name, list(values.shape), "INT64")
            tensor.set_data_from_numpy(values, binary_data=binary)
            inputs.append(tensor)
        requested = [http.InferRequestedOutput("logits", binary_data=binary)]
        answer = client.infer("labels", inputs, outputs=requested, request_id="7", headers=headers)
        expected = models["labels"](**{name: torch.from_numpy(values) for name, values in feeds.items()}).logits
        assert np.allclose(answer.as_numpy("logits"), expected, atol=1e-5)
        assert answer.get_response()["id"] == "7"


@pytest.mark.parametrize("binary", [True, False])
def test_triton_with_texts(binary: bool, address: str, models: dict[str, accel.ORTModel]) -> None:
    http = pytest.importorskip("tritonclient.http")
    headers = {"Authorization": "Bearer secret"}
    texts = ["where is my card", "die Bänk 👩"]
    with http.InferenceServerClient(address) as client:
        (described,) = client.get_model_metadata("labels.text", headers=headers)["inputs"]
        text_input = http.InferInput(described["name"], [2, 1], described["datatype"])
        text_input.set_data_from_numpy(np.array([[text] for text in texts], dtype=object), binary_data=binary)
        requested = [http.InferRequestedOutput(name, binary_data=binary) for name in ("LABEL", "SCORE")]
        answer = client.infer("labels.text", [text_input], outputs=requested, headers=headers)
        labels_of_answer = answer.as_numpy("LABEL")[:, 0]
        labels = [item.decode() if isinstance(item, bytes) else item for item in labels_of_answer]
        expected = accel.pipeline("text-classification", model=models["labels"])(texts)
        assert labels == [item["label"] for item in expected]
        assert np.allclose(answer.as_numpy("SCORE")[:, 0], [item["score"] for item in expected], atol=1e-4)
        with pytest.raises(http.InferenceServerException, match="Not Found"):
            client.get_model_repository_index(headers=headers)


def test_random_bodies_cause_no_server_error(address: str) -> None:
    schemathesis = pytest.importorskip("schemathesis")
    hypothesis = pytest.importorskip("hypothesis")
    schema = schemathesis.openapi.from_url(f"http://{address}/openapi.json")
    for operation in schema.get_all_operations():
        strategy = operation.ok().as_strategy(generation_mode=schemathesis.GenerationMode.POSITIVE)

        @hypothesis.settings(
            max_examples=15, deadline=None, database=None, suppress_health_check=list(hypothesis.HealthCheck)
        )
        @hypothesis.given(case=strategy)
        def check(case: object) -> None:
            answer = case.call(headers={"Authorization": "Bearer secret"})  # type: ignore[attr-defined]
            assert answer.status_code < 500, answer.content

        check()
