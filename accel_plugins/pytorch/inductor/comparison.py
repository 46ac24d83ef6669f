"""Comparison of the outputs of compiled code with the outputs of the original model."""

from __future__ import annotations

import math
from typing import Any

import torch

from ..upstream import tree_flatten, tree_leaves, tree_unflatten
from .sizes import CallSizes, axes_to_cut, cut


def compare(
    actual: Any, expected: Any, have: CallSizes, want: CallSizes, mask: torch.Tensor | None = None
) -> tuple[Any, float, list[dict[int, str]]]:
    """Compare the output of compiled code with the original model's output.

    Args:
        actual: The output of the compiled code for the padded call: a nested structure of tensors `(batch, ...)`.
        expected: The output of the original model for the call without padding.
        have: Sizes of the call without padding.
        want: Sizes that the call was padded to.
        mask: Attention mask `(batch, sequence)`. With a mask, outputs with one value per token are compared only for
            tokens whose mask is not 0.

    Returns:
        The output of the compiled code without padding; the largest difference as a fraction of the largest expected
        value (infinity if the structures of the outputs differ); and the axes of each tensor from which padding was
        removed.
    """
    leaves, spec = tree_flatten(actual)
    reference = tree_leaves(expected)
    if len(leaves) != len(reference):
        return actual, math.inf, []
    worst, axes = 0.0, []
    for i, (leaf, other) in enumerate(zip(leaves, reference, strict=True)):
        if not isinstance(leaf, torch.Tensor) or not isinstance(other, torch.Tensor):
            # Outputs may also contain values that are not tensors, such as the number of rows; these must be equal.
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
    return tree_unflatten(leaves, spec), worst, axes


def difference(actual: torch.Tensor, expected: torch.Tensor) -> float:
    """Return the largest difference of two tensors of equal shape, as a fraction of the largest finite expected value.
    Two NaN at the same index count as equal.
    """
    if not actual.numel():
        return 0.0
    values, other = actual.double(), expected.double()
    if not bool(values.isfinite().all()) and bool(other.isfinite().all()):
        return math.inf
    same = (values == other) | (values.isnan() & other.isnan())
    gap = torch.where(same, torch.zeros_like(values), (values - other).abs()).nan_to_num(nan=math.inf).max()
    finite = other[other.isfinite()]
    scale = float(finite.abs().max()) if finite.numel() else 1.0
    return float(gap) / (scale or 1.0)
