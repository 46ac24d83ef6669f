"""A module around a transformers model, traced in its place; what is put around one stands in a module of its own."""

from __future__ import annotations

import torch

Tensors = dict[str, torch.Tensor]


class Wrapper(torch.nn.Module):
    """A module around a transformers model, traced in its place."""

    def __init__(self, model: torch.nn.Module) -> None:
        super().__init__()
        self.model = model
        self.config = model.config

    @property
    def unwrapped(self) -> torch.nn.Module:
        """The transformers model itself."""
        return self.model.unwrapped if isinstance(self.model, Wrapper) else self.model
