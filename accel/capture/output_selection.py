"""A wrapper that returns only some outputs of a model."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from ..interfaces.wrapper import Tensors, Wrapper
from .layer_outputs import inner_states


class OutputSelection(Wrapper):
    """A model that returns only the outputs named in `keeps`, as far as the model has them."""

    def __init__(self, model: torch.nn.Module, keeps: Sequence[str]) -> None:
        super().__init__(model)
        self.keeps = tuple(keeps)

    def forward(self, **inputs: torch.Tensor) -> Tensors:
        """Run the model. Return all tensors if it returns none of the outputs in `keeps`."""
        found = {name: value for name, value in self.model(**inputs).items() if isinstance(value, torch.Tensor)}
        kept = {name: found[name] for name in self.keeps if name in found}
        return {**kept, **inner_states(found)} if kept else found
