"""Masked language modelling."""

from __future__ import annotations

from ..interfaces.task import Task
from ..models.encoders import ORTModelForMaskedLM


class FillMask(Task):
    """Masked language modelling."""

    model = ORTModelForMaskedLM
