"""Tests of models in forked processes, whose parent process has used the models before."""

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


def in_child(answer: Callable[..., Any], *args: Any) -> Any:
    """Call a function in a forked child process, and return its result."""
    context = multiprocessing.get_context("fork")
    queue = context.SimpleQueue()
    child = context.Process(target=lambda: queue.put(answer(*args)))
    child.start()
    child.join(timeout=60)
    assert child.exitcode == 0
    return queue.get()


@pytest.mark.parametrize("backend", ["cpu", "openvino"])
def test_child_process_opens_its_own_sessions(backend: str, tiny_artifact: Callable[..., Artifact]) -> None:
    def logits() -> Any:
        return model(input_ids=IDS).logits.numpy()

    model, other = (
        ORTModelForSequenceClassification(tiny_artifact(), backend=backend, session_options=OPTIONS) for _ in range(2)
    )
    expected = logits()
    # Close the second session before the fork. Otherwise OpenVINO would wait in the child for threads that exist only
    # in the parent.
    other.close()
    assert abs(in_child(logits) - expected).max() < 1e-6


def test_closed_model_stays_closed_in_child(tiny_artifact: Callable[..., Artifact]) -> None:
    def answer() -> str:
        try:
            model(input_ids=IDS)
        except SessionClosedError:
            return "closed"
        return "open"

    model = ORTModelForSequenceClassification(tiny_artifact())
    model.close()
    assert in_child(answer) == "closed"


def test_child_process_generates(generator: Callable[..., Artifact]) -> None:
    model = ORTModelForCausalLM(generator("llama"), session_options=OPTIONS)
    expected = model.generate(IDS, max_new_tokens=4)
    tokens = in_child(lambda: model.generate(IDS, max_new_tokens=4).numpy())
    assert torch.equal(torch.from_numpy(tokens), expected)


def test_child_process_multiplies_in_several_threads() -> None:
    """A forked child can compute matrix products in several threads. If PyTorch uses GNU OpenMP, the child must not
    wait for threads of its parent.
    """
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


# The script has two sessions that the garbage collector closes (before and after the fork), a closed session, and a
# session that is still open at the end.
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
def test_child_process_releases_inherited_sessions(backend: str, tiny_artifact: Callable[..., Artifact]) -> None:
    command = [sys.executable, "-c", _INHERITED, str(tiny_artifact().path), backend]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
