"""A module around a transformers model, traced in its place."""

from __future__ import annotations

from typing import Any

import torch

from .family import Tensors as Tensors  # most wrappers return them


class Wrapper(torch.nn.Module):
    """A module around a transformers model, traced in its place."""

    def __init__(self, model: torch.nn.Module) -> None:
        super().__init__()
        self.model = model
        self.config = model.config

    @property
    def required_token(self) -> int | None:
        """The token that each row of `input_ids` must hold; `None` where any rows will do."""
        return self.model.required_token if isinstance(self.model, Wrapper) else None

    @property
    def returns_layers(self) -> bool:
        """Whether hidden states and attentions of single layers come out, where they are asked for."""
        return self.model.returns_layers if isinstance(self.model, Wrapper) else True


def unwrapped(model: torch.nn.Module) -> Any:
    """The transformers model in the modules around it."""
    while isinstance(model, Wrapper):
        model = model.model
    return model
