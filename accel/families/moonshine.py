"""Family of Moonshine, which transcribes waveforms of any length."""

from __future__ import annotations

from typing import Any

from ..interfaces.family import Family, Replacement

# Kernel size and stride of each of Moonshine's three convolutions. The config does not contain these values.
_CONVOLUTIONS = ((127, 64), (7, 3), (3, 2))


def _lengths(samples: Any) -> Any:
    for kernel, stride in _CONVOLUTIONS:
        samples = (samples - kernel) // stride + 1
    return samples


class Moonshine(Family):
    """Family of Moonshine."""

    sounds_of_any_length = True

    def replacements(self, model: Any) -> list[Replacement]:
        """Replace transformers' computation of lengths by one with integers.

        transformers divides floating-point numbers, and a trace cannot use the result as an axis size.
        """
        return [(model.get_encoder(), "_get_feat_extract_output_lengths", _lengths)]


FAMILY = Moonshine()
