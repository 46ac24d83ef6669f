"""Helpers for calls that have a static KV cache of transformers among their inputs."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

import torch
from transformers.cache_utils import StaticLayer

from accel.capture import CACHE_NAMES

from ..upstream import keep_address


def cache_of(call: Mapping[str, Any]) -> Any | None:
    """Return the KV cache among the inputs of a call, or `None`."""
    return next((call[name] for name in CACHE_NAMES if call.get(name) is not None), None)


def _layers(cache: Any) -> list[Any]:
    caches = [
        getattr(cache, name) for name in ("self_attention_cache", "cross_attention_cache") if hasattr(cache, name)
    ]
    return [layer for part in (caches or [cache]) for layer in getattr(part, "layers", [])]


def is_decoding(call: Mapping[str, Any], cache: Any) -> bool:
    """Return whether a call adds one token per row to a static cache that already contains tokens. The compiled code of
    one call works for all later calls of this kind.

    All layers of the cache must be of the class `StaticLayer`. Cache layers of other classes (sliding windows,
    recurrent states) count their tokens in Python, and compiled code would keep the count of its first call.
    """
    layers = _layers(cache)
    fixed = bool(layers) and all(type(layer) is StaticLayer and layer.is_initialized for layer in layers)
    names = ("input_ids", "decoder_input_ids", "inputs_embeds", "decoder_inputs_embeds")
    first = next((call[name] for name in names if isinstance(call.get(name), torch.Tensor)), None)
    return fixed and first is not None and first.shape[1] == 1


def as_inputs(cache: Any) -> None:
    """Make the compiler treat the tensors of a cache as inputs, so that the compiled code works with every cache of the
    same sizes.
    """
    for tensor in tensors_of(cache):
        keep_address(tensor)


def shape_of(cache: Any) -> str:
    """Return a text that contains the class of a cache, and the classes and key shapes of its layers."""
    layers = sorted(
        {f"{type(layer).__name__}{tuple(layer.keys.shape)}" for layer in _layers(cache) if _keys(layer) is not None}
    )
    return f"{type(cache).__name__} {', '.join(layers)}".strip()


def _keys(layer: Any) -> torch.Tensor | None:
    keys = getattr(layer, "keys", None)
    return keys if isinstance(keys, torch.Tensor) else None


def copied(call: Mapping[str, Any]) -> dict[str, Any]:
    """Return the inputs of a call with a copy of the KV cache, because running the call changes the cache."""
    return {name: copy.deepcopy(value) if name in CACHE_NAMES else value for name, value in call.items()}


def tensors_of(cache: Any) -> list[torch.Tensor]:
    """Return the tensors of a static KV cache: keys, values and token counts of each layer."""
    return [tensor for layer in _layers(cache) for tensor in (layer.keys, layer.values, layer.cumulative_length)]
