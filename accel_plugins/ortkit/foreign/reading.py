"""What stands in an ONNX file of another tool's: inputs and outputs, weights beside it, operators, precision."""

from __future__ import annotations

import math
import re
from collections.abc import Collection, Iterable, Iterator, Mapping
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, Any

from accel.artifact.checksums import FileRecord, check_file
from accel.artifact.manifest import MARK, Quantization, lost_manifest
from accel.artifact.tensors import TensorSpec
from accel.errors import IntegrityError

if TYPE_CHECKING:
    import onnx

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
_HALF = {10: "float16", 16: "bfloat16"}
_WORDS = {"float": "float32", "double": "float64"}
# What `torch.export` calls an axis: `s72`.
_SYMBOL = re.compile(r"s\d+\Z")
_TEXT: dict[str, tuple[str, ...]] = dict.fromkeys(
    ("input_ids", "attention_mask", "token_type_ids", "position_ids"), ("batch", "sequence")
)
_TEXT |= dict.fromkeys(("pixel_values", "input_values", "input_features"), ("batch",))
# Of no more digits than Python reads.
_NUMBER = re.compile(r"\d{1,18}\Z")
_LONGEST = 400
_PACKED = {"UINT4": 4, "INT4": 4, "FLOAT4E2M1": 4, "UINT2": 2, "INT2": 2}
"""Bits of the types of which a byte holds several."""
_COPY = "copy the file itself into the folder, or export the model again."


def read_onnx(folder: Path, name: str) -> onnx.ModelProto:
    """The graph of a file in a folder; weights beside it stay there.

    Raises:
        IntegrityError: It is no regular file, a link that leaves the folder, not ONNX, or one of ours without its manifest.
    """
    import onnx
    from google.protobuf.message import DecodeError

    path = folder / name
    check_file(path, folder, fix=_COPY)
    try:
        model = onnx.load(str(path), load_external_data=False)
    except (DecodeError, OSError, ValueError) as error:
        raise IntegrityError(
            f"{path} cannot be read as ONNX: {error}.", fix="copy or export the file again."
        ) from error
    if not model.graph.output:
        raise IntegrityError(f"{path} holds no graph: truncated?", fix="copy or export the file again.")
    if any(entry.key == MARK for entry in model.metadata_props):
        raise lost_manifest(path)
    # What is no UTF-8 comes as bytes.
    if not all(isinstance(text, str) for text in _texts(model)):
        raise IntegrityError(f"{path} has names that are no text: damaged?", fix="copy or export the file again.")
    for tensor in tensors_in(model):
        if tensor.raw_data and len(tensor.raw_data) != _bytes_of(tensor):
            raise IntegrityError(
                f"The tensor {tensor.name[:_LONGEST]!r} in {path} has {len(tensor.raw_data)} bytes and not {_bytes_of(tensor)}, as its "
                "shape says.",
                fix="copy or export the file again.",
            )
    return model


def _bytes_of(tensor: onnx.TensorProto) -> int:
    """Bytes of a tensor, by its shape and type.

    Raises:
        IntegrityError: It has none: a negative size, or a type that nothing here knows.
    """
    import onnx

    try:
        name = onnx.TensorProto.DataType.Name(tensor.data_type)
        bits = _PACKED[name] if name in _PACKED else 8 * onnx.helper.tensor_dtype_to_np_dtype(tensor.data_type).itemsize
    except (ValueError, KeyError, TypeError):
        bits = 0
    if not bits or any(size < 0 for size in tensor.dims):
        raise IntegrityError(
            f"The tensor {tensor.name[:_LONGEST]!r} has the shape {list(tensor.dims)[:8]} and the type {tensor.data_type}, which "
            "cannot be.",
            fix="copy or export the file again.",
        )
    count: int = math.prod(tensor.dims)
    return (count * bits + 7) // 8


def _texts(model: onnx.ModelProto) -> Iterator[Any]:
    """Every name in a model, and where its weights lie; the weights themselves are not touched."""
    for opset in model.opset_import:
        yield opset.domain
    for entry in model.metadata_props:
        yield from (entry.key, entry.value)
    for graph in graphs_in(model.graph):
        for value in (*graph.input, *graph.output, *graph.value_info):
            yield value.name
            yield from (size.dim_param for size in value.type.tensor_type.shape.dim)
        for node in graph.node:
            yield from (node.name, node.op_type, node.domain, *node.input, *node.output)
            yield from (attribute.name for attribute in node.attribute)
    for tensor in tensors_in(model):
        yield tensor.name
        for entry in tensor.external_data:
            yield from (entry.key, entry.value)


def graphs_in(graph: onnx.GraphProto) -> Iterator[onnx.GraphProto]:
    """A graph and all graphs in its nodes."""
    yield graph
    for node in graph.node:
        for attribute in node.attribute:
            yield from _graphs_of(attribute)


def _graphs_of(attribute: onnx.AttributeProto) -> Iterator[onnx.GraphProto]:
    for inner in (*([attribute.g] if attribute.HasField("g") else []), *attribute.graphs):
        yield from graphs_in(inner)


def tensors_in(model: onnx.ModelProto) -> Iterator[onnx.TensorProto]:
    """Every tensor that a model stores: initializers, sparse ones' parts, and attributes of nodes; also those of graphs in nodes,
    of functions and of training.
    """
    attributes = [a for function in model.functions for a in function.attribute_proto]
    attributes += [a for function in model.functions for node in function.node for a in node.attribute]
    graphs = [*graphs_in(model.graph), *(graph for attribute in attributes for graph in _graphs_of(attribute))]
    for info in model.training_info:
        graphs += [*graphs_in(info.initialization), *graphs_in(info.algorithm)]
    for graph in graphs:
        yield from graph.initializer
        attributes += [attribute for node in graph.node for attribute in node.attribute]
        for sparse in graph.sparse_initializer:
            yield from (sparse.values, sparse.indices)
    for attribute in attributes:
        if attribute.HasField("t"):
            yield attribute.t
        yield from attribute.tensors
        for sparse in (
            *([attribute.sparse_tensor] if attribute.HasField("sparse_tensor") else []),
            *attribute.sparse_tensors,
        ):
            yield from (sparse.values, sparse.indices)


def external_files(model: onnx.ModelProto, folder: Path, name: str) -> list[str]:
    """Files with the weights, relative to the folder.

    Raises:
        IntegrityError: One of them is missing, no regular file, too short, or not in the folder.
    """
    parent, ends = PurePosixPath(name).parent, dict[str, int]()
    for tensor in tensors_in(model):
        if tensor.data_location != tensor.EXTERNAL:
            continue
        place, offset, length = external_place(tensor)
        if PurePosixPath(place).is_absolute() or ".." in PurePosixPath(place).parts or not place:
            raise IntegrityError(
                f"{folder / name} keeps weights in {place[:_LONGEST]!r}, which is not beside it.",
                fix="use a model that keeps its weights beside the graph.",
            )
        needed = _bytes_of(tensor)
        if length and length < needed:
            raise IntegrityError(
                f"{folder / name} keeps {length} bytes of the weight {tensor.name[:_LONGEST]!r}, whose shape takes {needed}.",
                fix="copy or export the file again.",
            )
        ends[place] = max(ends.get(place, 0), offset + max(length, needed))
    for place, end in ends.items():
        path = folder / parent / place
        try:
            size = check_file(path, folder, fix="copy that file itself beside the graph.").st_size
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


def external_place(tensor: onnx.TensorProto) -> tuple[str, int, int]:
    """File, offset and length in bytes of a weight that lies beside its graph; a length of 0 where the graph does not say."""
    entries = {entry.key: entry.value for entry in tensor.external_data}
    numbers = [entries.get(key) or "0" for key in ("offset", "length")]
    if not all(map(_NUMBER.match, numbers)):
        raise IntegrityError(
            f"The weight {tensor.name[:_LONGEST]!r} begins at {numbers[0][:_LONGEST]!r} and has {numbers[1][:_LONGEST]!r} bytes, "
            "which is no place.",
            fix="export the model again.",
        )
    return entries.get("location", ""), int(numbers[0]), int(numbers[1])


def array_of(tensor: onnx.TensorProto) -> Any:
    """The values of a tensor that stands in its graph.

    Raises:
        IntegrityError: They are not as many as its shape says, or of no known type.
    """
    from onnx import numpy_helper

    try:
        return numpy_helper.to_array(tensor)
    # onnx says of damaged tensors what NumPy and its own tables say.
    except Exception as error:
        raise IntegrityError(
            f"The tensor {tensor.name[:_LONGEST]!r} cannot be read: {error}.", fix="copy or export the file again."
        ) from error


def stamp(folder: Path, name: str) -> FileRecord:
    """A record that identifies a file without reading it; adopted folders have no checksums to compare with."""
    stat = (folder / name).stat()
    return FileRecord(name=name, bytes=stat.st_size, sha256=f"mtime:{stat.st_mtime_ns}")


def dtype_word(elem_type: int) -> str:
    """torch's word for one of ONNX' element types.

    Raises:
        IntegrityError: It is none of them.
    """
    import onnx

    try:
        word = str(onnx.TensorProto.DataType.Name(elem_type)).lower()
    except ValueError as error:
        raise IntegrityError(
            f"The graph declares elements of the type {elem_type}, which ONNX does not have.",
            fix="copy or export the file again.",
        ) from error
    return _WORDS.get(word, word)


def dimensions(value: onnx.ValueInfoProto) -> tuple[int | str, ...]:
    """Sizes, and the names of axes that vary, as the file has them; a name that is a number is one. Never evaluated."""
    return tuple(
        int(dim.dim_param)
        if _NUMBER.match(dim.dim_param)
        else dim.dim_param or (dim.dim_value if dim.HasField("dim_value") else f"{value.name}_{i}")
        for i, dim in enumerate(value.type.tensor_type.shape.dim)
    )


def axes_of(inputs: Iterable[onnx.ValueInfoProto]) -> dict[str, str]:
    """Our names for a file's names of axes: by the inputs of transformers' models that have them, and as other tools call them."""
    found = dict(AXES)
    for value in inputs:
        for size, axis in zip(dimensions(value), _TEXT.get(value.name, ()), strict=False):
            if isinstance(size, str) and _SYMBOL.match(size):
                found.setdefault(size, axis)
    return found


def fixed_axes(config: Mapping[str, Any]) -> dict[str, int]:
    """Sizes of axes that files name, and that a model's weights fix: an image's channels."""
    parts = (config.get("encoder"), config.get("vision_config"), config)
    sizes = (part.get("num_channels") for part in parts if isinstance(part, Mapping))
    channels = next((size for size in sizes if isinstance(size, int)), None)
    return {} if channels is None else {"num_channels": channels}


def named_specs(
    values: Iterable[onnx.ValueInfoProto],
    axes: Mapping[str, str | int] | None = None,
    pad: int = 0,
    stored: Collection[str] = (),
) -> tuple[TensorSpec, ...]:
    """Inputs or outputs with our names for their axes; none of what is stored in the file."""
    axes = AXES if axes is None else axes
    return tuple(
        TensorSpec(
            value.name,
            dtype_word(value.type.tensor_type.elem_type),
            tuple(axes.get(size, size) if isinstance(size, str) else size for size in dimensions(value)),
            role="mask" if value.name == "attention_mask" else "data",
            pad_value=pad if value.name == "input_ids" else 0,
        )
        for value in values
        if value.name not in stored
    )


def precision(models: Iterable[onnx.ModelProto]) -> tuple[str, Quantization | None]:
    """The type that graphs compute in, and how they are quantized, by their weights and operators."""
    types, operators = set[int](), set[str]()
    for model in models:
        for graph in graphs_in(model.graph):
            types |= {tensor.data_type for tensor in graph.initializer}
            operators |= {node.op_type for node in graph.node}
        types |= {value.type.tensor_type.elem_type for value in (*model.graph.input, *model.graph.output)} & set(_HALF)
    scheme = "int8" if operators & _INTEGER_OPERATORS else "weight-int4" if operators & _BLOCK_OPERATORS else None
    dtype = next((_HALF[kind] for kind in _HALF if kind in types and 1 not in types), "float32")
    return dtype, Quantization(scheme=scheme) if scheme else None


def opset(model: onnx.ModelProto) -> int | None:
    """The version of the standard's operators."""
    return next((item.version for item in model.opset_import if item.domain in ("", "ai.onnx")), None)


def operator_domains(model: onnx.ModelProto) -> tuple[str, ...]:
    """Domains of the operators that a graph uses; functions that the file itself defines count by what they use."""
    own = {(function.domain, function.name) for function in model.functions}
    nodes = [*model.graph.node, *(node for function in model.functions for node in function.node)]
    found = set()
    while nodes:
        node = nodes.pop()
        if (node.domain, node.op_type) not in own:
            found.add("" if node.domain == "ai.onnx" else node.domain)
        for attribute in node.attribute:
            for graph in (attribute.g, *attribute.graphs):
                nodes.extend(graph.node)
    return tuple(sorted(found))
