"""Decomposition of the operators for which `torch.onnx` has no ONNX function, without a second trace of the model.

| name | seen in | public alternative |
|---|---|---|
| `torch.onnx._internal.exporter._fx_passes.decompose_with_registry` | torch 2.13 | none |
| `torch.onnx._internal.exporter._decomp.get_onnx_implemented_overloads` | torch 2.13 | none |
| `torch.onnx._internal.exporter._decomp.create_onnx_friendly_decomposition_table` | torch 2.13 | none |
| `torch._export.utils`: `_is_cia_op`, `_is_preservable_cia_op` | torch 2.13 | none |
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch

from .replaced_attributes import replaced_attributes
from .symbolic_sizes import statically_known_true


@contextmanager
def decomposed_in_place() -> Iterator[None]:
    """Let `torch.onnx` decompose the operators of a traced graph in place within the block, if all of them are simple.

    `torch.onnx` (2.13) traces a graph a second time to decompose its operators, although most graphs contain only a few operators that must
    be decomposed: conversions of data types, and reshapes. The second trace takes a third of the time of an export. If the graph has
    another operator that must be decomposed, `torch.onnx` traces it as usual.
    """
    from torch.onnx._internal.exporter import _decomp, _fx_passes

    original = _fx_passes.decompose_with_registry

    def decompose(exported_program: Any, registry: Any) -> Any:
        implemented = set(_decomp.get_onnx_implemented_overloads(registry))
        decompositions = _decomp.create_onnx_friendly_decomposition_table(implemented)
        if _decompose(exported_program.graph_module, decompositions):
            return exported_program
        return original(exported_program, registry)

    with replaced_attributes([(_fx_passes, "decompose_with_registry", decompose)]):
        yield


def _decompose(module: torch.fx.GraphModule, decompositions: Mapping[Any, Any]) -> bool:
    """Decompose the operators of a graph in place. Return `False`, without a change, if a second trace is necessary."""
    nodes = [node for node in module.graph.nodes if node.op not in ("placeholder", "output")]
    # Nodes of constants that the model creates have no description of their values, which the conversion needs.
    if not all(
        node.op == "call_function" and "val" in node.meta and _is_simple(node.target, decompositions) for node in nodes
    ):
        return False
    # The signature of the program contains the names of the nodes that are outputs, so these nodes must stay.
    if any(node.target in _DECOMPOSITIONS for node in module.graph.output_node().all_input_nodes):
        return False
    for node in nodes:
        if node.target in _DECOMPOSITIONS:
            _DECOMPOSITIONS[node.target](node)
    module.graph.eliminate_dead_code()
    module.recompile()
    return True


def _is_simple(target: Any, decompositions: Mapping[Any, Any]) -> bool:
    """Return whether `_DECOMPOSITIONS` contains an operator or a second trace would not change it."""
    from torch._export.utils import _is_cia_op, _is_preservable_cia_op

    if target in _DECOMPOSITIONS:
        return True
    if not isinstance(target, torch._ops.OpOverload):
        # Functions of Python for sizes, such as `operator.add`, stay. Operators that contain graphs may change.
        return not isinstance(target, torch._ops.OperatorBase)
    if target in decompositions or target._schema.is_mutable:
        return False
    return not _is_cia_op(target) or _is_preservable_cia_op(target)


def _convert(node: torch.fx.Node) -> None:
    """Replace `Tensor.to` by a conversion of the data type, or by its input if the data type stays."""
    tensor: Any = node.args[0]
    dtype = node.meta["val"].dtype
    if tensor.meta["val"].dtype is dtype:
        _skip(node)
    else:
        node.target, node.args, node.kwargs = _ATEN._to_copy.default, (tensor,), {"dtype": dtype}


def _skip(node: torch.fx.Node) -> None:
    """Replace a node by its first input."""
    tensor: Any = node.args[0]
    node.replace_all_uses_with(tensor)
    node.graph.erase_node(node)


def _skip_dropout(node: torch.fx.Node) -> None:
    *_, train = node.args
    if not train:
        _skip(node)


def _copy(node: torch.fx.Node) -> None:
    """Replace `Tensor.contiguous` by a copy. The optimizer of onnxscript removes copies."""
    node.target, node.args, node.kwargs = _ATEN.clone.default, node.args[:1], _CONTIGUOUS


def _copy_and_view(node: torch.fx.Node) -> None:
    """Replace `Tensor.reshape` by a view of a copy, or by its input if the shape stays.

    A graph keeps an axis of size 0 in a view, but not in a reshape.
    """
    tensor: Any = node.args[0]
    before, after = tensor.meta["val"].shape, node.meta["val"].shape
    if len(before) == len(after) and all(statically_known_true(a == b) for a, b in zip(before, after, strict=True)):
        _skip(node)
        return
    with node.graph.inserting_before(node):
        copy = node.graph.call_function(_ATEN.clone.default, (tensor,), _CONTIGUOUS)
    copy.meta.update(node.meta, val=tensor.meta["val"])
    node.target, node.args = _ATEN.view.default, (copy, *node.args[1:])


def _call(target: Any) -> Callable[[torch.fx.Node], None]:
    def replace(node: torch.fx.Node) -> None:
        node.target = target

    return replace


_ATEN = torch.ops.aten
_CONTIGUOUS: dict[str, Any] = {"memory_format": torch.contiguous_format}
_DECOMPOSITIONS: Mapping[Any, Callable[[torch.fx.Node], None]] = {
    _ATEN.to.dtype: _convert,
    _ATEN.to.dtype_layout: _convert,
    _ATEN.to.device: _convert,
    _ATEN.to.other: _convert,
    _ATEN.contiguous.default: _copy,
    _ATEN.dropout.default: _skip_dropout,
    _ATEN.lift_fresh_copy.default: _skip,
    _ATEN.reshape.default: _copy_and_view,
    _ATEN.__and__.Tensor: _call(_ATEN.bitwise_and.Tensor),
    _ATEN.__or__.Tensor: _call(_ATEN.bitwise_or.Tensor),
}
"""Functions that decompose a node in place, by operator."""
