"""A wrapper that returns only some outputs of a model."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from ..interfaces.tracing_wrapper import Tensors, Wrapper
from .layer_outputs import inner_states


class OutputSelection(Wrapper):
    """A model that returns only the outputs in `keeps`. Names in `keeps` that the model does not have are ignored."""

    def __init__(self, model: torch.nn.Module, keeps: Sequence[str]) -> None:
        super().__init__(model)
        self.keeps = tuple(keeps)

    def forward(self, **inputs: torch.Tensor) -> Tensors:
        """Run the model, and return the outputs in `keeps`. If the model has none of these outputs, return all tensors."""
        outputs = {name: value for name, value in self.model(**inputs).items() if isinstance(value, torch.Tensor)}
        selected = {name: outputs[name] for name in self.keeps if name in outputs}
        return {**selected, **inner_states(outputs)} if selected else outputs
