"""Tokens of logits, in one thread on the host, so that a runtime's next call finds the processors free.

torch shares work on large tensors among OpenMP's threads, which then wait for more by spinning, for milliseconds: on the
processors that the runtime's own threads need for the next step. Found with logits of 151,936 tokens on two processors: a step of
eight rows took a fifth longer after `argmax`, one row drawn from all tokens took 1.7 times as long as in one thread.
"""

from __future__ import annotations

import contextlib
import math
import threading
from collections.abc import Iterator
from typing import Any

import torch


def likeliest(scores: torch.Tensor) -> torch.Tensor:
    """The place of the greatest value of each row: `(rows, vocabulary)` to `(rows,)`."""
    if scores.device.type == "cpu" and scores.dtype == torch.float32:
        # torch's takes twenty times as long.
        return torch.from_numpy(scores.detach().numpy().argmax(axis=-1))
    return scores.argmax(dim=-1)


def drawn(scores: torch.Tensor, generator: torch.Generator | None = None) -> torch.Tensor:
    """A place drawn from each row by its scores: `(rows, vocabulary)` to `(rows,)`.

    Those that `torch.multinomial(scores.softmax(-1), 1)` draws, which for one draw is the greatest of the probabilities, each over an
    exponential random number.

    Raises:
        RuntimeError: No place is possible, or scores are not numbers.
    """
    probabilities = torch.softmax(scores, dim=-1)
    if probabilities.device.type != "cpu" or probabilities.dtype != torch.float32:
        return torch.multinomial(probabilities, num_samples=1, generator=generator).squeeze(1)
    raced = probabilities.div_(torch.empty_like(probabilities).exponential_(1, generator=generator))
    places = likeliest(raced)
    won = raced.gather(1, places.unsqueeze(1))[:, 0].tolist()
    if not all(0 < one < math.inf for one in won):
        raise RuntimeError("The scores leave no token that can be drawn, or are not numbers.")
    return places


def has_own_threads(model: Any) -> bool:
    """Whether a model's runtime computes on the host with threads of its own, not with torch's."""
    return bool(model.artifact.format != "torch" and model.device.type == "cpu")


def use_one_thread() -> None:
    """Have torch's operators compute in this thread alone, when it calls them; other threads keep their number.

    The setting is OpenMP's, of one thread; only the number that threads begin with is the process's.
    """
    usual = torch.get_num_threads()
    if usual == 1:
        return
    torch.set_num_threads(1)
    _begin_with(usual)


@contextlib.contextmanager
def one_thread() -> Iterator[None]:
    """`use_one_thread`, and as before at the end."""
    usual = torch.get_num_threads()
    use_one_thread()
    try:
        yield
    finally:
        if usual != 1:
            torch.set_num_threads(usual)


def _begin_with(threads: int) -> None:
    """The number that threads begin with, which a thread can only set together with its own: so another one does."""
    setter = threading.Thread(target=torch.set_num_threads, args=(threads,))
    setter.start()
    setter.join()
