"""A model of which some outputs are kept."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from ..interfaces.wrapper import Tensors, Wrapper
from .layer_outputs import inner_states


class Answering(Wrapper):
    """A model of which only some outputs are kept: what its task is about, as far as the model returns it."""

    def __init__(self, model: torch.nn.Module, keeps: Sequence[str]) -> None:
        super().__init__(model)
        self.keeps = tuple(keeps)

    def forward(self, **inputs: torch.Tensor) -> Tensors:
        """Run the model; everything that is a tensor where it returns none of what is kept."""
        found = {name: value for name, value in self.model(**inputs).items() if isinstance(value, torch.Tensor)}
        kept = {name: found[name] for name in self.keeps if name in found}
        return {**kept, **inner_states(found)} if kept else found
