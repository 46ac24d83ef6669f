"""A decoder's state in transformers' own cache."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from typing import Self

import torch
from transformers.cache_utils import DynamicCache

from accel.artifact import Component
from accel.interfaces.state import State, StateOwner

_TOKEN_AXES = {"keys": 2, "values": 2, "indexer_keys": 1}
"""Tensors of a layer with an entry for each token, by the axis of tokens."""


class CacheState(State):
    """transformers' own cache.

    Args:
        session: Made it.
        component: What the artifact says of the decoder.
        batch: Rows.
        new_cache: Makes an empty cache.
        joinable: Whether the cache holds nothing but a tensor of each token, so that rows can come and go.
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
        """The axis of tokens: of keys and values, or of an indexer's keys."""
        return _TOKEN_AXES[name.partition(".")[2]]

    def tensors(self) -> dict[str, torch.Tensor]:
        """The tensors of each token in the layers."""
        return {
            f"{i}.{name}": tensor
            for i, layer in enumerate(self.cache.layers)
            for name in _TOKEN_AXES
            if layer.is_initialized and (tensor := getattr(layer, name, None)) is not None
        }

    def store(self, tensors: Mapping[str, torch.Tensor]) -> None:
        """Put tensors into the layers."""
        for key, tensor in tensors.items():
            place, _, name = key.partition(".")
            setattr(self.cache.layers[int(place)], name, tensor)

    def copy_from(self, other: Self) -> None:
        """Hold a copy of another cache."""
        self.cache = copy.deepcopy(other.cache)

    def clear(self) -> None:
        """Begin with an empty cache."""
        self.cache = self._new_cache()

    def select_rows(self, rows: Sequence[int]) -> None:
        """Let row `i` become what row `rows[i]` was, in states of one size as well."""
        if self._length:
            self.cache.reorder_cache(torch.tensor(rows))

    def take_back(self) -> None:
        """Forget what a call that failed left in the first layers, where tokens can be taken out of them."""
        if not self._length:
            self.clear()
        elif self.component.croppable:
            self.keep_columns(0, self._length)
