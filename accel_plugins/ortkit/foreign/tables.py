"""Which values an ONNX graph's ids may have: as many as the tables have rows that it looks them up in."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import TYPE_CHECKING

from accel.artifact.tensors import TensorSpec

if TYPE_CHECKING:
    import onnx

_IDS = frozenset(("input_ids", "token_type_ids", "position_ids"))
_SAME = ("Cast", "Identity")
_LOOKUPS = {"Gather": "axis", "GatherBlockQuantized": "gather_axis"}


def with_bounds(specs: Iterable[TensorSpec], graph: onnx.GraphProto) -> tuple[TensorSpec, ...]:
    """Inputs with bounds for ids that are looked up in stored tables as they are; runtimes wrap or clamp what is in none."""
    rows = _rows(graph)
    return tuple(replace(spec, bounds=(0, rows[spec.name] - 1)) if spec.name in rows else spec for spec in specs)


def _rows(graph: onnx.GraphProto) -> dict[str, int]:
    makers = {name: node for node in graph.node for name in node.output}
    sizes = {tensor.name: tensor.dims[0] for tensor in graph.initializer if tensor.dims}

    def source(name: str, through: tuple[str, ...]) -> str:
        while name in makers and makers[name].op_type in through and makers[name].input:
            name = makers[name].input[0]
        return name

    found: dict[str, int] = {}
    for node in graph.node:
        if node.op_type not in _LOOKUPS or len(node.input) < 2:
            continue
        axis = next((one.i for one in node.attribute if one.name == _LOOKUPS[node.op_type]), 0)
        name, size = source(node.input[1], _SAME), sizes.get(source(node.input[0], (*_SAME, "DequantizeLinear")), 0)
        if axis == 0 and size and name in _IDS:
            found[name] = min(size, found.get(name, size))
    return found
