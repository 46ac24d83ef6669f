"""Decoder state in a KV cache of transformers."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from typing import Self

import torch
from transformers.cache_utils import DynamicCache

from accel.artifact import Component
from accel.interfaces.state import State, StateOwner

_TOKEN_AXES = {"keys": 2, "values": 2, "indexer_keys": 1}
"""Tensor attributes of a cache layer that have one entry per token, with the index of their token axis."""


class CacheState(State):
    """Decoder state that stores a KV cache object of transformers.

    Args:
        session: The session that created the state.
        component: The decoder component.
        batch: Number of rows of the batch.
        new_cache: Function that creates an empty cache.
        joinable: Whether every cache tensor has one entry per token. Only then can the caller add rows to the batch and
            remove rows.
    """

    readable = False

    def __init__(
        self,
        session: StateOwner,
        component: Component,
        batch: int,
        new_cache: Callable[[], DynamicCache],
        *,
        joinable: bool,
    ) -> None:
        super().__init__(session, component, batch)
        self._new_cache = new_cache
        self.joinable = joinable
        self.cache = new_cache()

    def growing_axis(self, name: str) -> int | None:
        """Return the index of the token axis of a cache tensor, whose name is "layer.name", such as "0.keys"."""
        return _TOKEN_AXES[name.partition(".")[2]]

    def tensors(self) -> dict[str, torch.Tensor]:
        """Return the cache tensors that have one entry per token, by names such as "0.keys" (layer 0)."""
        return {
            f"{i}.{name}": tensor
            for i, layer in enumerate(self.cache.layers)
            for name in _TOKEN_AXES
            if layer.is_initialized and (tensor := getattr(layer, name, None)) is not None
        }

    def store(self, tensors: Mapping[str, torch.Tensor]) -> None:
        """Replace tensors of the cache layers; the names are like those of `tensors`, such as "0.keys"."""
        for key, tensor in tensors.items():
            layer, _, name = key.partition(".")
            setattr(self.cache.layers[int(layer)], name, tensor)

    def copy_from(self, other: Self) -> None:
        """Replace the KV cache with a deep copy of another state's cache."""
        self.cache = copy.deepcopy(other.cache)

    def clear(self) -> None:
        """Replace the KV cache with an empty cache."""
        self.cache = self._new_cache()

    def select_rows(self, rows: Sequence[int]) -> None:
        """Reorder the rows of the batch: row `i` becomes the previous row `rows[i]`. The same applies
        to cache tensors of a fixed size.
        """
        if self._length:
            self.cache.reorder_cache(torch.tensor(rows))

    def take_back(self) -> None:
        """Remove the tokens that a failed call added to some layers of the cache, if the cache can be cropped."""
        if not self._length:
            self.clear()
        elif self.component.croppable:
            self.keep_columns(0, self._length)
