"""SmoothQuant (Xiao et al., 2022): move outliers of activations into the weights before both are rounded to 8 bits."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import onnx_ir as ir

from ..graph.editing import NewNodes, add_initializer, constant, insert_after, root_graph
from .calibrators import ChannelRange
from .layers import QuantizableLayer

_NORMS = ("LayerNormalization", "SimplifiedLayerNormalization", "RMSNormalization")


def grouped(layers: Sequence[QuantizableLayer]) -> dict[str, list[QuantizableLayer]]:
    """Group layers by the name of the activation that they read."""
    groups: dict[str, list[QuantizableLayer]] = {}
    for layer in layers:
        groups.setdefault(str(layer.activation.name), []).append(layer)
    return groups


def smoothing_divisors(
    layers: Sequence[QuantizableLayer], channels: Mapping[str, ChannelRange], exponent: float
) -> dict[str, np.ndarray]:
    """Return the divisors `(channels,)` of each activation by name: `max|x|^a / max|w|^(1 - a)`, where `a` is `exponent`.

    The divisor is 1 for channels that are always 0.
    """
    divisors = {}
    for name, group in grouped(layers).items():
        if name not in channels:
            continue
        largest = np.maximum(np.abs(channels[name].low), np.abs(channels[name].high))
        weight = np.max([np.abs(layer.weight()).max(axis=1) for layer in group], axis=0)
        usable = (largest > 0) & (weight > 0)
        divisor = np.ones_like(largest)
        divisor[usable] = largest[usable] ** exponent / weight[usable] ** (1 - exponent)
        divisors[name] = np.clip(divisor, 1e-5, 1e5).astype(np.float32)
    return divisors


def smooth(layers: Sequence[QuantizableLayer], divisors: Mapping[str, np.ndarray]) -> dict[str, int]:
    """Divide activations by the divisors `(channels,)` and multiply weights by them.

    If a normalization computes the activation and only these layers read it, the division is folded into the
    normalization's weights.

    Returns:
        The number of divisions that were `folded` into normalizations, and the number that were `inserted` as `Mul`
        nodes.
    """
    report = {"folded": 0, "inserted": 0}
    for name, group in grouped(layers).items():
        if name not in divisors:
            continue
        divisor, source = divisors[name], group[0].activation
        graph = root_graph(group[0].node)
        readers = {id(layer.node) for layer in group}
        norm = source.producer()
        foldable = (
            norm is not None
            and norm.op_type in _NORMS
            and not source.is_graph_output()
            and all(id(use.node) in readers for use in source.uses())
            and all(constant(value) is not None for value in norm.inputs[1:] if value is not None)
        )
        if foldable and norm is not None:
            for index, value in enumerate(norm.inputs[1:], start=1):
                array = constant(value)
                if value is not None and array is not None:
                    scaled = add_initializer(graph, f"{value.name}.smoothed", (array / divisor).astype(array.dtype))
                    norm.replace_input_with(index, scaled)
            report["folded"] += 1
        else:
            new = NewNodes(graph, name)
            smoothed = new.op("Mul", source, new.constant(1 / divisor, np.float32), like=source)
            smoothed.name = f"{name}.smoothed"
            insert_after(source, graph, new.nodes)
            for layer in group:
                layer.node.replace_input_with(0, smoothed)
            report["inserted"] += 1
        for layer in group:
            scaled_weight = (layer.weight() * divisor[:, None]).astype(np.float32)
            _set_weight(layer, scaled_weight)
    return report


def _set_weight(layer: QuantizableLayer, weight: np.ndarray) -> None:
    """Give a layer a new weight `(inner, outer)`; the old constant stays in the graph, because other layers may read it."""
    node = layer.node
    if node.op_type == "Gemm":
        node.attributes["transB"] = ir.AttrInt64("transB", 0)
        node.attributes["alpha"] = ir.AttrFloat32("alpha", 1.0)
    value = add_initializer(root_graph(node), f"{node.name}.weight_smoothed", weight)
    node.replace_input_with(1, value)
