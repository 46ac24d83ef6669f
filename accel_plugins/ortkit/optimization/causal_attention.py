"""Decoder graphs without an attention mask, for attention kernels that take the length of each row of the batch.

The graph in an artifact gives `GroupQueryAttention` an additive bias that marks the visible keys of each query. ONNX
Runtime's CUDA kernel does not support that bias. If the bias means only "no later tokens, no padding, no tokens outside
the window", the operator does not need it: it is causal, it takes the length of each row, and it has a window. In the
graphs that this module writes, the lengths are inputs and there is no mask. Each row's tokens start at the beginning of
its cache buffers; the state of a session moves them there.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import onnx_ir as ir
from onnx_ir.passes import common as passes

from accel.errors import SessionError

from ..graph.analysis import bounds, dims, producer, shape_value
from ..graph.editing import MICROSOFT, nodes, read_graph, scalar, serialized
from ..runtime.state import LENGTHS as LENGTHS
from .attention_rotary import fuse_inner_rotary
from .padding import padding_source

TOTAL = "accel.total"
"""Name of an input `(1,) int32` in CPU memory: in a prompt, the number of new tokens.

Later, at least the longest row's length.
"""
_LENGTHS, _TOTAL, _BIAS = 5, 6, 10
# A file with embedded weights would be loaded into memory a second time.
_LARGE_BYTES = 256 << 20
_FIX = "run the model on the CPU: backend='cpu'."


class NoCausalFormError(SessionError):
    """Raised when a decoder graph cannot be rewritten to take row lengths as input instead of a mask."""


@dataclass(frozen=True, slots=True)
class CausalForm:
    """A decoder graph that takes the lengths of rows instead of a mask.

    Attributes:
        model: The serialized graph; its weights stay in the files next to the original.
        windowed: Whether a layer attends only to a window of the last tokens.
        rotary_inside: Whether `GroupQueryAttention` rotates queries and keys. Flash attention would ignore the given
            position ids in that case.
    """

    model: bytes
    windowed: bool
    rotary_inside: bool


@dataclass(frozen=True, slots=True)
class _VisibleKeys:
    """The keys that a condition over (query, key) makes visible; all of the restrictions apply.

    Attributes:
        causal: Keys after the query are hidden.
        padding: Keys that the attention mask marks as padding are hidden.
        window: The number of last keys that are visible, including the query's own; 0 for no limit.
    """

    causal: bool = False
    padding: bool = False
    window: int = 0

    def also(self, other: _VisibleKeys) -> _VisibleKeys:
        windows = [window for window in (self.window, other.window) if window]
        return _VisibleKeys(self.causal or other.causal, self.padding or other.padding, min(windows, default=0))


def causal_form(path: Path, *, rotary_inside: bool = True) -> CausalForm:
    """Return the decoder graph of a file, rewritten to take row lengths as input instead of a mask.

    Args:
        path: The graph file.
        rotary_inside: Whether to move rotary position embeddings into attention, if the graph allows it.

    Raises:
        NoCausalFormError: An attention bias is not just causal order, padding and a window, or the graph reads the mask
            outside of attention.
    """
    model = read_graph(path)
    windowed = take_lengths(model, path.name)
    inside = rotary_inside and fuse_inner_rotary().apply(model) > 0
    return CausalForm(serialized(model), windowed, inside)


def lengths_form(path: Path) -> bytes | None:
    """Return the serialized decoder graph of a file with the additional input `accel.lengths (batch,) int32`.

    The graph of an artifact computes the position of each row's last token from the width of the mask. With lengths as
    an input, each row can start at the first column of its cache buffers, so each row is computed exactly as in a batch
    of one. Padding in front would round sums in another order. The mask stays an input, and the weights stay in their
    files.

    Returns:
        The graph, or `None` if rows cannot have different lengths: an attention uses other keys than the unmasked
        tokens up to the query, or the mask is read elsewhere. Also `None` for a large file with embedded weights.
    """
    if path.stat().st_size > _LARGE_BYTES:
        return None
    try:
        # Attention windows count columns of the buffers, so windows do not work with rows of different lengths.
        if take_lengths(read_graph(path), path.name):
            return None
    except SessionError:
        return None
    model = read_graph(path)
    lengths = _lengths_input(model.graph)
    for node in nodes(model, "GroupQueryAttention", domain=MICROSOFT):
        node.replace_input_with(_LENGTHS, lengths)
    return serialized(model)


def _lengths_input(graph: ir.Graph) -> ir.Value:
    """Add the lengths input to a graph and return it."""
    lengths = ir.Value(name=LENGTHS, type=ir.TensorType(ir.DataType.INT32), shape=ir.Shape(["batch"]))
    graph.inputs.append(lengths)
    return lengths


def take_lengths(model: ir.Model, name: str) -> bool:
    """Rewrite a decoder graph to take lengths instead of a mask; see `causal_form`.

    Return whether a layer has a window.
    """
    graph = model.graph
    attentions = list(nodes(model, "GroupQueryAttention", domain=MICROSOFT))
    mask = next((value for value in graph.inputs if len(sizes := dims(value) or []) == 2 and sizes[1] == "total"), None)
    if not attentions or mask is None:
        raise NoCausalFormError(
            f"{name} has a KV cache but no GroupQueryAttention nodes with an attention mask; accel needs them to run a decoder on a GPU.",
            fix=_FIX,
        )
    seen = [_seen_by(node, mask, name) for node in attentions]
    lengths = _lengths_input(graph)
    total = ir.Value(name=TOTAL, type=ir.TensorType(ir.DataType.INT32), shape=ir.Shape([1]))
    graph.inputs.append(total)
    for node, one in zip(attentions, seen, strict=True):
        node.replace_input_with(_LENGTHS, lengths)
        node.replace_input_with(_TOTAL, total)
        node.replace_input_with(_BIAS, None)
        if one.window:
            node.attributes["local_window_size"] = ir.AttrInt64("local_window_size", one.window)
    passes.RemoveUnusedNodesPass()(model)
    if mask.uses():
        users = sorted({use.node.op_type for use in mask.uses()})
        raise NoCausalFormError(
            f"The result of {name} depends on {mask.name} outside its attention (in the operators {', '.join(users)}). On a "
            "GPU, accel replaces this mask by the length of each row, so other operators cannot read it.",
            fix=_FIX,
        )
    graph.inputs.remove(mask)
    return any(one.window for one in seen)


def _seen_by(node: ir.Node, mask: ir.Value, name: str) -> _VisibleKeys:
    """Return which keys an attention makes visible.

    Raises:
        NoCausalFormError: The attention needs a bias, because the operator has no attribute or input for its condition.
    """
    bias = node.inputs[_BIAS] if len(node.inputs) > _BIAS else None
    if bias is None:
        raise SessionError(
            f"The attention node {node.name} of {name} does not read the attention mask, so it would attend to padding.",
            fix="export the model again: `accel export MODEL OUT`.",
        )
    choice = producer(bias, "Where")
    low = scalar(choice.inputs[2]) if choice is not None else None
    visible = None
    if choice is not None and scalar(choice.inputs[1]) == 0.0 and low is not None and low <= -1e4:
        visible = _read(choice.inputs[0], mask)
    if visible is None or not (visible.causal and visible.padding):
        raise NoCausalFormError(
            f"The attention node {node.name} of {name} has a bias that is more than causal order, padding and a sliding window; "
            "ONNX Runtime's CUDA kernel of GroupQueryAttention does not support a bias.",
            fix=_FIX,
        )
    return visible


def _read(condition: ir.Value | None, mask: ir.Value) -> _VisibleKeys | None:
    """Return which keys a condition makes visible; `None` if any part of the condition is unknown."""
    if condition is None:
        return None
    if bounds(condition) == (1.0, 1.0):
        return _VisibleKeys()
    both = producer(condition, "And")
    if both is not None:
        one, other = (_read(item, mask) for item in both.inputs)
        return one.also(other) if one is not None and other is not None else None
    source = padding_source(condition)
    if source is not None:
        return _VisibleKeys(padding=True) if _same(source) is mask else None
    return _comparison(condition)


def _same(value: ir.Value | None) -> ir.Value | None:
    """Return the original of a value, before casts, `Identity` and reshapes to the same shape."""
    while value is not None and (node := value.producer()) is not None:
        kept = node.op_type == "Reshape" and dims(node.inputs[0]) == dims(value)
        if node.domain or not (kept or node.op_type in ("Cast", "Identity")):
            break
        value = node.inputs[0]
    return value


def _comparison(condition: ir.Value) -> _VisibleKeys | None:
    """Parse the comparisons `key <= query` (causal) and `key > query - window`, in any equivalent form."""
    node = condition.producer()
    if node is None or node.domain or node.op_type not in ("LessOrEqual", "Less", "GreaterOrEqual", "Greater"):
        return None
    small, large = node.inputs if node.op_type.startswith("Less") else reversed(node.inputs)
    strict = not node.op_type.endswith("OrEqual")
    left, right = _place(small), _place(large)
    if left is None or right is None:
        return None
    (what, moved), (other, shift) = left, right
    if (what, other) == ("key", "query"):
        # The condition is key + moved <= query + shift, or the same with <.
        return _VisibleKeys(causal=True) if shift - moved - strict == 0 else None
    if (what, other) == ("query", "key"):
        # The condition is query + moved < key + shift: the last (shift - moved) keys are visible; with <=, one more.
        window = shift - moved + (not strict)
        return _VisibleKeys(window=window) if window > 0 else None
    return None


def _place(value: ir.Value | None) -> tuple[str, int] | None:
    """Return `("query", n)` or `("key", n)` if a value holds the positions of queries or keys plus `n`, else `None`.

    Query positions have the shape `(.., sequence, 1)`, key positions `(.., 1, total)`.
    """
    sizes = dims(value)
    if sizes is None or len(sizes) < 2:
        return None
    counted = _counted(value)
    if counted is None:
        return None
    what, moved = counted
    laid = sizes[-2:] == (["sequence", 1] if what == "query" else [1, "total"]) and all(
        size == 1 for size in sizes[:-2]
    )
    return (what, moved) if laid else None


def _counted(value: ir.Value | None) -> tuple[str, int] | None:
    """Return what a value counts, and its offset: `key` counts from 0 to `total`, `query` from `total - sequence` to `total`."""
    node = value.producer() if value is not None else None
    if node is None or node.domain:
        return None
    match node.op_type:
        case "Unsqueeze" | "Identity" | "Cast":
            return _counted(node.inputs[0])
        case "Range":
            start, step, end = scalar(node.inputs[0]), scalar(node.inputs[2]), _size(node.inputs[1])
            if step != 1:
                return None
            if start == 0:
                return {"total": ("key", 0), "sequence": ("new", 0)}.get(str(end))
            return ("query", 0) if _size(node.inputs[0]) == "past" and end == "total" else None
        case "Add" | "Sub":
            return _moved(node)
        case _:
            return None


def _moved(node: ir.Node) -> tuple[str, int] | None:
    """Return the counted positions of a sum or difference of positions and a constant."""
    pairs = [(0, 1), (1, 0)] if node.op_type == "Add" else [(0, 1)]
    for one, other in pairs:
        counted = _counted(node.inputs[one])
        if counted is None:
            continue
        number = scalar(node.inputs[other])
        if number is not None and number == int(number):
            return counted[0], counted[1] + (int(number) if node.op_type == "Add" else -int(number))
        if counted[0] == "new" and node.op_type == "Add" and _size(node.inputs[other]) == "past":
            return "query", counted[1]
    return None


def _size(value: ir.Value | None) -> str | None:
    """Return `total` or `sequence` if a value is the size of this axis, `past` if it is their difference, else `None`."""
    difference = producer(value, "Sub")
    if difference is not None:
        parts = [_size(item) for item in difference.inputs]
        return "past" if parts == ["total", "sequence"] else None
    known = shape_value(value)
    return str(known[0]) if known is not None and len(known) == 1 and known[0] in ("total", "sequence") else None
