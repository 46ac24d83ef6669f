"""Linear layers that multiply in float8, with one scale for each input row and one scale for each weight row.

A separate kernel that rounds the input takes as much time as the faster matrix product saves. A float8 layer is
therefore faster only if the kernel that computes its input also rounds the input. The kernels of PyTorch's compiler do
this for norms, and a custom kernel does it for GELU. `round_layers` chooses the layers by their shapes.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.fx import Graph
from torch.nn.functional import gelu

from ..upstream import scaled_product
from .fusible_layers import side_by_side, spans_of

LARGEST = 448.0
"""Largest finite value of `torch.float8_e4m3fn`."""
SMALLEST_SCALE = 1e-12
"""Smallest scale. A row that contains only zeros gets this scale."""
# Sizes of float8 matrix products must be multiples of this.
_MULTIPLE = 16
# Largest number of features per row that the GELU kernel supports.
_MOST_FEATURES = 16384


class Float8Linear(torch.nn.Module):
    """Linear layer whose weight is a range of rows of a float8 tensor. Several layers may share the float8 tensor.

    Args:
        layer: The layer to replace.
        values: Weights of all layers that share the tensor, `(output features of all layers, input features)
            float8_e4m3fn`.
        scale: Scale of each weight row, `(output features of all layers, 1) float32`.
        bias: Bias of all layers, `(output features of all layers,)`, in the data type of the layer's output.
        rows: The weight rows of this layer.
    """

    values: torch.Tensor
    scale: torch.Tensor
    biases: torch.Tensor | None

    def __init__(
        self,
        layer: torch.nn.Linear,
        values: torch.Tensor,
        scale: torch.Tensor,
        bias: torch.Tensor | None,
        rows: slice,
    ) -> None:
        super().__init__()
        self.in_features, self.out_features, self.rows = layer.in_features, layer.out_features, rows
        self._dtype = layer.weight.dtype
        self.register_buffer("values", values, persistent=False)
        self.register_buffer("scale", scale, persistent=False)
        self.register_buffer("biases", bias, persistent=False)

    @property
    def weight(self) -> torch.Tensor:
        """Weight in the original data type of the layer, computed from the float8 values. Some model code reads the
        weight of a layer or the data type of the weight.
        """
        return (self.values[self.rows].float() * self.scale[self.rows]).to(self._dtype)

    @property
    def bias(self) -> torch.Tensor | None:
        """Bias of this layer, or `None`."""
        return None if self.biases is None else self.biases[self.rows]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Compute the linear layer; the output has the data type of `x`."""
        output: torch.Tensor = LINEAR(x, self.values[self.rows], self.scale[self.rows], self.bias)
        return output


def round_layers(model: torch.nn.Module) -> int:
    """Replace the linear layers that are faster in float8, and return the number of replaced layers.

    Two kinds of layers are replaced: linear layers of one module with equal input sizes, which may read the same input
    (such as query, key and value), and layers with at least twice as many inputs as outputs or twice as many outputs as
    inputs.

    Returns:
        The number of replaced layers.
    """
    count = 0
    for parent in list(model.modules()):
        names = {id(layer): name for name, layer in parent.named_children()}
        for layers in side_by_side(parent):
            layers = [
                candidate
                for candidate in layers
                if not candidate.in_features % _MULTIPLE and not candidate.out_features % _MULTIPLE
            ]
            wide = len(layers) == 1 and max(layers[0].weight.shape) >= 2 * min(layers[0].weight.shape)
            if len(layers) > 1 or wide:
                for layer, rounded in zip(layers, _rounded(layers), strict=True):
                    setattr(parent, names[id(layer)], rounded)
                count += len(layers)
    return count


def _rounded(layers: list[torch.nn.Linear]) -> list[Float8Linear]:
    values, scale = rows_in_float8(torch.cat([linear_layer.weight.detach() for linear_layer in layers]))
    biases = [linear_layer.bias.detach() for linear_layer in layers if linear_layer.bias is not None]
    bias = torch.cat(biases) if biases else None
    rounded_layers, start = [], 0
    for layer in layers:
        rounded_layers.append(Float8Linear(layer, values, scale, bias, slice(start, start + layer.out_features)))
        start += layer.out_features
    return rounded_layers


def rows_in_float8(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Round rows to float8.

    Args:
        x: Tensor `(rows, features)`.

    Returns:
        The values divided by the scale of their row, `(rows, features) float8_e4m3fn`, and the scales, `(rows, 1)
        float32`.
    """
    scale = (x.abs().amax(-1, keepdim=True).float() / LARGEST).clamp(min=SMALLEST_SCALE)
    return (x.float() / scale).to(torch.float8_e4m3fn), scale


def float8_linear(
    x: torch.Tensor, weight: torch.Tensor, scale: torch.Tensor, bias: torch.Tensor | None
) -> torch.Tensor:
    """Round the input to float8 and compute a linear layer in float8.

    Args:
        x: Input `(..., input features)`.
        weight: Weight `(output features, input features) float8_e4m3fn`.
        scale: Scale of each weight row, `(output features, 1) float32`.
        bias: Bias `(output features,)` in the data type of `x`, or `None`.
    """
    return _product(x, rows_in_float8(x.reshape(-1, x.shape[-1])), weight, scale, bias)


def float8_gelu_linear(
    x: torch.Tensor, weight: torch.Tensor, scale: torch.Tensor, bias: torch.Tensor | None
) -> torch.Tensor:
    """Compute GELU of the input, and then a linear layer in float8. The arguments are those of `float8_linear`."""
    flat = x.reshape(-1, x.shape[-1])
    if not x.is_cuda or flat.shape[-1] > _MOST_FEATURES:
        return _product(x, rows_in_float8(gelu(flat)), weight, scale, bias)
    # Triton is installed only with PyTorch's builds for GPUs.
    from .kernels import gelu_rows_in_float8

    return _product(x, gelu_rows_in_float8(flat.contiguous(), LARGEST, SMALLEST_SCALE), weight, scale, bias)


def _product(
    x: torch.Tensor,
    rounded: tuple[torch.Tensor, torch.Tensor],
    weight: torch.Tensor,
    scale: torch.Tensor,
    bias: torch.Tensor | None,
) -> torch.Tensor:
    values, scales = rounded
    output = scaled_product(
        values, weight.t(), scale_a=scales, scale_b=scale.t(), bias=bias, out_dtype=x.dtype, use_fast_accum=True
    )
    return output.view(*x.shape[:-1], weight.shape[0])


# Register both functions as operators, so that each call is a single node in the graph when the graph pass runs. The
# compiler decomposes these nodes after the graph pass.
_LIBRARY: Any = torch.library.Library("accel", "FRAGMENT")  # type: ignore[no-untyped-call]
for _function in (float8_linear, float8_gelu_linear):
    _LIBRARY.define(f"{_function.__name__}(Tensor x, Tensor weight, Tensor scale, Tensor? bias) -> Tensor")
    _LIBRARY.impl(_function.__name__, _function, "CompositeImplicitAutograd")
LINEAR: Any = torch.ops.accel.float8_linear.default
GELU_LINEAR: Any = torch.ops.accel.float8_gelu_linear.default


def activate_before_rounding(graph: Graph) -> None:
    """Replace GELU and the float8 linear layer after it by one operation, if only this layer reads the output of GELU."""
    spans = spans_of(graph)
    for node in list(graph.find_nodes(op="call_function", target=LINEAR)):
        read = node.args[0]
        if read.op != "call_function" or read.target is not gelu or len(read.users) > 1 or spans[read] != spans[node]:
            continue
        if len(read.args) != 1 or read.kwargs.get("approximate", "none") != "none":
            continue
        with graph.inserting_before(node):
            fused = graph.call_function(GELU_LINEAR, (read.args[0], *node.args[1:]))
        fused.meta = dict(node.meta)
        node.replace_all_uses_with(fused)
        graph.erase_node(node)
        graph.erase_node(read)
