"""Wrappers that let a model also return its hidden states and attentions, as one tensor for each layer."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from ..interfaces.tracing_wrapper import Tensors, Wrapper
from ..upstream.attention_choice import attention_of


class ReturnsLayerOutputs(Wrapper):
    """A model that returns its hidden states or attentions in each call.

    Elements of tuples become numbered tensors: `logits`, `hidden_states_0`, `hidden_states_1`, ...
    """

    def __init__(self, model: torch.nn.Module, *, hidden_states: bool, attentions: bool) -> None:
        super().__init__(model)
        self.hidden_states = hidden_states
        self.attentions = attentions

    def forward(self, **inputs: torch.Tensor) -> Tensors:
        """Run the model. If attentions are requested, use eager attention, because only eager attention returns them."""
        model: Any = self.model
        settings = {"output_hidden_states": self.hidden_states, "output_attentions": self.attentions}
        with attention_of(model, "eager" if self.attentions else None):
            result = model(**inputs, **settings)
        outputs: Tensors = {}
        for name, value in result.items():
            if isinstance(value, torch.Tensor):
                outputs[name] = value
            elif isinstance(value, tuple | list):
                outputs |= {f"{name}_{i}": layer for i, layer in enumerate(value) if isinstance(layer, torch.Tensor)}
        return outputs


class EagerAttentionInTrace(Wrapper):
    """A model that is traced with eager attention. Outside of a trace, the model runs unchanged.

    In a graph from transformers' exporter, a fully masked row of attention scores gives zeros, as in PyTorch's fused GPU kernels. On the
    CPU, PyTorch computes the mean of the values. Conformer encoders (Parakeet) mask padded frames completely, so the outputs for padded
    frames would differ.
    """

    def forward(self, **inputs: torch.Tensor) -> Any:
        """Run the model."""
        with attention_of(self.model, "eager" if torch.compiler.is_exporting() else None):
            return self.model(**inputs)


def inner_states(outputs: Mapping[str, torch.Tensor]) -> Tensors:
    """Select the numbered hidden states and attentions from a model's outputs."""
    return {name: value for name, value in outputs.items() if name.startswith(("hidden_states_", "attentions_"))}
