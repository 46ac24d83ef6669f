"""Packed execution: an encoder's layers are computed only for tokens, without the padding between them.

The graph is rewritten from the first attention on. Values `(batch, sequence, hidden)` become `(tokens, hidden)`: the
tokens of all rows of the batch one after another. Every attention becomes `PackedAttention`, which gets the start of
each row. Operators that compute each token independently work on packed values. A residual in the original layout is
packed where it is added. All other operators get the original layout, with zeros at padding positions.

ONNX Runtime's own `RemovePadding` reads the number of tokens in CPU memory during a run, which is impossible in a CUDA
graph. In this module, the number of packed rows is chosen before the run and rounded up, and the indices are inputs of
the graph, which `PackingInputs` computes on the GPU. The packed rows after the last token are computed but never read.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import onnx_ir as ir
import torch
from onnx_ir.passes import common as passes

from ...ortkit.graph.analysis import dims, producer
from ...ortkit.graph.editing import MICROSOFT, NewNodes, insert_after, replace_value, scalar
from ...ortkit.optimization.pooled_token import token_inputs

INDEX = "accel.packed_index"
"""Name of an input `(tokens,) int64`: the index in `(batch * sequence)` of each packed row."""
OFFSETS = "accel.token_offset"
"""Name of an input `(batch, sequence) int32` for `PackedAttention`: all indices, first those of tokens, then those of padding."""
STARTS = "accel.text_starts"
"""Name of an input `(batch + 1,) int32`: the packed row at which each row of the batch starts, and the end of the last one."""
FIRST = "accel.first_tokens"
"""Name of an input `(batch,) int32`: the packed row of the first token in each row of the batch."""
POSITIONS = "accel.packed_positions"
"""Name of an input `(batch, sequence) int64`: the packed row of each token; any packed row for padding."""
_TOKENS = "accel.tokens"
_OTHER_ATTENTION = {"MultiHeadAttention", "Softmax", "PackedAttention", "GroupQueryAttention"}
_FEWEST_ROWS = 64


def packed_rows(tokens: int, places: int) -> int:
    """Return the number of rows to compute for a batch without its padding: the number of tokens, rounded up.

    `places` is the batch size times the sequence length. The result is one of at most sixteen values, so that few CUDA
    graphs are needed for different amounts of padding.
    """
    step = -(-places // (16 * _FEWEST_ROWS)) * _FEWEST_ROWS
    return min(places, -(-tokens // step) * step)


class PackingInputs:
    """The graph inputs that tell a packed graph where the tokens of a batch are, in GPU buffers at fixed addresses.

    Args:
        shape: The batch size and the sequence length of the call.
        rows: The number of packed rows to compute; see `packed_rows`.
        device: The GPU that runs the graph and holds the buffers.
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
        """Compute the indices of the tokens for an attention mask `(batch, sequence)`. Each row of the mask must have a
        token. This does not wait for the GPU.
        """
        tokens = mask.ne(0).flatten()
        counted = tokens.cumsum(0)
        # Order: first all tokens, then all padding, each in its original order.
        positions = torch.where(tokens, counted - 1, counted[-1] + self._places - counted)
        order = torch.empty_like(positions).scatter_(0, positions, self._places)
        self.inputs[INDEX].copy_(order[: self._rows])
        self.inputs[OFFSETS].copy_(order.view(mask.shape))
        self.inputs[POSITIONS].copy_(positions.clamp_(max=self._rows - 1).view(mask.shape))
        self._starts[1:].copy_(counted.view(mask.shape)[:, -1])


def can_pack(model: ir.Model, mask: ir.Value) -> bool:
    """Return whether a graph can be computed without padding: all of its attention nodes are `Attention`, read this
    mask, and have no other optional inputs.
    """
    has_attention = False
    for node in model.graph:
        if node.op_type in _OTHER_ATTENTION:
            return False
        if node.op_type != "Attention" or node.domain != MICROSOFT:
            continue
        present = {i for i, value in enumerate(node.inputs) if value is not None}
        if present != {0, 1, 2, 3} or node.inputs[3] is not mask or len(node.outputs) != 1:
            return False
        if not set(node.attributes) <= {"num_heads", "scale", "mask_filter_value"}:
            return False
        has_attention = True
    return has_attention


class PackingRewriter:
    """Rewriter that changes a graph so that it computes only tokens, without padding. It adds the graph inputs that
    `PackingInputs` provides.

    `can_pack` must be true for the graph.
    """

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
        """Rewrite the graph in place."""
        order = list(self._graph)
        # Find the token inputs of all nodes before any change, because the search reads the shapes of the original
        # graph.
        tokens = {id(node): token_inputs(node, more_outputs=True) for node in order}
        for node in order:
            if node.op_type == "Attention" and node.domain == MICROSOFT:
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

    def _visit(self, node: ir.Node, positions: list[int]) -> None:
        """Rewrite a node that reads packed values to compute packed values. If the node does not support this, pass it
        the values in the original layout.
        """
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
        """Return whether a value is packed, or has the mask's batch and sequence axes, like a residual around an attention."""
        if value is None or value.shape is None:
            return False
        return id(value) in self._packed or list(value.shape[:2]) == [self._batch, self._sequence]

    def _packed_of(self, value: ir.Value | None) -> ir.Value:
        """Return a value in the packed layout `(tokens, hidden)`. If the value is in the original layout, its padding
        is removed.
        """
        assert value is not None
        if id(value) not in self._packed:
            self._remove_padding(value)
        return self._packed[id(value)]

    def _remove_padding(self, value: ir.Value) -> None:
        assert value.shape is not None
        new, hidden = NewNodes(self._graph, f"{value.name}.remove_padding"), value.shape[2]
        flat = new.op("Reshape", value, new.constant([-1, hidden]), like=value, shape=["accel.places", hidden])
        index = self._input(INDEX, ir.DataType.INT64, _TOKENS)
        self._packed[id(value)] = new.op("Gather", flat, index, axis=0, like=value, shape=[_TOKENS, hidden])
        insert_after(value, self._graph, new.nodes)

    def _pack_attention(self, node: ir.Node) -> None:
        new, old = NewNodes(self._graph, f"{node.name}.packed"), node.outputs[0]
        x, weight, bias = node.inputs[:3]
        offsets = self._input(OFFSETS, ir.DataType.INT32, self._batch, self._sequence)
        starts = self._input(STARTS, ir.DataType.INT32, "accel.batch_and_one")
        attributes = {a.name: a.value for a in node.attributes.values() if a.name in ("num_heads", "scale")}
        assert old.shape is not None
        result = new.op(
            "PackedAttention", self._packed_of(x), weight, bias, offsets, starts, domain=MICROSOFT, like=old,
            shape=[_TOKENS, old.shape[2]], **attributes,
        )  # fmt: skip
        self._graph.insert_after(node, new.nodes)
        self._packed[id(old)] = self._packed[id(result)] = result

    def _reads_first_token(self, node: ir.Node) -> bool:
        """Return whether a node reads only the first token of each row of the batch."""
        if node.op_type != "Gather" or node.domain or id(node.inputs[0]) not in self._packed:
            return False
        alone = node.attributes.get_int("axis", 0) == 1 and dims(node.inputs[1]) == []
        return bool(alone and scalar(node.inputs[1]) == 0)

    def _pack_first_token(self, node: ir.Node) -> None:
        new = NewNodes(self._graph, f"{node.name}.first")
        first = self._input(FIRST, ir.DataType.INT32, self._batch)
        result = new.op("Gather", self._packed[id(node.inputs[0])], first, axis=0)
        self._graph.insert_after(node, new.nodes)
        replace_value(node.outputs[0], result)

    def _unpacked(self, value: ir.Value) -> ir.Value:
        """Return a packed value in the original layout `(batch, sequence, hidden)`, with zeros at padding positions."""
        source = self._packed[id(value)]
        if id(source) not in self._restored:
            new = NewNodes(self._graph, f"{source.name}.restore_padding")
            assert source.dtype is not None
            assert source.shape is not None
            shape = [self._batch, self._sequence, *source.shape[1:]]
            positions = self._input(POSITIONS, ir.DataType.INT64, self._batch, self._sequence)
            rows = new.op("Gather", source, positions, axis=0, like=source, shape=shape)
            zero = new.constant(0, source.dtype.numpy())
            self._restored[id(source)] = new.op("Where", self._token_places(), rows, zero, like=source, shape=shape)
            insert_after(source, self._graph, new.nodes)
        return self._restored[id(source)]

    def _token_places(self) -> ir.Value:
        """Return a boolean value `(batch, sequence, 1)` that is true at the positions of tokens."""
        if self._keep is None:
            new, cast = NewNodes(self._graph, "accel.kept_places"), producer(self._mask, "Cast")
            assert cast is not None
            shape = [self._batch, self._sequence, 1]
            self._keep = new.op("Unsqueeze", cast.inputs[0], new.constant([2]), dtype=ir.DataType.BOOL, shape=shape)
            insert_after(self._mask, self._graph, new.nodes)
        return self._keep
