"""Conversion of generated tokens to final pieces of text, and detection of stop texts."""

from __future__ import annotations

from collections.abc import Sequence, Set
from typing import Any

_UNFINISHED = "�"


def byte_tokens(tokenizer: Any) -> frozenset[int]:
    """Return the token ids that represent single bytes; a run of such tokens is decoded only after its last token."""
    names = [f"<0x{byte:02X}>" for byte in range(256)]
    unknown = (None, tokenizer.unk_token_id)
    return frozenset(token for token in tokenizer.convert_tokens_to_ids(names) if token not in unknown)


class TextPieces:
    """Generated text in final pieces: their concatenation is the text up to the first stop text.

    Text is held back while its last character is incomplete or while it may become a stop text.

    Args:
        tokenizer: The model's tokenizer.
        stop: Stop texts; the generated text ends before the first of them.
        byte_tokens: Result of `byte_tokens`.

    Attributes:
        stopped: Whether a stop text was found.
    """

    def __init__(self, tokenizer: Any, stop: Sequence[str] = (), byte_tokens: Set[int] = frozenset()) -> None:
        self.stopped = False
        self._bytes = byte_tokens
        self._tokenizer, self._stop = tokenizer, tuple(stop)
        self._ids: list[int] = []
        # Tokens from `_start` to `_read` are decoded again together with the next tokens, because the space between two words may
        # depend on the first word.
        self._start = self._read = 0
        self._held = ""

    def push(self, token: int) -> str:
        """Add a token and return the text that becomes final; empty if there is none."""
        if self.stopped:
            return ""
        self._ids.append(token)
        if token in self._bytes:
            return ""
        before, after = self._decoded(self._read), self._decoded(len(self._ids))
        if after.endswith(_UNFINISHED) or len(after) <= len(before):
            return ""
        self._start, self._read = self._read, len(self._ids)
        return self._released(after[len(before) :])

    def finish(self) -> str:
        """Return the remaining text, after the last token."""
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
        places = [place for stop in self._stop if (place := text.find(stop)) >= 0]
        if places:
            self.stopped, self._held = True, ""
            return text[: min(places)]
        # The longest suffix of the text that is a prefix of a stop text.
        kept = max((_overlap(text, stop) for stop in self._stop), default=0)
        self._held = text[len(text) - kept :]
        return text[: len(text) - kept]


def _overlap(text: str, stop: str) -> int:
    return next((n for n in range(min(len(stop) - 1, len(text)), 0, -1) if text.endswith(stop[:n])), 0)
