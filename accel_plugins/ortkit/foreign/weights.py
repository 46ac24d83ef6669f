"""Weights of graphs that are written anew: each once, and those that lie beside their graph where they are."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from accel.artifact.manifest import MANIFEST, MARK
from accel.artifact.writing import copy_file

from .reading import array_of, external_place, graphs_in, tensors_in

if TYPE_CHECKING:
    import onnx

WEIGHTS = "weights.data"
_LARGE_BYTES = 256
# Elements have to be aligned where runtimes map the file.
_ALIGNMENT = 64
_BLOCK = 1 << 24


def is_large(tensor: onnx.TensorProto) -> bool:
    """Whether a weight is worth a place in a file of weights: not a shape, an axis or a scale."""
    return tensor.data_location == tensor.EXTERNAL or len(tensor.raw_data) >= _LARGE_BYTES or _typed(tensor)


def _typed(tensor: onnx.TensorProto) -> bool:
    """Whether values are many, and stored in another field than raw bytes."""
    size = 1
    for dim in tensor.dims:
        size *= dim
    return not tensor.raw_data and size * 4 >= _LARGE_BYTES and tensor.data_type != tensor.STRING


def content(tensor: onnx.TensorProto, folder: Path) -> str:
    """What makes two weights one: type, shape and bytes."""
    digest = hashlib.sha256(f"{tensor.data_type} {list(tensor.dims)} ".encode())
    if tensor.data_location != tensor.EXTERNAL:
        digest.update(_bytes(tensor))
        return digest.hexdigest()
    place, offset, length = external_place(tensor)
    with (folder / place).open("rb") as file:
        file.seek(offset)
        left = length or os.fstat(file.fileno()).st_size - offset
        while left > 0 and (block := file.read(min(left, _BLOCK))):
            digest.update(block)
            left -= len(block)
    return digest.hexdigest()


def _bytes(tensor: onnx.TensorProto) -> bytes:
    raw: bytes = tensor.raw_data or array_of(tensor).tobytes()
    return raw


def write_graphs(graphs: Mapping[str, tuple[onnx.ModelProto, Path]], out: Path) -> dict[str, list[str]]:
    """Write graphs by file name into one folder, with the weights that stood in them in one file beside, each once.

    Args:
        graphs: Each with the folder in which it kept weights beside it. Changed.
        out: Where to write.

    Returns:
        The files that each needs beside it.
    """
    places: dict[str, tuple[int, int]] = {}
    copied: dict[Path, str] = {}
    beside: dict[str, list[str]] = {}
    with (out / WEIGHTS).open("wb") as file:
        for name, (model, folder) in graphs.items():
            needs = set[str]()
            # Weights in attributes and functions stay where they stand, but for those that lie beside the graph.
            for tensor in (one for one in tensors_in(model) if one.data_location == one.EXTERNAL):
                place, *_ = external_place(tensor)
                source = (folder / place).resolve()
                copied.setdefault(source, _beside(source, out, f"{len(copied)}-{Path(place).name}"))
                _point(tensor, copied[source])
                needs.add(copied[source])
            for tensor in (one for graph in graphs_in(model.graph) for one in graph.initializer):
                if tensor.data_location != tensor.EXTERNAL and is_large(tensor):
                    key = content(tensor, folder)
                    if key not in places:
                        raw = _bytes(tensor)
                        file.write(b"\0" * (-file.tell() % _ALIGNMENT))
                        places[key] = (file.tell(), len(raw))
                        file.write(raw)
                    _point(tensor, WEIGHTS, *places[key])
                    needs.add(WEIGHTS)
            model.metadata_props.add(key=MARK, value=MANIFEST)
            (out / name).write_bytes(model.SerializeToString())
            beside[name] = sorted(needs)
    if not places:
        (out / WEIGHTS).unlink()
    return beside


def _beside(source: Path, out: Path, name: str) -> str:
    """The file under a name in `out`."""
    if not (out / name).exists():
        copy_file(source, out / name)
    return name


def _point(tensor: onnx.TensorProto, place: str, offset: int | None = None, length: int | None = None) -> None:
    """Let a weight lie in a file; without an offset, where it lies there already."""
    entries: dict[str, str] = {entry.key: entry.value for entry in tensor.external_data}
    entries["location"] = place
    if offset is not None:
        entries |= {"offset": str(offset), "length": str(length)}
    for field in ("raw_data", "float_data", "int32_data", "int64_data", "double_data", "uint64_data"):
        tensor.ClearField(field)
    del tensor.external_data[:]
    for key, value in entries.items():
        tensor.external_data.add(key=key, value=value)
    tensor.data_location = tensor.EXTERNAL
