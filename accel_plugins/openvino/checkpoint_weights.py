"""Constants of a graph whose values are in a checkpoint, and their quantized values in the files of an artifact."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np
import openvino as ov
import torch

from accel.capture import (
    ModelWeight,
    Source,
    StreamedWeight,
    StreamedWeights,
    StreamingError,
    WeightReader,
    empty_weight,
    release_pages,
)

from .runtime import core
from .upstream import nncf_compiles_once, nncf_reads

# Smallest size of a constant that can be a streamed weight, a part of one, or computed from one.
_LARGE_BYTES = 1 << 12
# A constant was computed from streamed weights if at most one of this number of values is not zero.
_ZEROS = 1000
# Number of weights that are dequantized together.
_TOGETHER = 1 << 20


@dataclass(frozen=True, slots=True)
class _Part:
    """A constant whose values are a part of a parameter, or a complete parameter.

    Attributes:
        weight: The parameter.
        start: Index of the constant's first value in the parameter.
        shape: Shape of the constant.
    """

    weight: ModelWeight
    start: int
    shape: tuple[int, ...]

    def of(self, values: torch.Tensor) -> torch.Tensor:
        """Return the part of a tensor with the shape of the parameter, as a view in the shape of the constant."""
        return values.flatten()[self.start : self.start + math.prod(self.shape)].view(self.shape)


class CheckpointWeights:
    """The weights of a checkpoint in graphs whose constants share memory with the model's parameters.

    The memory of streamed weights contains zeros, see `StreamedWeights.zeros`.
    """

    def __init__(self, streamed: StreamedWeights) -> None:
        self._streamed = streamed
        self._values: np.ndarray | None = None
        self._compressed: dict[str, _Part] = {}
        self._readers: dict[int, list[tuple[_Part, WeightReader]]] = {}

    def check(self, model: ov.Model) -> None:
        """Check that no constant was computed from streamed weights, which have no values.

        Raises:
            StreamingError: A constant was computed.
        """
        for constant in _large_constants(model):
            values = constant.data
            if self._part(constant) is None and np.count_nonzero(values) * _ZEROS < values.size:
                raise StreamingError(
                    f"The converter computed the weight {constant.get_friendly_name()} from weights whose values it does not have.",
                    fix="export and quantize the model with two commands.",
                )

    @contextmanager
    def read_by_nncf(self) -> Iterator[None]:
        """Let NNCF read the weights from the checkpoint while the context is open."""
        self._compressed.clear()
        with nncf_reads(self._read), nncf_compiles_once():
            yield

    def fill(self, model: ov.Model) -> None:
        """Read the weights that were not quantized into memory."""
        for constant in _large_constants(model):
            part = self._part(constant)
            if part is not None and isinstance(part.weight, StreamedWeight):
                self._streamed.fill(part.weight)

    def add_file(self, path: Path) -> None:
        """Add the file with the graph that NNCF quantized last."""
        model = core().read_model(path)
        for constant in model.get_ops():
            part = self._compressed.get(constant.get_friendly_name())
            if (
                part is not None
                and constant.get_type_name() == "Constant"
                and constant.get_element_type().is_integral()
            ):
                self._readers.setdefault(part.weight.address, []).append((part, partial(_dequantized, model, constant)))

    def readers(self, source: Source) -> dict[str, WeightReader]:
        """Return functions that read quantized weights from the added files, by parameter name of the PyTorch model."""
        weights = self._streamed.of(source.model)
        return {
            name: partial(_read, weight, self._readers[weight.address])
            for name, weight in weights.items()
            if weight.address in self._readers
        }

    def _read(self, constant: ov.Node) -> np.ndarray | None:
        part = self._part(constant)
        if part is None:
            return None
        self._compressed[constant.get_friendly_name()] = part
        # NNCF does not copy the values, so they must stay in memory until it has compressed them.
        self._values = part.of(part.weight.read()).numpy()
        return self._values

    def _part(self, constant: ov.Node) -> _Part | None:
        if constant.get_element_type() != ov.Type.f32:
            return None
        address = constant.data.__array_interface__["data"][0]
        weight = self._streamed.at(address)
        return None if weight is None else _Part(weight, (address - weight.address) // 4, constant.data.shape)


def _large_constants(model: ov.Model) -> Iterator[ov.Node]:
    for node in model.get_ops():
        is_constant = node.get_type_name() == "Constant" and node.get_element_type() == ov.Type.f32
        if is_constant and node.get_byte_size() >= _LARGE_BYTES:
            yield node


def _read(weight: ModelWeight, parts: list[tuple[_Part, WeightReader]]) -> torch.Tensor:
    """Read a parameter: its values in the checkpoint, with the quantized values of all parts."""
    part, read = parts[0]
    if math.prod(part.shape) == math.prod(weight.shape):
        return read().view(weight.shape)
    values = weight.read().clone()
    for part, read in parts:
        part.of(values).copy_(read())
    return values


def _dequantized(_: ov.Model, constant: ov.Node) -> torch.Tensor:
    """Return the values of a compressed weight in float32, as the kernels compute with them.

    Args:
        _: The model. Without it, OpenVINO removes the nodes that read the constant.
        constant: The integers.
    """
    shape = tuple(constant.get_output_shape(0))
    zeros: torch.Tensor | None = None
    node = constant
    while node.get_type_name() != "Multiply":
        (reader, *_) = node.output(0).get_target_inputs()
        node = reader.get_node()
        if node.get_type_name() == "Subtract":
            zeros = _operand(node).expand(shape)
    scales = _operand(node).expand(shape)
    values = empty_weight(math.prod(shape)).view(shape)
    # A step is an even number of rows, so it begins with a complete byte.
    step = 2 * max(_TOGETHER // (2 * math.prod(shape[1:])), 1)
    for start in range(0, shape[0], step):
        rows = slice(start, min(start + step, shape[0]))
        _read_integers(constant, rows, values[rows])
        if zeros is not None:
            values[rows] -= zeros[rows]
        values[rows] *= scales[rows]
    release_pages([constant.data])
    return values


def _operand(node: ov.Node) -> torch.Tensor:
    """Return the constant second input of a node in float32."""
    constant = node.input_value(1).get_node()
    while constant.get_type_name() == "Convert":
        constant = constant.input_value(0).get_node()
    shape = tuple(constant.get_output_shape(0))
    if len(shape) < 2 or not constant.get_element_type().is_integral():
        return torch.from_numpy(np.array(constant.get_data(), np.float32))
    values = torch.empty(shape)
    _read_integers(constant, slice(0, shape[0]), values)
    return values


def _read_integers(constant: ov.Node, rows: slice, values: torch.Tensor) -> None:
    """Convert rows of a constant with integers of 4 or 8 bits to float32 numbers."""
    dtype, width = constant.get_element_type(), math.prod(values.shape[1:])
    raw = constant.data.reshape(-1).view(np.uint8)
    begin, end = (row * width * dtype.bitwidth for row in (rows.start, rows.stop))
    # A copy, because torch cannot use the pages of a file that must not be changed.
    packed = torch.from_numpy(raw[begin // 8 : -(-end // 8)].copy())
    flat = values.view(-1)
    if dtype.bitwidth == 8:
        flat.copy_(packed.view(torch.int8) if dtype == ov.Type.i8 else packed)
        return
    low, high = packed & 15, packed >> 4
    if dtype == ov.Type.i4:
        low, high = ((half ^ 8).view(torch.int8) - 8 for half in (low, high))
    flat[0::2] = low
    flat[1::2] = high[: len(flat) // 2]
