"""Sample inputs of encoder-decoders that read audio, and the padding mask that their encoder shortens with the audio."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from ..interfaces.family import Axes, Sample
from ..interfaces.family_registry import family_of
from ..interfaces.wrapper import unwrapped
from ..upstream.model_internals import shortened_by
from .samples import default_sample
from .sound_samples import fixed_window, samples_for, sound_sample


def speech_sample(module: torch.nn.Module, folder: Path | None) -> Sample:
    """Make inputs for a speech-to-text model: audio of any length with its mask, or Whisper's fixed window without a mask.

    Raises:
        ExportError: The model has another main input.
    """
    config = getattr(module, "config", None)
    window = fixed_window(config, getattr(unwrapped(module), "main_input_name", None))
    # For other encoder-decoders it is unknown how the encoder's mask reaches the decoder.
    reads_sounds = window is not None or family_of(config).sounds_of_any_length
    return sound_sample(module, folder) if reads_sounds else default_sample(module, folder)


def longest_sound(module: torch.nn.Module, axes: Axes) -> dict[str, int]:
    """Return the most samples or frames that a conformer's relative positions allow (Wav2Vec2-Conformer, Wav2Vec2-BERT).

    The model extends its table if needed, but a graph cannot.
    """
    inner: Any = unwrapped(module)
    varied = {axis for named in axes.values() for axis in named.values()}
    if (positions := _relative_positions(inner)) is None:
        return {}
    if "samples" in varied and (beyond := samples_for(positions + 1, inner.config)) is not None:
        return {"samples": beyond - 1}
    # These encoders shorten frames only at the end, so they have one position for each frame.
    return {"frames": positions} if "frames" in varied else {}


def _relative_positions(module: torch.nn.Module) -> int | None:
    """Return the longest sequence that a conformer's table of relative positions supports, or `None` without such a table."""
    held = [getattr(part, "pe", None) for part in module.modules() if hasattr(part, "extend_pe")]
    sizes = [(int(table.shape[1]) + 1) // 2 for table in held if isinstance(table, torch.Tensor) and table.ndim == 3]
    return min(sizes, default=None)


def shortened_mask(encoder: Any, output: Any, mask: torch.Tensor) -> torch.Tensor | None:
    """Return the padding mask of an encoder's output, `(batch, encoder_sequence)`, or `None` if the encoder does not shorten.

    Args:
        encoder: The encoder.
        output: Output of the encoder.
        mask: Mask of the encoder's input, `(batch, samples)` or `(batch, frames)`.
    """
    found: torch.Tensor | None = getattr(output, "attention_mask", None)
    if found is None:
        found = shortened_by(encoder, output.last_hidden_state.shape[1], mask)
    return None if found is None else found.to(mask.dtype)
