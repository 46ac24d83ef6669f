"""How far an answer of compiled code is from the model's own."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch.utils import _pytree as pytree

from .sizes import Sizes, axes_to_cut, cut


def compare(
    found: Any, expected: Any, have: Sizes, want: Sizes, mask: torch.Tensor | None = None
) -> tuple[Any, float, list[dict[int, str]]]:
    """What was found without its padding, its largest difference as a share of the largest value, and the axes cut of each tensor.

    Args:
        found: The answer to a padded call: tensors, `(batch, ...)` each, in any nesting.
        expected: The answer to the call itself.
        have: Sizes of the call.
        want: Sizes that it was padded to.
        mask: `(batch, sequence)`; where it is given, tensors of tokens are compared at the tokens it has.
    """
    leaves, spec = pytree.tree_flatten(found)
    reference = pytree.tree_leaves(expected)
    if len(leaves) != len(reference):
        return found, math.inf, []
    worst, axes = 0.0, []
    for i, (leaf, other) in enumerate(zip(leaves, reference, strict=True)):
        if not isinstance(leaf, torch.Tensor) or not isinstance(other, torch.Tensor):
            # Numbers among the answers, such as that of the rows.
            if isinstance(leaf, (bool, int, float, str)) and leaf != other:
                worst = math.inf
            continue
        cuts = axes_to_cut(leaf, other, have, want)
        axes.append(cuts or {})
        if cuts is None:
            worst = math.inf
            continue
        leaves[i] = leaf = cut(leaf, cuts, have)
        if mask is not None and leaf.shape[:2] == mask.shape:
            leaf, other = leaf[mask != 0], other[mask != 0]
        worst = max(worst, difference(leaf, other))
    return pytree.tree_unflatten(leaves, spec), worst, axes


def difference(found: torch.Tensor, expected: torch.Tensor) -> float:
    """The largest difference of two tensors of one shape, as a share of the largest finite value expected; NaN equals NaN."""
    if not found.numel():
        return 0.0
    one, other = found.double(), expected.double()
    if not bool(one.isfinite().all()) and bool(other.isfinite().all()):
        return math.inf
    same = (one == other) | (one.isnan() & other.isnan())
    gap = torch.where(same, torch.zeros_like(one), (one - other).abs()).nan_to_num(nan=math.inf).max()
    finite = other[other.isfinite()]
    scale = float(finite.abs().max()) if finite.numel() else 1.0
    return float(gap) / (scale or 1.0)
