"""What a transformers model takes inputs for that are left out: one answer for calls, calibration and evaluation."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

_FILL = {"attention_mask": 1, "token_type_ids": 0}


def with_defaults(
    feeds: Mapping[str, torch.Tensor], names: Iterable[str], own_defaults: Collection[str] = ()
) -> dict[str, torch.Tensor]:
    """Inputs with those that may be left out, of the shape of `input_ids` or of images; what has no default is still missing.

    Args:
        feeds: Inputs by name.
        names: What the graph takes.
        own_defaults: Inputs whose default the model computes, from `Component.own_defaults`: a graph cannot.
    """
    import torch

    made = dict(feeds)
    for name in names:
        if name not in made and name in _FILL and name not in own_defaults and "input_ids" in feeds:
            made[name] = torch.full_like(feeds["input_ids"], _FILL[name])
        if name not in made and name == "pixel_mask" and "pixel_values" in feeds:
            # No padding.
            made[name] = torch.ones_like(feeds["pixel_values"][:, 0], dtype=torch.int64)
    return made
