"""Inputs and outputs of a graph's file: ONNX, and OpenVINO's IR, without the libraries that run them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from xml.etree import ElementTree as ET

from ...errors import IntegrityError

_IR = {
    "i64": "int64", "i32": "int32", "f32": "float32", "f16": "float16", "bf16": "bfloat16", "boolean": "bool", "u8": "uint8",
    "i8": "int8", "f64": "float64", "FP32": "float32", "FP16": "float16", "BF16": "bfloat16", "I64": "int64", "I32": "int32",
    "BOOL": "bool", "U8": "uint8", "I8": "int8", "FP64": "float64",
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Declared:
    """A tensor as a file declares it: torch's name of its type, and sizes, -1 for those that vary."""

    dtype: str
    dims: tuple[int, ...]


Tensors = Mapping[str, Declared]


def read_graph(path: Path) -> tuple[Tensors, Tensors, tuple[str, ...]]:
    """Inputs, outputs, and names of files beside it that it needs.

    Raises:
        IntegrityError: It cannot be read.
    """
    try:
        return _read_ir(path) if path.suffix == ".xml" else _read_onnx(path)
    # Parsers of hostile files raise what they like.
    except Exception as error:
        raise IntegrityError(f"{path} cannot be read: {error}", fix="copy it again, or deploy again.") from error


def _read_onnx(path: Path) -> tuple[Tensors, Tensors, tuple[str, ...]]:
    import onnx

    model = onnx.load(str(path), load_external_data=False)
    constants = {one.name for one in model.graph.initializer}

    def declared(value: onnx.ValueInfoProto) -> Declared:
        kind = onnx.helper.tensor_dtype_to_np_dtype(value.type.tensor_type.elem_type)
        dims = tuple(dim.dim_value if dim.HasField("dim_value") else -1 for dim in value.type.tensor_type.shape.dim)
        return Declared(str(kind), dims)

    beside = set()
    for one in model.graph.initializer:
        entry = {item.key: item.value for item in one.external_data}
        if "location" in entry:
            beside.add(entry["location"])
            _check_bytes(path.parent / entry["location"], int(entry.get("offset", 0)) + int(entry.get("length", 0)))
    if not model.graph.output:
        raise ValueError("it returns nothing")
    inputs = {value.name: declared(value) for value in model.graph.input if value.name not in constants}
    return inputs, {value.name: declared(value) for value in model.graph.output}, tuple(sorted(beside))


def _check_bytes(path: Path, needed: int) -> None:
    """Whether a file, where it is there, is as long as what stands in it."""
    if path.is_file() and path.stat().st_size < needed:
        raise ValueError(f"{path.name} beside it has {path.stat().st_size} bytes, and the graph's weights {needed}")


def _read_ir(path: Path) -> tuple[Tensors, Tensors, tuple[str, ...]]:
    root = ET.parse(path).getroot()
    layers = {layer.attrib["id"]: layer for layer in root.iterfind("layers/layer")}
    inputs: dict[str, Declared] = {}
    outputs: dict[str, Declared] = {}
    for layer in layers.values():
        if layer.attrib["type"] == "Parameter":
            for port in layer.iterfind("output/port"):
                inputs[_name(port, layer)] = _port(port)
    for edge in root.iterfind("edges/edge"):
        if layers[edge.attrib["to-layer"]].attrib["type"] == "Result":
            source = layers[edge.attrib["from-layer"]]
            port = next(p for p in source.iterfind("output/port") if p.attrib["id"] == edge.attrib["from-port"])
            outputs[_name(port, source)] = _port(port)
    if not outputs:
        raise ValueError("it returns nothing")
    return inputs, outputs, (path.with_suffix(".bin").name,)


def _name(port: ET.Element, layer: ET.Element) -> str:
    return port.attrib.get("names", layer.attrib["name"]).split(",")[0]


def _port(port: ET.Element) -> Declared:
    precision = port.attrib["precision"]
    return Declared(_IR.get(precision, precision), tuple(int(dim.text or 0) for dim in port.iterfind("dim")))
