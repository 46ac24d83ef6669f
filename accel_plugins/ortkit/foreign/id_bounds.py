"""Bounds of input ids: an id must be smaller than the number of rows of the embedding table that the id indexes."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

import onnx_ir as ir

from accel.artifact.tensor_specs import TensorSpec

from ..graph.analysis import unwrapped

_IDS = frozenset(("input_ids", "token_type_ids", "position_ids"))
_SAME = ("Cast", "Identity")
_LOOKUPS = {"Gather": "axis", "GatherBlockQuantized": "gather_axis"}


def with_bounds(specs: Iterable[TensorSpec], graph: ir.Graph) -> tuple[TensorSpec, ...]:
    """Return the input specs with bounds for inputs that the graph uses directly as indices into a stored table.

    Runtimes do not report ids outside of the bounds: they wrap or clamp the ids, so accel must check the ids itself.
    """
    rows: dict[str, int] = {}
    sizes = {name: int(value.shape[0]) for name, value in graph.initializers.items() if value.shape}
    for node in graph:
        if node.op_type not in _LOOKUPS or len(node.inputs) < 2:
            continue
        table, ids = unwrapped(node.inputs[0], *_SAME, "DequantizeLinear"), unwrapped(node.inputs[1], *_SAME)
        size = sizes.get(table.name) if table is not None else None
        if size is None or ids is None or ids.name not in _IDS or node.attributes.get_int(_LOOKUPS[node.op_type], 0):
            continue
        rows[ids.name] = min(size, rows.get(ids.name, size))
    return tuple(replace(spec, bounds=(0, rows[spec.name] - 1)) if spec.name in rows else spec for spec in specs)
