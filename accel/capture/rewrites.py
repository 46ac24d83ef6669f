"""What the libraries under the trace rewrite, held to what is exact."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    import onnx_ir

# What ONNX Runtime's CPU provider (1.31) has no bfloat16 kernels for.
_ARITHMETIC = ("Add", "Sub", "Mul", "Div")


@functools.cache
def make_rewrites_exact() -> None:
    """Let onnxscript drop `x + 0` and `x * 1` for 0 and 1 alone.

    Its rules take any number up to 1e-8 for 0 and up to 1.00001 for 1 (onnxscript 0.7). That removes the epsilon of an
    RMSNorm (Helium's is 1e-8), which makes NaN of padding, whose embeddings are zeros. Call it before its optimizer runs.
    """
    from onnxscript.rewriter.rules.common import _no_op

    for rule in _no_op.rules:
        for node in rule._target_pattern:
            for value in node.inputs:
                if hasattr(value, "_abs_tol"):
                    value._abs_tol = value._rel_tol = 0.0


@contextmanager
def squeeze_known_axes() -> Iterator[None]:
    """While a model is traced, a squeeze that names no axes drops those that are 1 in every call.

    A graph's squeeze would drop the axes that are 1 when it runs: the rows of a batch of one, too (mBART's shift of its tokens).
    The model itself does that as well, and broadcasting makes up for it there; graphs compute with the ranks of the trace.
    """
    original = torch.Tensor.squeeze

    def squeeze(self: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        if args or kwargs:
            return original(self, *args, **kwargs)
        # Axes that vary are symbols here, also where the sample's size is 1.
        found: torch.Tensor = original(self, tuple(i for i, n in enumerate(self.shape) if isinstance(n, int) and n == 1))
        return found

    torch.Tensor.squeeze = squeeze  # type: ignore[method-assign, assignment]
    try:
        yield
    finally:
        torch.Tensor.squeeze = original  # type: ignore[method-assign]


def round_to_bfloat16(model: onnx_ir.Model) -> None:
    """Compute sums and products of bfloat16 in float32 and round them, which is what PyTorch does: the same numbers.

    Falcon's and BLOOM's positions are bfloat16 in models of any type.
    """
    import onnx_ir

    for graph in model.graphs():
        for node in [node for node in graph if node.op_type in _ARITHMETIC and node.domain == ""]:
            result = node.outputs[0]
            if result.dtype != onnx_ir.DataType.BFLOAT16:
                continue
            wide = [
                onnx_ir.node("Cast", [value], {"to": onnx_ir.DataType.FLOAT}, name=f"{result.name}_wide_{i}")
                for i, value in enumerate(node.inputs)
            ]
            for cast, value in zip(wide, node.inputs, strict=True):
                cast.outputs[0].dtype = onnx_ir.DataType.FLOAT
                cast.outputs[0].shape = value.shape if value is not None else None
                cast.outputs[0].name = cast.name
            graph.insert_before(node, wide)
            for i, cast in enumerate(wide):
                node.replace_input_with(i, cast.outputs[0])
            back = onnx_ir.node("Cast", [result], {"to": onnx_ir.DataType.BFLOAT16}, name=f"{result.name}_rounded")
            rounded = back.outputs[0]
            rounded.name, rounded.dtype, rounded.shape = back.name, onnx_ir.DataType.BFLOAT16, result.shape
            result.replace_all_uses_with(rounded)
            back.replace_input_with(0, result)
            graph.insert_after(node, back)
            result.dtype = onnx_ir.DataType.FLOAT
