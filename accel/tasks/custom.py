"""Task `custom`: runs any graph, with the input and output names of the graph."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from transformers.utils import ModelOutput

from ..interfaces.task import Task
from ..models.base import ORTModel


class ORTModelForCustomTasks(ORTModel):
    """Model for any graph: inputs are passed by name; outputs are a `ModelOutput` with the graph's output names."""

    task = "custom"

    def _choose_output(self, names: Sequence[str]) -> Any:
        return ModelOutput


class Custom(Task):
    """The task `custom`, which runs any graph with the input and output names of the graph."""

    model = ORTModelForCustomTasks
