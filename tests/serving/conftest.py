"""Tiny models as they are served, and one whose calls wait until they are let through."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import accel
from accel.testing.models import save_tiny, tiny_model, tiny_tokenizer


@pytest.fixture(scope="session")
def served(tiny_folder: Callable[..., Path], shared: Callable[..., Path]) -> Callable[[str], accel.ORTModel]:
    """A model of a task, run by PyTorch: nothing has to be exported for what the tests here are about."""
    made: dict[str, accel.ORTModel] = {}

    def ranker(folder: Path) -> None:
        tiny_model("bert", num_labels=1, id2label={0: "score"}, label2id={"score": 0}).save_pretrained(folder)
        tiny_tokenizer().save_pretrained(folder)

    def judge(folder: Path) -> None:
        names = ["contradiction", "neutral", "entailment"]
        ids = {name: i for i, name in enumerate(names)}
        save_tiny(folder, "bert", id2label=dict(enumerate(names)), label2id=ids)

    own = {"rank": ranker, "zero-shot-classification": judge}

    def get(task: str) -> accel.ORTModel:
        if task not in made:
            folder = shared(f"served-{task}", own[task]) if task in own else tiny_folder("bert", task)
            # The pipeline of sentence similarity is that of features.
            named = None if task in own else task
            made[task] = accel.ORTModel.from_pretrained(folder, backend="pytorch", task=named)
        return made[task]

    return get


class Gate:
    """A session whose calls wait.

    Attributes:
        calls: Shapes of the token ids of each call that was made.
        waiting: Set while a call waits.
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
    """A text classifier whose calls wait, and its gate."""
    model = accel.ORTModel.from_pretrained(tiny_folder("bert", "text-classification"), backend="pytorch")
    gate = Gate(model._session)
    model._session = gate
    yield model, gate
    gate.open()
    model.close()
