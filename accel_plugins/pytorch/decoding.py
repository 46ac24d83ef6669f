"""Generating models in PyTorch: one call of the decoder over transformers' own cache."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Self

import torch
from transformers.cache_utils import DynamicCache, EncoderDecoderCache

from accel.artifact import Component
from accel.capture import CACHE_NAME, Source, cache_argument, encoder_output
from accel.errors import AccelError, InputError
from accel.interfaces.protocols import Feeds, Names
from accel.interfaces.specs import DeviceSpec
from accel.interfaces.state import State, StateOwner

from .cuda_graphs import on_device
from .session import ModuleSession

_ENCODER_MASK = "encoder_attention_mask"
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
