"""Read quantized weights from the files of an artifact, as float32 values of the parameters of the PyTorch model."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial

import numpy as np
import onnx_ir as ir
import torch

from accel.artifact import Artifact
from accel.capture import ModelWeight, Source, WeightReader, empty_weight

from ..graph.checkpoint_tensors import CheckpointPart
from ..graph.editing import MICROSOFT, load_graphs, nodes
from ..quantization.lookups import TABLE, QuantizedTable
from ..quantization.weight_only import CHECKPOINT

# Number of weights that are computed together. With this number, a weight takes 0.9 ns on two cores, and 1.9 ns with 16 times as many.
_TOGETHER = 1 << 20


@dataclass(frozen=True, slots=True)
class StoredBlocks:
    """The constants of a block-wise quantized weight, in a file.

    Attributes:
        packed: `(outer, blocks, block_size * bits / 8) uint8`, or with the last two axes as one axis.
        scales: `(outer, blocks) float32`.
        zero_points: `(outer, blocks)`, packed uint8 or float32; `None` for the middle of the integer range.
        bits: The number of bits, 4 or 8.
        inner: The number of weights in a row.
        offsets: `(outer, blocks) float32`, subtracted from the dequantized weights; `None` if there are none.
    """

    packed: ir.ExternalTensor
    scales: ir.ExternalTensor | ir.Tensor
    zero_points: ir.ExternalTensor | ir.Tensor | None
    bits: int
    inner: int
    offsets: ir.ExternalTensor | ir.Tensor | None = None

    def read(self, rows: slice) -> np.ndarray:
        """Return rows of the weight `(rows, inner) float32`, as the kernel computes with them."""
        packed, scales = torch.from_numpy(_rows(self.packed, rows)), torch.from_numpy(_rows(self.scales, rows))
        count, blocks = scales.shape
        packed = packed.view(count, blocks, -1)
        size = packed.shape[2] * 8 // self.bits
        zeros = torch.full((1, 1, 1), float(2 ** (self.bits - 1)))
        if self.zero_points is not None:
            zeros = _unpacked(torch.from_numpy(_rows(self.zero_points, rows)), self.bits).view(count, -1)[
                :, :blocks, None
            ]
        values = empty_weight(count * blocks * size).view(count, blocks, size)
        step = max(_TOGETHER // (blocks * size), 1)
        for start in range(0, count, step):
            part = slice(start, start + step)
            _unpack(packed[part], self.bits, values[part])
            values[part] -= zeros[part] if len(zeros) == count else zeros
            values[part] *= scales.view(count, blocks, 1)[part]
        if self.offsets is not None:
            values -= torch.from_numpy(_rows(self.offsets, rows)).view(count, blocks, 1)
        return values.view(count, -1)[:, : self.inner].numpy()


def _unpack(packed: torch.Tensor, bits: int, values: torch.Tensor) -> None:
    """Write packed integers into `values` as float32 numbers."""
    if bits == 8:
        values.copy_(packed)
    else:
        values[..., 0::2] = packed & 15
        values[..., 1::2] = packed >> 4


def _unpacked(zeros: torch.Tensor, bits: int) -> torch.Tensor:
    """Return zero points as float32 numbers, `(rows, blocks)`."""
    if zeros.dtype is torch.float32 or bits == 8:
        return zeros.float()
    return torch.stack((zeros & 15, zeros >> 4), dim=-1).float()


def _rows(tensor: ir.ExternalTensor | ir.Tensor, rows: slice) -> np.ndarray:
    """Read rows of a constant. The file is not memory-mapped, so its pages do not count as memory of this process."""
    shape = tuple(int(size) for size in tensor.shape)
    if not isinstance(tensor, ir.ExternalTensor):
        array: np.ndarray = tensor.numpy()[rows]
        return array
    dtype = np.dtype(tensor.dtype.numpy())
    width = int(np.prod(shape[1:]))
    count = rows.stop - rows.start
    offset = (tensor.offset or 0) + rows.start * width * dtype.itemsize
    return np.fromfile(tensor.path, dtype, count * width, offset=offset).reshape(count, *shape[1:])


def quantized_weights(source: Source, models: Mapping[str, ir.Model], artifact: Artifact) -> dict[str, WeightReader]:
    """Return functions that read the quantized weights of an artifact, by parameter name of the PyTorch model.

    Args:
        source: The PyTorch model, with streamed weights.
        models: The quantized graphs in memory, by component name. They contain which parameters a weight consists of.
        artifact: The artifact with these graphs. Only its files are read.
    """
    products: dict[int, list[_Product]] = {}
    tables: dict[int, tuple[ModelWeight, StoredBlocks]] = {}
    stored = load_graphs(artifact)
    for name, model in models.items():
        blocks = {
            str(node.inputs[1].name): _stored(node) for node in nodes(stored[name], "MatMulNBits", domain=MICROSOFT)
        }
        for node in nodes(model, "MatMulNBits", domain=MICROSOFT):
            checkpoint = node.inputs[1].meta.get(CHECKPOINT)
            for part, rows in checkpoint.parts if checkpoint is not None else ():
                product = _Product(part, blocks[str(node.inputs[1].name)], rows, checkpoint.factor)
                products.setdefault(part.weight.address, []).append(product)
        for node in nodes(model, "GatherBlockQuantized", domain=MICROSOFT):
            if TABLE in node.inputs[0].meta:
                part, table = node.inputs[0].meta[TABLE]
                tables[part.weight.address] = part.weight, _stored_table(table, stored[name])
    readers: dict[str, WeightReader] = {}
    assert source.streamed is not None
    for name, weight in source.streamed.of(source.model).items():
        module = source.model.get_submodule(name.rpartition(".")[0])
        is_table = isinstance(module, torch.nn.Embedding)
        if weight.address in tables and (is_table or weight.address not in products):
            readers[name] = partial(_read_table, *tables[weight.address])
        elif weight.address in products and not is_table:
            readers[name] = partial(_read, weight, products[weight.address])
    return readers


@dataclass(frozen=True, slots=True)
class _Product:
    """A quantized product with a part of a parameter.

    Attributes:
        part: The part, in the layout `(inner, rows)`.
        blocks: The quantized weight.
        rows: The rows of the quantized weight that belong to the part.
        factor: The number by which the parameter was multiplied before it was quantized.
    """

    part: CheckpointPart
    blocks: StoredBlocks
    rows: slice
    factor: float

    def read(self) -> np.ndarray:
        """Return the quantized values of the part, `(rows, inner)`."""
        values = self.blocks.read(self.rows)
        return values if self.factor == 1 else values / np.float32(self.factor)


def _read(weight: ModelWeight, products: list[_Product]) -> torch.Tensor:
    """Read a parameter: its values in the checkpoint, with the quantized values of all parts."""
    flipped = products[0].part.view.T
    if flipped.flags.c_contiguous and flipped.nbytes == weight.nbytes:
        # The quantized weight is the complete parameter.
        return torch.from_numpy(products[0].read()).view(weight.shape)
    values = weight.read().clone()
    for product in products:
        product.part.of(values.numpy())[...] = product.read().T
    return values


def _read_table(weight: ModelWeight, blocks: StoredBlocks) -> torch.Tensor:
    """Read an embedding table."""
    return torch.from_numpy(blocks.read(slice(0, weight.shape[0]))).view(weight.shape)


def _stored_table(table: QuantizedTable, model: ir.Model) -> StoredBlocks:
    """Return the constants of a quantized table in a graph from a file."""
    weights = {name: value.const_value for graph in model.graphs() for name, value in graph.initializers.items()}
    integers, scales, zeros, offsets = (
        None if value is None else weights[str(value.name)]
        for value in (table.integers, table.scales, table.zero_points, table.offsets)
    )
    return StoredBlocks(integers, scales, zeros, table.bits, table.width, offsets)


def _stored(node: ir.Node) -> StoredBlocks:
    packed, scales, *zeros = (None if value is None else value.const_value for value in node.inputs[1:4])
    attributes = node.attributes
    return StoredBlocks(
        packed, scales, zeros[0] if zeros else None, attributes.get_int("bits", 4), attributes.get_int("K")
    )
