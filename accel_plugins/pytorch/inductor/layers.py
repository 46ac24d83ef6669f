"""Linear layers of a model that are candidates for one product."""

from __future__ import annotations

from collections import defaultdict
from typing import Any

import torch


def side_by_side(parent: torch.nn.Module) -> list[list[torch.nn.Linear]]:
    """A module's own linear layers, those together that read equally many features and have weights of one type and device."""
    alike: dict[Any, list[torch.nn.Linear]] = defaultdict(list)
    for layer in parent.children():
        # Other kinds of layers and weights (quantized ones), and layers with a `forward` of their own, are left.
        if type(layer) is not torch.nn.Linear or "forward" in vars(layer):
            continue
        if all(type(one) is torch.nn.Parameter for one in layer.parameters()):
            weight = layer.weight
            alike[layer.in_features, layer.bias is None, weight.dtype, weight.device].append(layer)
    return list(alike.values())
