"""Any graph, its names kept."""

from __future__ import annotations

from ..interfaces.task import Task
from ..models.encoders import ORTModelForCustomTasks


class Custom(Task):
    """Any graph, its names kept."""

    model = ORTModelForCustomTasks
