"""Decoder graphs without an attention mask, for attention kernels that take the length of each row of the batch.

The graph in an artifact gives `GroupQueryAttention` an additive bias that marks the visible keys of each query. ONNX
Runtime's CUDA kernel does not support a bias. If the bias hides only later tokens, padding and tokens outside of a
window, the operator does not need the bias: the operator is causal, reads the length of each row, and has an attribute
for the window. In the graphs that this module writes, the lengths are inputs and there is no mask. The tokens of each
row start at the beginning of the row's cache buffers; the state of a session moves the tokens to this position.
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
from .padding_masks import padding_source

TOTAL = "accel.total"
"""Name of an input `(1,) int32` in CPU memory: in a prompt, the number of new tokens.

Later, at least the longest row's length.
"""
_LENGTHS, _TOTAL, _BIAS = 5, 6, 10
# For files with embedded weights above this size, `lengths_form` returns `None`: it would load the weights twice.
_LARGE_BYTES = 256 << 20
_FIX = "run the model on the CPU: backend='cpu'."


class MaskRemovalError(SessionError):
    """Raised when a decoder graph cannot be rewritten to take row lengths as input instead of a mask."""


@dataclass(frozen=True, slots=True)
class MasklessDecoderGraph:
    """A decoder graph that takes the lengths of rows instead of a mask.

    Attributes:
        model: The serialized graph; its weights stay in the files next to the original.
        windowed: Whether a layer attends only to a window of the last tokens.
        rotary_inside: Whether `GroupQueryAttention` rotates queries and keys. If so, flash attention must not run,
            because it ignores the position ids of the graph.
    """

    model: bytes
    windowed: bool
    rotary_inside: bool


@dataclass(frozen=True, slots=True)
class _VisibleKeys:
    """The keys that a condition over (query, key) makes visible: keys that no attribute hides.

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


def causal_form(path: Path, *, rotary_inside: bool = True) -> MasklessDecoderGraph:
    """Return the decoder graph of a file, rewritten to take row lengths as input instead of a mask.

    Args:
        path: The graph file.
        rotary_inside: Whether to move rotary position embeddings into attention, if the graph allows it.

    Raises:
        MaskRemovalError: An attention bias is not just causal order, padding and a window, or the graph reads the mask
            outside of attention.
    """
    model = read_graph(path)
    windowed = take_lengths(model, path.name)
    inside = rotary_inside and fuse_inner_rotary().apply(model) > 0
    return MasklessDecoderGraph(serialized(model), windowed, inside)


def lengths_form(path: Path) -> bytes | None:
    """Return the serialized decoder graph of a file with the additional input `accel.lengths (batch,) int32`.

    The graph of an artifact computes the position of each row's last token from the width of the mask. With lengths as
    an input, each row can start at the first column of its cache buffers, and the graph computes each row exactly as in
    a batch of one row. With padding in front of the tokens, sums would be rounded in another order. The mask stays an
    input, and the weights stay in their files.

    Returns:
        The graph, or `None` if rows cannot have different lengths: the visible keys of an attention are not exactly the
        unmasked tokens up to the query, or nodes outside of attention read the mask. Also `None` for a large file with
        embedded weights.
    """
    if path.stat().st_size > _LARGE_BYTES:
        return None
    model = read_graph(path)
    try:
        # Attention windows count columns of the buffers, so windows do not work with rows of different lengths.
        if take_lengths(model.clone(), path.name):
            return None
    except SessionError:
        return None
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
    """Rewrite a decoder graph in place to read row lengths instead of a mask; see `causal_form`.

    Return whether any attention has a window.
    """
    graph = model.graph
    attentions = list(nodes(model, "GroupQueryAttention", domain=MICROSOFT))
    mask = next((value for value in graph.inputs if len(sizes := dims(value) or []) == 2 and sizes[1] == "total"), None)
    if not attentions or mask is None:
        raise MaskRemovalError(
            f"{name} has a KV cache but no GroupQueryAttention nodes with an attention mask; accel needs them to run a decoder on a GPU.",
            fix=_FIX,
        )
    visible_keys = [_seen_by(node, mask, name) for node in attentions]
    lengths = _lengths_input(graph)
    total = ir.Value(name=TOTAL, type=ir.TensorType(ir.DataType.INT32), shape=ir.Shape([1]))
    graph.inputs.append(total)
    for node, visible in zip(attentions, visible_keys, strict=True):
        node.replace_input_with(_LENGTHS, lengths)
        node.replace_input_with(_TOTAL, total)
        node.replace_input_with(_BIAS, None)
        if visible.window:
            node.attributes["local_window_size"] = ir.AttrInt64("local_window_size", visible.window)
    passes.RemoveUnusedNodesPass()(model)
    if mask.uses():
        users = sorted({use.node.op_type for use in mask.uses()})
        raise MaskRemovalError(
            f"The result of {name} depends on {mask.name} outside its attention (in the operators {', '.join(users)}). On a "
            "GPU, accel replaces this mask by the length of each row, so other operators cannot read it.",
            fix=_FIX,
        )
    graph.inputs.remove(mask)
    return any(visible.window for visible in visible_keys)


def _seen_by(node: ir.Node, mask: ir.Value, name: str) -> _VisibleKeys:
    """Return the keys that an attention node makes visible.

    Raises:
        MaskRemovalError: The attention node needs its bias, because the bias hides other keys than later tokens,
            padding and tokens outside of a window.
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
        raise MaskRemovalError(
            f"The attention node {node.name} of {name} has a bias that does not only hide later tokens, padding, or tokens "
            "outside of a sliding window. ONNX Runtime's CUDA kernel of GroupQueryAttention does not support a bias.",
            fix=_FIX,
        )
    return visible


def _read(condition: ir.Value | None, mask: ir.Value) -> _VisibleKeys | None:
    """Return the keys that a condition makes visible; `None` if accel does not recognize a part of the condition."""
    if condition is None:
        return None
    if bounds(condition) == (1.0, 1.0):
        return _VisibleKeys()
    conjunction = producer(condition, "And")
    if conjunction is not None:
        left, right = (_read(item, mask) for item in conjunction.inputs)
        return left.also(right) if left is not None and right is not None else None
    source = padding_source(condition)
    if source is not None:
        return _VisibleKeys(padding=True) if _same(source) is mask else None
    return _comparison(condition)


def _same(value: ir.Value | None) -> ir.Value | None:
    """Return the value before casts, `Identity` nodes and reshapes to the same shape."""
    while value is not None and (node := value.producer()) is not None:
        keeps_shape = node.op_type == "Reshape" and dims(node.inputs[0]) == dims(value)
        if node.domain or not (keeps_shape or node.op_type in ("Cast", "Identity")):
            break
        value = node.inputs[0]
    return value


def _comparison(condition: ir.Value) -> _VisibleKeys | None:
    """Return the keys that a comparison of key and query positions makes visible, else `None`.

    The comparison must be equivalent to `key <= query` (causal) or `key > query - window`.
    """
    node = condition.producer()
    if node is None or node.domain or node.op_type not in ("LessOrEqual", "Less", "GreaterOrEqual", "Greater"):
        return None
    small, large = node.inputs if node.op_type.startswith("Less") else reversed(node.inputs)
    strict = not node.op_type.endswith("OrEqual")
    left, right = _place(small), _place(large)
    if left is None or right is None:
        return None
    (small_kind, small_offset), (large_kind, large_offset) = left, right
    if (small_kind, large_kind) == ("key", "query"):
        # The condition is key + small_offset <= query + large_offset, or < instead of <= if `strict` is true.
        return _VisibleKeys(causal=True) if large_offset - small_offset - strict == 0 else None
    if (small_kind, large_kind) == ("query", "key"):
        # The condition is query + small_offset < key + large_offset. It makes the last `large_offset - small_offset`
        # keys visible; with <= instead of <, one more key is visible.
        window = large_offset - small_offset + (not strict)
        return _VisibleKeys(window=window) if window > 0 else None
    return None


def _place(value: ir.Value | None) -> tuple[str, int] | None:
    """Return `("query", n)` or `("key", n)` if a value contains the positions of queries or keys plus `n`, else `None`.

    Query positions have the shape `(.., sequence, 1)`, key positions `(.., 1, total)`.
    """
    sizes = dims(value)
    if sizes is None or len(sizes) < 2:
        return None
    counted = _counted(value)
    if counted is None:
        return None
    kind, offset = counted
    has_layout = sizes[-2:] == (["sequence", 1] if kind == "query" else [1, "total"]) and all(
        size == 1 for size in sizes[:-2]
    )
    return (kind, offset) if has_layout else None


def _counted(value: ir.Value | None) -> tuple[str, int] | None:
    """Return the kind of positions that a value counts, and the constant that the graph adds to them; else `None`.

    `key` positions count from 0 to `total`, `query` positions from `total - sequence` to `total`, and `new` positions
    from 0 to `sequence`.
    """
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
    """Return the kind of positions and the offset (see `_counted`) of a sum or difference with a constant; else `None`."""
    pairs = [(0, 1), (1, 0)] if node.op_type == "Add" else [(0, 1)]
    for index, other_index in pairs:
        counted = _counted(node.inputs[index])
        if counted is None:
            continue
        number = scalar(node.inputs[other_index])
        if number is not None and number == int(number):
            return counted[0], counted[1] + (int(number) if node.op_type == "Add" else -int(number))
        if counted[0] == "new" and node.op_type == "Add" and _size(node.inputs[other_index]) == "past":
            return "query", counted[1]
    return None


def _size(value: ir.Value | None) -> str | None:
    """Return the name of the size that a value contains: `total`, `sequence`, or `past` for `total - sequence`; else `None`."""
    difference = producer(value, "Sub")
    if difference is not None:
        parts = [_size(item) for item in difference.inputs]
        return "past" if parts == ["total", "sequence"] else None
    elements = shape_value(value)
    return (
        str(elements[0])
        if elements is not None and len(elements) == 1 and elements[0] in ("total", "sequence")
        else None
    )
