"""What a generating model keeps between calls, as tensors that go into its graph and come out of it.

Keys and values grow with the text. The states of a state-space model, of linear attention and of short convolutions have one
size and are overwritten: they can be reordered and copied, but no token can be taken back out of them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from transformers.cache_utils import DummyLayer, DynamicCache, LinearAttentionCacheLayerMixin

from ..errors import ExportError
from ..interfaces.wrapper import Tensors
from .cached_attention import CacheLayer
from .recurrence import read_state

TOKENS = "capacity"
"""The axis of a kept tensor that grows with the text."""


@dataclass(frozen=True, slots=True)
class Kept:
    """One tensor of a layer.

    Attributes:
        shape: Sizes behind the batch's; `TOKENS` for the axis that grows.
        dtype: Its type; that of the model where it is `None`.
    """

    shape: tuple[int | str, ...]
    dtype: torch.dtype | None = None


Layer = Mapping[str, Kept]
"""What one layer keeps: `key` and `value`, `indexer`, `conv` and `recurrent` (`conv_1` where there are several)."""


class StateLayer(LinearAttentionCacheLayerMixin):  # type: ignore[misc]  # transformers is untyped here
    """The states of one layer: graph inputs before a call, graph outputs after it. A new one is all zeros.

    Args:
        conv: The last inputs `(batch, channels, width)` of each of its convolutions.
        recurrent: Its recurrent states, in the layout of `recurrence.recur`.
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
        """By number. Whoever reads them is about to compute this layer."""
        found = getattr(self, "_recurrent", {})
        read_state(found.get(0))
        return {i: found.get(i) for i in range(self.number_of_states)}

    @recurrent_states.setter
    def recurrent_states(self, _: Any) -> None:
        """Nothing: transformers' constructor sets them empty."""

    def lazy_initialization(self, *_: Any, **__: Any) -> None:
        """Nothing: the tensors are there."""

    def update_conv_state(self, conv_states: torch.Tensor, state_idx: int = 0, **_: Any) -> torch.Tensor:
        """The inputs of a convolution: those kept and the new ones `(batch, channels, new)`; the last of them are kept."""
        before = self.conv_states[state_idx]
        whole = torch.cat([before, conv_states], dim=-1)
        self.conv_states[state_idx] = whole[..., -before.shape[-1] :]
        return whole

    def update_recurrent_state(self, recurrent_states: torch.Tensor, state_idx: int = 0, **_: Any) -> torch.Tensor:
        """The state after the new tokens."""
        self._recurrent[state_idx] = recurrent_states
        return recurrent_states

    def tensors(self) -> Tensors:
        """What it keeps, by name."""
        found = {_numbered("conv", i): tensor for i, tensor in self.conv_states.items()}
        return found | {_numbered("recurrent", i): tensor for i, tensor in self._recurrent.items()}


class HybridLayer(CacheLayer, StateLayer):
    """A layer with attention and states side by side."""

    def __init__(self, attention: tuple[Any, ...], roomy: bool, conv: Any, recurrent: Any) -> None:
        CacheLayer.__init__(self, *attention, roomy=roomy)
        StateLayer.__init__(self, conv, recurrent)

    def tensors(self) -> Tensors:
        """What it keeps, by name."""
        return CacheLayer.tensors(self) | StateLayer.tensors(self)


# Of the attributes of transformers' layers.
_NAMES = {"keys", "values", "indexer_keys", "_sliding_window_tensor"}


def _numbered(what: str, number: int) -> str:
    return f"{what}_{number}" if number else what


def _by_number(tensors: Tensors, what: str) -> dict[int, torch.Tensor]:
    return {
        int(name.removeprefix(what).lstrip("_") or 0): tensor
        for name, tensor in tensors.items()
        if name.partition("_")[0] == what
    }


def made(layers: Sequence[Layer], feeds: Tensors, total: Any, new: Any, *, roomy: bool) -> list[Any]:
    """Cache layers over the tensors `past_…` among a graph's inputs.

    Args:
        layers: What each keeps.
        feeds: The graph's inputs.
        total, new: Tokens after this call, and those that it brings.
        roomy: Whether keys and values have room for more tokens.
    """
    found: list[Any] = []
    for i, layer in enumerate(layers):
        own = {name: feeds[f"past_{i}_{name}"] for name in layer}
        conv, recurrent = _by_number(own, "conv"), _by_number(own, "recurrent")
        if not layer:
            found.append(DummyLayer())
        elif "key" not in own:
            found.append(StateLayer(conv, recurrent))
        elif conv or recurrent:
            found.append(HybridLayer((own["key"], own["value"], total, new), roomy, conv, recurrent))
        else:
            found.append(CacheLayer(own["key"], own["value"], total, new, roomy=roomy, indexer=own.get("indexer")))
    return found


def presents(layers: Sequence[Any]) -> Tensors:
    """What the layers keep after a call, as a graph's outputs."""
    return {
        f"present_{i}_{name}": tensor
        for i, layer in enumerate(layers)
        if not isinstance(layer, DummyLayer)
        for name, tensor in layer.tensors().items()
    }


def described(cache: Any, architecture: str) -> list[Layer]:
    """What the layers of a transformers cache keep.

    Args:
        cache: After a call.
        architecture: Of the model, for the error.

    Raises:
        ExportError: It keeps something else, or nothing.
    """
    # RemBERT's kind keeps a pair of caches also where it has no encoder.
    cache = getattr(cache, "self_attention_cache", cache)
    layers = list(getattr(cache, "layers", ()))
    found = [_described(layer) for layer in layers] if type(cache) is DynamicCache else []
    if not any(found) or None in found:
        kinds = sorted({type(layer).__name__ for layer, kept in zip(layers, found, strict=False) if kept is None})
        raise ExportError(
            f"{architecture} keeps {', '.join(kinds) if kinds else f'a {type(cache).__name__}'} between tokens, which cannot be "
            "put into a graph.",
            fix="export it for another task, or run it with transformers.",
        )
    return [layer for layer in found if layer is not None]


def _described(layer: Any) -> Layer | None:
    """What one layer keeps; `None` where that is something unknown."""
    if isinstance(layer, DummyLayer):
        return {}
    found: dict[str, Kept] = {}
    for what, tensors in (
        ("conv", getattr(layer, "conv_states", {})),
        ("recurrent", getattr(layer, "recurrent_states", {})),
    ):
        for i, tensor in tensors.items():
            if isinstance(tensor, torch.Tensor):
                dtype = tensor.dtype if what == "recurrent" else None
                found[_numbered(what, i)] = Kept(tuple(int(n) for n in tensor.shape[1:]), dtype)
    keys, values = getattr(layer, "keys", None), getattr(layer, "values", None)
    if isinstance(keys, torch.Tensor) and isinstance(values, torch.Tensor) and keys.ndim == values.ndim == 4:
        if keys.shape[:3] != values.shape[:3]:
            return None
        # DeepSeek's latent attention has values of another size than its keys.
        for what, tensor in (("key", keys), ("value", values)):
            found[what] = Kept((int(tensor.shape[1]), TOKENS, int(tensor.shape[3])))
    others = {name for name, value in vars(layer).items() if isinstance(value, torch.Tensor)} - _NAMES
    if others or getattr(layer, "indexer_position_ids", None) is not None:
        return None
    indexer = getattr(layer, "indexer_keys", None)
    if isinstance(indexer, torch.Tensor):
        found["indexer"] = Kept((TOKENS, int(indexer.shape[2])))
    return found or None


def croppable(layers: Sequence[Layer]) -> bool:
    """Whether all that is kept grows with the text, so that tokens can be cut off its end."""
    return all(TOKENS in kept.shape for layer in layers for kept in layer.values())


def without_tokens(layers: Sequence[Layer]) -> bool:
    """Whether nothing that is kept says how many tokens it stands for."""
    return not any(TOKENS in kept.shape for layer in layers for kept in layer.values())
