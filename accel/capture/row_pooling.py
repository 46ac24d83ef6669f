"""Wrappers of models that pool tokens, so that a traced model pools each row of the batch separately."""

from __future__ import annotations

import inspect
from typing import Any

import torch

from ..interfaces.wrapper import Tensors, Wrapper
from ..upstream.model_internals import shifted_right


class EndTokenClassifier(Wrapper):
    """A classifier like BART's or T5's, which reads the last end token of each row.

    transformers selects end tokens by a mask over the whole batch. PyTorch raises if rows have different numbers of end tokens. A
    graph of that code would compute a row's logits from another row's tokens. End tokens inside the padding are ignored.
    """

    @property
    def required_token(self) -> int:
        """The end token's id, which every row must contain."""
        config: Any = self.config
        return int(config.eos_token_id)

    def forward(self, input_ids: torch.Tensor, attention_mask: torch.Tensor | None = None, **inputs: Any) -> Tensors:
        """Run the model. Return `logits: (batch, num_labels)` and the other outputs of its decoder."""
        model: Any = self.model
        # BART creates decoder inputs in its base model, but T5 does not.
        inputs.setdefault("decoder_input_ids", shifted_right(model, input_ids))
        found = model.base_model(input_ids, attention_mask=attention_mask, **inputs)
        hidden = found["last_hidden_state"]
        places = torch.arange(hidden.shape[1], device=hidden.device)
        last = (_kept(input_ids, model.config.eos_token_id, attention_mask) * places).argmax(1)
        selected = hidden.gather(1, last[:, None, None].expand(-1, 1, hidden.shape[2])).squeeze(1)
        others = {name: value for name, value in found.items() if name not in ("last_hidden_state", "past_key_values")}
        return {"logits": model.classification_head(selected), **others}


def _kept(input_ids: torch.Tensor, token: int, attention_mask: torch.Tensor | None) -> torch.Tensor:
    """Return a `(batch, sequence) int64` tensor with 1 where the token occurs outside the padding, else 0."""
    found = (input_ids == token).to(torch.int64)
    return found if attention_mask is None else found * (attention_mask != 0)


def answering_by_row(model: Any) -> torch.nn.Module:
    """Wrap the model if its head selects tokens by a mask over the whole batch. Return any other model unchanged."""
    module: torch.nn.Module = model
    return EndTokenClassifier(model) if _pools_ends(model) and isinstance(model.config.eos_token_id, int) else module


def _pools_ends(model: Any) -> bool:
    """Return whether a model is a classifier that checks that all rows have the same number of end tokens."""
    forward = getattr(inspect.unwrap(type(model).forward), "__code__", None)
    return forward is not None and "unique_consecutive" in forward.co_names and hasattr(model, "classification_head")
