"""Generating models in PyTorch: one call of the decoder over transformers' own cache."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from transformers.cache_utils import DynamicCache, EncoderDecoderCache

from accel.artifact import Component
from accel.capture import CACHE_NAME, Source, cache_argument, encoder_output
from accel.errors import AccelError, InputError
from accel.interfaces.protocols import Feeds, Names
from accel.interfaces.specs import DeviceSpec
from accel.interfaces.state import State

from .cuda_graphs import on_device
from .session import ModuleSession
from .state import CacheState

_ENCODER_MASK = "encoder_attention_mask"


class ModuleDecoderSession(ModuleSession):
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
        kinds = {name.rpartition("_")[2] for name in part.example if name.startswith("past_")}
        # All layers hold all tokens where they hold nothing else: what a sliding window hides, the mask hides, and tokens can
        # be taken back.
        self._config = None if kinds <= {"key", "value"} else model.config.get_text_config(decoder=True)
        self._alone = "key" not in kinds
        self._argument = cache_argument(model)

    def _read(self, feeds: Feeds, state: State | None = None) -> dict[str, torch.Tensor]:
        tensors = super()._read(feeds)
        assert state is not None
        # Which logits are wanted is read where the caller has it: a GPU that gathers beyond the end ends the process.
        state.check_step(feeds, state.batch, state.length)
        return tensors

    def _compute(
        self, tensors: dict[str, torch.Tensor], names: Names, out: Feeds, state: State | None
    ) -> dict[str, torch.Tensor]:
        model: Any = self.runtime
        assert isinstance(state, CacheState)
        new = tensors[state.check_step.tokens].shape[1]
        try:
            with on_device(self._where), torch.inference_mode():
                if self._cross:
                    logits = self._decode(model, tensors, state)
                elif self._component.croppable:
                    logits = self._extend(model, tensors, state, new)
                else:
                    logits = self._advance(model, tensors, state, new)
        except AccelError:
            raise
        except self.run_errors:
            state.take_back()
            raise
        state.advance(new)
        return {"logits": self._declared("logits", logits)}

    def _extend(self, model: Any, tensors: Mapping[str, torch.Tensor], state: CacheState, new: int) -> torch.Tensor:
        """One call of a model that keeps keys and values of every token."""
        found: torch.Tensor = model(**tensors, use_cache=True, **{CACHE_NAME: state.cache}).logits
        return found

    def _advance(self, model: Any, tensors: Mapping[str, torch.Tensor], state: CacheState, new: int) -> torch.Tensor:
        """One call of a model with states of one size.

        Behind others, tokens go one by one: transformers' functions that take several begin with an empty state (Mamba's).
        """
        mask, length = tensors["attention_mask"], state.length
        if new == 1 or not length:
            return self._call(model, tensors, state)
        if not bool(mask[:, length:].all()):
            raise InputError(
                "Tokens behind others are padded; PyTorch's functions for one token take it for a real one.",
                fix="pass turns of one length, or use a backend that runs graphs (backend='cpu').",
            )

        def run(part: Feeds) -> dict[str, torch.Tensor]:
            return {"logits": self._call(model, part, state)}

        return state.one_by_one(tensors, new, run)["logits"]

    def _call(self, model: Any, tensors: Mapping[str, torch.Tensor], state: CacheState) -> torch.Tensor:
        inputs: dict[str, Any] = dict(tensors)
        if self._alone:
            # Nothing looks back at the tokens before: the model's code masks the new ones alone.
            new = inputs["input_ids"].shape[1]
            inputs["attention_mask"] = inputs["attention_mask"][:, -new:] if new > 1 else None
        inputs[self._argument] = state.cache
        found: torch.Tensor = model(**inputs, use_cache=True).logits
        return found

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
            encoder_outputs=encoder_output(hidden, tensors.get(_ENCODER_MASK)),
            use_cache=True,
            **{CACHE_NAME: cache},
            **optional,
        ).logits
        return found

    def new_state(self, batch: int) -> CacheState:
        """An empty cache for `batch` rows."""
        return CacheState(
            self, self._component, batch, self._new_cache, joinable=self._component.croppable and not self._cross
        )

    def _new_cache(self) -> DynamicCache:
        return DynamicCache(config=self._config)
