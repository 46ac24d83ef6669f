"""Packed execution: an encoder's layers computed on the tokens alone, without the padding between them.

The graph is rewritten from the first attention on. What is `(batch, sequence, hidden)` there becomes `(tokens, hidden)`: the
rows of all texts one after another. Every attention becomes `PackedAttention`, which is told where each text starts; what
treats each token alike follows, and what comes past an attention in the old layout (a residual) is packed where they meet.
Everything else gets the old layout back, with zeros in the padded places.

ONNX Runtime's own `RemovePadding` reads the number of tokens on the host in the middle of a run, which no CUDA graph can
hold. Here the number of rows is chosen before the run, rounded up, and the indices are inputs of the graph (`Packing`
computes them on the GPU): the rows between the last token and the end are computed and never read.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import onnx_ir as ir
import torch
from onnx_ir.passes import common as passes

from ...ortkit.graph.analysis import dims, producer
from ...ortkit.graph.editing import MICROSOFT, add_initializer, insert_after, replace_value, scalar
from ...ortkit.optimization.pooled_token import token_inputs

INDEX = "accel.packed_index"
"""`(tokens,) int64`: the place in `(batch * sequence)` of each packed row."""
OFFSETS = "accel.token_offset"
"""`(batch, sequence) int32`: all places, those of tokens first; `PackedAttention` wants it."""
STARTS = "accel.text_starts"
"""`(batch + 1,) int32`: the row at which each text starts, and at which the last one ends."""
FIRST = "accel.first_tokens"
"""`(batch,) int32`: the row of each text's first token."""
POSITIONS = "accel.packed_positions"
"""`(batch, sequence) int64`: the row that holds each place; any row for padding."""
_TOKENS = "accel.tokens"
_OTHER_ATTENTION = {"MultiHeadAttention", "Softmax", "PackedAttention", "GroupQueryAttention"}
_FEWEST_ROWS = 64


def packed_rows(tokens: int, places: int) -> int:
    """Rows to compute for so many tokens in `places = batch * sequence`: sixteen sizes, so that few graphs serve all fills."""
    step = -(-places // (16 * _FEWEST_ROWS)) * _FEWEST_ROWS
    return min(places, -(-tokens // step) * step)


class Packing:
    """The indices of a packed call, in buffers that stay where they are.

    Args:
        shape: Batch and sequence of the call.
        rows: To compute; see `packed_rows`.
        device: The GPU whose memory holds the buffers; the graph's session runs there.
    """

    def __init__(self, shape: Sequence[int], rows: int, device: torch.device) -> None:
        batch, sequence = shape
        self._places = torch.arange(batch * sequence, device=device)
        self._starts = torch.zeros(batch + 1, dtype=torch.int32, device=device)
        self._rows = rows
        self.inputs: Mapping[str, torch.Tensor] = {
            INDEX: torch.zeros(rows, dtype=torch.int64, device=device),
            OFFSETS: torch.zeros((batch, sequence), dtype=torch.int32, device=device),
            STARTS: self._starts,
            FIRST: self._starts[:-1],
            POSITIONS: torch.zeros((batch, sequence), dtype=torch.int64, device=device),
        }

    def fill(self, mask: torch.Tensor) -> None:
        """Compute them for a `(batch, sequence)` mask with at least one token in each row; nothing waits for the GPU."""
        kept = mask.ne(0).flatten()
        counted = kept.cumsum(0)
        # Tokens in their order, then the padding in its order.
        positions = torch.where(kept, counted - 1, counted[-1] + self._places - counted)
        order = torch.empty_like(positions).scatter_(0, positions, self._places)
        self.inputs[INDEX].copy_(order[: self._rows])
        self.inputs[OFFSETS].copy_(order.view(mask.shape))
        self.inputs[POSITIONS].copy_(positions.clamp_(max=self._rows - 1).view(mask.shape))
        self._starts[1:].copy_(counted.view(mask.shape)[:, -1])


def can_pack(model: ir.Model, mask: ir.Value) -> bool:
    """Whether all attention of a graph is `Attention` that knows of nothing but this padding mask."""
    found = False
    for node in model.graph:
        if node.op_type in _OTHER_ATTENTION:
            return False
        if node.op_type != "Attention" or node.domain != MICROSOFT:
            continue
        given = {i for i, value in enumerate(node.inputs) if value is not None}
        if given != {0, 1, 2, 3} or node.inputs[3] is not mask or len(node.outputs) != 1:
            return False
        if not set(node.attributes) <= {"num_heads", "scale", "mask_filter_value"}:
            return False
        found = True
    return found


def pack(model: ir.Model, mask: ir.Value) -> None:
    """Rewrite a graph for which `can_pack` holds. Its new inputs are those of `Packing` that it needs."""
    _Packer(model, mask).run()


class _Packer:
    """The rewriting of one graph: which values are packed so far, and the packed layout's inputs."""

    def __init__(self, model: ir.Model, mask: ir.Value) -> None:
        self._model = model
        self._graph = model.graph
        self._mask = mask
        assert mask.shape is not None
        self._batch, self._sequence = mask.shape[0], mask.shape[1]
        self._inputs: dict[str, ir.Value] = {}
        self._packed: dict[int, ir.Value] = {}
        self._restored: dict[int, ir.Value] = {}
        self._keep: ir.Value | None = None

    def run(self) -> None:
        order = list(self._graph)
        # Read before anything changes: it looks at shapes.
        tokens = {id(node): token_inputs(node, more_outputs=True) for node in order}
        for node in order:
            if self._is_attention(node):
                self._pack_attention(node)
            elif any(id(value) in self._packed for value in node.inputs if value is not None):
                self._visit(node, tokens[id(node)])
        for position, value in enumerate(list(self._graph.outputs)):
            if id(value) in self._packed:
                name = value.name
                restored = self._unpacked(value)
                value.name, restored.name = f"{name}.packed", name
                self._graph.outputs[position] = restored
        passes.RemoveUnusedNodesPass()(self._model)
        for value in self._inputs.values():
            if not value.uses():
                self._graph.inputs.remove(value)

    def _is_attention(self, node: ir.Node) -> bool:
        return bool(node.op_type == "Attention" and node.domain == MICROSOFT)

    def _visit(self, node: ir.Node, positions: list[int]) -> None:
        """Let a node that reads packed values compute in the packed layout, or give it the old one."""
        if self._reads_first_token(node):
            self._pack_first_token(node)
        elif positions and all(self._holds_tokens(node.inputs[position]) for position in positions):
            for position in positions:
                node.replace_input_with(position, self._packed_of(node.inputs[position]))
            if "axis" in node.attributes:
                node.attributes["axis"] = ir.AttrInt64("axis", -1)
            for output in node.outputs:
                self._make_packed(output)
        else:
            for position, value in enumerate(node.inputs):
                if value is not None and id(value) in self._packed:
                    node.replace_input_with(position, self._unpacked(value))

    def _make_packed(self, value: ir.Value) -> None:
        if value.shape is not None:
            value.shape = ir.Shape([_TOKENS, *value.shape[2:]])
        self._packed[id(value)] = value

    def _input(self, name: str, dtype: ir.DataType, *shape: int | str | ir.SymbolicDim) -> ir.Value:
        if name not in self._inputs:
            value = ir.Value(name=name, type=ir.TensorType(dtype), shape=ir.Shape(list(shape)))
            self._graph.inputs.append(value)
            self._inputs[name] = value
        return self._inputs[name]

    def _holds_tokens(self, value: ir.Value | None) -> bool:
        """Whether a value is packed, or has a place for each place of the mask: what a residual brings past an attention."""
        if value is None or value.shape is None:
            return False
        return id(value) in self._packed or list(value.shape[:2]) == [self._batch, self._sequence]

    def _packed_of(self, value: ir.Value | None) -> ir.Value:
        """A value in the packed layout; its padding is removed where it is still in the old one."""
        assert value is not None
        if id(value) not in self._packed:
            self._remove_padding(value)
        return self._packed[id(value)]

    def _remove_padding(self, value: ir.Value) -> None:
        assert value.shape is not None
        hidden = value.shape[2]
        flat_shape = add_initializer(self._graph, "accel.flat", np.array([-1, hidden], np.int64))
        flat = ir.node("Reshape", [value, flat_shape], name=f"{value.name}.flat")
        index = self._input(INDEX, ir.DataType.INT64, _TOKENS)
        rows = ir.node("Gather", [flat.outputs[0], index], {"axis": 0}, name=f"{value.name}.remove_padding")
        flat.outputs[0].type = rows.outputs[0].type = value.type
        flat.outputs[0].shape = ir.Shape(["accel.places", hidden])
        rows.outputs[0].shape = ir.Shape([_TOKENS, hidden])
        insert_after(value, self._graph, [flat, rows])
        self._packed[id(value)] = rows.outputs[0]

    def _pack_attention(self, node: ir.Node) -> None:
        x, weight, bias = node.inputs[:3]
        offsets = self._input(OFFSETS, ir.DataType.INT32, self._batch, self._sequence)
        starts = self._input(STARTS, ir.DataType.INT32, "accel.batch_and_one")
        attributes = {a.name: a.value for a in node.attributes.values() if a.name in ("num_heads", "scale")}
        fused = ir.node(
            "PackedAttention",
            [self._packed_of(x), weight, bias, offsets, starts],
            attributes,
            domain=MICROSOFT,
            name=f"{node.name}.packed",
        )
        old, new = node.outputs[0], fused.outputs[0]
        new.type = old.type
        assert old.shape is not None
        new.shape = ir.Shape([_TOKENS, old.shape[2]])
        self._graph.insert_after(node, fused)
        self._packed[id(old)] = self._packed[id(new)] = new

    def _reads_first_token(self, node: ir.Node) -> bool:
        """Whether a node takes the first token of each text, and that alone."""
        if node.op_type != "Gather" or node.domain or id(node.inputs[0]) not in self._packed:
            return False
        alone = node.attributes.get_int("axis", 0) == 1 and dims(node.inputs[1]) == []
        return bool(alone and scalar(node.inputs[1]) == 0)

    def _pack_first_token(self, node: ir.Node) -> None:
        first = self._input(FIRST, ir.DataType.INT32, self._batch)
        source = self._packed[id(node.inputs[0])]
        made = ir.node("Gather", [source, first], {"axis": 0}, name=f"{node.name}.first")
        self._graph.insert_after(node, made)
        replace_value(node.outputs[0], made.outputs[0])

    def _unpacked(self, value: ir.Value) -> ir.Value:
        """A packed value in the old layout, with zeros where padding is."""
        source = self._packed[id(value)]
        if id(source) not in self._restored:
            positions = self._input(POSITIONS, ir.DataType.INT64, self._batch, self._sequence)
            rows = ir.node("Gather", [source, positions], {"axis": 0}, name=f"{source.name}.places")
            assert source.dtype is not None
            zero = add_initializer(self._graph, "accel.padding", np.zeros((), source.dtype.numpy()))
            chosen = ir.node("Where", [self._kept(), rows.outputs[0], zero], name=f"{source.name}.restore_padding")
            assert source.shape is not None
            for output in (rows.outputs[0], chosen.outputs[0]):
                output.type = source.type
                output.shape = ir.Shape([self._batch, self._sequence, *source.shape[1:]])
            insert_after(source, self._graph, [rows, chosen])
            self._restored[id(source)] = chosen.outputs[0]
        return self._restored[id(source)]

    def _kept(self) -> ir.Value:
        """Which places hold tokens: `(batch, sequence, 1) bool`."""
        if self._keep is None:
            cast = producer(self._mask, "Cast")
            assert cast is not None
            kept = cast.inputs[0]
            axis = add_initializer(self._graph, "accel.last_axis", np.array([2], np.int64))
            node = ir.node("Unsqueeze", [kept, axis], name="accel.kept_places")
            node.outputs[0].type = ir.TensorType(ir.DataType.BOOL)
            node.outputs[0].shape = ir.Shape([self._batch, self._sequence, 1])
            insert_after(self._mask, self._graph, [node])
            self._keep = node.outputs[0]
        return self._keep
