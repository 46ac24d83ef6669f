"""Tokens to text that does not change any more, and what ends it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

_UNFINISHED = "�"


class TextPieces:
    """Text of an answer, in pieces as they are final; together they are the answer up to its stop string.

    Held back: letters whose bytes are not all there, and what may become a stop string.

    Args:
        tokenizer: The model's.
        stop: The text ends before the first of these.

    Attributes:
        stopped: Whether one was found.
    """

    def __init__(self, tokenizer: Any, stop: Sequence[str] = ()) -> None:
        self.stopped = False
        self._tokenizer, self._stop = tokenizer, tuple(stop)
        self._ids: list[int] = []
        # Tokens before `_start` are text; those from there to `_read` are decoded again with what follows: what stands
        # between words may depend on the word before.
        self._start = self._read = 0
        self._held = ""

    def push(self, token: int) -> str:
        """The piece of text that a token makes final."""
        if self.stopped:
            return ""
        self._ids.append(token)
        before, after = self._decoded(self._read), self._decoded(len(self._ids))
        if after.endswith(_UNFINISHED) or len(after) <= len(before):
            return ""
        self._start, self._read = self._read, len(self._ids)
        return self._released(after[len(before) :])

    def finish(self) -> str:
        """The rest, behind the last token."""
        if self.stopped:
            return ""
        rest = self._released(self._decoded(len(self._ids))[len(self._decoded(self._read)) :])
        if self.stopped:
            return rest
        rest, self._held = rest + self._held, ""
        return rest

    def _decoded(self, end: int) -> str:
        text: str = self._tokenizer.decode(self._ids[self._start : end], skip_special_tokens=True)
        return text

    def _released(self, new: str) -> str:
        text = self._held + new
        found = [at for stop in self._stop if (at := text.find(stop)) >= 0]
        if found:
            self.stopped, self._held = True, ""
            return text[: min(found)]
        # The longest end of it that some stop string begins with.
        kept = max((_overlap(text, stop) for stop in self._stop), default=0)
        self._held = text[len(text) - kept :]
        return text[: len(text) - kept]


def _overlap(text: str, stop: str) -> int:
    return next((n for n in range(min(len(stop) - 1, len(text)), 0, -1) if text.endswith(stop[:n])), 0)
