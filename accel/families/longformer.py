"""Family of Longformer, which has sliding-window attention and global attention for some tokens."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from ..interfaces.family import Replacement, Tensors
from ..interfaces.tracing_wrapper import Wrapper
from .longformer_attention import replacements
from .roberta import Roberta


def _first_separator(input_ids: torch.Tensor, sep_token_id: int) -> torch.Tensor:
    """Return the number of tokens before the first separator of each row, `(batch,)`. These tokens are the question.

    transformers raises an error if a row does not have three separators. A graph cannot raise errors, so this function has no check.
    """
    return ((input_ids == sep_token_id).to(torch.int64).cumsum(1) == 0).sum(1)


class LongformerQuestionAnswering(Wrapper):
    """Longformer for question answering, with global attention for the question (the tokens before the first separator of each row).

    transformers searches the separators in the complete batch and assumes that each row has exactly three. This class searches the
    first separator in each row.
    """

    @property
    def required_token(self) -> int:
        """The separator token's id, which every row must contain."""
        config: Any = self.config
        return int(config.sep_token_id)

    def forward(self, input_ids: torch.Tensor, attention_mask: torch.Tensor | None = None, **inputs: Any) -> Any:
        """Run the model. If the caller passes no `global_attention_mask`, compute this mask from the separators."""
        if inputs.get("global_attention_mask") is None:
            separators = input_ids == self.required_token
            if attention_mask is not None:
                separators = separators & (attention_mask != 0)
            inputs["global_attention_mask"] = (separators.to(torch.int64).cumsum(1) == 0).to(torch.int64)
        return self.model(input_ids, attention_mask=attention_mask, **inputs)


class Longformer(Roberta):
    """Family of Longformer, which has the same position embeddings as RoBERTa."""

    def row_token(self, architecture: str, config: Mapping[str, Any]) -> int | None:
        """Return the separator token for question-answering models. It is 2 if `config.json` has no `sep_token_id`."""
        token = config.get("sep_token_id")
        return (token if isinstance(token, int) else 2) if architecture.endswith("ForQuestionAnswering") else None

    def traced_module(self, model: torch.nn.Module) -> torch.nn.Module:
        """Wrap a model with the question-answering head."""
        return LongformerQuestionAnswering(model) if hasattr(model, "qa_outputs") else model

    def replacements(self, model: Any) -> list[Replacement]:
        """Return versions of the sliding-window attention and of the search for the question that can be traced."""
        from transformers.models.longformer import modeling_longformer as modeling

        return [
            *replacements(modeling.LongformerSelfAttention, modeling.LongformerModel),
            (modeling, "_get_question_end_index", _first_separator),
        ]

    def fill(self, feeds: Tensors, config: Any) -> None:
        """Write three separators into each row: two between question and context, and one at the end.

        The question-answering head needs these separators.
        """
        ids, mask = feeds.get("input_ids"), feeds.get("attention_mask")
        if ids is None or mask is None or ids.shape != mask.shape:
            return
        separator = config.sep_token_id
        ids[ids == separator] = next(i for i in range(3) if i not in (separator, config.pad_token_id))
        lengths = mask.sum(-1, keepdim=True).to(torch.int64)
        question = (lengths - 1) // 3
        for place in (question, (question + 1).clamp(max=lengths - 1), lengths - 1):
            ids.scatter_(-1, place, separator)


FAMILY = Longformer()
