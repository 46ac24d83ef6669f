"""Models that pool tokens, as modules that can be traced: each row of a batch by itself."""

from __future__ import annotations

import inspect
from typing import Any

import torch

from ..interfaces.wrapper import Tensors, Wrapper


class EndTokenClassifier(Wrapper):
    """A classifier of BART's or T5's kind that reads the last end token of each row.

    transformers selects end tokens by a mask over the whole batch. PyTorch refuses a batch whose rows have unequal numbers of them;
    a graph of that code answers a row from another row's tokens. End tokens within the padding do not count.
    """

    @property
    def required_token(self) -> int:
        """The end token."""
        config: Any = self.config
        return int(config.eos_token_id)

    def forward(self, input_ids: torch.Tensor, attention_mask: torch.Tensor | None = None, **inputs: Any) -> Tensors:
        """Run the model; `logits: (batch, num_labels)` and what else its decoder returns."""
        model: Any = self.model
        if hasattr(model, "_shift_right"):
            # T5's own decoder does not make its inputs, BART's does.
            inputs.setdefault("decoder_input_ids", model._shift_right(input_ids))
        found = model.base_model(input_ids, attention_mask=attention_mask, **inputs)
        hidden = found["last_hidden_state"]
        places = torch.arange(hidden.shape[1], device=hidden.device)
        last = (_kept(input_ids, model.config.eos_token_id, attention_mask) * places).argmax(1)
        selected = hidden.gather(1, last[:, None, None].expand(-1, 1, hidden.shape[2])).squeeze(1)
        others = {name: value for name, value in found.items() if name not in ("last_hidden_state", "past_key_values")}
        return {"logits": model.classification_head(selected), **others}


def _kept(input_ids: torch.Tensor, token: int, attention_mask: torch.Tensor | None) -> torch.Tensor:
    """Places of a token that are not padding, as 0 and 1: `(batch, sequence) int64`."""
    found = (input_ids == token).to(torch.int64)
    return found if attention_mask is None else found * (attention_mask != 0)


def answering_by_row(model: Any) -> torch.nn.Module:
    """The model, or a module around it where its head selects tokens by a mask over the whole batch."""
    module: torch.nn.Module = model
    return EndTokenClassifier(model) if _pools_ends(model) and isinstance(model.config.eos_token_id, int) else module


def _pools_ends(model: Any) -> bool:
    """Whether a model is a classifier that compares the numbers of end tokens in the rows, before it selects them."""
    forward = getattr(inspect.unwrap(type(model).forward), "__code__", None)
    return forward is not None and "unique_consecutive" in forward.co_names and hasattr(model, "classification_head")
