"""Question answering over tables."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from ..capture.document_samples import table_sample
from ..interfaces.task import Sample, Task
from ..models.tables import ORTModelForTableQuestionAnswering


class TableQuestionAnswering(Task):
    """Question answering over tables."""

    model = ORTModelForTableQuestionAnswering

    def sample(self, module: Any, folder: Path | None) -> Sample | None:
        return table_sample(module, folder)
