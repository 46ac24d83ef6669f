"""Fusions that reduce the number of operators in decoder layers.

For a single token, most of the time is spent on kernel launches (GPU) or on thread scheduling (CPU), not on arithmetic.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import onnx_ir as ir
from onnx_ir.passes import common as passes

from accel.capture import MODULE

from ..graph.analysis import Linear, dims, linear, only_user, producer
from ..graph.checkpoint_tensors import concatenated
from ..graph.editing import MICROSOFT, NewNodes, add_initializer, constant, nodes, replace_value, root_graph
from ..graph.rewrites import graph_rewrite

_HEADS_FIRST = [0, 2, 1, 3]


@graph_rewrite
def cancel_transposes(model: ir.Model) -> int:
    """Remove transposes of `(batch, length, heads, depth)` that cancel each other, and the reshapes around them."""
    count = 0
    for outer in nodes(model, "Transpose"):
        inner = producer(outer.inputs[0], "Transpose")
        if inner is None or any(list(n.attributes.get_ints("perm", [])) != _HEADS_FIRST for n in (inner, outer)):
            continue
        original = inner.inputs[0]
        assert original is not None
        replace_value(outer.outputs[0], original)
        count += 1
    passes.RemoveUnusedNodesPass()(model)
    for merge in nodes(model, "Reshape"):
        split = producer(merge.inputs[0], "Reshape")
        source = split.inputs[0] if split is not None else None
        if source is None or dims(source) is None or dims(source) != dims(merge.outputs[0]):
            continue
        replace_value(merge.outputs[0], source)
        count += 1
    return count


@graph_rewrite
def merge_products(model: ir.Model) -> int:
    """Merge linear layers with the same input, and their biases, into one product and a `Split`.

    Examples are the query, key and value projections, or the gate and up projections. Only decoders are changed: for a
    single token, the GPU mostly waits for kernel launches.
    """
    if not any(True for _ in nodes(model, "GroupQueryAttention", domain=MICROSOFT)):
        return 0
    groups: dict[tuple[int, int], list[tuple[ir.Node, ir.Value, Linear]]] = {}
    for product in nodes(model, "MatMul"):
        result = _result(product)
        layer = linear(result)
        if result is not None and layer is not None:
            groups.setdefault((id(product.graph), id(layer.x)), []).append((product, result, layer))
    count = 0
    for group in groups.values():
        if len(group) > 1 and len({tuple(dims(layer.weight) or ())[:1] for *_, layer in group}) == 1:
            products, results, layers = zip(*group, strict=True)
            _merge(products, layers, results)
            count += len(group)
    return count


def _result(product: ir.Node) -> ir.Value | None:
    """Return the result `(batch, length, outer)` of a product and its bias; `None` if another node also reads the weight."""
    result, weight = product.outputs[0], product.inputs[1]
    if len(dims(product.inputs[0]) or ()) != 3 or weight is None or len(weight.uses()) != 1:
        return None
    add = only_user(result)
    layer = linear(add.outputs[0]) if add is not None else None
    if add is not None and layer is not None and dims(layer.bias) == (dims(weight) or [])[1:]:
        return add.outputs[0]
    return None if result.is_graph_output() else result


def _merge(products: Sequence[ir.Node], layers: Sequence[Linear], results: Sequence[ir.Value]) -> None:
    """Compute layers with the same input as one product, inserted before the first of their products."""
    first = products[0]
    new, x = NewNodes(root_graph(first), str(first.name)), layers[0].x
    weights = [tensor for layer in layers if (tensor := ir.convenience.get_const_tensor(layer.weight)) is not None]
    biases = [constant(layer.bias) for layer in layers]
    widths = [int(weight.shape[1]) for weight in weights]
    assert x.shape is not None
    kind = {"dtype": first.outputs[0].dtype, "shape": [*x.shape[:2], sum(widths)]}
    weight = add_initializer(new.graph, f"{first.name}.merged", concatenated(weights))
    merged = new.op("MatMul", x, weight, name=f"{first.name}.product", **kind)
    names = [str(product.metadata_props[MODULE]) for product in products if MODULE in product.metadata_props]
    if names:
        new.nodes[-1].metadata_props[MODULE] = "+".join(names)
    if any(bias is not None for bias in biases):
        parts = [
            bias if bias is not None else np.zeros(width, weights[0].dtype.numpy())
            for bias, width in zip(biases, widths, strict=True)
        ]
        bias = add_initializer(new.graph, f"{first.name}.merged_bias", np.concatenate(parts))
        merged = new.op("Add", merged, bias, name=f"{first.name}.biased", **kind)
    inputs = [merged, new.constant(widths)]
    split = ir.node("Split", inputs, {"axis": -1}, num_outputs=len(layers), name=f"{first.name}.split")
    new.graph.insert_before(first, [*new.nodes, split])
    for result, part in zip(results, split.outputs, strict=True):
        replace_value(result, part)
