"""Question answering over tables."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers.utils import ModelOutput

from ..capture.document_samples import table_sample
from ..errors import InputError
from ..interfaces.task import Sample, Task
from ..models.base import ORTModel


@dataclass
class TableAnswerOutput(ModelOutput):  # type: ignore[misc]  # transformers is untyped here
    """What a model of tables returns; `tokenizer.convert_logits_to_predictions` turns it into cells.

    Attributes:
        logits: `(batch, sequence)`: whether a token's cell is among the answer.
        logits_aggregation: `(batch, operators)`: what is done with the cells, of models that sum, count or average.
    """

    logits: torch.Tensor | None = None
    logits_aggregation: torch.Tensor | None = None


class ORTModelForTableQuestionAnswering(ORTModel):
    """Cells of tables for questions: `logits: (batch, sequence)`."""

    task = "table-question-answering"
    output_class = TableAnswerOutput

    def forward(
        self, input_ids: Any = None, attention_mask: Any = None, token_type_ids: Any = None, **inputs: Any
    ) -> Any:
        """Run the graph on `input_ids` and `attention_mask: (batch, sequence)` and `token_type_ids: (batch, sequence, 7)`, which say
        each token's column, row and rank.

        Raises:
            InputError: Columns, rows or ranks that the model has none for.
        """
        if token_type_ids is not None:
            self._check_places(torch.as_tensor(token_type_ids))
        given = {"input_ids": input_ids, "attention_mask": attention_mask, "token_type_ids": token_type_ids}
        return self._run({**given, **inputs})

    def _check_places(self, places: torch.Tensor) -> None:
        """Runtimes look up what PyTorch refuses: numbers below 0 count from a table's end."""
        sizes = torch.tensor(self.config.type_vocab_sizes, device=places.device)
        if places.ndim != 3 or places.shape[-1] != len(sizes):
            return  # the session says what shape it takes
        wrong = (places < 0) | (places >= sizes)
        if bool(wrong.any()):
            kind = int(wrong.nonzero()[0][-1])
            raise InputError(
                f"token_type_ids hold {int(places[..., kind].max())} for their kind {kind}, of which the model has {int(sizes[kind])}.",
                fix="cut the table: tokenizer(..., truncation='drop_rows_to_fit').",
            )


class TableQuestionAnswering(Task):
    """Question answering over tables."""

    model = ORTModelForTableQuestionAnswering

    def sample(self, module: Any, folder: Path | None) -> Sample | None:
        return table_sample(module, folder)
