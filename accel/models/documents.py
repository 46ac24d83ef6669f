"""Models that answer questions from a document's words and where they stand."""

from __future__ import annotations

from typing import Any

from .base import ORTModel


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
