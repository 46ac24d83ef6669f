"""Sample audio for a trace: waveforms and spectrograms of different lengths with padding."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

from ..errors import ExportError
from ..interfaces.family import Sample
from ..interfaces.tracing_wrapper import Tensors, unwrapped
from .samples import IMAGE_AXES, SAMPLE_BATCH, parameters_of, processor_settings

SOUND_AXES = ("samples", "frames")
"""Names of audio axes whose size may vary: the samples of a waveform, and the frames of a spectrogram."""

AXIS_STEPS = {**dict.fromkeys(IMAGE_AXES, 32), "samples": 4000, "frames": 100}
"""Axes that models downsample, each with a step for its size. Exporters use multiples of the step as sample sizes.

A smaller size could become 0 after the downsampling.
"""

# Number of encoder positions in the sample. The second row has half of them, which is more than the 14 positions that x-vector
# convolutions remove. The number is odd, so that the trace contains the padding that SEW needs for an odd number.
_ENCODED = 49
_SECOND = 16000  # Number of samples in one second, for models whose config has no strides.
# Lengths of the reference cases, relative to the sample. With these factors, no length is a multiple of a stride.
_LENGTHS = (0.77, 1.43, 1.13, 0.91, 1.29)
_BINS = ("input_feat_per_channel", "feature_projection_input_dim", "num_mel_bins", "num_mels", "n_mels", "input_dim")
_PARTS = ("encoder_config", "audio_config", "encoder", "speech_encoder")


def sound_sample(module: torch.nn.Module, folder: Path | None) -> Sample:
    """Make inputs for an audio model: `input_values: (batch, samples)` or `input_features: (batch, frames, bins)`.

    The inputs also contain `attention_mask` if the model reads it. If the model accepts only one audio length, the audio has this length.

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
    """Return the sizes of the audio axes for the reference case `index`, or an empty dict for a graph without audio axes."""
    factor = _LENGTHS[index % len(_LENGTHS)]
    return {axis: max(2, round(size * factor)) for axis, size in sizes.items() if axis in SOUND_AXES}


def usual_sounds(axes: Collection[str], config: Any) -> dict[str, int]:
    """Return the usual sizes of audio axes, which are the sizes in the sample inputs of a trace (about one second)."""
    sizes = {}
    if "samples" in axes:
        sizes["samples"] = _samples(config)
    if "frames" in axes:
        sizes["frames"] = _ENCODED * _stride_of_frames(config)
    return sizes


def fixed_window(config: Any, main: str | None) -> tuple[int, int] | None:
    """Return the shape of a spectrogram of fixed length, or `None` if the length may vary."""
    bins: Any = getattr(config, "num_mel_bins", None)
    positions: Any = getattr(config, "max_source_positions", None)
    if main == "input_features" and bins and positions and not hasattr(config, "input_feat_per_channel"):
        # Whisper's spectrograms are (bins, frames). The number of frames is twice the number of encoder positions.
        return int(bins), 2 * int(positions)
    length: Any = getattr(config, "max_length", None)
    if main == "input_values" and bins and length:
        # The spectrograms of the audio spectrogram transformer are (frames, bins).
        return int(length), int(bins)
    return None


def _samples(config: Any) -> int:
    """Return the number of waveform samples that give `_ENCODED` encoder positions."""
    return samples_for(_ENCODED * _stride_of_adapter(config), config) or _SECOND


def samples_for(positions: int, config: Any) -> int | None:
    """Return the smallest number of waveform samples that give the number of encoder positions.

    Return `None` if the config describes no strided convolutions.
    """
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
    """Return the number of spectrogram frames for one encoder position."""
    for part in _with_parts(config):
        for name in ("subsampling_factor", "subsampling_conv_stride"):
            if isinstance(value := getattr(part, name, None), int):
                return max(4, value**2 if name.endswith("stride") else value)
    return 4 * _stride_of_adapter(config)


def _bins(config: Any, folder: Path | None) -> int | None:
    """Return the number of frequency bins of a frame from the model's config or from the settings of its feature extractor."""
    for part in _with_parts(config):
        for name in _BINS:
            if isinstance(value := getattr(part, name, None), int):
                return value
    size = processor_settings(folder, "feature_extractor").get("feature_size")
    return int(size) if isinstance(size, int | float) and math.isfinite(size) else None


def _with_parts(config: Any) -> list[Any]:
    parts = [part for name in _PARTS if (part := getattr(config, name, None)) is not None]
    return [config, *(SimpleNamespace(**part) if isinstance(part, Mapping) else part for part in parts)]
