"""Cache layers of a generating model whose tensors are inputs and outputs of the model's graph.

Keys and values grow by one column for each token. The states of state-space models, linear attention and short convolutions have a
fixed size, and each call overwrites them. The rows of a state can be reordered and copied, but tokens cannot be removed from a state.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from transformers.cache_utils import DummyLayer, DynamicCache, LinearAttentionCacheLayerMixin

from ..errors import ExportError
from ..interfaces.tracing_wrapper import Tensors
from .cached_attention import CacheLayer
from .recurrence import read_state

TOKENS = "capacity"
"""Value in `Kept.shape` for the axis of a cached tensor that grows with each token."""


@dataclass(frozen=True, slots=True)
class CachedTensorSpec:
    """Shape and data type of one cached tensor of a layer.

    Attributes:
        shape: Sizes of the axes after the batch axis. `TOKENS` marks the axis that grows.
        dtype: Data type of the tensor; `None` for the model's data type.
    """

    shape: tuple[int | str, ...]
    dtype: torch.dtype | None = None


Layer = Mapping[str, CachedTensorSpec]
"""Cached tensors of one layer by name.

The names are `key`, `value`, `indexer`, `conv` and `recurrent`. If a layer has several convolution states, the second is `conv_1`.
"""


class StateLayer(LinearAttentionCacheLayerMixin):  # type: ignore[misc]  # transformers is untyped here
    """States of one layer with a fixed size. The tensors are graph inputs before a call of the layer, and graph outputs after the call.

    At the start of a text, all states are zero.

    Args:
        conv: The last inputs of each convolution of the layer, `(batch, channels, width)`, by the number of the convolution.
        recurrent: The recurrent states of the layer by number, in the layout of `recurrence.recur`.
    """

    def __init__(self, conv: Mapping[int, torch.Tensor], recurrent: Mapping[int, torch.Tensor]) -> None:
        LinearAttentionCacheLayerMixin.__init__(self, number_of_states=max(*conv, *recurrent, 0) + 1)
        self.conv_states = dict(conv)
        self._recurrent = dict(recurrent)
        self.has_previous_state = dict.fromkeys(range(self.number_of_states), True)
        self.is_conv_states_initialized = dict.fromkeys(conv, True)
        self.is_recurrent_states_initialized = dict.fromkeys(recurrent, True)

    @property
    def recurrent_states(self) -> dict[int, torch.Tensor | None]:
        """Return the recurrent states by number, and store the first state for accel's recurrence functions (`read_state`)."""
        states = getattr(self, "_recurrent", {})
        read_state(states.get(0))
        return {i: states.get(i) for i in range(self.number_of_states)}

    @recurrent_states.setter
    def recurrent_states(self, _: Any) -> None:
        """Ignore the value, because transformers' constructor assigns empty states."""

    def lazy_initialization(self, *_: Any, **__: Any) -> None:
        """Do nothing, because the tensors already exist."""

    def update_conv_state(self, conv_states: torch.Tensor, state_idx: int = 0, **_: Any) -> torch.Tensor:
        """Append new inputs `(batch, channels, new)` to the cached inputs of a convolution, and return all inputs.

        The method caches the last inputs for the next call.
        """
        before = self.conv_states[state_idx]
        inputs = torch.cat([before, conv_states], dim=-1)
        self.conv_states[state_idx] = inputs[..., -before.shape[-1] :]
        return inputs

    def update_recurrent_state(self, recurrent_states: torch.Tensor, state_idx: int = 0, **_: Any) -> torch.Tensor:
        """Store and return the recurrent state after the new tokens."""
        self._recurrent[state_idx] = recurrent_states
        return recurrent_states

    def tensors(self) -> Tensors:
        """Return the layer's tensors by name."""
        states = {_numbered("conv", i): tensor for i, tensor in self.conv_states.items()}
        return states | {_numbered("recurrent", i): tensor for i, tensor in self._recurrent.items()}


class HybridLayer(CacheLayer, StateLayer):
    """A layer with keys and values and with states of a fixed size."""

    def __init__(self, attention: tuple[Any, ...], roomy: bool, conv: Any, recurrent: Any) -> None:
        CacheLayer.__init__(self, *attention, roomy=roomy)
        StateLayer.__init__(self, conv, recurrent)

    def tensors(self) -> Tensors:
        """Return the layer's tensors by name."""
        return CacheLayer.tensors(self) | StateLayer.tensors(self)


# Names of tensor attributes of transformers' cache layers that accel can make graph inputs and outputs of.
_NAMES = {"keys", "values", "indexer_keys", "_sliding_window_tensor"}


def _numbered(kind: str, number: int) -> str:
    return f"{kind}_{number}" if number else kind


def _by_number(tensors: Tensors, kind: str) -> dict[int, torch.Tensor]:
    return {
        int(name.removeprefix(kind).lstrip("_") or 0): tensor
        for name, tensor in tensors.items()
        if name.partition("_")[0] == kind
    }


def make_cache_layers(layers: Sequence[Layer], feeds: Tensors, total: Any, new: Any, *, roomy: bool) -> list[Any]:
    """Create the cache layers of a model from the `past_…` inputs of its graph.

    Args:
        layers: Cached tensors of each layer.
        feeds: Inputs of the graph by name.
        total: Number of tokens after this call.
        new: Number of tokens of this call.
        roomy: Whether the key and value buffers have room for more tokens.
    """
    cache_layers: list[Any] = []
    for i, layer in enumerate(layers):
        tensors = {name: feeds[f"past_{i}_{name}"] for name in layer}
        conv, recurrent = _by_number(tensors, "conv"), _by_number(tensors, "recurrent")
        if not layer:
            cache_layers.append(DummyLayer())
        elif "key" not in tensors:
            cache_layers.append(StateLayer(conv, recurrent))
        elif conv or recurrent:
            cache_layers.append(HybridLayer((tensors["key"], tensors["value"], total, new), roomy, conv, recurrent))
        else:
            cache_layers.append(
                CacheLayer(tensors["key"], tensors["value"], total, new, roomy=roomy, indexer=tensors.get("indexer"))
            )
    return cache_layers


def presents(layers: Sequence[Any]) -> Tensors:
    """Return the tensors of all cache layers after a call, by the names of the graph's outputs (`present_…`)."""
    return {
        f"present_{i}_{name}": tensor
        for i, layer in enumerate(layers)
        if not isinstance(layer, DummyLayer)
        for name, tensor in layer.tensors().items()
    }


def described(cache: Any, architecture: str) -> list[Layer]:
    """Describe the tensors in the layers of a transformers cache.

    Args:
        cache: The cache after a call of the model.
        architecture: Name of the model class, for the error message.

    Raises:
        ExportError: The cache is empty, or contains tensors that accel cannot make graph inputs of.
    """
    # Models such as RemBERT return an `EncoderDecoderCache` although they have no encoder.
    cache = getattr(cache, "self_attention_cache", cache)
    layers = list(getattr(cache, "layers", ()))
    descriptions = [_described(layer) for layer in layers] if type(cache) is DynamicCache else []
    if not any(descriptions) or None in descriptions:
        kinds = sorted(
            {
                type(layer).__name__
                for layer, description in zip(layers, descriptions, strict=False)
                if description is None
            }
        )
        raise ExportError(
            f"{architecture} cannot be exported for text generation, because accel cannot make graph inputs and outputs of its "
            f"KV cache ({', '.join(kinds) if kinds else type(cache).__name__}).",
            fix="export the model for a task that does not generate text, such as 'feature-extraction', or run it with transformers.",
        )
    return [layer for layer in descriptions if layer is not None]


def _described(layer: Any) -> Layer | None:
    """Describe the tensors of one cache layer. Return `None` if accel does not support all tensors of the layer."""
    if isinstance(layer, DummyLayer):
        return {}
    cached: dict[str, CachedTensorSpec] = {}
    for kind, tensors in (
        ("conv", getattr(layer, "conv_states", {})),
        ("recurrent", getattr(layer, "recurrent_states", {})),
    ):
        for i, tensor in tensors.items():
            if isinstance(tensor, torch.Tensor):
                dtype = tensor.dtype if kind == "recurrent" else None
                cached[_numbered(kind, i)] = CachedTensorSpec(tuple(int(n) for n in tensor.shape[1:]), dtype)
    keys, values = getattr(layer, "keys", None), getattr(layer, "values", None)
    if isinstance(keys, torch.Tensor) and isinstance(values, torch.Tensor) and keys.ndim == values.ndim == 4:
        if keys.shape[:3] != values.shape[:3]:
            return None
        # The head sizes of keys and values may differ, as in DeepSeek's latent attention.
        for kind, tensor in (("key", keys), ("value", values)):
            cached[kind] = CachedTensorSpec((int(tensor.shape[1]), TOKENS, int(tensor.shape[3])))
    others = {name for name, value in vars(layer).items() if isinstance(value, torch.Tensor)} - _NAMES
    if others or getattr(layer, "indexer_position_ids", None) is not None:
        return None
    indexer = getattr(layer, "indexer_keys", None)
    if isinstance(indexer, torch.Tensor):
        cached["indexer"] = CachedTensorSpec((TOKENS, int(indexer.shape[2])))
    return cached or None


def croppable(layers: Sequence[Layer]) -> bool:
    """Return whether all cached tensors have a token axis, so that tokens can be removed from the end of the cache."""
    return all(TOKENS in tensor.shape for layer in layers for tensor in layer.values())


def without_tokens(layers: Sequence[Layer]) -> bool:
    """Return whether no cached tensor has a token axis, because all tensors are states of a fixed size."""
    return not any(TOKENS in tensor.shape for layer in layers for tensor in layer.values())
