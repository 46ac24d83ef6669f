"""transformers' `generate` for audio longer than the encoder's window, with timestamps.

Seen in transformers 5.23 and 5.24. transformers has this loop only in a private class of Whisper's module. There is no public
alternative for models that are not PyTorch models.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from transformers.models.whisper.generation_whisper import WhisperGenerationMixin


class LongFormSpeech(WhisperGenerationMixin):  # type: ignore[misc]  # transformers is untyped here
    """Whisper's loop over windows. Subclasses may override `window_outputs`."""

    def window_outputs(self, outputs: Any) -> Any:
        """Return the part of a window's outputs that can be split by rows of the batch."""
        return outputs

    def _postprocess_outputs(self, seek_outputs: Any, *args: Any, **kwargs: Any) -> Any:
        return super()._postprocess_outputs(self.window_outputs(seek_outputs), *args, **kwargs)


def encoder_strides(config: Any) -> SimpleNamespace:
    """Return an object with the attributes that Whisper's loop reads from a PyTorch model: the strides of its convolutions."""
    convolutions = {"conv1": SimpleNamespace(stride=(1,)), "conv2": SimpleNamespace(stride=(2,))}
    return SimpleNamespace(encoder=SimpleNamespace(**convolutions), config=config)
