"""Speech to text: the own `generate` of Whisper, and transformers' usual one of others, over our encoder and decoder."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from transformers.cache_utils import Cache

from ..decoding.kv_cache import renamed
from ..errors import InputError
from ..upstream.long_form_speech import LongFormSpeech, encoder_strides
from .encoder_decoder import EncoderDecoder
from .outputs import numpy_too

_WHISPER = "whisper"


class ORTModelForSpeechSeq2Seq(LongFormSpeech, EncoderDecoder):
    """Speech to text: Whisper's `input_features: (batch, mels, frames)`, long recordings and timestamps too; Speech2Text's
    `input_features: (batch, frames, mels)` and Moonshine's `input_values: (batch, samples)`, with `attention_mask` where rows are padded.
    """

    task = "automatic-speech-recognition"

    @numpy_too
    def generate(self, input_features: Any = None, *args: Any, **kwargs: Any) -> Any:  # type: ignore[override]  # transformers' name
        """The `generate` of the model in transformers, with every argument it has; the first one is the sounds, whatever their name.

        Raises:
            InputError: Inputs that are no sounds, and what `ORTModelForSeq2SeqLM.generate` refuses.
        """
        if self.config.model_type != _WHISPER:
            return EncoderDecoder.generate(self, input_features, *args, **kwargs)
        self._check_prompt(input_features, kwargs)
        if kwargs.get("return_token_timestamps"):
            raise InputError(
                "The times of words come from the decoder's attention to the sound, which the graphs do not return.",
                fix="ask for those of segments, return_timestamps=True; or run Whisper with transformers, or a model with a CTC head.",
            )
        return super().generate(input_features, *args, **renamed(kwargs))

    def window_outputs(self, outputs: Any) -> Any:
        """Leave out a cache that cannot be split by rows: graphs of other tools name their states as they like."""
        if isinstance(outputs, Mapping):
            return {name: value for name, value in outputs.items() if not _is_unreadable(value)}
        return outputs

    def prepare_inputs_for_generation(
        self, input_ids: torch.Tensor, **kwargs: Any
    ) -> dict[str, Any]:  # transformers' signature
        """Whisper's positions count what the mask of the decoder's tokens shows: rows of a batch may be padded in front."""
        mask = kwargs.get("decoder_attention_mask")
        if self.config.model_type == _WHISPER and mask is not None and kwargs.get("decoder_position_ids") is None:
            positions = (mask.long().cumsum(-1) - 1).masked_fill(mask == 0, 0)
            kwargs["decoder_position_ids"] = positions[:, -input_ids.shape[1] :]
        made: dict[str, Any] = super().prepare_inputs_for_generation(input_ids, **kwargs)
        return made

    def _open(self) -> None:
        super()._open()
        if type(self) is ORTModelForSpeechSeq2Seq:
            self.__class__ = _NAMED.get(self.config.model_type, ORTModelForSpeechSeq2Seq)
        if self.config.model_type == _WHISPER:
            self.model = encoder_strides(self.config)


class Speech2TextForConditionalGeneration(ORTModelForSpeechSeq2Seq):
    """Speech2Text under the name by which the stock pipeline knows that it generates."""


class MoonshineForConditionalGeneration(ORTModelForSpeechSeq2Seq):
    """Moonshine, likewise."""


def _is_unreadable(value: Any) -> bool:
    """Whether a value is a cache of something else than keys and values by layer."""
    if not isinstance(value, Cache):
        return False
    try:
        getattr(value, "layers", ())
    except InputError:
        return True
    return False


_NAMED = {"speech_to_text": Speech2TextForConditionalGeneration, "moonshine": MoonshineForConditionalGeneration}
