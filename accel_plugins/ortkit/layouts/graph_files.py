"""Graph files with weights inside, or with weights in numbered data files next to them."""

from __future__ import annotations

from pathlib import Path

import onnx_ir as ir

from accel.artifact.manifest import MARK

from ..graph.editing import identity, in_memory, prepare_to_write, write_graph

IN_ONE_FILE_BYTES = 1 << 30
"""Largest size of weights that are stored in the graph file. Protobuf limits files to 2 GiB."""
DATA_FILE_BYTES = 2_000_000_000
"""Largest size of a data file. Browsers limit a buffer to 2 GiB or a little more."""


def write_graph_file(
    model: ir.Model, path: Path, *, single_bytes: int = IN_ONE_FILE_BYTES, data_bytes: int = DATA_FILE_BYTES
) -> list[Path]:
    """Write a graph for a library that does not read accel's manifest, and return the written files.

    Large weights go to data files with the names of transformers.js: `NAME.onnx_data`, `NAME.onnx_data_1`, ...

    Args:
        model: The graph. Its weights are in external files afterwards, or in memory.
        path: The graph file.
        single_bytes: Largest size of weights that are stored in the graph file.
        data_bytes: Largest size of a data file; a larger weight has a file of its own.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    prepare_to_write(model)
    model.metadata_props.pop(MARK, None)
    weights = [value for graph in model.graphs() for value in graph.initializers.values() if value.const_value]
    tensors = {identity(value.const_value): value.const_value for value in weights}
    if sum(tensor.nbytes for tensor in tensors.values()) <= single_bytes:
        for value in weights:
            if isinstance(value.const_value, ir.ExternalTensor):
                value.const_value = in_memory(value.const_value)
        write_graph(model, path)
        return [path]
    places: dict[object, tuple[str, int, int]] = {}
    sizes: list[int] = []
    for key, tensor in tensors.items():
        if tensor.nbytes < 1024 or tensor.dtype == ir.DataType.STRING:
            continue
        if not sizes or sizes[-1] + tensor.nbytes > data_bytes:
            sizes.append(0)
        name = f"{path.name}_data" + (f"_{len(sizes) - 1}" if len(sizes) > 1 else "")
        places[key] = (name, sizes[-1], tensor.nbytes)
        with (path.parent / name).open("r+b" if sizes[-1] else "wb") as file:
            file.seek(sizes[-1])
            file.write(tensor.tobytes())
        sizes[-1] += -(-tensor.nbytes // 64) * 64
    for value in weights:
        tensor = value.const_value
        key = identity(tensor)
        if key in places:
            value.const_value = ir.ExternalTensor(
                *places[key], tensor.dtype, shape=tensor.shape, name=str(value.name), base_dir=path.parent
            )
        elif isinstance(tensor, ir.ExternalTensor):
            value.const_value = in_memory(tensor)
    write_graph(model, path)
    return [path, *(path.parent / name for name in dict.fromkeys(name for name, _, _ in places.values()))]
