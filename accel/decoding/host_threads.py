"""torch's threads on the host while a runtime with threads of its own generates.

torch shares work on large tensors among OpenMP's threads, which then wait for more by spinning, for milliseconds: on the
processors that the runtime's own threads need for the next step. Measured with logits of 151,936 tokens on two processors: a step of
eight rows took a fifth longer after `argmax`, one row drawn from all tokens took 1.7 times as long as in one thread.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from typing import Any

import torch


def has_own_threads(model: Any) -> bool:
    """Whether a model's runtime computes on the host with threads of its own, not with torch's."""
    return bool(model.artifact.format != "torch" and model.device.type == "cpu")


def use_one_thread() -> None:
    """Run torch's operators in the calling thread alone; other threads keep their number.

    The setting is OpenMP's and belongs to one thread; only the number that new threads start with belongs to the process.
    """
    usual = torch.get_num_threads()
    if usual == 1:
        return
    torch.set_num_threads(1)
    _begin_with(usual)


@contextlib.contextmanager
def one_thread() -> Iterator[None]:
    """`use_one_thread` while the context is open."""
    usual = torch.get_num_threads()
    use_one_thread()
    try:
        yield
    finally:
        if usual != 1:
            torch.set_num_threads(usual)


def _begin_with(threads: int) -> None:
    """Set the number that new threads start with; a thread can only set it together with its own, so another thread does."""
    setter = threading.Thread(target=torch.set_num_threads, args=(threads,))
    setter.start()
    setter.join()
