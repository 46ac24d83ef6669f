"""The loss of a call that brings labels, by transformers' own functions: for evaluation loops, as nothing is trained here."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Mapping
from typing import Any

import torch
from transformers.loss.loss_utils import LOSS_MAPPING

from ..errors import InputError

TARGETS = ("labels", "start_positions", "end_positions")
"""Arguments that a loss is computed from."""


def loss_of(kind: str, outputs: Mapping[str, torch.Tensor], targets: Mapping[str, Any], config: Any) -> torch.Tensor:
    """The loss that transformers computes for these outputs, a scalar on their device.

    Args:
        kind: `TaskSpec.loss`.
        outputs: What the graph returned.
        targets: `labels: (batch,)`, `(batch, sequence)` or whatever the task has; tensors or arrays.
        config: The model's transformers config.

    Raises:
        InputError: They do not fit the outputs.
    """
    logits = next(iter(outputs.values()))
    try:
        return _loss(kind, outputs, logits, targets, config)
    # Whatever torch makes of other shapes, types and classes.
    except (IndexError, RuntimeError, TypeError, ValueError) as error:
        shapes = ", ".join(f"{name}: {_shape(value)}" for name, value in targets.items())
        raise InputError(
            f"No loss can be computed of {shapes} and logits {tuple(logits.shape)}: {' '.join(str(error).split())[:200]}",
            fix=f"pass a class below {logits.shape[-1]} for each row or token that the model answers, -100 for those that do not count; "
            "or leave them out.",
        ) from error


def _shape(value: Any) -> str:
    shape = getattr(value, "shape", None)
    return type(value).__name__ if shape is None else f"{tuple(shape)} {value.dtype}"


def _loss(
    kind: str, outputs: Mapping[str, torch.Tensor], logits: torch.Tensor, targets: Mapping[str, Any], config: Any
) -> torch.Tensor:
    given = {name: torch.as_tensor(value).to(logits.device) for name, value in targets.items()}
    function = LOSS_MAPPING[kind]
    known = {
        # transformers notes in the config which kind of labels came first, and holds later calls to it.
        **outputs, **given, "pooled_logits": logits, "config": copy.copy(config), "vocab_size": logits.shape[-1],
    }  # fmt: skip
    wanted = [name for name in inspect.signature(function).parameters if name in known]
    loss: torch.Tensor = function(**{name: known[name] for name in wanted})
    return loss
