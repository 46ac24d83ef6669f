"""Encoder-decoders that hear: what they are traced with, and their mask, which the encoder shortens as it shortens the sound."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import torch

from ..interfaces.wrapper import Tensors, Wrapper
from .samples import Axes, default_sample
from .sound_samples import samples_for, sound_sample

# Of other encoder-decoders it is not known here how their masks reach the decoder.
_ANY_LENGTH = ("moonshine", "speech_to_text")
# Kernels and strides of Moonshine's three convolutions, which its config does not say.
_MOONSHINE = ((127, 64), (7, 3), (3, 2))


def speech_sample(module: torch.nn.Module, folder: Path | None) -> tuple[Tensors, Axes, tuple[str, ...]]:
    """Inputs for a model that writes what it hears: sounds of any length with their mask, Whisper's windows without one.

    Raises:
        ExportError: The model reads something else.
    """
    if getattr(getattr(module, "config", None), "model_type", None) in _ANY_LENGTH:
        return sound_sample(module, folder)
    return default_sample(module, folder)


def longest_sound(module: torch.nn.Module, axes: Axes) -> dict[str, int]:
    """How many samples or frames the encoder's positions allow, where a model makes more of them when it needs to, which a graph
    cannot: Speech2Text's table, and the relative positions of conformers (Wav2Vec2-Conformer, Wav2Vec2-BERT).
    """
    inner: Any = module.unwrapped if isinstance(module, Wrapper) else module
    config: Any = getattr(inner, "config", None)
    varied = {axis for named in axes.values() for axis in named.values()}
    if (positions := _relative_positions(inner)) is not None:
        if "samples" in varied and (beyond := samples_for(positions + 1, config)) is not None:
            return {"samples": beyond - 1}
        # What comes as frames is shortened behind the encoder alone.
        return {"frames": positions} if "frames" in varied else {}
    if getattr(config, "model_type", None) != "speech_to_text" or "frames" not in varied:
        return {}
    table: Any = inner.get_encoder().embed_positions
    # The model counts from behind its padding row, and makes a longer table where it needs one, which a graph cannot.
    positions = int(table.weights.shape[0]) - int(table.padding_idx) - 1
    return {"frames": positions * 2 ** int(config.num_conv_layers)}


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
def traced_lengths(encoder: Any) -> Iterator[None]:
    """In a trace, an encoder that compares the lengths of its answers without fractions; outside of one it is as it was.

    Moonshine's own code divides floats, which are no sizes in a trace. Speech2Text's divides integers of the mask, which OpenVINO
    (2026.3) answers with other masks.
    """
    replacements: dict[str, Callable[..., Any]] = {}
    if torch.compiler.is_exporting():
        kind = getattr(encoder.config, "model_type", None)
        if kind == "moonshine":
            replacements["_get_feat_extract_output_lengths"] = _moonshine_lengths
        elif kind == "speech_to_text":
            replacements["_get_feature_vector_attention_mask"] = partial(_compared, encoder)
    vars(encoder).update(replacements)
    try:
        yield
    finally:
        for name in replacements:
            delattr(encoder, name)


def _moonshine_lengths(samples: Any) -> Any:
    for kernel, stride in _MOONSHINE:
        samples = (samples - kernel) // stride + 1
    return samples


def _compared(encoder: Any, length: Any, mask: torch.Tensor) -> torch.Tensor:
    """The mask `(batch, length)` of what an encoder makes of frames with a mask `(batch, frames)`."""
    frames = mask.sum(-1, keepdim=True)
    # Each convolution halves and rounds up: a position is real where its first frame is.
    first = torch.arange(length, device=mask.device) * 2 ** int(encoder.config.num_conv_layers)
    # A row without any frame counts as whole, as in the model's own code.
    real: torch.Tensor = (first < frames) | (frames < 1)
    return real.to(mask.dtype)


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
