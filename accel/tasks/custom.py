"""Any graph, its names kept."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from transformers.utils import ModelOutput

from ..interfaces.task import Task
from ..models.base import ORTModel


class ORTModelForCustomTasks(ORTModel):
    """Any graph, its names kept: inputs by name, outputs as a `ModelOutput` with one entry a name."""

    task = "custom"

    def _choose_output(self, names: Sequence[str]) -> Any:
        return ModelOutput


class Custom(Task):
    """Any graph, its names kept."""

    model = ORTModelForCustomTasks
