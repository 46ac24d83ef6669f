"""The loss of a call that brings labels, by transformers' own functions: for evaluation loops, as nothing is trained here."""

from __future__ import annotations

import copy
import inspect
import math
from collections.abc import Mapping
from typing import Any

import torch

from ..errors import InputError
from ..interfaces.session_contract import check_readable

TARGETS = ("labels", "start_positions", "end_positions")
"""Arguments that a loss is computed from."""
_SPANS = ("start_positions", "end_positions")
_OF_TOKENS = ("ForTokenClassification", "ForMaskedLM", "ForCausalLM")
_PASSED_OVER = -100


def loss_of(kind: str, outputs: Mapping[str, torch.Tensor], targets: Mapping[str, Any], config: Any) -> torch.Tensor:
    """The loss that transformers computes for these outputs, a scalar on their device.

    Args:
        kind: `TaskSpec.loss`.
        outputs: What the graph returned.
        targets: `labels: (batch,)`, `(batch, sequence)` or whatever the task has; tensors or arrays.
        config: The model's transformers config.

    Raises:
        InputError: Targets of another task, or of a shape, type or class that the outputs do not have.
    """
    # transformers' functions view them in other shapes: those of a bucket are a part of what was computed.
    outputs = {name: tensor.contiguous() for name, tensor in outputs.items()}
    logits = next(iter(outputs.values()))
    wanted = _SPANS if kind == "ForQuestionAnswering" else ("labels",)
    if set(targets) != set(wanted):
        raise InputError(
            f"The loss of this task is computed from {' and '.join(wanted)}; {' and '.join(sorted(targets))} came.",
            fix=f"pass {' and '.join(wanted)}, or none of them.",
        )
    given = {name: _as_tensor(name, value).to(logits.device).contiguous() for name, value in targets.items()}
    for name, tensor in given.items():
        _check(kind, name, tensor, logits, config)
    # Imports SciPy's optimization, for losses of detectors: most of the time that loading a small model would take.
    from transformers.loss.loss_utils import LOSS_MAPPING

    function = LOSS_MAPPING[kind]
    known = {
        # transformers notes in the config which kind of labels came first, and holds later calls to it.
        **outputs, **given, "pooled_logits": logits, "config": copy.copy(config), "vocab_size": logits.shape[-1],
    }  # fmt: skip
    taken = [name for name in inspect.signature(function).parameters if name in known]
    loss: torch.Tensor = function(**{name: known[name] for name in taken})
    return loss


def computes_next_tokens_loss(config: Any) -> bool:
    """Whether transformers' decoder of this config computes the loss of each token from the logits in front of it, as most do; XLNet's,
    XLM's and those of encoder-decoders have other ideas.
    """
    from transformers import MODEL_FOR_CAUSAL_LM_MAPPING

    model = MODEL_FOR_CAUSAL_LM_MAPPING.get(type(config), None)
    return model is not None and "loss_function" in inspect.unwrap(model.forward).__code__.co_names


def _as_tensor(name: str, value: Any) -> torch.Tensor:
    """Targets as a tensor, integers of any width as those that PyTorch's losses take."""
    try:
        tensor = torch.as_tensor(value)
    except (TypeError, ValueError, RuntimeError) as error:
        raise InputError(
            f"{name} is a {type(value).__name__}, not a tensor.", fix="pass a tensor of numbers."
        ) from error
    check_readable(name, tensor)
    if tensor.is_complex() or tensor.dtype is torch.bool:
        raise InputError(f"{name} is {tensor.dtype}.", fix="pass integers, or floating-point values.")
    return tensor if tensor.is_floating_point() else tensor.long()


def _check(kind: str, name: str, given: torch.Tensor, logits: torch.Tensor, config: Any) -> None:
    """Check targets against the outputs that they are for.

    Raises:
        InputError: Another shape or type, or a class that is not there; `-100` is one that is passed over.
    """
    classes = logits.shape[-1]
    shape: tuple[int, ...] = tuple(logits.shape[:1])
    if kind in _OF_TOKENS:
        shape = tuple(logits.shape[:-1])
    elif kind != "ForQuestionAnswering":
        problem = getattr(config, "problem_type", None)
        if problem == "regression" or (problem is None and classes == 1):
            shape = tuple(logits.shape[:1] if classes == 1 else logits.shape)
            _check_shape(name, given, shape)
            return
        if problem == "multi_label_classification" or (problem is None and given.is_floating_point()):
            _check_shape(name, given, tuple(logits.shape), exactly=True)
            if not given.is_floating_point():
                raise InputError(
                    f"{name} is {given.dtype}; the labels of several classes at once are floating-point values.",
                    fix=f"pass {name}.float().",
                )
            return
    _check_shape(name, given, shape)
    if given.is_floating_point():
        raise InputError(
            f"{name} is {given.dtype}; they are numbers of classes or tokens.", fix="pass integers (int64)."
        )
    if kind == "ForQuestionAnswering":
        # Those outside of the text are passed over.
        return
    counted = given[given != _PASSED_OVER]
    if counted.numel() and (int(counted.min()) < 0 or int(counted.max()) >= classes):
        wrong = int(counted.min()) if int(counted.min()) < 0 else int(counted.max())
        raise InputError(
            f"{name} holds {wrong}; the model has the classes 0 to {classes - 1}.",
            fix=f"use the model's own (config.id2label), and {_PASSED_OVER} for what does not count.",
        )


def _check_shape(name: str, given: torch.Tensor, shape: tuple[int, ...], *, exactly: bool = False) -> None:
    """Check a shape; transformers' losses take the same values in one row or column, too."""
    flat = given.ndim <= 1 or tuple(given.shape) == (*shape, 1)
    if tuple(given.shape) != shape and (exactly or not flat or given.numel() != math.prod(shape)):
        raise InputError(
            f"{name} has shape {tuple(given.shape)}; {shape} belongs to these inputs.", fix="pass one for each."
        )
