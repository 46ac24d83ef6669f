"""Functions that read one ONNX file of another tool: checks, inputs and outputs, external weights, and precision."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any

import onnx
import onnx_ir as ir
from google.protobuf.message import DecodeError, Message

from accel.artifact.checksums import check_file
from accel.artifact.manifest import MARK, Component, Manifest, Origin, Quantization, lost_manifest
from accel.artifact.tensor_specs import TensorSpec
from accel.errors import IntegrityError

from ..graph.editing import COPY_AGAIN, read_graph, unreadable

AXES = {
    "batch_size": "batch",
    "sequence_length": "sequence",
    "seq_len": "sequence",
    "seq_length": "sequence",
    "num_choices": "choices",
    "encoder_sequence_length": "encoder_sequence",
}
_INTEGER_OPERATORS = {
    "DynamicQuantizeLinear",
    "QuantizeLinear",
    "MatMulInteger",
    "QLinearMatMul",
    "DynamicQuantizeMatMul",
}
_BLOCK_OPERATORS = {"MatMulNBits", "MatMulBnb4"}
_HALF = {ir.DataType.FLOAT16: "float16", ir.DataType.BFLOAT16: "bfloat16"}
_WORDS = {"float": "float32", "double": "float64"}
# Axis names that `torch.export` generates, for example `s72`.
_SYMBOL = re.compile(r"s\d+\Z")
_TEXT: dict[str, tuple[str, ...]] = dict.fromkeys(
    ("input_ids", "attention_mask", "token_type_ids", "position_ids"), ("batch", "sequence")
)
_TEXT |= dict.fromkeys(("pixel_values", "input_values", "input_features"), ("batch",))
# A number with more digits than this may not fit into 64 bits.
_NUMBER = re.compile(r"\d{1,18}\Z")
_LONGEST = 400
_COPY = "copy the file itself into the folder, or export the model again."


@dataclass(slots=True)
class OnnxFile:
    """An ONNX file that passed the checks of `read_onnx`.

    Attributes:
        name: The file name, relative to the folder.
        model: The graph; external weights stay in their files.
        external_files: The files with the graph's external weights, relative to the folder.
    """

    name: str
    model: ir.Model
    external_files: list[str]

    @property
    def files(self) -> tuple[str, ...]:
        """Names of the ONNX file and of the files with its weights."""
        return (self.name, *self.external_files)

    @property
    def input_names(self) -> list[str]:
        """Names of the graph's inputs."""
        return [str(value.name) for value in self.model.graph.inputs]


def read_onnx(folder: Path, name: str) -> OnnxFile:
    """Read and check one ONNX file of a folder.

    Raises:
        IntegrityError: The file is not a regular file, is a link to a file outside of the folder, is not ONNX, or
            belongs to an artifact of accel whose manifest is missing. The same error is raised if a weight file is
            missing, is not a regular file, is too short, or is outside of the folder.
    """
    path = folder / name
    check_file(path, folder, fix=_COPY)
    try:
        model = onnx.load(str(path), load_external_data=False)
    except (DecodeError, OSError, ValueError) as error:
        raise unreadable(path, error) from error
    if not model.graph.output:
        raise IntegrityError(f"The graph in {path} has no outputs; the file may be truncated.", fix=COPY_AGAIN)
    if any(entry.key == MARK for entry in model.metadata_props):
        raise lost_manifest(path)
    tensors = []
    for message in _messages(model):
        if not all(isinstance(text, str) for text in _texts(message)):
            raise IntegrityError(
                f"The file {path} contains names that are not valid UTF-8 text; the file may be damaged.",
                fix=COPY_AGAIN,
            )
        if isinstance(message, onnx.TypeProto.Tensor) and message.elem_type not in onnx.TensorProto.DataType.values():
            raise IntegrityError(
                f"The file {path} declares a tensor with elements of the type {message.elem_type}, which does not exist in ONNX.",
                fix=COPY_AGAIN,
            )
        if isinstance(message, onnx.TensorProto):
            tensors.append(message)
            if message.raw_data and len(message.raw_data) != _bytes_of(message):
                raise IntegrityError(
                    f"The tensor {message.name[:_LONGEST]!r} in {path} has {len(message.raw_data)} bytes, but its shape "
                    f"and data type require {_bytes_of(message)} bytes.",
                    fix=COPY_AGAIN,
                )
    external = [tensor for tensor in tensors if tensor.data_location == tensor.EXTERNAL]
    external_files = _external_files(external, folder, name)
    return OnnxFile(name, read_graph(path, model), external_files)


def _messages(message: Message) -> Iterator[Message]:
    """Iterate over a protobuf message and all messages inside the message: subgraphs, functions, sparse tensors, training info."""
    yield message
    # `ListFields` of a tensor would copy the tensor's data, so read only the field with the external files.
    fields = [message.external_data] if isinstance(message, onnx.TensorProto) else [v for _, v in message.ListFields()]
    for value in fields:
        items = [value] if isinstance(value, Message | str | bytes | int | float) else value
        for item in items:
            if not isinstance(item, Message):
                break
            yield from _messages(item)


def _texts(message: Message) -> Iterator[Any]:
    """Iterate over the string fields of a message; protobuf returns bytes if a string is not UTF-8."""
    if isinstance(message, onnx.TensorProto):
        yield message.name
        return
    for field, value in message.ListFields():
        if field.type == field.TYPE_STRING:
            yield from [value] if isinstance(value, str | bytes) else value


def _bytes_of(tensor: onnx.TensorProto) -> int:
    """Return the size of a tensor in bytes, computed from its shape and data type.

    Raises:
        IntegrityError: An axis size is negative, or the data type is unknown.
    """
    is_known = tensor.data_type in onnx.TensorProto.DataType.values()
    bits = ir.DataType(tensor.data_type).bitwidth if is_known and tensor.data_type not in (0, tensor.STRING) else 0
    if not bits or any(size < 0 for size in tensor.dims):
        raise IntegrityError(
            f"The tensor {tensor.name[:_LONGEST]!r} has the invalid shape {list(tensor.dims)[:8]} or the unknown data type "
            f"{tensor.data_type}.",
            fix=COPY_AGAIN,
        )
    count: int = math.prod(tensor.dims)
    return (count * bits + 7) // 8


def _external_files(tensors: Iterable[onnx.TensorProto], folder: Path, name: str) -> list[str]:
    """Return the files with external weights, relative to the folder.

    Raises:
        IntegrityError: A file is missing, is not a regular file, is too short, or is outside of the folder.
    """
    parent, ends = PurePosixPath(name).parent, dict[str, int]()
    for tensor in tensors:
        location, offset, length = _external_place(tensor)
        if PurePosixPath(location).is_absolute() or ".." in PurePosixPath(location).parts or not location:
            raise IntegrityError(
                f"The graph {folder / name} stores weights in {location[:_LONGEST]!r}, which is outside of the graph's folder.",
                fix="use a model whose weight files are in the same folder as the graph.",
            )
        size_needed = _bytes_of(tensor)
        if length and length < size_needed:
            raise IntegrityError(
                f"The graph {folder / name} declares {length} bytes for the weight {tensor.name[:_LONGEST]!r}, but its shape and data type "
                f"require {size_needed} bytes.",
                fix=COPY_AGAIN,
            )
        ends[location] = max(ends.get(location, 0), offset + max(length, size_needed))
    for location, end in ends.items():
        path = folder / parent / location
        try:
            size = check_file(
                path, folder, fix="copy the file itself (not a link) into the folder of the graph."
            ).st_size
        except IntegrityError as error:
            raise IntegrityError(
                f"The weights of {folder / name} are in {location[:_LONGEST]!r}, which cannot be used: {error.message[:_LONGEST]}",
                fix=error.fix,
            ) from error
        if size < end:
            raise IntegrityError(
                f"The weight file {path} has {size} bytes, but {name} needs {end} bytes of it; the file may be truncated.",
                fix=COPY_AGAIN,
            )
    return sorted((parent / location).as_posix() for location in ends)


def _external_place(tensor: onnx.TensorProto) -> tuple[str, int, int]:
    """Return the file, offset and length in bytes of an external weight; the length is 0 if the graph does not specify it."""
    entries = {entry.key: entry.value for entry in tensor.external_data}
    numbers = [entries.get(key) or "0" for key in ("offset", "length")]
    if not all(map(_NUMBER.match, numbers)):
        raise IntegrityError(
            f"The weight {tensor.name[:_LONGEST]!r} has the offset {numbers[0][:_LONGEST]!r} and the length "
            f"{numbers[1][:_LONGEST]!r} in its file; both must be whole numbers of bytes.",
            fix=COPY_AGAIN,
        )
    return entries.get("location", ""), int(numbers[0]), int(numbers[1])


def dtype_word(value: ir.Value) -> str:
    """Return the name of a value's data type: `int64`, `float32`, ..."""
    dtype_name = value.dtype.name.lower() if value.dtype is not None else "undefined"
    return _WORDS.get(dtype_name, dtype_name)


def dimensions(value: ir.Value) -> tuple[int | str, ...]:
    """Return the axis sizes of a value as the file declares them: numbers, and names of variable axes.

    A name that consists of digits becomes a number. Expressions in names are never evaluated.
    """
    sizes: list[int | str] = []
    for axis, dim in enumerate(value.shape or ()):
        name = None if isinstance(dim, int) else dim.value
        size = dim if isinstance(dim, int) else name or f"{value.name}_{axis}"
        sizes.append(int(size) if isinstance(size, str) and _NUMBER.match(size) else size)
    return tuple(sizes)


def axes_of(inputs: Iterable[ir.Value]) -> dict[str, str]:
    """Return a map from a file's axis names to accel's axis names.

    The map contains names that other tools use often. For a name that `torch.export` generates, such as `s72`, the map
    uses the inputs that have an axis with this name: for example, axis 0 of `input_ids` is the batch.
    """
    axes = dict(AXES)
    for value in inputs:
        for size, axis in zip(dimensions(value), _TEXT.get(str(value.name), ()), strict=False):
            if isinstance(size, str) and _SYMBOL.match(size):
                axes.setdefault(size, axis)
    return axes


def fixed_axes(config: Mapping[str, Any]) -> dict[str, int]:
    """Return the sizes of named axes that are fixed for a model: the number of image channels, from the config."""
    parts = (config.get("encoder"), config.get("vision_config"), config)
    sizes = (part.get("num_channels") for part in parts if isinstance(part, Mapping))
    channels = next((size for size in sizes if isinstance(size, int)), None)
    return {} if channels is None else {"num_channels": channels}


def given_inputs(graph: ir.Graph) -> list[ir.Value]:
    """Return the inputs that a caller must pass, without inputs that have a default value in the file."""
    return [value for value in graph.inputs if value.name not in graph.initializers]


def named_specs(values: Iterable[ir.Value], axes: Mapping[str, str | int], pad: int = 0) -> tuple[TensorSpec, ...]:
    """Return specs of inputs or outputs with accel's axis names."""
    return tuple(
        TensorSpec(
            str(value.name),
            dtype_word(value),
            tuple(axes.get(size, size) if isinstance(size, str) else size for size in dimensions(value)),
            role="mask" if value.name == "attention_mask" else "data",
            pad_value=pad if value.name == "input_ids" else 0,
        )
        for value in values
    )


def manifest_of(
    task: str,
    config: Mapping[str, Any],
    folder: Path,
    models: Sequence[ir.Model],
    components: tuple[Component, ...] = (),
) -> Manifest:
    """Return a manifest for a folder of another tool, with the data type, opset and quantization that its graphs have."""
    dtype, quantization = precision(models)
    return Manifest(
        format="onnx",
        task=task,
        architecture=str((config.get("architectures") or [""])[0]),
        dtype=dtype,
        opset=models[-1].opset_imports.get(""),
        source=Origin(id=str(folder)),
        components=components,
        quantization=quantization,
    )


def precision(models: Iterable[ir.Model]) -> tuple[str, Quantization | None]:
    """Return the floating-point type and the quantization of graphs, as the weights and operators show them."""
    types, operators = set[ir.DataType | None](), set[str]()
    for model in models:
        for graph in model.graphs():
            types |= {value.dtype for value in graph.initializers.values()}
            operators |= {node.op_type for node in graph}
        types |= {value.dtype for value in (*model.graph.inputs, *model.graph.outputs)} & set(_HALF)
    scheme = "int8" if operators & _INTEGER_OPERATORS else "weight-int4" if operators & _BLOCK_OPERATORS else None
    halves = [_HALF[kind] for kind in _HALF if kind in types and ir.DataType.FLOAT not in types]
    return (halves or ["float32"])[0], Quantization(scheme=scheme) if scheme else None
