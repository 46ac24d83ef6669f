"""Decoder graphs without a mask, for attention kernels that know rows by their lengths.

The graph of an artifact gives `GroupQueryAttention` an additive bias that says which keys each query sees, which ONNX
Runtime's CUDA kernel refuses. Where that bias says no more than "no later token, no padding, none outside the window",
the operator says it by itself: it is causal, it takes the length of each row, and it has a window. In this form of the
graph the lengths are inputs, the mask is gone, and each row's tokens stand at the beginning of its buffers
(`state of a session puts them there).
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import onnx_ir as ir
from onnx_ir.passes import common as passes

from accel.errors import SessionError

from ..graph.analysis import bounds, dims, producer, shape_value
from ..graph.editing import MICROSOFT, nodes, read_graph, scalar
from ..runtime.state import LENGTHS as LENGTHS
from .attention_rotary import fuse_inner_rotary
from .padding import padding_source

TOTAL = "accel.total"
"""Input `(1,) int32` in host memory: at least the longest row after this call; the number of new tokens in a prompt."""
_LENGTHS, _TOTAL, _BIAS = 5, 6, 10
_FIX = "open it on the CPU: backend='cpu'."


class NoCausalFormError(SessionError):
    """A decoder whose graph has no such form."""


@dataclass(frozen=True, slots=True)
class CausalForm:
    """A decoder graph that takes lengths.

    Attributes:
        model: The serialized graph; its weights stay in the files beside the original.
        windowed: Whether a layer sees the last tokens only.
        rotary_inside: Whether attention turns queries and keys, which flash attention would do by positions of its own.
    """

    model: bytes
    windowed: bool
    rotary_inside: bool


@dataclass(frozen=True, slots=True)
class _Seen:
    """What a condition over (query, key) lets through: all of these hold.

    Attributes:
        causal: Keys up to the query.
        padding: Keys that the attention mask keeps.
        window: The last so many keys, the query's own included; 0 for all.
    """

    causal: bool = False
    padding: bool = False
    window: int = 0

    def also(self, other: _Seen) -> _Seen:
        windows = [window for window in (self.window, other.window) if window]
        return _Seen(self.causal or other.causal, self.padding or other.padding, min(windows, default=0))


def causal_form(path: Path, *, rotary_inside: bool = True) -> CausalForm:
    """The decoder graph of a file in this form, with rotary positions inside attention where that can be and is wanted.

    Raises:
        NoCausalFormError: Its attention sees something else than the last tokens, or its result depends on the mask
            elsewhere.
    """
    model = read_graph(path)
    windowed = take_lengths(model, path.name)
    inside = rotary_inside and fuse_inner_rotary().apply(model) > 0
    serialized: bytes = ir.to_proto(model).SerializeToString()
    return CausalForm(serialized, windowed, inside)


def take_lengths(model: ir.Model, name: str) -> bool:
    """Rewrite a decoder graph into this form; see `causal_form`. Returns whether a layer has a window."""
    graph = model.graph
    attentions = list(nodes(model, "GroupQueryAttention", domain=MICROSOFT))
    mask = next((value for value in graph.inputs if len(sizes := dims(value) or []) == 2 and sizes[1] == "total"), None)
    if not attentions or mask is None:
        raise NoCausalFormError(
            f"{name} keeps its cache without GroupQueryAttention, the operator that a GPU needs.", fix=_FIX
        )
    seen = [_seen_by(node, mask, name) for node in attentions]
    lengths = ir.Value(name=LENGTHS, type=ir.TensorType(ir.DataType.INT32), shape=ir.Shape(["batch"]))
    total = ir.Value(name=TOTAL, type=ir.TensorType(ir.DataType.INT32), shape=ir.Shape([1]))
    graph.inputs.extend([lengths, total])
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
            f"The result of {name} depends on {mask.name} outside its attention ({', '.join(users)}), which the GPU's "
            "form of a decoder does not have.",
            fix=_FIX,
        )
    graph.inputs.remove(mask)
    return any(one.window for one in seen)


def _seen_by(node: ir.Node, mask: ir.Value, name: str) -> _Seen:
    """What an attention sees.

    Raises:
        NoCausalFormError: Something that the operator cannot say by itself.
    """
    bias = node.inputs[_BIAS] if len(node.inputs) > _BIAS else None
    if bias is None:
        raise SessionError(f"An attention of {name} ({node.name}) ignores padding.", fix="export it again.")
    choice = producer(bias, "Where")
    low = scalar(choice.inputs[2]) if choice is not None else None
    found = None
    if choice is not None and scalar(choice.inputs[1]) == 0.0 and low is not None and low <= -1e4:
        found = _read(choice.inputs[0], mask)
    if found is None or not (found.causal and found.padding):
        raise NoCausalFormError(
            f"An attention of {name} ({node.name}) has a bias that is more than causal order, padding and a window; ONNX "
            "Runtime's CUDA kernel takes none.",
            fix=_FIX,
        )
    return found


def _read(condition: ir.Value | None, mask: ir.Value) -> _Seen | None:
    """What a condition says, when all of it is understood."""
    if condition is None:
        return None
    if bounds(condition) == (1.0, 1.0):
        return _Seen()
    both = producer(condition, "And")
    if both is not None:
        one, other = (_read(item, mask) for item in both.inputs)
        return one.also(other) if one is not None and other is not None else None
    source = padding_source(condition)
    if source is not None:
        return _Seen(padding=True) if _same(source) is mask else None
    return _comparison(condition)


def _same(value: ir.Value | None) -> ir.Value | None:
    """What a value is a copy of."""
    while value is not None and (node := value.producer()) is not None:
        kept = node.op_type == "Reshape" and dims(node.inputs[0]) == dims(value)
        if node.domain or not (kept or node.op_type in ("Cast", "Identity")):
            break
        value = node.inputs[0]
    return value


def _comparison(condition: ir.Value) -> _Seen | None:
    """`key <= query` and `key > query - window`, as they may be written."""
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
        # key + moved <= query + shift, or <.
        return _Seen(causal=True) if shift - moved - strict == 0 else None
    if (what, other) == ("query", "key"):
        # query + moved < key + shift: the last (shift - moved) keys, one more without strictness.
        window = shift - moved + (not strict)
        return _Seen(window=window) if window > 0 else None
    return None


def _place(value: ir.Value | None) -> tuple[str, int] | None:
    """`("query", n)` or `("key", n)`, when a value is the places of queries `(.., sequence, 1)` or of keys `(.., 1, total)`,
    moved by `n`.
    """
    sizes = dims(value)
    if sizes is None or len(sizes) < 2:
        return None
    found = _counted(value)
    if found is None:
        return None
    what, moved = found
    laid = sizes[-2:] == (["sequence", 1] if what == "query" else [1, "total"]) and all(
        size == 1 for size in sizes[:-2]
    )
    return (what, moved) if laid else None


def _counted(value: ir.Value | None) -> tuple[str, int] | None:
    """What a value counts: `key` from 0 to `total`, `query` from `total - sequence` to `total`."""
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
    """Counted places plus or minus a number."""
    pairs = [(0, 1), (1, 0)] if node.op_type == "Add" else [(0, 1)]
    for one, other in pairs:
        found = _counted(node.inputs[one])
        if found is None:
            continue
        number = scalar(node.inputs[other])
        if number is not None and number == int(number):
            return found[0], found[1] + (int(number) if node.op_type == "Add" else -int(number))
        if found[0] == "new" and node.op_type == "Add" and _size(node.inputs[other]) == "past":
            return "query", found[1]
    return None


def _size(value: ir.Value | None) -> str | None:
    """`total`, `sequence`, or `past` for their difference."""
    difference = producer(value, "Sub")
    if difference is not None:
        parts = [_size(item) for item in difference.inputs]
        return "past" if parts == ["total", "sequence"] else None
    known = shape_value(value)
    return str(known[0]) if known is not None and len(known) == 1 and known[0] in ("total", "sequence") else None
