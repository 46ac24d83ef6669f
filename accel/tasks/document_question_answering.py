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
from ..models.base import ORTModel


class ORTModelForDocumentQuestionAnswering(ORTModel):
    """Answers out of documents: `start_logits` and `end_logits`, `(batch, sequence)` each."""

    task = "document-question-answering"

    def forward(
        self, input_ids: Any = None, bbox: Any = None, attention_mask: Any = None, image: Any = None, **inputs: Any
    ) -> Any:
        """Run the graph.

        Args:
            input_ids: `(batch, sequence)`: the question and the document's words.
            bbox: `(batch, sequence, 4)`: left, top, right and bottom of each token's word, from 0 to 1000.
            attention_mask: `(batch, sequence)`; ones when `None`.
            image: The stock pipeline's, which LayoutLM and LayoutLMv3 in transformers pass over as well.
            **inputs: The graph's others.

        Raises:
            InputError: Boxes that end before they begin, or leave the page.
        """
        if "image" in self._input_names:
            inputs["image"] = image
        return self._run({"input_ids": input_ids, "bbox": bbox, "attention_mask": attention_mask, **inputs})


class DocumentQuestionAnswering(Task):
    """Question answering over the words of a page and their boxes."""

    model = ORTModelForDocumentQuestionAnswering

    def sample(self, module: Any, folder: Path | None) -> Sample | None:
        return document_sample(module, folder)

    def encode(self, rows: Rows, processor: Any, max_length: int | None) -> Encoded:
        return encode_documents(rows, processor, max_length)

    def predictor(self, config: Any) -> type[Predictor]:
        return DocumentAnswers
