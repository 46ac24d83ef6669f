"""Rewrites that reduce the number of operators without changing the result; every runtime can run the rewritten graph."""

from __future__ import annotations

import numpy as np
import onnx_ir as ir
from onnx_ir.passes import common as passes

from accel.capture import prepare_rewriter

from ..graph.analysis import Dim, bounds, dims, producer, shape_value
from ..graph.editing import NewNodes, add_initializer, constant, nodes, replace_value, root_graph
from ..graph.rewrites import graph_rewrite, node_rewrite


def count_nodes(model: ir.Model) -> int:
    """Return the number of nodes in the graph and its subgraphs."""
    return sum(len(graph) for graph in model.graphs())


@graph_rewrite
def fold_constants(model: ir.Model) -> int:
    """Compute all values that do not depend on inputs.

    Graphs with an `If` node are not changed, because onnxscript's optimizer (0.7) treats the sizes of values outside of
    a branch as constants. For example, an optimized BART decoder with two branches worked only for a batch of one row.
    """
    from onnxscript.optimizer import optimize

    if any(node.op_type == "If" for node in model.graph):
        return 0
    prepare_rewriter()
    node_count = count_nodes(model)
    optimize(model)
    return node_count - count_nodes(model)


@graph_rewrite
def merge_duplicates(model: ir.Model) -> int:
    """Merge nodes that compute the same value, and merge equal constants."""
    node_count = count_nodes(model)
    passes.DeduplicateInitializersPass()(model)
    passes.CommonSubexpressionEliminationPass()(model)
    passes.RemoveUnusedNodesPass()(model)
    return node_count - count_nodes(model)


@node_rewrite("Reshape")
def fix_reshapes(node: ir.Node) -> bool:
    """Give a `Reshape` a constant shape if the shape only copies sizes of the input; 0 means the input's size on that axis."""
    if constant(node.inputs[1]) is not None:
        return False
    target = _reshape_target(node)
    if target is None:
        return False
    graph = root_graph(node)
    shape = add_initializer(graph, f"{node.name}.shape", np.array(target, np.int64))
    node.replace_input_with(1, shape)
    node.attributes.pop("allowzero", None)
    return True


def _reshape_target(node: ir.Node) -> list[int] | None:
    """Return a constant shape, with at most one -1, that is equivalent to the shape input of a `Reshape`, else `None`."""
    source = dims(node.inputs[0])
    sizes = shape_value(node.inputs[1])
    result = dims(node.outputs[0])
    if source is None or (sizes is None and result is None):
        return None
    if sizes is None or (result is not None and len(result) != len(sizes)):
        sizes = result
    assert sizes is not None
    target: list[int] = []
    for position, size in enumerate(sizes):
        dim: Dim = size
        if result is not None and (size == -1 or not isinstance(size, int)) and isinstance(result[position], int):
            dim = result[position]
        if isinstance(dim, int):
            if dim == 0:
                return None
            target.append(dim)
        elif position < len(source) and source[position] == dim:
            target.append(0)
        else:
            target.append(-1)
    return target if target.count(-1) <= 1 else None


@graph_rewrite
def fix_key_transposes(model: ir.Model) -> int:
    """Replace the operators that swap the last two axes of a key by one `Transpose`.

    `torch.export` writes a reshape to three axes, a transpose, and a reshape to four axes.
    """
    count = 0
    for outer in nodes(model, "Reshape"):
        swap = producer(outer.inputs[0], "Transpose")
        inner = producer(swap.inputs[0], "Reshape") if swap is not None else None
        if swap is None or inner is None or list(swap.attributes.get_ints("perm", [])) != [0, 2, 1]:
            continue
        key = inner.inputs[0]
        sizes = dims(key)
        if sizes is None or len(sizes) != 4 or key is None:
            continue
        flat, target = _result_dims(inner), _result_dims(outer)
        if flat is None or target is None or len(flat) != 3 or len(target) != 4:
            continue
        if flat[1:] != sizes[2:] or target[-2:] != [sizes[3], sizes[2]] or target[:2] != sizes[:2]:
            continue
        assert key.shape is not None
        new, shape = NewNodes(root_graph(outer), f"{outer.name}.transpose"), [key.shape[i] for i in (0, 1, 3, 2)]
        result = new.op("Transpose", key, perm=[0, 1, 3, 2], like=outer.outputs[0], shape=shape)
        new.graph.insert_before(outer, new.nodes)
        replace_value(outer.outputs[0], result)
        count += 1
    passes.RemoveUnusedNodesPass()(model)
    if count:
        infer_shapes(model)
    return count


def _result_dims(reshape: ir.Node) -> list[Dim] | None:
    """Return the sizes that the shape input of a `Reshape` gives; a size of -1 is replaced by the size of the output."""
    target, result = shape_value(reshape.inputs[1]), dims(reshape.outputs[0])
    if target is None:
        return result
    source = dims(reshape.inputs[0])
    resolved: list[Dim] = []
    for position, size in enumerate(target):
        if size == 0 and source is not None and not reshape.attributes.get_int("allowzero", 0):
            size = source[position]
        elif size == -1 and result is not None and len(result) == len(target):
            size = result[position]
        resolved.append(size)
    return resolved


def infer_shapes(model: ir.Model) -> None:
    """Infer shapes and data types that are missing after rewrites; existing shapes and data types are kept."""
    passes.ShapeInferencePass()(model)


@node_rewrite("Where", "And", "Add")
def drop_certain_conditions(node: ir.Node) -> bool:
    """Remove masks and conditions that are the same for every input.

    Examples are `And` with true, `Where` with a constant condition, and the addition of an all-zero mask.
    """
    unchanged = _certain(node)
    if unchanged is None or not _same_shape(unchanged, node.outputs[0]):
        return False
    replace_value(node.outputs[0], unchanged)
    root_graph(node).remove(node, safe=True)
    return True


def _certain(node: ir.Node) -> ir.Value | None:
    """Return the input that the node always returns unchanged, else `None`."""
    inputs = node.inputs
    if node.op_type == "Where":
        low, high = bounds(inputs[0])
        return inputs[1] if low == 1 else inputs[2] if high == 0 else None
    certain = (1.0, 1.0) if node.op_type == "And" else (0.0, 0.0)
    for index, other in ((0, 1), (1, 0)):
        if bounds(inputs[index]) == certain:
            return inputs[other]
    return None


def _same_shape(new: ir.Value, old: ir.Value) -> bool:
    new_sizes, old_sizes = dims(new), dims(old)
    return new_sizes is not None and new_sizes == old_sizes
