"""Multiple choice."""

from __future__ import annotations

from ..interfaces.task import Task
from ..models.modality_models import TextModel


class ORTModelForMultipleChoice(TextModel):
    """Multiple choice: inputs `(batch, choices, sequence)`, `logits: (batch, choices)`."""

    task = "multiple-choice"


class MultipleChoice(Task):
    """Multiple choice."""

    model = ORTModelForMultipleChoice
