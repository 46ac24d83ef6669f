"""Task `automatic-speech-recognition` with encoder-decoder models."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from transformers.cache_utils import Cache

from ..decoding.kv_cache import renamed
from ..errors import InputError
from ..interfaces.family_registry import family_of
from ..interfaces.task import Task
from ..models.encoder_decoder import EncoderDecoder
from ..models.outputs import numpy_too
from ..serving.operations import Operation
from ..upstream.auto_models import architectures
from ..upstream.long_form_speech import LongFormSpeech, encoder_strides

if TYPE_CHECKING:
    from ..serving.http.endpoints import Endpoint


class ORTModelForSpeechSeq2Seq(LongFormSpeech, EncoderDecoder):
    """Speech recognition model with encoder and decoder.

    Whisper's input is `input_features: (batch, mels, frames)`; Whisper supports long recordings and timestamps. The input of Speech2Text is
    `input_features: (batch, frames, mels)`, and the input of Moonshine is `input_values: (batch, samples)`. Speech2Text and Moonshine also
    need an `attention_mask` if rows are padded.
    """

    task = "automatic-speech-recognition"

    @numpy_too
    def generate(self, input_features: Any = None, *args: Any, **kwargs: Any) -> Any:  # type: ignore[override]  # transformers' name
        """Generate text with the model's `generate` of transformers; all of its arguments are supported.

        The first argument contains the sounds, as waveforms or spectrograms.

        Raises:
            InputError: The inputs are not sounds, or `ORTModelForSeq2SeqLM.generate` raises for these arguments.
        """
        if not self._long_form:
            return EncoderDecoder.generate(self, input_features, *args, **kwargs)
        self._check_prompt(input_features, kwargs)
        if kwargs.get("return_token_timestamps"):
            raise InputError(
                "return_token_timestamps=True is not supported: transformers computes word timestamps from the decoder's "
                "cross-attention, which the exported graphs do not return.",
                fix="pass return_timestamps=True for timestamps of segments. For timestamps of words, run Whisper with transformers or use "
                "a CTC model.",
            )
        return super().generate(input_features, *args, **renamed(kwargs))

    def window_outputs(self, outputs: Any) -> Any:
        """Remove a cache that cannot be split by rows. Graphs from other exporters may have states that are not keys and values."""
        if isinstance(outputs, Mapping):
            return {name: value for name, value in outputs.items() if not _is_unreadable(value)}
        return outputs

    def prepare_inputs_for_generation(
        self, input_ids: torch.Tensor, **kwargs: Any
    ) -> dict[str, Any]:  # transformers' signature
        """Prepare the inputs of a decoder step.

        For Whisper, position ids are counted from the decoder's mask, because rows of a batch may be padded on the left.
        """
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
    members = {"__module__": __name__, "__doc__": ORTModelForSpeechSeq2Seq.__doc__}
    return type(architecture, (ORTModelForSpeechSeq2Seq,), members)


def __getattr__(name: str) -> type[ORTModelForSpeechSeq2Seq]:
    # To load a pickled model, pickle reads the class as an attribute of this module: `_named_after` creates these classes at runtime.
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


class TranscriptionOperation(Operation):
    """Operation that returns the text of a recording. It runs the pipeline of the same name."""

    name = "automatic-speech-recognition"

    def endpoint(self) -> Endpoint:
        from ..serving.http.openai_transcriptions import transcription_endpoint

        return transcription_endpoint(self.name)


class AutomaticSpeechRecognition(Task):
    """The task `automatic-speech-recognition` with encoder-decoder models."""

    model = ORTModelForSpeechSeq2Seq

    def operations(self) -> Sequence[Operation]:
        return (TranscriptionOperation(),)
