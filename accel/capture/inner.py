"""Models that also return what happens inside of them: hidden states and attentions, one tensor a layer."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from .pooling import Tensors, Wrapper


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
        with _plain_attention(model, self.attentions):
            result = model(**inputs, **wanted)
        found: Tensors = {}
        for name, value in result.items():
            if isinstance(value, torch.Tensor):
                found[name] = value
            elif isinstance(value, tuple | list):
                found |= {f"{name}_{i}": one for i, one in enumerate(value) if isinstance(one, torch.Tensor)}
        return found


@contextmanager
def _plain_attention(model: Any, wanted: bool) -> Iterator[None]:
    """The attention that returns its weights; the model's own afterwards."""
    before = getattr(model.config, "_attn_implementation", None)
    if not wanted or before in (None, "eager"):
        yield
        return
    model.set_attn_implementation("eager")
    try:
        yield
    finally:
        model.set_attn_implementation(before)
