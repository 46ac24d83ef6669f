"""Speech to text: Whisper's own `generate` over our encoder and decoder."""

from __future__ import annotations

from types import SimpleNamespace

from transformers.models.whisper.generation_whisper import WhisperGenerationMixin

from .encoder_decoder import EncoderDecoder


class ORTModelForSpeechSeq2Seq(
    WhisperGenerationMixin,  # type: ignore[misc]  # transformers is untyped here
    EncoderDecoder,
):
    """Speech to text with Whisper: `input_features: (batch, mels, frames)` to text, long recordings and timestamps too."""

    task = "automatic-speech-recognition"

    def _open(self) -> None:
        super()._open()
        # Whisper's long-form loop reads how many frames one position covers from the encoder's convolutions.
        stride = SimpleNamespace(stride=(1,)), SimpleNamespace(stride=(2,))
        self.model = SimpleNamespace(encoder=SimpleNamespace(conv1=stride[0], conv2=stride[1]), config=self.config)
