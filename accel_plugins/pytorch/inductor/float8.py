"""Linear layers whose products are of 8-bit floats, with a scale for each row that is read and for each row of the weight.

Rounding what a product reads costs as much as the smaller product gains, unless the kernel that computes those values rounds them, too:
the compiler's norms do, GELU has a kernel for it. So layers are left alone that read what neither computes.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.fx import Graph
from torch.nn.functional import gelu

from .parallel_layers import side_by_side, spans_of

LARGEST = 448.0
"""The largest value of `torch.float8_e4m3fn`."""
SMALLEST_SCALE = 1e-12
"""Of rows of zeros."""
# What products of 8-bit floats want sizes to be multiples of.
_MULTIPLE = 16
# Features of a row that the kernel for GELU holds at once.
_MOST_FEATURES = 16384


class Float8Linear(torch.nn.Module):
    """A linear layer by some rows of a rounded weight.

    Args:
        layer: What it stands for.
        values: `(features out of all layers of the weight, features in) float8_e4m3fn`.
        scale: `(features out, 1) float32`.
        bias: `(features out,)`, in the type of what the layer returns.
        rows: The layer's own of them.
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
        """The rounded weight in the layer's own type, for models that read it themselves, or ask for its type."""
        return (self.values[self.rows].float() * self.scale[self.rows]).to(self._dtype)

    @property
    def bias(self) -> torch.Tensor | None:
        """The layer's own."""
        return None if self.biases is None else self.biases[self.rows]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """The product and its bias, in the type of `x`."""
        found: torch.Tensor = LINEAR(x, self.values[self.rows], self.scale[self.rows], self.bias)
        return found


def round_layers(model: torch.nn.Module) -> int:
    """Put layers of 8-bit floats into the place of those that gain by it: neighbours that may read the same, such as query, key and
    value, and layers that read or write twice as many features as they write or read.

    Returns:
        How many.
    """
    count = 0
    for parent in list(model.modules()):
        names = {id(layer): name for name, layer in parent.named_children()}
        for layers in side_by_side(parent):
            layers = [one for one in layers if not one.in_features % _MULTIPLE and not one.out_features % _MULTIPLE]
            wide = len(layers) == 1 and max(layers[0].weight.shape) >= 2 * min(layers[0].weight.shape)
            if len(layers) > 1 or wide:
                for layer, rounded in zip(layers, _rounded(layers), strict=True):
                    setattr(parent, names[id(layer)], rounded)
                count += len(layers)
    return count


def _rounded(layers: list[torch.nn.Linear]) -> list[Float8Linear]:
    values, scale = rows_in_float8(torch.cat([one.weight.detach() for one in layers]))
    biases = [one.bias.detach() for one in layers if one.bias is not None]
    bias = torch.cat(biases) if biases else None
    made, start = [], 0
    for layer in layers:
        made.append(Float8Linear(layer, values, scale, bias, slice(start, start + layer.out_features)))
        start += layer.out_features
    return made


def rows_in_float8(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Rows rounded to 8-bit floats.

    Args:
        x: `(rows, features)`.

    Returns:
        The values over their row's scale, `(rows, features) float8_e4m3fn`, and the scales, `(rows, 1) float32`.
    """
    scale = (x.abs().amax(-1, keepdim=True).float() / LARGEST).clamp(min=SMALLEST_SCALE)
    return (x.float() / scale).to(torch.float8_e4m3fn), scale


def float8_linear(
    x: torch.Tensor, weight: torch.Tensor, scale: torch.Tensor, bias: torch.Tensor | None
) -> torch.Tensor:
    """A linear layer of 8-bit floats.

    Args:
        x: `(..., features in)`.
        weight: `(features out, features in) float8_e4m3fn`.
        scale: `(features out, 1) float32`.
        bias: `(features out,)` of the type of `x`.
    """
    return _product(x, rows_in_float8(x.reshape(-1, x.shape[-1])), weight, scale, bias)


def float8_gelu_linear(
    x: torch.Tensor, weight: torch.Tensor, scale: torch.Tensor, bias: torch.Tensor | None
) -> torch.Tensor:
    """GELU, and a linear layer of 8-bit floats behind it; see `float8_linear`."""
    flat = x.reshape(-1, x.shape[-1])
    if not x.is_cuda or flat.shape[-1] > _MOST_FEATURES:
        return _product(x, rows_in_float8(gelu(flat)), weight, scale, bias)
    # Triton comes with PyTorch's builds for GPUs alone.
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
    found = torch._scaled_mm(
        values, weight.t(), scale_a=scales, scale_b=scale.t(), bias=bias, out_dtype=x.dtype, use_fast_accum=True
    )
    return found.view(*x.shape[:-1], weight.shape[0])


# Operators, so that the pass over a graph sees them whole; the compiler takes them apart behind it.
_LIBRARY: Any = torch.library.Library("accel", "FRAGMENT")  # type: ignore[no-untyped-call]
for _function in (float8_linear, float8_gelu_linear):
    _LIBRARY.define(f"{_function.__name__}(Tensor x, Tensor weight, Tensor scale, Tensor? bias) -> Tensor")
    _LIBRARY.impl(_function.__name__, _function, "CompositeImplicitAutograd")
LINEAR: Any = torch.ops.accel.float8_linear.default
GELU_LINEAR: Any = torch.ops.accel.float8_gelu_linear.default


def activate_before_rounding(graph: Graph) -> None:
    """Let GELU round its values itself where a product of 8-bit floats is all that reads them."""
    spans = spans_of(graph)
    for node in list(graph.find_nodes(op="call_function", target=LINEAR)):
        read = node.args[0]
        if read.op != "call_function" or read.target is not gelu or len(read.users) > 1 or spans[read] != spans[node]:
            continue
        if len(read.args) != 1 or read.kwargs.get("approximate", "none") != "none":
            continue
        with graph.inserting_before(node):
            made = graph.call_function(GELU_LINEAR, (read.args[0], *node.args[1:]))
        made.meta = dict(node.meta)
        node.replace_all_uses_with(made)
        graph.erase_node(node)
        graph.erase_node(read)
