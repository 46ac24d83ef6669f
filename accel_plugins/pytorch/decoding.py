"""Generating models in PyTorch: one call of the decoder over transformers' own cache."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from typing import Any

import torch
from transformers.cache_utils import DynamicCache, EncoderDecoderCache

from accel.artifact import Component
from accel.capture import CACHE_NAME, Source, cache_argument, encoder_output
from accel.errors import AccelError, InputError
from accel.interfaces.continuation import moved_right
from accel.interfaces.description import StateDescription
from accel.interfaces.protocols import Feeds, Names, State
from accel.interfaces.session_contract import (
    StepCheck,
    check_crop,
    check_drop,
    check_join,
    check_rows,
    check_state,
    wanted_outputs,
)
from accel.interfaces.specs import DeviceSpec

from .cuda_graphs import on_device
from .session import RUN_ERRORS, ModuleSession, failed

_ENCODER_MASK = "encoder_attention_mask"


class CacheState(StateDescription):
    """transformers' own cache, the number of its rows and that of its tokens.

    Args:
        batch: Rows.
        new_cache: Makes an empty one.
        component: What the artifact says of the decoder.
    """

    def __init__(self, batch: int, new_cache: Callable[[], DynamicCache], component: Component) -> None:
        check_rows(batch)
        super().__init__(batch)
        self._new_cache = new_cache
        self._component = component
        self.cache = new_cache()

    def advance(self, new: int) -> None:
        """Count tokens that the cache has taken."""
        self._length += new

    def reorder(self, index: torch.Tensor) -> None:
        """Row `i` becomes what row `index[i]` was (`index: (rows,)` of integers)."""
        rows = check_rows(self._batch, index)
        self._batch = len(rows)
        if self._length:
            self.cache.reorder_cache(torch.tensor(rows))

    def crop(self, length: int) -> None:
        """Forget all tokens from `length` on."""
        check_crop(length, self._length, croppable=self._component.croppable)
        if length < self._length:
            self._cut(length)
        self._length = length

    def take_back(self) -> None:
        """Forget what a call that failed left in the first layers, where tokens can be taken out of them."""
        if self._component.croppable or not self._length:
            self._cut(self._length)

    def _cut(self, length: int) -> None:
        if length == 0:
            self.cache = self._new_cache()
            return
        for layer in self.cache.layers:
            if not layer.is_initialized:
                continue
            layer.keys, layer.values = layer.keys[..., :length, :], layer.values[..., :length, :]
            if getattr(layer, "indexer_keys", None) is not None:
                layer.indexer_keys = layer.indexer_keys[:, :length]

    def clone(self) -> CacheState:
        """An independent copy."""
        held = copy.deepcopy(self.cache)
        made = copy.copy(self)
        made.cache = held
        return made


class KeysAndValues(CacheState):
    """A cache that holds nothing but a tensor of each token, so that rows can come and go."""

    def join(self, other: State) -> None:
        """The rows of another state of the model behind these, the shorter ones moved to the right."""
        check_join(self, other, same=getattr(other, "_component", None) is self._component)
        assert isinstance(other, KeysAndValues)
        length = max(self._length, other._length)
        for mine, theirs in zip(self.cache.layers, other.cache.layers, strict=True):
            for name, axis in _token_axes(mine).items():
                parts = [moved_right(getattr(layer, name), axis, length) for layer in (mine, theirs)]
                setattr(mine, name, torch.cat(parts))
        self._batch, self._length = self._batch + other._batch, length

    def drop(self, columns: int) -> None:
        """Forget the first columns of every row, which all masks hid."""
        check_drop(columns, self._length)
        self._length -= columns
        for layer in self.cache.layers:
            for name, axis in _token_axes(layer).items():
                setattr(layer, name, getattr(layer, name).narrow(axis, columns, self._length))


def _token_axes(layer: Any) -> dict[str, int]:
    """What a layer keeps of each token, and along which axis."""
    if not layer.is_initialized:
        return {}
    indexer = {"indexer_keys": 1} if getattr(layer, "indexer_keys", None) is not None else {}
    return {"keys": 2, "values": 2, **indexer}


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
        self._check_step = StepCheck(component)
        self._cross = sum(name.startswith("cross_") for name in part.example) // 2
        self._hidden_size = getattr(part.model, "encoder_size", 0)
        kinds = {name.rpartition("_")[2] for name in part.example if name.startswith("past_")}
        # All layers hold all tokens where they hold nothing else: what a sliding window hides, the mask hides, and tokens can
        # be taken back.
        self._config = None if kinds <= {"key", "value"} else model.config.get_text_config(decoder=True)
        self._alone = "key" not in kinds
        self._argument = cache_argument(model)

    def run(
        self, feeds: Feeds, *, outputs: Names | None = None, out: Feeds | None = None, state: State | None = None
    ) -> dict[str, torch.Tensor]:
        """See `accel.interfaces.protocols.Session.run`."""
        model: Any = self.runtime
        check_state(state, CacheState, stateful=True, out=out)
        assert isinstance(state, CacheState)
        if outputs is not None:
            wanted_outputs(outputs, list(self._output_dtypes))
        # Which logits are asked for is read where the caller has it: what a GPU gathers beyond the end ends the process.
        read = self._read(feeds, self._dtypes)
        new = self._check_step(read, state.batch, state.length)
        tensors = self._moved(read)
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
        except RUN_ERRORS as error:
            state.take_back()
            raise failed(error, tensors) from error
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
        found = []
        for i in range(new):
            step = {
                name: tensor[:, i : i + 1] if name in ("input_ids", "position_ids") else tensor
                for name, tensor in tensors.items()
                if name != "logits_to_keep"
            }
            step["attention_mask"] = mask[:, : length + i + 1]
            found.append(self._call(model, step, state))
        logits = torch.cat(found, dim=1)
        return logits.index_select(1, tensors["logits_to_keep"]) if "logits_to_keep" in tensors else logits

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
        kind = KeysAndValues if self._component.croppable and not self._cross else CacheState
        return kind(batch, lambda: DynamicCache(config=self._config), self._component)
