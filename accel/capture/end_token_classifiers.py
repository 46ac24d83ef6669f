"""Wrapper of classifiers that read the hidden state of an end token. In a traced model, each row of the batch is independent."""

from __future__ import annotations

import inspect
from typing import Any

import torch

from ..interfaces.tracing_wrapper import Tensors, Wrapper
from ..upstream.model_internals import shifted_right


class EndTokenClassifier(Wrapper):
    """A classifier such as BART's or T5's, which reads the hidden state of the last end token of each row.

    transformers selects end tokens with a mask over the complete batch, and raises an error if rows have different numbers of end tokens.
    A graph of transformers' code could not raise an error, and would compute the logits of a row from tokens of another row. This class
    selects the end token of each row separately, and ignores end tokens in the padding.
    """

    @property
    def required_token(self) -> int:
        """Id of the end token, which every row must contain."""
        config: Any = self.config
        return int(config.eos_token_id)

    def forward(self, input_ids: torch.Tensor, attention_mask: torch.Tensor | None = None, **inputs: Any) -> Tensors:
        """Run the model. Return `logits: (batch, num_labels)` and the other outputs of its decoder."""
        model: Any = self.model
        # T5's base model does not create decoder inputs, so this method creates them.
        inputs.setdefault("decoder_input_ids", shifted_right(model, input_ids))
        outputs = model.base_model(input_ids, attention_mask=attention_mask, **inputs)
        hidden = outputs["last_hidden_state"]
        places = torch.arange(hidden.shape[1], device=hidden.device)
        last = (_occurrences(input_ids, model.config.eos_token_id, attention_mask) * places).argmax(1)
        selected = hidden.gather(1, last[:, None, None].expand(-1, 1, hidden.shape[2])).squeeze(1)
        others = {
            name: value for name, value in outputs.items() if name not in ("last_hidden_state", "past_key_values")
        }
        return {"logits": model.classification_head(selected), **others}


def _occurrences(input_ids: torch.Tensor, token: int, attention_mask: torch.Tensor | None) -> torch.Tensor:
    """Return a tensor `(batch, sequence) int64` with 1 at each occurrence of the token outside of the padding."""
    is_token = (input_ids == token).to(torch.int64)
    return is_token if attention_mask is None else is_token * (attention_mask != 0)


def answering_by_row(model: Any) -> torch.nn.Module:
    """Wrap a classifier whose head searches for end tokens in the complete batch. Return any other model unchanged."""
    module: torch.nn.Module = model
    return EndTokenClassifier(model) if _pools_ends(model) and isinstance(model.config.eos_token_id, int) else module


def _pools_ends(model: Any) -> bool:
    """Return whether a model is a classifier whose code checks that all rows have the same number of end tokens."""
    forward = getattr(inspect.unwrap(type(model).forward), "__code__", None)
    return forward is not None and "unique_consecutive" in forward.co_names and hasattr(model, "classification_head")
