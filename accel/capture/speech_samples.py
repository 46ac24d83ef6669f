"""Sample inputs of encoder-decoders that read audio, and the padding mask of the encoder's shorter output."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from ..interfaces.family import Axes, Sample
from ..interfaces.family_registry import family_of
from ..interfaces.tracing_wrapper import unwrapped
from ..upstream.model_internals import shortened_by
from .samples import default_sample
from .sound_samples import fixed_window, samples_for, sound_sample


def speech_sample(module: torch.nn.Module, folder: Path | None) -> Sample:
    """Make sample inputs for a speech-to-text model.

    The inputs are audio of any length with a padding mask, or for Whisper audio of a fixed length without a mask.

    Raises:
        ExportError: The model has another main input.
    """
    config = getattr(module, "config", None)
    window = fixed_window(config, getattr(unwrapped(module), "main_input_name", None))
    # accel does not support audio of any length for other encoder-decoders, because their mask of the encoder's output is unknown.
    reads_sounds = window is not None or family_of(config).sounds_of_any_length
    return sound_sample(module, folder) if reads_sounds else default_sample(module, folder)


def longest_sound(module: torch.nn.Module, axes: Axes) -> dict[str, int]:
    """Return the largest number of samples or frames for which a conformer has relative positions.

    Wav2Vec2-Conformer and Wav2Vec2-BERT are such models. The PyTorch model extends its table of positions for longer audio, but a graph
    cannot extend the table.
    """
    inner: Any = unwrapped(module)
    varied = {axis for named in axes.values() for axis in named.values()}
    if (positions := _relative_positions(inner)) is None:
        return {}
    if "samples" in varied and (beyond := samples_for(positions + 1, inner.config)) is not None:
        return {"samples": beyond - 1}
    # Encoders that read frames shorten the sequence only after the last layer, so each frame needs one position.
    return {"frames": positions} if "frames" in varied else {}


def _relative_positions(module: torch.nn.Module) -> int | None:
    """Return the longest sequence that a conformer's table of relative positions supports, or `None` for a model without such a table."""
    tables = [getattr(part, "pe", None) for part in module.modules() if hasattr(part, "extend_pe")]
    sizes = [(int(table.shape[1]) + 1) // 2 for table in tables if isinstance(table, torch.Tensor) and table.ndim == 3]
    return min(sizes, default=None)


def shortened_mask(encoder: Any, output: Any, mask: torch.Tensor) -> torch.Tensor | None:
    """Return the padding mask `(batch, encoder_sequence)` of an encoder's output.

    Return `None` if the output has as many positions as the input, so that the input mask can be used.

    Args:
        encoder: The encoder.
        output: Output of the encoder.
        mask: Mask of the encoder's input, `(batch, samples)` or `(batch, frames)`.
    """
    shortened: torch.Tensor | None = getattr(output, "attention_mask", None)
    if shortened is None:
        shortened = shortened_by(encoder, output.last_hidden_state.shape[1], mask)
    return None if shortened is None else shortened.to(mask.dtype)
