"""Models in processes that were forked from a process that had used the models."""

from __future__ import annotations

import multiprocessing
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch

from accel import ORTModelForCausalLM, ORTModelForSequenceClassification, SessionOptions
from accel.artifact import Artifact
from accel.errors import SessionClosedError

OPTIONS = SessionOptions(threads=2)
IDS = torch.tensor([[5, 6, 7]])


def in_child(answer: Callable[..., Any], *given: Any) -> Any:
    """Return the result of a function in a forked child process."""
    context = multiprocessing.get_context("fork")
    queue = context.SimpleQueue()
    child = context.Process(target=lambda: queue.put(answer(*given)))
    child.start()
    child.join(timeout=60)
    assert child.exitcode == 0
    return queue.get()


@pytest.mark.parametrize("backend", ["cpu", "openvino"])
def test_a_child_opens_sessions_of_its_own(backend: str, tiny_artifact: Callable[..., Artifact]) -> None:
    def logits() -> Any:
        return model(input_ids=IDS).logits.numpy()

    model, other = (
        ORTModelForSequenceClassification(tiny_artifact(), backend=backend, session_options=OPTIONS) for _ in range(2)
    )
    expected = logits()
    # The other session must be closed, because OpenVINO would expect its threads in the child.
    other.close()
    assert abs(in_child(logits) - expected).max() < 1e-6


def test_a_model_that_was_closed_stays_closed(tiny_artifact: Callable[..., Artifact]) -> None:
    def answer() -> str:
        try:
            model(input_ids=IDS)
        except SessionClosedError:
            return "closed"
        return "open"

    model = ORTModelForSequenceClassification(tiny_artifact())
    model.close()
    assert in_child(answer) == "closed"


def test_a_child_generates(generator: Callable[..., Artifact]) -> None:
    model = ORTModelForCausalLM(generator("llama"), session_options=OPTIONS)
    expected = model.generate(IDS, max_new_tokens=4)
    found = in_child(lambda: model.generate(IDS, max_new_tokens=4).numpy())
    assert torch.equal(torch.from_numpy(found), expected)


def test_a_child_multiplies_in_several_threads() -> None:
    """If PyTorch uses GNU OpenMP, a child must not wait for its parent's threads."""
    factor = torch.randn((600, 600), generator=torch.Generator().manual_seed(0))

    def product() -> Any:
        return (factor @ factor)[::100].numpy()

    threads = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        expected = product()
        assert abs(in_child(product) - expected).max() < 1e-3
    finally:
        torch.set_num_threads(threads)


# Sessions that only the garbage collector finds (early and late), a closed session, and a session that is alive at the end.
_INHERITED = """
import gc, os, sys
from accel import ORTModelForSequenceClassification, SessionOptions

def opened():
    return ORTModelForSequenceClassification.from_pretrained(
        sys.argv[1], backend=sys.argv[2], session_options=SessionOptions(threads=2)
    )

gc.disable()
early, late = opened(), opened()
early.itself, late.itself = early, late
del early
closed, last = opened(), opened()
child = os.fork()
if child:
    sys.exit(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
gc.collect()
own = [opened() for _ in range(4)]
del late
gc.collect()
closed.close()
if sys.argv[2] == "cpu":  # whose exit handlers hang in a child, sessions or none
    os._exit(0)
"""


@pytest.mark.parametrize("backend", ["cpu", pytest.param("openvino", marks=pytest.mark.thorough)])
def test_a_child_lets_go_of_what_it_inherited(backend: str, tiny_artifact: Callable[..., Artifact]) -> None:
    command = [sys.executable, "-c", _INHERITED, str(tiny_artifact().path), backend]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
