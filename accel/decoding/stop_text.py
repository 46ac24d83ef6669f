"""Conversion of generated tokens to pieces of text for streaming, and detection of stop texts."""

from __future__ import annotations

from collections.abc import Sequence, Set
from typing import Any

_UNFINISHED = "�"


def byte_tokens(tokenizer: Any) -> frozenset[int]:
    """Return the token ids that represent single bytes, such as `<0xE2>`.

    Several byte tokens in sequence can form one character, so they are decoded only after the last byte token.
    """
    names = [f"<0x{byte:02X}>" for byte in range(256)]
    unknown = (None, tokenizer.unk_token_id)
    return frozenset(token for token in tokenizer.convert_tokens_to_ids(names) if token not in unknown)


class TextPieces:
    """Pieces of generated text that never change later. All pieces together are the text before the first stop text.

    A piece is returned only when its last character is complete and when no part of it can be the start of a stop text.

    Args:
        tokenizer: The model's tokenizer.
        stop: Stop texts. The generated text ends before the first stop text.
        byte_tokens: The single-byte tokens of the tokenizer, as the function `byte_tokens` returns them.
        visible: Special tokens that stay in the text.

    Attributes:
        stopped: Whether the generated text contained a stop text.
    """

    def __init__(
        self,
        tokenizer: Any,
        stop: Sequence[str] = (),
        byte_tokens: Set[int] = frozenset(),
        visible: Sequence[int] = (),
    ) -> None:
        self.stopped = False
        self._bytes = byte_tokens
        self._hidden = frozenset(tokenizer.all_special_ids).difference(visible) if visible else None
        self._tokenizer, self._stop = tokenizer, tuple(stop)
        self._ids: list[int] = []
        # Tokens from `_start` to `_read` are decoded again together with the next tokens, because tokenizers may write a space
        # before a word only if another word precedes it.
        self._start = self._read = 0
        self._held = ""

    def push(self, token: int) -> str:
        """Add a token, and return the next piece of text. The piece is empty if the text may still change."""
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
        ids = self._ids[self._start : end]
        if self._hidden is not None:
            ids = [token for token in ids if token not in self._hidden]
        text: str = self._tokenizer.decode(ids, skip_special_tokens=self._hidden is None)
        return text

    def _released(self, new: str) -> str:
        text = self._held + new
        places = [place for stop in self._stop if (place := text.find(stop)) >= 0]
        if places:
            self.stopped, self._held = True, ""
            return text[: min(places)]
        # Keep back the longest end of the text that is the start of a stop text.
        overlap = max((_overlap(text, stop) for stop in self._stop), default=0)
        self._held = text[len(text) - overlap :]
        return text[: len(text) - overlap]


def _overlap(text: str, stop: str) -> int:
    return next((n for n in range(min(len(stop) - 1, len(text)), 0, -1) if text.endswith(stop[:n])), 0)
