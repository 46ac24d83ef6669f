"""Question answering over the words of a page and their boxes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from ..capture.document_samples import document_sample
from ..data.batches import Encoded
from ..data.documents import encode_documents
from ..data.rows import Rows
from ..interfaces.task import Sample, Task
from ..measuring.accuracy.documents import DocumentAnswers
from ..measuring.accuracy.predictors import Predictor
from ..models.documents import ORTModelForDocumentQuestionAnswering


class DocumentQuestionAnswering(Task):
    """Question answering over the words of a page and their boxes."""

    model = ORTModelForDocumentQuestionAnswering

    def sample(self, module: Any, folder: Path | None) -> Sample | None:
        return document_sample(module, folder)

    def encode(self, rows: Rows, processor: Any, max_length: int | None) -> Encoded:
        return encode_documents(rows, processor, max_length)

    def predictor(self, config: Any) -> type[Predictor]:
        return DocumentAnswers
