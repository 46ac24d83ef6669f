"""Log-probabilities of generated tokens, and the bytes that a token represents."""

from __future__ import annotations

import functools
import re
from dataclasses import dataclass
from typing import Any

import torch

_BYTE = re.compile(r"<0x([0-9A-F]{2})>\Z")


@dataclass(frozen=True, slots=True)
class TokenProbability:
    """Log-probabilities at one place of the generated text, before temperature, penalties and other options.

    Attributes:
        value: Natural logarithm of the generated token's probability.
        top: The likeliest tokens as (token id, logarithm), the likeliest first.
    """

    value: float
    top: tuple[tuple[int, float], ...] = ()


def token_probability(logits: torch.Tensor, token: int, top: int) -> TokenProbability:
    """Return the log-probability of a token and of the `top` likeliest tokens, from logits `(vocabulary,)`."""
    values = torch.log_softmax(logits.float(), dim=-1)
    likeliest = torch.topk(values, min(top, len(values)))
    pairs = zip(likeliest.indices.tolist(), likeliest.values.tolist(), strict=True)
    return TokenProbability(float(values[token]), tuple(pairs))


def token_bytes(tokenizer: Any, token: int) -> bytes:
    """Return the bytes that a token represents. They may be a part of a character in UTF-8."""
    name = tokenizer.convert_ids_to_tokens(token) or ""
    if match := _BYTE.match(name):
        return bytes([int(match[1], 16)])
    text: str = tokenizer.decode([token], skip_special_tokens=False)
    if "�" in text and all(character in _byte_characters() for character in name):
        return bytes(_byte_characters()[character] for character in name)
    # SentencePiece writes a space as U+2581. `decode` removes the space at the start of a text.
    return (" " + text if name.startswith("▁") and not text.startswith(" ") else text).encode()


@functools.cache
def _byte_characters() -> dict[str, int]:
    """Return the byte for each character of a byte-level vocabulary."""
    from transformers.convert_slow_tokenizer import bytes_to_unicode

    return {character: byte for byte, character in bytes_to_unicode().items()}
