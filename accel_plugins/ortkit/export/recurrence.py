"""Conversion of recurrent layers to ONNX loops: `accel::recurrence` becomes a `Scan` over the tokens.

`Scan` passes the state from token to token and collects the output of each token, so one graph accepts any number of
tokens and any initial state. The body of the loop has six operators, or nine operators for layers with the delta rule.
"""

from __future__ import annotations

from collections.abc import Sequence

import onnx_ir as ir

from accel.capture import DELTA_RECURRENCE, RECURRENCE, RECURRENCE_DOMAIN

_FLOAT = ir.DataType.FLOAT


def expand_recurrences(model: ir.Model) -> int:
    """Replace every recurrence of the graph by a `Scan`.

    Args:
        model: The model; changed in place.

    Returns:
        The number of replaced recurrences.
    """
    nodes = [node for node in model.graph if node.domain == RECURRENCE_DOMAIN]
    for i, node in enumerate(nodes):
        scan = _scan(node, f"recurrence_{i}")
        model.graph.insert_before(node, scan)
        for old, new in zip(node.outputs, (scan.outputs[1], scan.outputs[0]), strict=True):
            new.name, new.shape, new.dtype = f"{old.name}_scanned", old.shape, _FLOAT
            was_output = old.is_graph_output()
            old.replace_all_uses_with(new, replace_graph_outputs=True)
            if was_output:
                new.name, old.name = old.name, f"{old.name}_before"
        model.graph.remove(node, safe=True)
    model.opset_imports.pop(RECURRENCE_DOMAIN, None)
    return len(nodes)


def _scan(node: ir.Node, name: str) -> ir.Node:
    delta = node.op_type == DELTA_RECURRENCE
    assert node.op_type in (RECURRENCE, DELTA_RECURRENCE), node.op_type
    decay, rate, *tokens, state = node.inputs
    assert state is not None
    assert rate is not None
    scanned = [decay, *tokens]
    old_state = ir.Value(name=f"{name}_state", shape=state.shape, type=ir.TensorType(_FLOAT))
    parts = []
    for value, label in zip(scanned, ("decay", "key", "value", "query", "beta"), strict=False):
        assert value is not None
        shape = None
        if value.shape is not None:
            shape = ir.Shape([dim for at, dim in enumerate(value.shape) if at != 1])
        parts.append(ir.Value(name=f"{name}_{label}", shape=shape, type=ir.TensorType(_FLOAT)))
    body: list[ir.Node] = []

    def add(kind: str, inputs: Sequence[ir.Value], label: str, **attributes: int) -> ir.Value:
        body.append(added := ir.node(kind, inputs, attributes or None, name=f"{name}_{label}_node"))
        added.outputs[0].name = f"{name}_{label}"
        added.outputs[0].dtype = _FLOAT
        return added.outputs[0]

    step, key, value, query = parts[:4]
    decayed = add("Mul", [old_state, add("Exp", [add("Mul", [step, rate], "exponent")], "factor")], "decayed")
    if delta:
        axes = ir.Value(
            name=f"{name}_axes", const_value=ir.tensor([2], dtype=ir.DataType.INT64), type=ir.TensorType(ir.DataType.INT64),
            shape=ir.Shape([1]),
        )  # fmt: skip
        predicted = add("ReduceSum", [add("Mul", [decayed, key], "read"), axes], "known", keepdims=1)
        value = add("Mul", [add("Sub", [value, predicted], "unknown"), parts[4]], "correction")
    new_state = add("Add", [decayed, add("Mul", [key, value], "written")], "after")
    result = add("MatMul", [query, new_state], "result")
    result.shape, new_state.shape = parts[2].shape, old_state.shape
    graph = ir.Graph(
        [old_state, *parts], [new_state, result], nodes=body, name=f"{name}_body",
        initializers=[axes] if delta else [],
    )  # fmt: skip
    attributes = {
        "body": graph,
        "num_scan_inputs": len(parts),
        "scan_input_axes": [1] * len(parts),
        "scan_output_axes": [1],
    }
    return ir.node("Scan", [state, *scanned], attributes, num_outputs=2, name=name)
