"""Keys and values that a call of a generating model brings with it: transformers' static caches."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

import torch
from transformers.cache_utils import StaticLayer

from accel.capture import CACHE_NAMES


def cache_of(call: Mapping[str, Any]) -> Any | None:
    """The cache among the inputs of a call, or `None`."""
    return next((call[name] for name in CACHE_NAMES if call.get(name) is not None), None)


def _layers(cache: Any) -> list[Any]:
    caches = [
        getattr(cache, name) for name in ("self_attention_cache", "cross_attention_cache") if hasattr(cache, name)
    ]
    return [layer for one in (caches or [cache]) for layer in getattr(one, "layers", [])]


def is_decoding(call: Mapping[str, Any], cache: Any) -> bool:
    """Whether a call adds one token to a cache of a fixed size that holds some: what can be compiled once.

    Layers of other kinds (sliding windows, recurrent states) count in Python what they hold: compiled code would keep the number
    of its first call.
    """
    layers = _layers(cache)
    fixed = bool(layers) and all(type(layer) is StaticLayer and layer.is_initialized for layer in layers)
    names = ("input_ids", "decoder_input_ids", "inputs_embeds", "decoder_inputs_embeds")
    first = next((call[name] for name in names if isinstance(call.get(name), torch.Tensor)), None)
    return fixed and first is not None and first.shape[1] == 1


def as_inputs(cache: Any) -> None:
    """Have the compiler take a cache's tensors as inputs, whichever cache a call brings.

    transformers marks them as tensors at a fixed address, for CUDA graphs. The compiler makes what is marked so a part of the code
    (guarded, or where it freezes weights), which then writes to the cache that it was compiled with for ever.
    """
    for layer in _layers(cache):
        for tensor in (layer.keys, layer.values, layer.cumulative_length):
            vars(tensor).pop("_dynamo_static_input_type", None)
            if tensor.device.type == "cuda":
                torch._dynamo.mark_static_address(tensor, guard=False)


def shape_of(cache: Any) -> str:
    """What compiled code depends on of a cache: its class, and the sizes of its tensors."""
    found = sorted(
        {f"{type(layer).__name__}{tuple(layer.keys.shape)}" for layer in _layers(cache) if _keys(layer) is not None}
    )
    return f"{type(cache).__name__} {', '.join(found)}".strip()


def _keys(layer: Any) -> torch.Tensor | None:
    keys = getattr(layer, "keys", None)
    return keys if isinstance(keys, torch.Tensor) else None


def copied(call: Mapping[str, Any]) -> dict[str, Any]:
    """The call with a copy of its cache, which it changes."""
    return {name: copy.deepcopy(value) if name in CACHE_NAMES else value for name, value in call.items()}


def tensors_of(cache: Any) -> list[torch.Tensor]:
    """What a static cache holds."""
    return [tensor for layer in _layers(cache) for tensor in (layer.keys, layer.values, layer.cumulative_length)]
