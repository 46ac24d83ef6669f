"""Encoder-decoders that hear: what they are traced with, and their mask, which the encoder shortens as it shortens the sound."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from ..interfaces.family import Axes, Sample
from ..interfaces.family_registry import family_of
from ..interfaces.wrapper import unwrapped
from .samples import default_sample
from .sound_samples import samples_for, sound_sample


def speech_sample(module: torch.nn.Module, folder: Path | None) -> Sample:
    """Inputs for a model that writes what it hears: sounds of any length with their mask, Whisper's windows without one.

    Raises:
        ExportError: The model reads something else.
    """
    # Of other encoder-decoders it is not known how their masks reach the decoder.
    any_length = family_of(getattr(module, "config", None)).sounds_of_any_length
    return sound_sample(module, folder) if any_length else default_sample(module, folder)


def longest_sound(module: torch.nn.Module, axes: Axes) -> dict[str, int]:
    """How many samples or frames the relative positions of a conformer allow (Wav2Vec2-Conformer, Wav2Vec2-BERT): the model makes more of
    them when it needs to, which a graph cannot.
    """
    inner: Any = unwrapped(module)
    varied = {axis for named in axes.values() for axis in named.values()}
    if (positions := _relative_positions(inner)) is None:
        return {}
    if "samples" in varied and (beyond := samples_for(positions + 1, inner.config)) is not None:
        return {"samples": beyond - 1}
    # Frames are shortened only after the encoder, which has a position for each of them.
    return {"frames": positions} if "frames" in varied else {}


def _relative_positions(module: torch.nn.Module) -> int | None:
    """The longest sequence that a conformer's table of distances, from one end to the other and back, is made for; `None` without one."""
    held = [getattr(part, "pe", None) for part in module.modules() if hasattr(part, "extend_pe")]
    sizes = [(int(table.shape[1]) + 1) // 2 for table in held if isinstance(table, torch.Tensor) and table.ndim == 3]
    return min(sizes, default=None)


def shortened_mask(encoder: Any, output: Any, mask: torch.Tensor) -> torch.Tensor | None:
    """Which positions of an encoder's answer are no padding, `(batch, encoder_sequence)`; `None` where it shortens nothing.

    Args:
        encoder: The encoder.
        output: What it answered.
        mask: What it was given, `(batch, samples)` or `(batch, frames)`.
    """
    found: torch.Tensor | None = getattr(output, "attention_mask", None)
    if found is None and hasattr(encoder, "_get_feature_vector_attention_mask"):
        found = encoder._get_feature_vector_attention_mask(output.last_hidden_state.shape[1], mask)
    return None if found is None else found.to(mask.dtype)


@contextmanager
def short_masks(model: Any) -> Iterator[None]:
    """A model that takes the mask of its encoder's answer as it is, where its own code would shorten that of its sounds."""
    inner: Any = getattr(model, "model", None)
    if not hasattr(inner, "_get_feature_vector_attention_mask"):
        yield
        return
    inner._get_feature_vector_attention_mask = lambda _, mask: mask
    try:
        yield
    finally:
        del inner._get_feature_vector_attention_mask
