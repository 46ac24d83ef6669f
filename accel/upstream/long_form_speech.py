"""transformers' `generate` for recordings longer than the encoder's window, with timestamps.

Seen in transformers 5.23 and 5.24. The class is private to its model's module; there is no public alternative that runs over a
model of another library.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from transformers.models.whisper.generation_whisper import WhisperGenerationMixin


class LongFormSpeech(WhisperGenerationMixin):  # type: ignore[misc]  # transformers is untyped here
    """The loop over windows; see `window_outputs` and `encoder_strides`."""

    def window_outputs(self, outputs: Any) -> Any:
        """What of a window's outputs is split by rows."""
        return outputs

    def _postprocess_outputs(self, seek_outputs: Any, *args: Any, **kwargs: Any) -> Any:
        return super()._postprocess_outputs(self.window_outputs(seek_outputs), *args, **kwargs)


def encoder_strides(config: Any) -> SimpleNamespace:
    """The part of a PyTorch model that the loop reads: the strides of the encoder's convolutions, one position for two frames."""
    convolutions = {"conv1": SimpleNamespace(stride=(1,)), "conv2": SimpleNamespace(stride=(2,))}
    return SimpleNamespace(encoder=SimpleNamespace(**convolutions), config=config)
