"""A model with pooling behind it, as one module that can be traced."""

from __future__ import annotations

import torch

from .inner import inner_states
from .wrapper import Tensors, Wrapper


class SentenceEmbedder(Wrapper):
    """A model with pooling and normalisation behind it, so that the graph returns sentence embeddings.

    Returns `last_hidden_state: (batch, sequence, hidden)` and `sentence_embedding: (batch, hidden)`.
    """

    def __init__(self, model: torch.nn.Module, pooling: str, normalize: bool) -> None:
        super().__init__(model)
        self.pooling = pooling
        self.normalize = normalize

    def forward(self, attention_mask: torch.Tensor, **inputs: torch.Tensor) -> Tensors:
        """Run the model, pool its last hidden state over the tokens that `attention_mask: (batch, sequence)` keeps."""
        found = self.model(attention_mask=attention_mask, **inputs)
        hidden = found["last_hidden_state"]
        mask = attention_mask.unsqueeze(-1).to(hidden.dtype)
        if self.pooling == "cls":
            pooled = hidden[:, 0]
        elif self.pooling == "max":
            pooled = hidden.masked_fill(mask == 0, torch.finfo(hidden.dtype).min).amax(1)
        elif self.pooling == "last":
            # The last kept position, wherever the padding is.
            positions = torch.arange(hidden.shape[1], device=hidden.device)
            last = (attention_mask * positions).argmax(1)
            pooled = hidden.gather(1, last[:, None, None].expand(-1, 1, hidden.shape[2])).squeeze(1)
        else:
            pooled = (hidden * mask).sum(1) / mask.sum(1).clamp(min=1e-9)
        if self.normalize:
            pooled = torch.nn.functional.normalize(pooled, dim=1)
        return {"last_hidden_state": hidden, "sentence_embedding": pooled, **inner_states(found)}
