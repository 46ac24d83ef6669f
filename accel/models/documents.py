"""Models that answer questions from a document's words and where they stand."""

from __future__ import annotations

from typing import Any

import torch

from ..errors import InputError
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
        if bbox is not None:
            self._check_boxes(torch.as_tensor(bbox))
        if "image" in self._input_names:
            inputs["image"] = image
        return self._run({"input_ids": input_ids, "bbox": bbox, "attention_mask": attention_mask, **inputs})

    def _check_boxes(self, boxes: torch.Tensor) -> None:
        """Runtimes look up what PyTorch refuses: numbers below 0 count from a table's end."""
        most = int(getattr(self.config, "max_2d_position_embeddings", 1024)) - 1
        if boxes.ndim != 3 or boxes.shape[-1] != 4 or not boxes.numel():
            return  # the session says what shape it takes
        if bool((boxes < 0).any()) or bool((boxes > most).any()) or bool((boxes[..., 2:] < boxes[..., :2]).any()):
            raise InputError(
                f"Boxes with corners from {int(boxes.min())} to {int(boxes.max())} came, or some that end before they begin.",
                fix=f"give [left, top, right, bottom] in shares of the page from 0 to 1000; the model has {most + 1} places.",
            )
