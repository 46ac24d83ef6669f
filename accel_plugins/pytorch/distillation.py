"""Distillation in quantization-aware training: the loss includes the distance to the outputs of the float model."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

import torch
from torch.nn import functional

from accel.errors import PrepareError

logger = logging.getLogger(__name__)


class Distillation:
    """Forward hook that adds a distillation term to the loss: the distance between the model's logits and the float
    model's logits.

    Source: Hinton et al., 2015, https://arxiv.org/abs/1503.02531.
    """

    def __init__(self, teacher: torch.nn.Module, share: float, temperature: float) -> None:
        self._teacher, self._share, self._temperature = teacher, share, temperature
        self._warned = False
        # Tells which labels the model counts when it divides its loss by `num_items_in_batch`: a key of `counts` in
        # `_weight`, "nothing" if the model does not divide its loss, or `None` before `_weight` has checked the model.
        self._counts: str | None = None

    def __deepcopy__(self, memo: Mapping[int, Any]) -> Distillation:
        return self

    def __call__(self, model: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> Any:
        """Add the distillation term to the loss in a model output, if the model is in training mode.

        PyTorch calls this forward hook after each call of the model, with the arguments and the output of the call.

        Raises:
            PrepareError: The output has no logits, or accel cannot determine how the model scales its loss.
        """
        loss = getattr(output, "loss", None)
        if not model.training:
            return output
        if loss is None:
            if not self._warned:
                logger.warning(
                    "The model returned no loss in training mode, so distillation has no effect. Pass labels to the model, and "
                    "use neither return_dict=False nor label smoothing."
                )
            self._warned = True
            return output
        device = next(model.parameters()).device
        with torch.no_grad():
            teacher_output = self._teacher.to(device)(*args, **kwargs)
        distance = sum(self._distance(output[name], teacher_output[name]) for name in self._names(model, output))
        output["loss"] = (1 - self._share) * loss + self._share * self._weight(args, kwargs) * distance
        return output

    @staticmethod
    def _names(model: torch.nn.Module, output: Any) -> list[str]:
        """Return the names of the logits in a model output: `logits`, or several names that end in `_logits`, such as
        the start and end of a span.

        Raises:
            PrepareError: The output has no logits.
        """
        names = ["logits"] if "logits" in output else [name for name in output if name.endswith("_logits")]
        if not names:
            raise PrepareError(
                f"The outputs of {type(model).__name__} are {', '.join(output)}. Distillation needs an output 'logits', or outputs "
                "whose names end in '_logits'.",
                fix="leave distillation=... out of accel.prepare_qat.",
            )
        return names

    def _distance(self, logits: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        if logits.shape[-1] == 1:
            # A model for regression outputs one number instead of a score for each class.
            return functional.mse_loss(logits, target)
        temperature = self._temperature
        student, teacher = (
            functional.log_softmax(scores.flatten(0, -2) / temperature, dim=-1) for scores in (logits, target)
        )
        return functional.kl_div(student, teacher, reduction="batchmean", log_target=True) * temperature * temperature

    def _weight(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> torch.Tensor | float:
        """Return the factor by which the distillation term must be multiplied to match the scale of the model's loss.

        With gradient accumulation, the Trainer of transformers adds the losses of several batches to one training step.
        The model then divides the summed loss of its batch by `num_items_in_batch`, the number of labels in all batches
        of the step.
        """
        items, labels = kwargs.get("num_items_in_batch"), kwargs.get("labels")
        if items is None or not isinstance(labels, torch.Tensor) or self._counts == "nothing":
            return 1.0
        counts = {"labels": labels.ne(-100).sum(), "labels after the first": labels[..., 1:].ne(-100).sum()}
        if self._counts is None:
            with torch.no_grad():
                arguments = {name: value for name, value in kwargs.items() if name != "num_items_in_batch"}
                mean, total = (
                    self._teacher(*args, **arguments, **extra).loss for extra in ({}, {"num_items_in_batch": 1})
                )
            matching = [name for name, count in counts.items() if torch.isclose(mean * count, total, rtol=1e-3)]
            if torch.isclose(mean, total, rtol=1e-3):
                if matching:
                    # In a batch with only one label, the sum and the mean of the loss are equal, so this batch does not
                    # tell how the model scales its loss. The next batch is checked again.
                    return 1.0
                matching = ["nothing"]
            if not matching:
                raise PrepareError(
                    f"{type(self._teacher).__name__} uses num_items_in_batch, but its loss is not the sum of the losses of all labels "
                    "divided by this number. accel therefore cannot scale the distillation loss like the loss of the model.",
                    fix="train with gradient_accumulation_steps=1 and do not pass num_items_in_batch to the model, or leave "
                    "distillation=... out of accel.prepare_qat.",
                )
            self._counts = matching[-1]
            return self._weight(args, kwargs)
        weight: torch.Tensor = counts[self._counts] / items
        return weight
