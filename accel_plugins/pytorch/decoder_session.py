"""Session for generating models in PyTorch: runs the decoder with a KV cache of transformers."""

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
    """Session that runs the decoder of a generating model. Its KV cache is in a `CacheState`.

    Args:
        model: The whole model.
        part: The decoder of the model, as exporters trace it; its example inputs define the input names.
        component: The component, which describes the inputs and outputs.
        device: The device of the model.
        dtype: Data type used for computation.
    """

    def __init__(self, model: Any, part: Source, component: Component, device: DeviceSpec, dtype: str) -> None:
        super().__init__(model, component, device, dtype, {})
        self._cross = sum(name.startswith("cross_") for name in part.example) // 2
        self._hidden_size = getattr(part.model, "encoder_size", 0)
        kinds = {name.rpartition("_")[2] for name in part.example if name.startswith("past_")}
        # A `DynamicCache` without a config stores all tokens in every layer, so that the cache can be cropped. For
        # layers with a sliding window, the attention mask excludes older tokens.
        self._config = None if kinds <= {"key", "value"} else model.config.get_text_config(decoder=True)
        self._no_attention = "key" not in kinds
        self._argument = cache_argument(model)

    def _read(self, feeds: Feeds, state: State | None = None) -> dict[str, torch.Tensor]:
        tensors = super()._read(feeds)
        assert state is not None
        # Check `logits_to_keep` on the caller's device: an out-of-range index on a GPU makes CUDA unusable for the
        # whole process.
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
        """Run a decoder whose cache stores keys and values of every token, and return the logits."""
        logits: torch.Tensor = model(**tensors, use_cache=True, **{CACHE_NAME: state.cache}).logits
        return logits

    def _advance(self, model: Any, tensors: Mapping[str, torch.Tensor], state: CacheState, new: int) -> torch.Tensor:
        """Run a decoder whose cache contains states of a fixed size, and return the logits.

        The first call processes all its tokens at once. Later calls process one token at a time, because the functions
        of transformers for several tokens start from an empty state (for example in Mamba).
        """
        mask, length = tensors["attention_mask"], state.length
        if new == 1 or not length:
            return self._call(model, tensors, state)
        if not bool(mask[:, length:].all()):
            raise InputError(
                f"attention_mask marks some of the {new} new tokens of each row as padding. After the first call, the PyTorch code "
                "of this model processes one token at a time and cannot skip padding.",
                fix="pass the same number of new tokens in each row, or use a backend that runs ONNX graphs (backend='cpu').",
            )

        def run(part: Feeds) -> dict[str, torch.Tensor]:
            return {"logits": self._call(model, part, state)}

        return state.one_by_one(tensors, new, run)["logits"]

    def _call(self, model: Any, tensors: Mapping[str, torch.Tensor], state: CacheState) -> torch.Tensor:
        inputs: dict[str, Any] = dict(tensors)
        if self._no_attention:
            # The model has no attention layers (for example Mamba), so its code expects a mask of the new tokens only.
            new = inputs["input_ids"].shape[1]
            inputs["attention_mask"] = inputs["attention_mask"][:, -new:] if new > 1 else None
        inputs[self._argument] = state.cache
        logits: torch.Tensor = model(**inputs, use_cache=True).logits
        return logits

    def _decode(self, model: Any, tensors: Mapping[str, torch.Tensor], state: CacheState) -> torch.Tensor:
        """Run a decoder with cross-attention and return the logits. The inputs contain the keys and values that
        cross-attention computes from the encoder output.
        """
        cross = DynamicCache()
        for i in range(self._cross):
            cross.update(tensors[f"cross.{i}.key"], tensors[f"cross.{i}.value"], i)
        cache = EncoderDecoderCache(state.cache, cross)
        cache.is_updated = dict.fromkeys(range(self._cross), True)
        key = tensors["cross.0.key"]
        # The cache already contains the keys and values of the encoder's hidden states, so the model reads only the
        # shape of the hidden states.
        hidden = key.new_zeros(1).expand(key.shape[0], key.shape[2], self._hidden_size)
        optional = {}
        if _ENCODER_MASK in tensors:
            optional["attention_mask"] = tensors[_ENCODER_MASK]
        if "position_ids" in tensors:
            optional["decoder_position_ids"] = tensors["position_ids"]
        logits: torch.Tensor = model(
            decoder_input_ids=tensors["input_ids"],
            decoder_attention_mask=tensors["attention_mask"],
            encoder_outputs=encoder_output(hidden, tensors.get(_ENCODER_MASK)),
            use_cache=True,
            **{CACHE_NAME: cache},
            **optional,
        ).logits
        return logits

    def new_state(self, batch: int) -> CacheState:
        """Return a decoder state with an empty KV cache for `batch` rows."""
        return CacheState(
            self, self._component, batch, self._new_cache, joinable=self._component.croppable and not self._cross
        )

    def _new_cache(self) -> DynamicCache:
        return DynamicCache(config=self._config)
