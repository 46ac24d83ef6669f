"""Multiple choice."""

from __future__ import annotations

from ..interfaces.task import Task
from ..models.encoders import ORTModelForMultipleChoice


class MultipleChoice(Task):
    """Multiple choice."""

    model = ORTModelForMultipleChoice
