"""Limit torch's CPU threads while a runtime with its own threads generates text.

torch distributes operations on large tensors over OpenMP threads. After an operation, the OpenMP threads wait actively (spin) for
some milliseconds. During this time they occupy the CPU cores that the runtime's threads need for the next decoding step. On a
machine with two CPU cores and a vocabulary of 151,936 tokens, a decoding step of eight rows took 20 % longer after a
multi-threaded `argmax`. Sampling one row from all tokens took 1.7 times as long as with one torch thread.
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
    """Let torch operators that the calling thread starts run in this thread only.

    OpenMP stores the number of threads separately for each thread, so other threads are not affected. `torch.set_num_threads`
    also changes the default of the process for new threads. This function restores that default.
    """
    threads = torch.get_num_threads()
    if threads == 1:
        return
    torch.set_num_threads(1)
    _begin_with(threads)


@contextlib.contextmanager
def one_thread() -> Iterator[None]:
    """Apply `use_one_thread` while the context is open."""
    threads = torch.get_num_threads()
    use_one_thread()
    try:
        yield
    finally:
        if threads != 1:
            torch.set_num_threads(threads)


def _begin_with(threads: int) -> None:
    """Set torch's default number of OpenMP threads for new threads.

    `torch.set_num_threads` also changes the number of the thread that calls it, so a temporary thread makes the call.
    """
    setter = threading.Thread(target=torch.set_num_threads, args=(threads,))
    setter.start()
    setter.join()
