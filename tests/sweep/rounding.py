"""Measure how much rounding to int8 or to float32 changes a model's outputs in PyTorch. Graphs may have differences up
to this size.

Models with random weights may turn a small error into a large error if they choose experts by almost equal scores, or
if no normalization limits the sum of the layers' outputs. Rounding then causes large differences even without a graph.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import torch

from .questions import Question, Tensors, answers, difference

_LEVELS = 127
_GRIDS = 8


def largest_error(model: Any, questions: Sequence[Question]) -> float:
    """Return the largest relative difference that int8 rounding causes, over several quantization grids. Each grid
    changes other expert choices.
    """
    return max(
        difference(question, answers(coarse, question.inputs))
        for coarse in (rounded(model, coarser=1 + i / (2 * _GRIDS)) for i in range(_GRIDS))
        for question in questions
    )


def own_error(model: Any, questions: Sequence[Question]) -> float:
    """Return the largest relative difference between a model's outputs in float32 and in float64, or 0 if the model
    does not run in float64.
    """
    exact = copy.deepcopy(model).double()
    try:
        return max(difference(question, answers(exact, _in_float64(question.inputs))) for question in questions)
    # Catch all exceptions, because model code may raise any type of exception.
    except Exception:  # noqa: BLE001
        return 0.0


def _in_float64(inputs: Tensors) -> Tensors:
    return {name: tensor.double() if tensor.is_floating_point() else tensor for name, tensor in inputs.items()}


@torch.no_grad()
def rounded(model: Any, coarser: float = 1.0) -> Any:
    """Return a copy of a model with linear and convolution layers rounded to int8.

    Weights are rounded symmetrically per output channel. Inputs are rounded to 256 levels between their smallest and largest value, because
    OpenVINO rounds inputs even if only the weights are stored in int8.

    Args:
        model: Model in evaluation mode.
        coarser: Factor of the step size, up to 2, which corresponds to seven bits.
    """
    copied = copy.deepcopy(model)
    for name, module in copied.named_modules():
        product = isinstance(module, torch.nn.Linear | torch.nn.Conv1d | torch.nn.Conv2d)
        for parameter in module.parameters(recurse=False):
            # The weights of experts are stacked matrices.
            if parameter.ndim >= 2 and (product or "expert" in name):
                by_last = parameter.ndim == 3 and "expert" in name
                parameter.copy_(_rounded_weights(parameter, coarser, by_last=by_last))
        if product:
            module.register_forward_pre_hook(lambda _, inputs: (_rounded_input(inputs[0], coarser), *inputs[1:]))
    return copied.eval()


def _rounded_weights(weights: torch.Tensor, coarser: float, *, by_last: bool) -> torch.Tensor:
    """Return weights that are rounded to 255 levels. There is one step size for each output channel `(outer, ...)`, or
    for each row of each expert `(experts, ...)`.
    """
    axes = (-1,) if by_last else tuple(range(1, weights.ndim))
    step = coarser * weights.abs().amax(axes, keepdim=True).clamp(min=1e-12) / _LEVELS
    return (weights / step).round() * step


def _rounded_input(value: torch.Tensor, coarser: float) -> torch.Tensor:
    low, high = value.min().clamp(max=0.0), value.max().clamp(min=0.0)
    step = coarser * (high - low).clamp(min=1e-12) / (2 * _LEVELS + 1)
    return ((value - low) / step).round() * step + low
