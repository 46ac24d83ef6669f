"""Moonshine: speech to text from waveforms of any length."""

from __future__ import annotations

from typing import Any

from ..interfaces.family import Family, Replacement

# Kernel sizes and strides of its three convolutions. Its config does not contain them.
_CONVOLUTIONS = ((127, 64), (7, 3), (3, 2))


def _lengths(samples: Any) -> Any:
    for kernel, stride in _CONVOLUTIONS:
        samples = (samples - kernel) // stride + 1
    return samples


class Moonshine(Family):
    """Family of Moonshine."""

    sounds_of_any_length = True

    def replacements(self, model: Any) -> list[Replacement]:
        """Compute lengths with integers. transformers divides floats, which a trace cannot use as sizes."""
        return [(model.get_encoder(), "_get_feat_extract_output_lengths", _lengths)]


FAMILY = Moonshine()
