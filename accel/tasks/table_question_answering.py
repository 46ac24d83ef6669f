"""Task `table-question-answering`: questions about tables, answered with cells of the table."""

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
    """Output of a table question answering model; `tokenizer.convert_logits_to_predictions` converts it to table cells.

    Attributes:
        logits: Logit that a token's cell belongs to the answer, `(batch, sequence)`.
        logits_aggregation: Logits of the aggregation operators (sum, count, average), `(batch, operators)`; only some models.
    """

    logits: torch.Tensor | None = None
    logits_aggregation: torch.Tensor | None = None


class ORTModelForTableQuestionAnswering(ORTModel):
    """Model that selects table cells as answers: `logits: (batch, sequence)`."""

    task = "table-question-answering"
    output_class = TableAnswerOutput

    def forward(
        self, input_ids: Any = None, attention_mask: Any = None, token_type_ids: Any = None, **inputs: Any
    ) -> Any:
        """Run the graph.

        Inputs are `input_ids` and `attention_mask`, `(batch, sequence)`, and `token_type_ids`, `(batch, sequence, 7)`, which contain the
        column, row and rank of each token.

        Raises:
            InputError: The table has more columns, rows or ranks than the model supports.
        """
        if token_type_ids is not None:
            self._check_type_ids(torch.as_tensor(token_type_ids))
        named = {"input_ids": input_ids, "attention_mask": attention_mask, "token_type_ids": token_type_ids}
        return self._run({**named, **inputs})

    def _check_type_ids(self, type_ids: torch.Tensor) -> None:
        """Raise for ids without an embedding. Without this check, runtimes would read negative ids from the end of the embedding table."""
        sizes = torch.tensor(self.config.type_vocab_sizes, device=type_ids.device)
        if type_ids.ndim != 3 or type_ids.shape[-1] != len(sizes):
            return  # the session raises an error about the shape
        wrong = (type_ids < 0) | (type_ids >= sizes)
        if bool(wrong.any()):
            kind = int(wrong.nonzero()[0][-1])
            raise InputError(
                f"token_type_ids[..., {kind}] contains values from {int(type_ids[..., kind].min())} to {int(type_ids[..., kind].max())}, "
                f"but the model has embeddings only for 0 to {int(sizes[kind]) - 1}. The table may have too many rows or columns.",
                fix="remove rows that do not fit with tokenizer(..., truncation='drop_rows_to_fit'), or pass a smaller table.",
            )


class TableQuestionAnswering(Task):
    """The task `table-question-answering`: questions about tables, answered with cells of the table."""

    model = ORTModelForTableQuestionAnswering

    def sample(self, module: Any, folder: Path | None) -> Sample | None:
        return table_sample(module, folder)

    def tiny_batch(self, config: Any, rows: int, draw: torch.Generator, texts: Any) -> dict[str, torch.Tensor]:
        batch: dict[str, torch.Tensor] = texts(rows)
        return {**batch, "token_type_ids": torch.randint(0, 2, (*batch["input_ids"].shape, 7), generator=draw)}
