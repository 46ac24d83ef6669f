"""Zero points that several weights share, in quantized graphs."""

from __future__ import annotations

import mmap
from pathlib import Path

# The names of the operators that have a zero point for weights contain one of these.
_INTEGER_OPERATORS = (b"DequantizeLinear", b"QLinear", b"Integer", b"DynamicQuantizeMatMul", b"QGemm", b"QAttention")


def with_separate_zero_points(path: Path) -> bytes | None:
    """Return the serialized graph with a separate zero point for each signed 8-bit weight; `None` if no zero point is shared.

    If ONNX Runtime (1.31) converts signed weights to unsigned ones (`session.x64quantprecision`), it also converts their
    zero points, and it fails if two weights have the same zero point. Exports of PyTorch models with quantized layers, and
    graphs whose equal constants were merged, have such zero points.
    """
    if not path.stat().st_size:
        return None
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as content:
        if not any(content.find(name) >= 0 for name in _INTEGER_OPERATORS):
            return None

    # Imported here, as most graphs have no such operator, and the import is slow.
    import onnx_ir as ir

    from ..graph.editing import read_graph, serialized

    model = read_graph(path)
    shared = 0
    for graph in model.graphs():
        for value in list(graph.initializers.values()):
            uses = [use for use in value.uses() if value.dtype == ir.DataType.INT8 and use.idx >= 2]
            for number, use in enumerate(uses[1:]):
                name = f"{value.name}.separate_{number}"
                copy = ir.Value(name=name, const_value=value.const_value, type=value.type, shape=value.shape)
                graph.register_initializer(copy)
                use.node.replace_input_with(use.idx, copy)
                shared += 1
    return serialized(model) if shared else None
