"""Limits torch's CPU threads while a runtime with its own threads generates text.

torch distributes operations on large tensors over OpenMP threads. Afterwards these threads wait actively (spin) for milliseconds
and occupy the processors that the runtime's threads need for the next step. Measured with logits of 151,936 tokens on two
processors: a step of eight rows took a fifth longer after `argmax`; sampling one row from all tokens took 1.7 times as long as
with one thread.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from typing import Any

import torch


def has_own_threads(model: Any) -> bool:
    """Return whether the model's runtime computes on the CPU with its own threads instead of torch's threads."""
    return bool(model.artifact.format != "torch" and model.device.type == "cpu")


def use_one_thread() -> None:
    """Run torch's operators in the calling thread only; other threads keep their number of threads.

    OpenMP stores this setting per thread. Only the default for new threads belongs to the process, and it is restored here.
    """
    usual = torch.get_num_threads()
    if usual == 1:
        return
    torch.set_num_threads(1)
    _begin_with(usual)


@contextlib.contextmanager
def one_thread() -> Iterator[None]:
    """Apply `use_one_thread` while the context is open."""
    usual = torch.get_num_threads()
    use_one_thread()
    try:
        yield
    finally:
        if usual != 1:
            torch.set_num_threads(usual)


def _begin_with(threads: int) -> None:
    """Set torch's default for new threads. torch also changes the calling thread's number, so a helper thread makes the call."""
    setter = threading.Thread(target=torch.set_num_threads, args=(threads,))
    setter.start()
    setter.join()
