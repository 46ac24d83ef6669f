"""Speech recognition by encoder-decoders."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from transformers.cache_utils import Cache

from ..capture.speech_samples import speech_sample
from ..data.batches import Encoded
from ..data.rows import Rows
from ..data.sound_rows import encode_sounds
from ..decoding.kv_cache import renamed
from ..errors import InputError
from ..interfaces.family_registry import family_of
from ..interfaces.task import Sample, Task
from ..models.encoder_decoder import EncoderDecoder
from ..models.outputs import numpy_too
from ..upstream.auto_models import architectures
from ..upstream.long_form_speech import LongFormSpeech, encoder_strides


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
        """Leave out a cache that cannot be split by rows: graphs of other tools name their states as they like."""
        if isinstance(outputs, Mapping):
            return {name: value for name, value in outputs.items() if not _is_unreadable(value)}
        return outputs

    def prepare_inputs_for_generation(
        self, input_ids: torch.Tensor, **kwargs: Any
    ) -> dict[str, Any]:  # transformers' signature
        """Whisper's positions count what the mask of the decoder's tokens shows: rows of a batch may be padded in front."""
        mask = kwargs.get("decoder_attention_mask")
        if self._long_form and mask is not None and kwargs.get("decoder_position_ids") is None:
            positions = (mask.long().cumsum(-1) - 1).masked_fill(mask == 0, 0)
            kwargs["decoder_position_ids"] = positions[:, -input_ids.shape[1] :]
        made: dict[str, Any] = super().prepare_inputs_for_generation(input_ids, **kwargs)
        return made

    def _open(self) -> None:
        super()._open()
        self._long_form = family_of(self.config).long_recordings
        if type(self) is ORTModelForSpeechSeq2Seq and not self._long_form:
            # The stock pipeline finds by the class's name that a model generates.
            self.__class__ = _named_after(*(self.config.architectures or ())[:1])
        if self._long_form:
            self.model = encoder_strides(self.config)


@functools.cache
def _named_after(architecture: str = "") -> type[ORTModelForSpeechSeq2Seq]:
    """Our class under the name of transformers' class for an architecture."""
    if architecture not in architectures(("AutoModelForSpeechSeq2Seq",)):
        return ORTModelForSpeechSeq2Seq
    facts = {"__module__": __name__, "__doc__": ORTModelForSpeechSeq2Seq.__doc__}
    return type(architecture, (ORTModelForSpeechSeq2Seq,), facts)


def __getattr__(name: str) -> type[ORTModelForSpeechSeq2Seq]:
    # For pickle.
    if name in architectures(("AutoModelForSpeechSeq2Seq",)):
        return _named_after(name)
    raise AttributeError(name)


def _is_unreadable(value: Any) -> bool:
    """Whether a value is a cache of something else than keys and values by layer."""
    if not isinstance(value, Cache):
        return False
    try:
        getattr(value, "layers", ())
    except InputError:
        return True
    return False


class AutomaticSpeechRecognition(Task):
    """Speech recognition by encoder-decoders."""

    model = ORTModelForSpeechSeq2Seq

    def sample(self, module: Any, folder: Path | None) -> Sample | None:
        return speech_sample(module, folder)

    def encode(self, rows: Rows, processor: Any, max_length: int | None) -> Encoded:
        return encode_sounds(rows, processor, max_length)
