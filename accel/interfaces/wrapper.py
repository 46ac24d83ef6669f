"""Base class of modules that wrap a transformers model and are traced instead of it."""

from __future__ import annotations

from typing import Any

import torch

from .family import Tensors as Tensors  # Most wrappers return `Tensors`.


class Wrapper(torch.nn.Module):
    """A module that wraps a transformers model and is traced instead of it."""

    def __init__(self, model: torch.nn.Module) -> None:
        super().__init__()
        self.model = model
        self.config = model.config

    @property
    def required_token(self) -> int | None:
        """Token that each row of `input_ids` must contain, or `None` if there is no such token."""
        return self.model.required_token if isinstance(self.model, Wrapper) else None

    @property
    def returns_layers(self) -> bool:
        """Whether the module can return the hidden states and attentions of all layers."""
        return self.model.returns_layers if isinstance(self.model, Wrapper) else True


def unwrapped(model: torch.nn.Module) -> Any:
    """Return the transformers model inside any wrappers."""
    while isinstance(model, Wrapper):
        model = model.model
    return model
