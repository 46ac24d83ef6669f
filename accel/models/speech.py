"""Speech to text: Whisper's own `generate` over our encoder and decoder."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from transformers.models.whisper.generation_whisper import WhisperGenerationMixin

from .encoder_decoder import EncoderDecoder
from .outputs import numpy_too


class ORTModelForSpeechSeq2Seq(
    WhisperGenerationMixin,  # type: ignore[misc]  # transformers is untyped here
    EncoderDecoder,
):
    """Speech to text with Whisper: `input_features: (batch, mels, frames)` to text, long recordings and timestamps too."""

    task = "automatic-speech-recognition"

    @numpy_too
    def generate(self, input_features: Any = None, *args: Any, **kwargs: Any) -> Any:  # type: ignore[override]  # transformers' name
        """Whisper's `generate`, with every argument it has; `input_features: (batch, mels, frames)`.

        Raises:
            InputError: Inputs that are no features, and what `ORTModelForSeq2SeqLM.generate` refuses.
        """
        self._check_prompt(input_features, kwargs)
        return super().generate(input_features, *args, **kwargs)

    def _open(self) -> None:
        super()._open()
        # Whisper's long-form loop reads how many frames one position covers from the encoder's convolutions.
        stride = SimpleNamespace(stride=(1,)), SimpleNamespace(stride=(2,))
        self.model = SimpleNamespace(encoder=SimpleNamespace(conv1=stride[0], conv2=stride[1]), config=self.config)
