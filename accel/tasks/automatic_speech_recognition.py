"""Task `automatic-speech-recognition` with encoder-decoder models."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any

import torch
from transformers.cache_utils import Cache

from ..decoding.kv_cache import renamed
from ..errors import InputError
from ..interfaces.family_registry import family_of
from ..interfaces.task import Task
from ..models.encoder_decoder import EncoderDecoder
from ..models.outputs import numpy_too
from ..upstream.auto_models import architectures
from ..upstream.long_form_speech import LongFormSpeech, encoder_strides


class ORTModelForSpeechSeq2Seq(LongFormSpeech, EncoderDecoder):
    """Speech recognition model with encoder and decoder.

    Whisper takes `input_features: (batch, mels, frames)` and supports long recordings and timestamps. Speech2Text takes
    `input_features: (batch, frames, mels)` and Moonshine `input_values: (batch, samples)`, both with `attention_mask` if rows are padded.
    """

    task = "automatic-speech-recognition"

    @numpy_too
    def generate(self, input_features: Any = None, *args: Any, **kwargs: Any) -> Any:  # type: ignore[override]  # transformers' name
        """Generate text with the model's `generate` of transformers; all of its arguments are supported. The first argument is the sounds.

        Raises:
            InputError: The inputs are not sounds, or `ORTModelForSeq2SeqLM.generate` rejects them.
        """
        if not self._long_form:
            return EncoderDecoder.generate(self, input_features, *args, **kwargs)
        self._check_prompt(input_features, kwargs)
        if kwargs.get("return_token_timestamps"):
            raise InputError(
                "The times of words come from the decoder's attention to the sound, which the graphs do not return.",
                fix="ask for those of segments, return_timestamps=True; or run Whisper with transformers, or a model with a CTC head.",
            )
        return super().generate(input_features, *args, **renamed(kwargs))

    def window_outputs(self, outputs: Any) -> Any:
        """Remove a cache that cannot be split by rows: graphs of other tools may have states that are not keys and values."""
        if isinstance(outputs, Mapping):
            return {name: value for name, value in outputs.items() if not _is_unreadable(value)}
        return outputs

    def prepare_inputs_for_generation(
        self, input_ids: torch.Tensor, **kwargs: Any
    ) -> dict[str, Any]:  # transformers' signature
        """Prepare inputs, with Whisper's position ids counted from the decoder mask, because rows of a batch may have left padding."""
        mask = kwargs.get("decoder_attention_mask")
        if self._long_form and mask is not None and kwargs.get("decoder_position_ids") is None:
            positions = (mask.long().cumsum(-1) - 1).masked_fill(mask == 0, 0)
            kwargs["decoder_position_ids"] = positions[:, -input_ids.shape[1] :]
        prepared: dict[str, Any] = super().prepare_inputs_for_generation(input_ids, **kwargs)
        return prepared

    def _open(self) -> None:
        super()._open()
        self._long_form = family_of(self.config).long_recordings
        if type(self) is ORTModelForSpeechSeq2Seq and not self._long_form:
            # transformers' pipeline recognizes generating speech models by class name.
            self.__class__ = _named_after(*(self.config.architectures or ())[:1])
        if self._long_form:
            self.model = encoder_strides(self.config)


@functools.cache
def _named_after(architecture: str = "") -> type[ORTModelForSpeechSeq2Seq]:
    """Return a subclass of `ORTModelForSpeechSeq2Seq` with the name of transformers' class for an architecture."""
    if architecture not in architectures(("AutoModelForSpeechSeq2Seq",)):
        return ORTModelForSpeechSeq2Seq
    facts = {"__module__": __name__, "__doc__": ORTModelForSpeechSeq2Seq.__doc__}
    return type(architecture, (ORTModelForSpeechSeq2Seq,), facts)


def __getattr__(name: str) -> type[ORTModelForSpeechSeq2Seq]:
    # Pickle looks up the generated subclasses by name in this module.
    if name in architectures(("AutoModelForSpeechSeq2Seq",)):
        return _named_after(name)
    raise AttributeError(name)


def _is_unreadable(value: Any) -> bool:
    """Return whether a value is a cache that contains something other than keys and values per layer."""
    if not isinstance(value, Cache):
        return False
    try:
        getattr(value, "layers", ())
    except InputError:
        return True
    return False


class AutomaticSpeechRecognition(Task):
    """The task `automatic-speech-recognition` with encoder-decoder models."""

    model = ORTModelForSpeechSeq2Seq
