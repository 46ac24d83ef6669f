"""What rounding does to a model's answers in PyTorch alone, to eight bits or to float32: the measure for a graph that is far off.

A model of random weights may turn a small error into a large one: where experts are chosen by scores that lie close
together, or where nothing normalizes what layers add up. Then rounding does so without any graph.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import torch

from .questions import Question, Tensors, answers, difference

_LEVELS = 127
_GRIDS = 8


def largest_error(model: Any, asked: Sequence[Question]) -> float:
    """The largest relative difference that rounding makes, over several grids: which scores change places differs."""
    return max(
        difference(question, answers(made, question.inputs))
        for made in (rounded(model, coarser=1 + i / (2 * _GRIDS)) for i in range(_GRIDS))
        for question in asked
    )


def own_error(model: Any, asked: Sequence[Question]) -> float:
    """The largest relative difference between a model's answers in float32 and in float64; 0 where it does not compute in float64."""
    exact = copy.deepcopy(model).double()
    try:
        return max(difference(one, answers(exact, _in_float64(one.inputs))) for one in asked)
    # Foreign model code, which may raise anything.
    except Exception:  # noqa: BLE001
        return 0.0


def _in_float64(inputs: Tensors) -> Tensors:
    return {name: tensor.double() if tensor.is_floating_point() else tensor for name, tensor in inputs.items()}


@torch.no_grad()
def rounded(model: Any, coarser: float = 1.0) -> Any:
    """A copy of a model whose products have weights in eight bits, symmetric and by output channel, and inputs in eight, of 256
    levels between the least and the largest value. OpenVINO rounds inputs also where weights alone are stored so.

    Args:
        model: In evaluation mode.
        coarser: Factor of the steps: up to 2, at which seven bits would do.
    """
    made = copy.deepcopy(model)
    for name, module in made.named_modules():
        product = isinstance(module, torch.nn.Linear | torch.nn.Conv1d | torch.nn.Conv2d)
        for parameter in module.parameters(recurse=False):
            # Experts are matrices side by side.
            if parameter.ndim >= 2 and (product or "expert" in name):
                by_last = parameter.ndim == 3 and "expert" in name
                parameter.copy_(_rounded_weights(parameter, coarser, by_last=by_last))
        if product:
            module.register_forward_pre_hook(lambda _, inputs: (_rounded_input(inputs[0], coarser), *inputs[1:]))
    return made.eval()


def _rounded_weights(weights: torch.Tensor, coarser: float, *, by_last: bool) -> torch.Tensor:
    """Weights `(outer, ...)`, or `(experts, ...)` with a step for each of their rows, at the nearest of 255 levels."""
    axes = (-1,) if by_last else tuple(range(1, weights.ndim))
    step = coarser * weights.abs().amax(axes, keepdim=True).clamp(min=1e-12) / _LEVELS
    return (weights / step).round() * step


def _rounded_input(value: torch.Tensor, coarser: float) -> torch.Tensor:
    low, high = value.min().clamp(max=0.0), value.max().clamp(min=0.0)
    step = coarser * (high - low).clamp(min=1e-12) / (2 * _LEVELS + 1)
    return ((value - low) / step).round() * step + low
