"""One ONNX file of another tool: its checks, its inputs and outputs, weights next to it, and precision."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any

import onnx
import onnx_ir as ir
from google.protobuf.message import DecodeError, Message

from accel.artifact.checksums import FileRecord, check_file
from accel.artifact.manifest import MARK, Quantization, lost_manifest
from accel.artifact.tensors import TensorSpec
from accel.errors import IntegrityError

from ..graph.editing import read_graph

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
# What `torch.export` calls an axis: `s72`.
_SYMBOL = re.compile(r"s\d+\Z")
_TEXT: dict[str, tuple[str, ...]] = dict.fromkeys(
    ("input_ids", "attention_mask", "token_type_ids", "position_ids"), ("batch", "sequence")
)
_TEXT |= dict.fromkeys(("pixel_values", "input_values", "input_features"), ("batch",))
# At most as many digits as Python converts.
_NUMBER = re.compile(r"\d{1,18}\Z")
_LONGEST = 400
_COPY = "copy the file itself into the folder, or export the model again."
_AGAIN = "copy or export the file again."


@dataclass(slots=True)
class OnnxFile:
    """A checked ONNX file.

    Attributes:
        name: The file, relative to its folder.
        model: Its graph; weights stay in the file.
        external_files: Files with its weights, relative to the folder.
    """

    name: str
    model: ir.Model
    external_files: list[str]

    @property
    def files(self) -> tuple[str, ...]:
        """The file, and those with its weights."""
        return (self.name, *self.external_files)

    @property
    def input_names(self) -> list[str]:
        """Names of the inputs."""
        return [str(value.name) for value in self.model.graph.inputs]


def read_onnx(folder: Path, name: str) -> OnnxFile:
    """Read and check one file of a folder.

    Raises:
        IntegrityError: It is no regular file, a link that leaves the folder, not ONNX, or one of ours without its manifest; or its
            weights are missing, no regular file, too short, or outside of the folder.
    """
    path = folder / name
    check_file(path, folder, fix=_COPY)
    try:
        model = onnx.load(str(path), load_external_data=False)
    except (DecodeError, OSError, ValueError) as error:
        raise IntegrityError(f"{path} cannot be read as ONNX: {error}.", fix=_AGAIN) from error
    if not model.graph.output:
        raise IntegrityError(f"{path} holds no graph: truncated?", fix=_AGAIN)
    if any(entry.key == MARK for entry in model.metadata_props):
        raise lost_manifest(path)
    tensors = []
    for message in _messages(model):
        if not all(isinstance(text, str) for text in _texts(message)):
            raise IntegrityError(f"{path} has names that are no text: damaged?", fix=_AGAIN)
        if isinstance(message, onnx.TypeProto.Tensor) and message.elem_type not in onnx.TensorProto.DataType.values():
            raise IntegrityError(
                f"{path} declares elements of the type {message.elem_type}, which ONNX does not have.", fix=_AGAIN
            )
        if isinstance(message, onnx.TensorProto):
            tensors.append(message)
            if message.raw_data and len(message.raw_data) != _bytes_of(message):
                raise IntegrityError(
                    f"The tensor {message.name[:_LONGEST]!r} in {path} has {len(message.raw_data)} bytes and not "
                    f"{_bytes_of(message)}, as its shape says.",
                    fix=_AGAIN,
                )
    external = [tensor for tensor in tensors if tensor.data_location == tensor.EXTERNAL]
    external_files = _external_files(external, folder, name)
    return OnnxFile(name, read_graph(path, model), external_files)


def _messages(message: Message) -> Iterator[Message]:
    """A message and all messages in it: also those of subgraphs, functions, sparse tensors and training."""
    yield message
    # Listing the fields of a tensor would copy its data.
    fields = [message.external_data] if isinstance(message, onnx.TensorProto) else [v for _, v in message.ListFields()]
    for value in fields:
        items = [value] if isinstance(value, Message | str | bytes | int | float) else value
        for item in items:
            if not isinstance(item, Message):
                break
            yield from _messages(item)


def _texts(message: Message) -> Iterator[Any]:
    """The texts of a message; protobuf returns bytes for those that are not UTF-8."""
    if isinstance(message, onnx.TensorProto):
        yield message.name
        return
    for field, value in message.ListFields():
        if field.type == field.TYPE_STRING:
            yield from [value] if isinstance(value, str | bytes) else value


def _bytes_of(tensor: onnx.TensorProto) -> int:
    """Bytes of a tensor, by its shape and type.

    Raises:
        IntegrityError: A size is negative, or the type is unknown.
    """
    known = tensor.data_type in onnx.TensorProto.DataType.values()
    bits = ir.DataType(tensor.data_type).bitwidth if known and tensor.data_type not in (0, tensor.STRING) else 0
    if not bits or any(size < 0 for size in tensor.dims):
        raise IntegrityError(
            f"The tensor {tensor.name[:_LONGEST]!r} has the shape {list(tensor.dims)[:8]} and the type {tensor.data_type}, which "
            "cannot be.",
            fix=_AGAIN,
        )
    count: int = math.prod(tensor.dims)
    return (count * bits + 7) // 8


def _external_files(tensors: Iterable[onnx.TensorProto], folder: Path, name: str) -> list[str]:
    """Files with the weights, relative to the folder.

    Raises:
        IntegrityError: One of them is missing, no regular file, too short, or not in the folder.
    """
    parent, ends = PurePosixPath(name).parent, dict[str, int]()
    for tensor in tensors:
        place, offset, length = _external_place(tensor)
        if PurePosixPath(place).is_absolute() or ".." in PurePosixPath(place).parts or not place:
            raise IntegrityError(
                f"{folder / name} keeps weights in {place[:_LONGEST]!r}, which is outside of its folder.",
                fix="use a model that keeps its weights next to the graph.",
            )
        needed = _bytes_of(tensor)
        if length and length < needed:
            raise IntegrityError(
                f"{folder / name} keeps {length} bytes of the weight {tensor.name[:_LONGEST]!r}, whose shape takes {needed}.",
                fix=_AGAIN,
            )
        ends[place] = max(ends.get(place, 0), offset + max(length, needed))
    for place, end in ends.items():
        path = folder / parent / place
        try:
            size = check_file(path, folder, fix="copy that file itself next to the graph.").st_size
        except IntegrityError as error:
            raise IntegrityError(
                f"{folder / name} keeps weights in {place[:_LONGEST]!r}: {error.message[:_LONGEST]}", fix=error.fix
            ) from error
        if size < end:
            raise IntegrityError(
                f"{path} has {size} bytes; {name} reads {end} of it: truncated?",
                fix="copy or download the file again.",
            )
    return sorted((parent / place).as_posix() for place in ends)


def _external_place(tensor: onnx.TensorProto) -> tuple[str, int, int]:
    """File, offset and length in bytes of a weight next to its graph; a length of 0 where the graph does not say."""
    entries = {entry.key: entry.value for entry in tensor.external_data}
    numbers = [entries.get(key) or "0" for key in ("offset", "length")]
    if not all(map(_NUMBER.match, numbers)):
        raise IntegrityError(
            f"The weight {tensor.name[:_LONGEST]!r} begins at {numbers[0][:_LONGEST]!r} and has {numbers[1][:_LONGEST]!r} bytes, "
            "which is no place.",
            fix="export the model again.",
        )
    return entries.get("location", ""), int(numbers[0]), int(numbers[1])


def stamp(folder: Path, name: str) -> FileRecord:
    """A record that identifies a file without reading it; adopted folders have no checksums to compare with."""
    stat = (folder / name).stat()
    return FileRecord(name=name, bytes=stat.st_size, sha256=f"mtime:{stat.st_mtime_ns}")


def dtype_word(value: ir.Value) -> str:
    """The name of a value's type: `int64`, `float32`, ..."""
    word = value.dtype.name.lower() if value.dtype is not None else "undefined"
    return _WORDS.get(word, word)


def dimensions(value: ir.Value) -> tuple[int | str, ...]:
    """Sizes, and the names of axes that vary, as the file has them; a name that is a number is one. Never evaluated."""
    sizes: list[int | str] = []
    for axis, dim in enumerate(value.shape or ()):
        name = None if isinstance(dim, int) else dim.value
        size = dim if isinstance(dim, int) else name or f"{value.name}_{axis}"
        sizes.append(int(size) if isinstance(size, str) and _NUMBER.match(size) else size)
    return tuple(sizes)


def axes_of(inputs: Iterable[ir.Value]) -> dict[str, str]:
    """Our names for a file's names of axes: by the inputs of transformers' models that have them, and as other tools call them."""
    axes = dict(AXES)
    for value in inputs:
        for size, axis in zip(dimensions(value), _TEXT.get(str(value.name), ()), strict=False):
            if isinstance(size, str) and _SYMBOL.match(size):
                axes.setdefault(size, axis)
    return axes


def fixed_axes(config: Mapping[str, Any]) -> dict[str, int]:
    """Sizes of axes that files name, and that a model's weights fix: an image's channels."""
    parts = (config.get("encoder"), config.get("vision_config"), config)
    sizes = (part.get("num_channels") for part in parts if isinstance(part, Mapping))
    channels = next((size for size in sizes if isinstance(size, int)), None)
    return {} if channels is None else {"num_channels": channels}


def given_inputs(graph: ir.Graph) -> list[ir.Value]:
    """Inputs that a caller passes: not those with a value in the file."""
    return [value for value in graph.inputs if value.name not in graph.initializers]


def named_specs(values: Iterable[ir.Value], axes: Mapping[str, str | int], pad: int = 0) -> tuple[TensorSpec, ...]:
    """Inputs or outputs with our names for their axes."""
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


def precision(models: Iterable[ir.Model]) -> tuple[str, Quantization | None]:
    """The type that graphs compute in, and how they are quantized, by their weights and operators."""
    types, operators = set[ir.DataType | None](), set[str]()
    for model in models:
        for graph in model.graphs():
            types |= {value.dtype for value in graph.initializers.values()}
            operators |= {node.op_type for node in graph}
        types |= {value.dtype for value in (*model.graph.inputs, *model.graph.outputs)} & set(_HALF)
    scheme = "int8" if operators & _INTEGER_OPERATORS else "weight-int4" if operators & _BLOCK_OPERATORS else None
    halves = [_HALF[kind] for kind in _HALF if kind in types and ir.DataType.FLOAT not in types]
    return (halves or ["float32"])[0], Quantization(scheme=scheme) if scheme else None
