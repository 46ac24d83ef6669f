"""Models that also return what happens inside of them: hidden states and attentions, one tensor a layer."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from ..interfaces.wrapper import Tensors, Wrapper
from ..upstream.attention_choice import attention_of


class WithInnerStates(Wrapper):
    """A model that is asked for its hidden states or attentions in each call.

    Returns its tensors by name, those of a tuple numbered: `logits`, `hidden_states_0`, `hidden_states_1`, ...
    """

    def __init__(self, model: torch.nn.Module, *, hidden_states: bool, attentions: bool) -> None:
        super().__init__(model)
        self.hidden_states = hidden_states
        self.attentions = attentions

    def forward(self, **inputs: torch.Tensor) -> Tensors:
        """Run the model; attentions are written down by its plain implementation alone."""
        model: Any = self.model
        wanted = {"output_hidden_states": self.hidden_states, "output_attentions": self.attentions}
        with attention_of(model, "eager" if self.attentions else None):
            result = model(**inputs, **wanted)
        found: Tensors = {}
        for name, value in result.items():
            if isinstance(value, torch.Tensor):
                found[name] = value
            elif isinstance(value, tuple | list):
                found |= {f"{name}_{i}": one for i, one in enumerate(value) if isinstance(one, torch.Tensor)}
        return found


class TracedPlainly(Wrapper):
    """A model whose trace holds its plain attention; outside of a trace it is the model itself.

    transformers' exporter answers a row that is masked everywhere with zeros, as PyTorch's fused kernels on GPUs do; on the CPU PyTorch
    answers with the mean. Conformers of frames (Parakeet) mask padded rows so, and what is behind the end of a sound would differ.
    """

    def forward(self, **inputs: torch.Tensor) -> Any:
        """Run the model."""
        with attention_of(self.model, "eager" if torch.compiler.is_exporting() else None):
            return self.model(**inputs)


def inner_states(found: Mapping[str, torch.Tensor]) -> Tensors:
    """Hidden states and attentions of single layers, where they were asked for."""
    return {name: value for name, value in found.items() if name.startswith(("hidden_states_", "attentions_"))}
