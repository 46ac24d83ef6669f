"""Generating models in PyTorch: one call of the decoder over transformers' own cache."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

import torch
from transformers.cache_utils import DynamicCache, EncoderDecoderCache
from transformers.modeling_outputs import BaseModelOutput

from accel.artifact import Component
from accel.backends.checks import check_rows, check_state, check_step, wanted_outputs
from accel.backends.interfaces import Feeds, Names, State
from accel.backends.specs import DeviceSpec
from accel.capture import Source

from .session import ModuleSession

_ENCODER_MASK = "encoder_attention_mask"


class CacheState:
    """A `DynamicCache` and the number of its rows.

    Args:
        batch: Rows.
    """

    def __init__(self, batch: int) -> None:
        check_rows(batch)
        self.batch = batch
        # All layers hold all tokens: what a sliding window hides, the mask hides, and tokens can be taken back.
        self.cache = DynamicCache()

    @property
    def length(self) -> int:
        """Tokens held."""
        return int(self.cache.get_seq_length())

    def reorder(self, index: torch.Tensor) -> None:
        """Row `i` becomes what row `index[i]` was (`index: (rows,)` of integers)."""
        rows = check_rows(self.batch, index)
        self.batch = len(rows)
        if self.cache.get_seq_length():
            device = self.cache.layers[0].keys.device
            self.cache.batch_select_indices(torch.tensor(rows, device=device))

    def crop(self, length: int) -> None:
        """Forget all tokens from `length` on."""
        for layer in self.cache.layers:
            if layer.is_initialized and layer.keys.shape[-2] > length:
                layer.keys, layer.values = layer.keys[..., :length, :], layer.values[..., :length, :]

    def clone(self) -> CacheState:
        """An independent copy."""
        made = copy.copy(self)
        made.cache = copy.deepcopy(self.cache)
        return made


class DecoderSession(ModuleSession):
    """The decoder of a generating model, with its cache in a `CacheState`.

    Args:
        model: The whole model.
        part: Its decoder as the exporters see it: which inputs it has.
        component: What goes in and out.
        device: Where the model is.
        dtype: What it computes in.
    """

    def __init__(self, model: Any, part: Source, component: Component, device: DeviceSpec, dtype: str) -> None:
        super().__init__(model, component, device, dtype, {})
        self._cross = sum(name.startswith("cross_") for name in part.example) // 2
        self._hidden_size = getattr(part.model, "encoder_size", 0)

    def run(
        self, feeds: Feeds, *, outputs: Names | None = None, out: Feeds | None = None, state: State | None = None
    ) -> dict[str, torch.Tensor]:
        """See `accel.backends.interfaces.Session.run`."""
        model: Any = self.runtime
        check_state(state, CacheState, stateful=True, out=out)
        assert isinstance(state, CacheState)
        if outputs is not None:
            wanted_outputs(outputs, list(self._output_dtypes))
        tensors = self._placed(feeds, self._dtypes)
        check_step(self._component, tensors, state.batch, state.length)
        with torch.inference_mode():
            if self._cross:
                logits = self._decode(model, tensors, state)
            else:
                logits = model(**tensors, past_key_values=state.cache, use_cache=True).logits
            return {"logits": self._declared("logits", logits)}

    def _decode(self, model: Any, tensors: Mapping[str, torch.Tensor], state: CacheState) -> torch.Tensor:
        """One call of a decoder that attends to an encoder, whose keys and values are among the inputs."""
        cross = DynamicCache()
        for i in range(self._cross):
            cross.update(tensors[f"cross.{i}.key"], tensors[f"cross.{i}.value"], i)
        cache = EncoderDecoderCache(state.cache, cross)
        cache.is_updated = dict.fromkeys(range(self._cross), True)
        key = tensors["cross.0.key"]
        # Nothing reads the hidden states behind the keys and values, only their shape.
        hidden = key.new_zeros(1).expand(key.shape[0], key.shape[2], self._hidden_size)
        optional = {}
        if _ENCODER_MASK in tensors:
            optional["attention_mask"] = tensors[_ENCODER_MASK]
        if "position_ids" in tensors:
            optional["decoder_position_ids"] = tensors["position_ids"]
        found: torch.Tensor = model(
            decoder_input_ids=tensors["input_ids"],
            decoder_attention_mask=tensors["attention_mask"],
            encoder_outputs=BaseModelOutput(last_hidden_state=hidden),
            past_key_values=cache,
            use_cache=True,
            **optional,
        ).logits
        return found

    def new_state(self, batch: int) -> CacheState:
        """An empty cache for `batch` rows."""
        return CacheState(batch)
