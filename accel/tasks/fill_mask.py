"""Masked language modelling."""

from __future__ import annotations

from ..interfaces.task import Task
from ..models.modality_models import TextModel


class ORTModelForMaskedLM(TextModel):
    """Masked language modelling: `logits: (batch, sequence, vocab_size)`."""

    task = "fill-mask"


class FillMask(Task):
    """Masked language modelling."""

    model = ORTModelForMaskedLM
