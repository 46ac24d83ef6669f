"""Family of Speech2Text, which transcribes spectrograms with any number of frames."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch

from ..interfaces.family import Axes, Family, Replacement


def _mask(convolutions: int, length: Any, mask: torch.Tensor) -> torch.Tensor:
    """Compute the padding mask `(batch, length)` of the encoder's output from the mask of frames `(batch, frames)`."""
    frames = mask.sum(-1, keepdim=True)
    # Each convolution halves the length and rounds up. So an output position is padding only if its first frame is padding.
    first = torch.arange(length, device=mask.device) * 2**convolutions
    # transformers treats a row whose mask is all 0 as a row without padding.
    real: torch.Tensor = (first < frames) | (frames < 1)
    return real.to(mask.dtype)


class SpeechToText(Family):
    """Family of Speech2Text."""

    sounds_of_any_length = True

    def replacements(self, model: Any) -> list[Replacement]:
        """Replace transformers' computation of the mask by one without integer division.

        With transformers' integer division, OpenVINO (2026.3) computes a wrong mask.
        """
        masked = partial(_mask, int(model.config.num_conv_layers))
        return [(model.get_encoder(), "_get_feature_vector_attention_mask", masked)]

    def max_sizes(self, model: Any, axes: Axes) -> dict[str, int]:
        """Return the largest number of frames for which the encoder has positions.

        The PyTorch model extends its position table for longer audio, but a graph cannot extend the table.
        """
        if not any("frames" in named.values() for named in axes.values()):
            return {}
        table = model.get_encoder().embed_positions
        # Positions start after `padding_idx`.
        positions = int(table.weights.shape[0]) - int(table.padding_idx) - 1
        return {"frames": positions * 2 ** int(model.config.num_conv_layers)}


FAMILY = SpeechToText()
