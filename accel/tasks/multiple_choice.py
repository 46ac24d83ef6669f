"""Task `multiple-choice`: selection of the best of several answers to a question."""

from __future__ import annotations

from typing import Any

import torch

from ..interfaces.task import Task
from ..models.modality_models import TextModel


class ORTModelForMultipleChoice(TextModel):
    """Multiple choice model. Its inputs are `(batch, choices, sequence)`, and its output is `logits: (batch, choices)`."""

    task = "multiple-choice"


class MultipleChoice(Task):
    """The task `multiple-choice`."""

    model = ORTModelForMultipleChoice

    def tiny_batch(self, config: Any, rows: int, draw: torch.Generator, texts: Any) -> dict[str, torch.Tensor]:
        return {name: tensor[None] for name, tensor in texts(rows).items()}
