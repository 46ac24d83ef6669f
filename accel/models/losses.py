"""The loss of a call that brings labels, by transformers' own functions: for evaluation loops, as nothing is trained here."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any

import torch
from transformers.loss.loss_utils import LOSS_MAPPING

TARGETS = ("labels", "start_positions", "end_positions")
"""Arguments that a loss is computed from."""


def loss_of(kind: str, outputs: Mapping[str, torch.Tensor], targets: Mapping[str, Any], config: Any) -> torch.Tensor:
    """The loss that transformers computes for these outputs, a scalar on their device.

    Args:
        kind: `TaskSpec.loss`.
        outputs: What the graph returned.
        targets: `labels: (batch,)`, `(batch, sequence)` or whatever the task has; tensors or arrays.
        config: The model's transformers config.
    """
    logits = next(iter(outputs.values()))
    given = {name: torch.as_tensor(value).to(logits.device) for name, value in targets.items()}
    function = LOSS_MAPPING[kind]
    known = {
        **outputs, **given, "pooled_logits": logits, "config": config, "vocab_size": logits.shape[-1],
    }  # fmt: skip
    wanted = [name for name in inspect.signature(function).parameters if name in known]
    loss: torch.Tensor = function(**{name: known[name] for name in wanted})
    return loss
