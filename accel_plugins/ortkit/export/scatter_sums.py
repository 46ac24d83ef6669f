"""Replacement of `ScatterElements` operators that add into a vector, for runtimes without this reduction, such as TensorRT.

Mixtures of experts count the tokens of each expert in this way. The number of tokens times the number of experts is small compared with the
work of the experts.
"""

from __future__ import annotations

import numpy as np
import onnx_ir as ir

from ..graph.analysis import dims
from ..graph.editing import NewNodes, nodes, replace_value, root_graph


def expand_scatter_sums(model: ir.Model) -> int:
    """Replace each addition into a vector of constant size by a comparison with all positions and a `ReduceSum`.

    `sums[i] = data[i] + (updates where indices == i).sum()`

    Args:
        model: The model; changed in place.

    Returns:
        The number of replaced operators.
    """
    count = 0
    for node in nodes(model, "ScatterElements"):
        data, indices, updates = node.inputs
        size = dims(data)
        if node.attributes.get_string("reduction", "none") != "add" or size is None or len(size) != 1:
            continue
        if not isinstance(size[0], int):
            continue
        assert data is not None
        assert indices is not None
        assert data.dtype is not None
        graph = root_graph(node)
        new = NewNodes(graph, f"{node.name}.sum")
        column, positions = new.constant([1]), new.constant(np.arange(size[0]))
        integers = new.op("Cast", indices, to=ir.DataType.INT64, dtype=ir.DataType.INT64, shape=indices.shape)
        # Indices may be negative: -1 is the last position.
        integers = new.op("Mod", integers, new.constant(size[0]), like=integers)
        matches = new.op(
            "Equal", new.op("Unsqueeze", integers, column, dtype=ir.DataType.INT64), positions, dtype=ir.DataType.BOOL
        )
        zero = new.constant(0, data.dtype.numpy())
        chosen = new.op(
            "Where", matches, new.op("Unsqueeze", updates, column, dtype=data.dtype), zero, dtype=data.dtype
        )
        added = new.op("ReduceSum", chosen, new.constant([0]), keepdims=0, like=data)
        result = new.op("Add", data, added, like=node.outputs[0])
        graph.insert_before(node, new.nodes)
        replace_value(node.outputs[0], result)
        graph.remove(node, safe=True)
        count += 1
    return count
