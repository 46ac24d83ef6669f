"""Wrapper of language models that rerank: the score compares the logits of answer tokens, such as "yes" and "no"."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from ..errors import ExportError
from ..interfaces.tracing_wrapper import Tensors, Wrapper, unwrapped


class AnswerHead(torch.nn.Module):
    """A language model head that computes only the logits of some tokens, and only at one position of each row.

    Args:
        head: The head of the language model.
        tokens: Ids of the tokens.
    """

    weight: torch.Tensor
    bias: torch.Tensor | None

    def __init__(self, head: torch.nn.Linear, tokens: Sequence[int]) -> None:
        super().__init__()
        self.register_buffer("weight", head.weight.detach()[list(tokens)].clone())
        self.register_buffer("bias", None if head.bias is None else head.bias.detach()[list(tokens)].clone())
        self.positions: torch.Tensor | None = None

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """Return logits `(batch, 1, tokens)` at `positions: (batch,)` of `hidden: (batch, sequence, hidden)`."""
        assert self.positions is not None
        last = hidden.gather(1, self.positions[:, None, None].expand(-1, 1, hidden.shape[2]))
        return torch.nn.functional.linear(last, self.weight, self.bias)


class AnswerScorer(Wrapper):
    """A language model that returns one score per row, from the logits after the last token that is not padding.

    Args:
        model: A language model of transformers. Its head is replaced.
        answers: Ids of one or two tokens. The score is the logit of the first token, minus the logit of the second.

    Raises:
        ExportError: The model has no linear head, or its head has no such tokens.
    """

    def __init__(self, model: torch.nn.Module, answers: Sequence[int]) -> None:
        super().__init__(model)
        inner: Any = unwrapped(model)
        head = inner.get_output_embeddings()
        if not isinstance(head, torch.nn.Linear) or max(answers) >= head.weight.shape[0] or min(answers) < 0:
            raise ExportError(
                f"The {type(inner).__name__} has no linear language model head with logits of the answer tokens {list(answers)}.",
                fix="check true_token_id and false_token_id in the config of the module LogitScore.",
            )
        self.answer_head = AnswerHead(head, answers)
        # The model itself calls the head, because some models scale or limit the logits after the head.
        inner.set_output_embeddings(self.answer_head)
        self.answers = len(answers)

    def forward(self, input_ids: torch.Tensor, attention_mask: torch.Tensor, **inputs: torch.Tensor) -> Tensors:
        """Run the model. Return `logits: (batch, 1)`."""
        places = torch.arange(1, attention_mask.shape[1] + 1, device=attention_mask.device)
        self.answer_head.positions = (attention_mask * places).argmax(1)
        outputs = self.model(input_ids=input_ids, attention_mask=attention_mask, use_cache=False, **inputs)
        logits = outputs["logits"][:, 0].float()
        score = logits[:, :1] - logits[:, 1:] if self.answers > 1 else logits
        return {"logits": score.to(outputs["logits"].dtype)}
