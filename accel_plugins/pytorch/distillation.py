"""Distillation in training for integers: the float model's answers are part of the loss."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

import torch
from torch.nn import functional

from accel.errors import PrepareError

logger = logging.getLogger(__name__)


class Distillation:
    """Adds to the loss that a model computes how far its answers are from those of the model before it was rounded (Hinton et al.,
    2015, https://arxiv.org/abs/1503.02531).
    """

    def __init__(self, teacher: torch.nn.Module, share: float, temperature: float) -> None:
        self._teacher, self._share, self._temperature = teacher, share, temperature
        self._told = False
        # What the model's loss is a sum of, where it divides by `num_items_in_batch`; `None`: not known yet.
        self._counts: str | None = None

    def __deepcopy__(self, memo: Mapping[int, Any]) -> Distillation:
        return self

    def __call__(self, model: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> Any:
        """What a model answers in training, with a loss that the teacher is part of: a forward hook with keyword arguments.

        Raises:
            PrepareError: Its answers or its loss cannot be distilled.
        """
        loss = getattr(output, "loss", None)
        if not model.training:
            return output
        if loss is None:
            if not self._told:
                logger.warning(
                    "The model answered in training without a loss of its own, so nothing is distilled: pass labels, and leave "
                    "return_dict=False and label smoothing out."
                )
            self._told = True
            return output
        device = next(model.parameters()).device
        with torch.no_grad():
            want = self._teacher.to(device)(*args, **kwargs)
        apart = sum(self._apart(output[name], want[name]) for name in self._names(model, output))
        output["loss"] = (1 - self._share) * loss + self._share * self._weight(args, kwargs) * apart
        return output

    @staticmethod
    def _names(model: torch.nn.Module, output: Any) -> list[str]:
        """What a model answers: `logits`, or several of them, as where a span begins and where it ends.

        Raises:
            PrepareError: Neither.
        """
        names = ["logits"] if "logits" in output else [name for name in output if name.endswith("_logits")]
        if not names:
            raise PrepareError(
                f"A {type(model).__name__} answers with {', '.join(output)}, and no logits that could be distilled.",
                fix="prepare the model without distillation.",
            )
        return names

    def _apart(self, logits: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        if logits.shape[-1] == 1:
            # A number: there are no classes whose shares could differ.
            return functional.mse_loss(logits, target)
        hot = self._temperature
        soft, aim = (functional.log_softmax(one.flatten(0, -2) / hot, dim=-1) for one in (logits, target))
        return functional.kl_div(soft, aim, reduction="batchmean", log_target=True) * hot * hot

    def _weight(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> torch.Tensor | float:
        """What the model's loss was multiplied by: transformers' Trainer sums over the batches of a step the losses of models that
        divide by the labels of all these batches, `num_items_in_batch`, and what is distilled has to count like them.
        """
        items, labels = kwargs.get("num_items_in_batch"), kwargs.get("labels")
        if items is None or not isinstance(labels, torch.Tensor) or self._counts == "nothing":
            return 1.0
        counts = {"labels": labels.ne(-100).sum(), "labels behind others": labels[..., 1:].ne(-100).sum()}
        if self._counts is None:
            with torch.no_grad():
                rest = {name: value for name, value in kwargs.items() if name != "num_items_in_batch"}
                mean, whole = (self._teacher(*args, **rest, **one).loss for one in ({}, {"num_items_in_batch": 1}))
            found = [name for name, count in counts.items() if torch.isclose(mean * count, whole, rtol=1e-3)]
            if torch.isclose(mean, whole, rtol=1e-3):
                if found:
                    # One label: the next batch will tell.
                    return 1.0
                found = ["nothing"]
            if not found:
                raise PrepareError(
                    "The model divides its loss by num_items_in_batch, and not as transformers counts them, so that it cannot be said "
                    "how much what is distilled counts.",
                    fix="train with gradient_accumulation_steps=1 and without num_items_in_batch, or without distillation.",
                )
            self._counts = found[-1]
            return self._weight(args, kwargs)
        weight: torch.Tensor = counts[self._counts] / items
        return weight
