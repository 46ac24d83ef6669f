"""Fixtures of the serving tests: tiny models, and a model whose calls block until the test releases them."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from starlette.testclient import TestClient

import accel
from accel.testing.generative_models import save_generator
from accel.testing.models import save_tiny, tiny_model, tiny_tokenizer

CHAT = "{% for message in messages %}{{ message['content'] }} {% endfor %}"


def save_ranker(folder: Path) -> None:
    """Save a cross-encoder with one output score, together with its tokenizer."""
    tiny_model("bert", num_labels=1, id2label={0: "score"}, label2id={"score": 0}).save_pretrained(folder)
    tiny_tokenizer().save_pretrained(folder)


def save_judge(folder: Path) -> None:
    """Save a text classifier with the labels of an entailment model."""
    names = ["contradiction", "neutral", "entailment"]
    save_tiny(folder, "bert", id2label=dict(enumerate(names)), label2id={name: i for i, name in enumerate(names)})


def save_chat(folder: Path, **config: Any) -> None:
    """Save a generating model whose tokenizer has a chat template."""
    save_generator(folder, "qwen3", **config)
    settings = json.loads((folder / "tokenizer_config.json").read_text())
    (folder / "tokenizer_config.json").write_text(json.dumps({**settings, "chat_template": CHAT}))


def post(client: TestClient, path: str, **body: Any) -> Any:
    """Send a POST request and return the JSON of its response. The test fails if the status is not 200."""
    answer = client.post(path, json=body)
    assert answer.status_code == 200, answer.text
    return answer.json()


def send_binary(client: TestClient, path: str, *tensors: tuple[str, str, list[int], bytes], **body: Any) -> Any:
    """Send an Open Inference Protocol request with binary tensors (name, datatype, shape, bytes) after the JSON."""
    inputs = [
        {"name": name, "datatype": datatype, "shape": shape, "parameters": {"binary_data_size": len(part)}}
        for name, datatype, shape, part in tensors
    ]
    head = json.dumps({"inputs": inputs, **body}).encode()
    content = head + b"".join(part for *_, part in tensors)
    return client.post(path, content=content, headers={"Inference-Header-Content-Length": str(len(head))})


def close(actual: Any, expected: Any) -> bool:
    """Return whether two results have equal structure and equal texts, and numbers that differ by at most 1e-4.

    Numbers may differ, because rounding in a batch differs from rounding in a single row.
    """
    if isinstance(expected, dict):
        return actual.keys() == expected.keys() and all(close(actual[k], expected[k]) for k in expected)
    if isinstance(expected, list | tuple):
        return len(actual) == len(expected) and all(close(a, b) for a, b in zip(actual, expected, strict=True))
    if isinstance(expected, float | np.floating | np.ndarray):
        return bool(np.allclose(actual, expected, atol=1e-4))
    return type(actual) is type(expected) and bool(actual == expected)


@pytest.fixture(scope="session")
def served(tiny_folder: Callable[..., Path], shared: Callable[..., Path]) -> Callable[[str], accel.ORTModel]:
    """Return a function that opens the model of a task. The `pytorch` backend runs the models, because these tests need
    no export.
    """
    models: dict[str, accel.ORTModel] = {}

    savers = {"rank": save_ranker, "zero-shot-classification": save_judge, "chat": save_chat}

    def get(task: str) -> accel.ORTModel:
        if task not in models:
            folder = shared(f"served-{task}", savers[task]) if task in savers else tiny_folder("bert", task)
            # Pass the task explicitly, because the default task of the model class for sentence-similarity is
            # feature-extraction.
            named = None if task in savers else task
            models[task] = accel.ORTModel.from_pretrained(folder, backend="pytorch", task=named)
        return models[task]

    return get


class Gate:
    """Session whose calls block until the gate is opened.

    Attributes:
        calls: Shape of the token ids in each call so far.
        waiting: Event that is set when a call begins to block.
    """

    def __init__(self, session: Any) -> None:
        self._session = session
        self._free = threading.Event()
        self.waiting = threading.Event()
        self.calls: list[tuple[int, ...]] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self._session, name)

    def run(self, feeds: Any, **arguments: Any) -> Any:
        self.calls.append(tuple(feeds["input_ids"].shape))
        self.waiting.set()
        assert self._free.wait(30)
        return self._session.run(feeds, **arguments)

    def open(self) -> None:
        self._free.set()


@pytest.fixture
def gated(tiny_folder: Callable[..., Path]) -> Iterator[tuple[accel.ORTModel, Gate]]:
    """Yield a text classifier whose calls block, and the `Gate` that releases its calls."""
    model = accel.ORTModel.from_pretrained(tiny_folder("bert", "text-classification"), backend="pytorch")
    gate = Gate(model._session)
    model._session = gate
    yield model, gate
    gate.open()
    model.close()
