"""Sample audio for a trace: waveforms and spectrograms of different lengths, padded, long enough for a model's strides."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

from ..errors import ExportError
from ..interfaces.family import Sample
from ..interfaces.wrapper import Tensors, unwrapped
from .samples import IMAGE_AXES, SAMPLE_BATCH, parameters_of, processor_settings

SOUND_AXES = ("samples", "frames")
"""Axes that may have any length: samples of a waveform and frames of a spectrogram."""

AXIS_STEPS = {**dict.fromkeys(IMAGE_AXES, 32), "samples": 4000, "frames": 100}
"""Axes that models downsample, and a step for their sizes. Exporters use multiples of the step, because small sizes would vanish."""

# Positions that the encoder sees. Half of them is more than the 14 that x-vector convolutions remove. The number is odd, so
# that SEW's padding after its downsampling is traced.
_ENCODED = 49
_SECOND = 16000  # Samples, for models whose config has no strides.
# Lengths of the reference cases, relative to the sample. None gives a multiple of a stride.
_LENGTHS = (0.77, 1.43, 1.13, 0.91, 1.29)
_BINS = ("input_feat_per_channel", "feature_projection_input_dim", "num_mel_bins", "num_mels", "n_mels", "input_dim")
_PARTS = ("encoder_config", "audio_config", "encoder", "speech_encoder")


def sound_sample(module: torch.nn.Module, folder: Path | None) -> Sample:
    """Make inputs for an audio model: `input_values: (batch, samples)` or `input_features: (batch, frames, bins)`.

    Adds `attention_mask` if the model reads it. If the model has positions for one length only, the audio has that length.

    Raises:
        ExportError: The model has another main input.
    """
    config: Any = getattr(module, "config", None)
    inner = unwrapped(module)
    main = getattr(inner, "main_input_name", None)
    window = fixed_window(config, main)
    if window is not None:
        return {str(main): torch.randn(SAMPLE_BATCH, *window)}, {str(main): {0: "batch"}}, ("attention_mask",)
    shape: tuple[int, ...]
    if main == "input_values":
        shape, axes = (_samples(config),), {0: "batch", 1: "samples"}
    elif main == "input_features" and (bins := _bins(config, folder)) is not None:
        shape, axes = (_ENCODED * _stride_of_frames(config), bins), {0: "batch", 1: "frames"}
    else:
        reads = f"its main input is {main!r}" if main else "its class declares no main input"
        raise ExportError(
            f"accel cannot make sample audio for a {type(inner).__name__}, because {reads}.",
            fix="pass sample={input name: tensor} and axes={input name: {0: 'batch', 1: 'samples'}}.",
        )
    example: Tensors = {main: torch.randn(SAMPLE_BATCH, *shape)}
    if "attention_mask" not in parameters_of(module):
        return example, {main: axes}, ()
    mask = torch.ones(SAMPLE_BATCH, shape[0], dtype=torch.int64)
    mask[1::2, (shape[0] + 1) // 2 :] = 0
    return {**example, "attention_mask": mask}, {main: axes, "attention_mask": axes}, ()


def sound_sizes(sizes: Mapping[str, int], index: int) -> dict[str, int]:
    """Return an audio length for the reference case `index`. Return an empty dict for a graph without audio axes."""
    factor = _LENGTHS[index % len(_LENGTHS)]
    return {axis: max(2, round(size * factor)) for axis, size in sizes.items() if axis in SOUND_AXES}


def usual_sounds(axes: Collection[str], config: Any) -> dict[str, int]:
    """Return default audio lengths: the lengths of the trace's sample, about one second."""
    found = {}
    if "samples" in axes:
        found["samples"] = _samples(config)
    if "frames" in axes:
        found["frames"] = _ENCODED * _stride_of_frames(config)
    return found


def fixed_window(config: Any, main: str | None) -> tuple[int, int] | None:
    """Return the shape of a spectrogram of fixed length, or `None` if the length may vary."""
    bins: Any = getattr(config, "num_mel_bins", None)
    positions: Any = getattr(config, "max_source_positions", None)
    if main == "input_features" and bins and positions and not hasattr(config, "input_feat_per_channel"):
        # Whisper: bins before frames; the number of frames is twice the encoder's positions.
        return int(bins), 2 * int(positions)
    length: Any = getattr(config, "max_length", None)
    if main == "input_values" and bins and length:
        # Audio spectrogram transformer: frames before bins.
        return int(length), int(bins)
    return None


def _samples(config: Any) -> int:
    """Return the number of waveform samples for which an encoder of strided convolutions has `_ENCODED` positions."""
    return samples_for(_ENCODED * _stride_of_adapter(config), config) or _SECOND


def samples_for(positions: int, config: Any) -> int | None:
    """Return the fewest waveform samples that strided convolutions turn into `positions`, or `None` without convolutions."""
    kernels, strides = getattr(config, "conv_kernel", None), getattr(config, "conv_stride", None)
    if not isinstance(kernels, list | tuple) or not isinstance(strides, list | tuple):
        return None
    length = positions
    for kernel, stride in zip(reversed(kernels), reversed(strides), strict=True):
        length = (length - 1) * int(stride) + int(kernel)
    return length


def _stride_of_adapter(config: Any) -> int:
    if not getattr(config, "add_adapter", False):
        return 1
    stride, layers = int(config.adapter_stride), int(getattr(config, "num_adapter_layers", 1))
    return int(stride**layers)


def _stride_of_frames(config: Any) -> int:
    """Return the number of frames that become one position of the encoder."""
    for part in _with_parts(config):
        for name in ("subsampling_factor", "subsampling_conv_stride"):
            if isinstance(value := getattr(part, name, None), int):
                return max(4, value**2 if name.endswith("stride") else value)
    return 4 * _stride_of_adapter(config)


def _bins(config: Any, folder: Path | None) -> int | None:
    """Return the number of frequency bins of a frame, from the model's config, else from its feature extractor."""
    for part in _with_parts(config):
        for name in _BINS:
            if isinstance(value := getattr(part, name, None), int):
                return value
    size = processor_settings(folder, "feature_extractor").get("feature_size")
    return int(size) if isinstance(size, int | float) and math.isfinite(size) else None


def _with_parts(config: Any) -> list[Any]:
    parts = [part for name in _PARTS if (part := getattr(config, name, None)) is not None]
    return [config, *(SimpleNamespace(**part) if isinstance(part, Mapping) else part for part in parts)]
