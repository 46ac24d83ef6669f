"""Keys and values of earlier prompts, for later prompts that begin with the same tokens."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence

import numpy as np

from ...decoding.kv_cache import StateCache

_LEAST = 32
"""Least number of tokens that are stored or reused; reading fewer tokens costs no more than copying their keys and values."""
_NEW_PART = 8
"""A prompt is stored if at least this fraction (1/8) of it is new. A later prompt then recomputes at most this fraction."""


class PrefixCache:
    """KV caches of earlier prompts, in the memory of the runtime. The least recently used prompts are removed first.

    A system prompt that several prompts share, few-shot examples and the history of a conversation are read only once. Finding a prefix
    takes microseconds, and storing or reusing it copies its keys and values.

    Args:
        most_bytes: Greatest size of all keys and values in bytes. With 0, nothing is stored.

    Attributes:
        used_bytes: Size of the stored keys and values in bytes.
    """

    def __init__(self, most_bytes: int) -> None:
        self.used_bytes = 0
        self._most = most_bytes
        self._token_bytes = 0
        self._caches: OrderedDict[bytes, tuple[np.ndarray, StateCache]] = OrderedDict()

    def find(self, ids: Sequence[int]) -> StateCache | None:
        """Return a copy of the longest stored beginning of a prompt, or `None`. It never contains the last token of the prompt."""
        prompt = np.asarray(ids)
        lengths = {key: _shared(tokens, prompt[:-1]) for key, (tokens, _) in self._caches.items()}
        best = max(lengths, key=lengths.__getitem__, default=b"")
        if lengths.get(best, 0) < _LEAST:
            return None
        self._caches.move_to_end(best)
        copy = self._caches[best][1].clone()
        copy.crop(min(lengths[best] - copy.get_seq_length(), 0))
        return copy

    def store(self, ids: Sequence[int], reused: int, cache: StateCache) -> None:
        """Store a copy of the KV cache of a prompt.

        Args:
            ids: The tokens of the prompt.
            reused: Number of tokens that came from this cache.
            cache: The KV cache, which contains exactly these tokens.
        """
        if len(ids) < _LEAST or (len(ids) - reused) * _NEW_PART < len(ids) or cache.state is None:
            return
        if not self._token_bytes:
            sizes = (tensor.nbytes for tensor in cache.state.tensors().values())
            self._token_bytes = -(-sum(sizes) // cache.get_seq_length())
        size = len(ids) * self._token_bytes
        if size > self._most:
            return
        tokens = np.asarray(ids)
        # A stored prompt that is the beginning of this prompt is of no further use.
        for key, (stored, _) in list(self._caches.items()):
            if len(stored) <= len(tokens) and _shared(stored, tokens) == len(stored):
                self._remove(key)
        while self.used_bytes + size > self._most:
            self._remove(next(iter(self._caches)))
        self._caches[tokens.tobytes()] = (tokens, cache.clone())
        self.used_bytes += size

    def clear(self) -> None:
        """Release all keys and values."""
        self._caches.clear()
        self.used_bytes = 0

    def _remove(self, key: bytes) -> None:
        tokens, _ = self._caches.pop(key)
        self.used_bytes -= len(tokens) * self._token_bytes


def _shared(first: np.ndarray, second: np.ndarray) -> int:
    """Return the number of equal tokens at the start of two prompts."""
    length = min(len(first), len(second))
    different = np.flatnonzero(first[:length] != second[:length])
    return int(different[0]) if len(different) else length
