"""Loss of a call with labels, computed by transformers' loss functions; for evaluation only, because graphs are not trained."""

from __future__ import annotations

import copy
import inspect
import math
from collections.abc import Mapping
from typing import Any

import torch

from ..errors import InputError
from ..interfaces.session_contract import check_readable
from .outputs import as_tensor

TARGETS = ("labels", "start_positions", "end_positions")
"""Names of the arguments from which a loss is computed."""
_SPANS = ("start_positions", "end_positions")
_OF_SPANS = "ForQuestionAnswering"
_OF_TOKENS = ("ForTokenClassification", "ForMaskedLM", "ForCausalLM")
_PASSED_OVER = -100


def loss_of(kind: str, outputs: Mapping[str, torch.Tensor], targets: Mapping[str, Any], config: Any) -> torch.Tensor:
    """Return the loss that transformers computes for these outputs, as a scalar on their device.

    Args:
        kind: Name of the loss (`TaskSpec.loss`).
        outputs: The graph's outputs.
        targets: `labels`, `(batch,)` or `(batch, sequence)`, or the other targets of the task; tensors or arrays.
        config: The model's transformers config.

    Raises:
        InputError: The targets belong to another task, or their shape, type or classes do not match the outputs.
    """
    # transformers' functions call `view`, which needs contiguous tensors: padded sizes make outputs slices of larger tensors.
    outputs = {name: tensor.contiguous() for name, tensor in outputs.items()}
    logits = next(iter(outputs.values()))
    names = _SPANS if kind == _OF_SPANS else ("labels",)
    if set(targets) != set(names):
        raise InputError(
            f"The loss of the model's task is computed from {' and '.join(names)}, but the call passed "
            f"{' and '.join(sorted(targets))}.",
            fix=f"pass {' and '.join(names)} to get a loss, or no labels for a call without a loss.",
        )
    tensors = {name: _target(name, value).to(logits.device).contiguous() for name, value in targets.items()}
    for name, tensor in tensors.items():
        _check(kind, name, tensor, logits, config)
    # Imported only when a loss is computed: the module imports `scipy.optimize`, which takes longer than loading a small model.
    from transformers.loss.loss_utils import LOSS_MAPPING

    function = LOSS_MAPPING[kind]
    arguments = {
        # A copy of the config, because transformers stores the `problem_type` of the first labels in it and applies it to later calls.
        **outputs, **tensors, "pooled_logits": logits, "config": copy.copy(config), "vocab_size": logits.shape[-1],
    }  # fmt: skip
    parameters = inspect.signature(function).parameters
    loss: torch.Tensor = function(**{name: value for name, value in arguments.items() if name in parameters})
    return loss


def computes_next_tokens_loss(config: Any) -> bool:
    """Return whether transformers' decoder for this config computes the loss of the next tokens.

    Its loss function then shifts the labels, so that the logits of each token predict the next token. XLNet, XLM and encoder-decoders do
    not shift labels.
    """
    from transformers import MODEL_FOR_CAUSAL_LM_MAPPING

    model = MODEL_FOR_CAUSAL_LM_MAPPING.get(type(config), None)
    return model is not None and "loss_function" in inspect.unwrap(model.forward).__code__.co_names


def _target(name: str, value: Any) -> torch.Tensor:
    """Convert targets to a tensor, and integers of any width to int64 as PyTorch's losses require."""
    tensor = as_tensor(name, value)
    check_readable(name, tensor)
    if tensor.is_complex() or tensor.dtype is torch.bool:
        raise InputError(
            f"{name} has the type {tensor.dtype}, from which no loss can be computed.",
            fix=f"pass {name} as integers, or as floating-point values for regression and several labels per row.",
        )
    return tensor if tensor.is_floating_point() else tensor.long()


def _check(kind: str, name: str, target: torch.Tensor, logits: torch.Tensor, config: Any) -> None:
    """Check that targets match the model's outputs; `-100` marks ignored targets.

    Raises:
        InputError: The shape or the data type of the targets is wrong, or a target is not one of the model's classes.
    """
    classes = logits.shape[-1]
    problem = "single_label_classification"
    if kind not in (*_OF_TOKENS, _OF_SPANS):
        guess = "multi_label_classification" if target.is_floating_point() else problem
        problem = getattr(config, "problem_type", None) or ("regression" if classes == 1 else guess)
    if problem == "regression":
        _check_shape(name, target, tuple(logits.shape[:1] if classes == 1 else logits.shape))
        return
    several = problem == "multi_label_classification"
    shape = tuple(logits.shape if several else logits.shape[:-1] if kind in _OF_TOKENS else logits.shape[:1])
    _check_shape(name, target, shape, exactly=several)
    if target.is_floating_point() != several:
        expected = (
            "floating-point values, one for each class (multi-label classification)"
            if several
            else "integers that are indices of classes or tokens"
        )
        raise InputError(
            f"{name} has the type {target.dtype}, but it must contain {expected}.",
            fix=f"pass {name}.float()." if several else f"pass {name}.long().",
        )
    counted = target[target != _PASSED_OVER]
    # transformers ignores spans outside the text.
    if several or kind == _OF_SPANS or not counted.numel():
        return
    least, most = int(counted.min()), int(counted.max())
    if least < 0 or most >= classes:
        raise InputError(
            f"{name} contains {least if least < 0 else most}, but the model has the classes 0 to {classes - 1}.",
            fix=f"use the class indices in model.config.id2label, and {_PASSED_OVER} for positions that the loss must ignore.",
        )


def _check_shape(name: str, target: torch.Tensor, shape: tuple[int, ...], *, exactly: bool = False) -> None:
    """Check the shape of targets; transformers' losses also accept a flat list of targets or an additional last axis of size 1."""
    flat = target.ndim <= 1 or tuple(target.shape) == (*shape, 1)
    if tuple(target.shape) != shape and (exactly or not flat or target.numel() != math.prod(shape)):
        raise InputError(
            f"{name} has shape {tuple(target.shape)}, but the model's outputs for these inputs need {name} of shape {shape}.",
            fix=f"pass {name} of shape {shape}.",
        )
