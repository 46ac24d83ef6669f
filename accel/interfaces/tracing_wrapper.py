"""Base class of modules that wrap a transformers model. accel traces the wrapper instead of the model."""

from __future__ import annotations

from typing import Any

import torch

from .family import Tensors as Tensors  # Most wrappers return `Tensors`.


class Wrapper(torch.nn.Module):
    """Module that wraps a transformers model. accel traces the wrapper instead of the model."""

    def __init__(self, model: torch.nn.Module) -> None:
        super().__init__()
        self.model = model
        self.config = model.config

    @property
    def required_token(self) -> int | None:
        """Id of a token that each row of `input_ids` must contain, or `None` if the model requires no token."""
        return self.model.required_token if isinstance(self.model, Wrapper) else None

    @property
    def returns_layers(self) -> bool:
        """Whether the module can return the hidden states and attentions of all layers."""
        return self.model.returns_layers if isinstance(self.model, Wrapper) else True


def unwrapped(model: torch.nn.Module) -> Any:
    """Return the transformers model inside of one or several wrappers. A model without a wrapper is returned unchanged."""
    while isinstance(model, Wrapper):
        model = model.model
    return model
