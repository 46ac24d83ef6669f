"""What a transformers model takes inputs for that are left out: one answer for calls, calibration and evaluation."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

_FILL = {"attention_mask": 1, "token_type_ids": 0}
# What a mask is as long as: tokens, samples of waveforms, frames of spectrograms.
_LONG_AS = ("input_ids", "input_values", "input_features")


def with_defaults(
    feeds: Mapping[str, torch.Tensor], names: Iterable[str], own_defaults: Collection[str] = ()
) -> dict[str, torch.Tensor]:
    """Inputs with those that may be left out, of the shape of the tokens, sounds or images; what has no default is still missing.

    Args:
        feeds: Inputs by name.
        names: What the graph takes.
        own_defaults: Inputs whose default the model computes, from `Component.own_defaults`: a graph cannot.
    """
    import torch

    made = dict(feeds)
    first = next((feeds[name] for name in _LONG_AS if name in feeds), None)
    for name in names:
        if name not in made and name in _FILL and name not in own_defaults and first is not None and first.ndim >= 2:
            shape = first.shape if "input_ids" in feeds else first.shape[:2]
            made[name] = torch.full(shape, _FILL[name], dtype=torch.int64, device=first.device)
        if name not in made and name == "bbox" and name not in own_defaults and "input_ids" in feeds:
            # All at the page's corner, as LayoutLM, LayoutLMv3 and LiLT in transformers have it.
            made[name] = torch.zeros(
                (*feeds["input_ids"].shape, 4), dtype=torch.int64, device=feeds["input_ids"].device
            )
        if name not in made and name == "pixel_mask" and "pixel_values" in feeds:
            # No padding.
            made[name] = torch.ones_like(feeds["pixel_values"][:, 0], dtype=torch.int64)
    return made
