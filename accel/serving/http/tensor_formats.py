"""Read and write tensors of the Open Inference Protocol. Numbers are torch tensors; texts (`BYTES`) are NumPy object arrays."""

from __future__ import annotations

import math
import struct
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from .replies import HttpError

DATATYPES = {
    "bool": "BOOL",
    "uint8": "UINT8",
    "int8": "INT8",
    "int16": "INT16",
    "int32": "INT32",
    "int64": "INT64",
    "float16": "FP16",
    "bfloat16": "BF16",
    "float32": "FP32",
    "float64": "FP64",
    "object": "BYTES",
}
"""Data type names of the Open Inference Protocol, by torch or NumPy name."""

Texts = np.ndarray[Any, Any]
Values = torch.Tensor | Texts

_DTYPES = {word: getattr(torch, name) for name, word in DATATYPES.items() if word != "BYTES"}


def check_datatype(name: str, datatype: str, *, texts: bool) -> None:
    """Raise if the data type of an input is unknown, or does not match the model: texts for `texts=True`, numbers for `texts=False`.

    Raises:
        HttpError: The data type is invalid.
    """
    accepted = ("BYTES",) if texts else tuple(_DTYPES)
    if datatype not in accepted:
        raise HttpError(
            422,
            f"Input {name!r} has the datatype {datatype[:20]!r}, which the model does not accept.",
            fix=f"use {' or '.join(accepted)}.",
        )


def from_json(name: str, datatype: str, shape: Sequence[int], data: list[Any] | None) -> Values:
    """Convert numbers or texts from JSON, flat or nested lists, to a tensor or array of the given shape.

    Raises:
        HttpError: The values have the wrong type or number, or are too large for their data type.
    """
    flat = _flat(data or [])
    if len(flat) != _elements(name, shape):
        raise HttpError(
            422,
            f"Input {name!r} has {len(flat)} values, but its shape {list(shape)} requires {math.prod(shape)}.",
            fix="send as many values as the shape requires.",
        )
    if datatype == "BYTES":
        if not all(isinstance(value, str) for value in flat):
            raise HttpError(
                422, f"Input {name!r} has the datatype BYTES, but some values are not texts.", fix="send only strings."
            )
        return as_texts(flat, shape)
    dtype = _DTYPES[datatype]
    kinds = (bool,) if datatype == "BOOL" else (int, float) if dtype.is_floating_point else (int,)
    if not all(isinstance(value, kinds) and (datatype == "BOOL" or not isinstance(value, bool)) for value in flat):
        raise HttpError(
            422,
            f"Input {name!r} has the datatype {datatype}, but some values have another type.",
            fix=f"send only {'true and false' if datatype == 'BOOL' else 'numbers' if dtype.is_floating_point else 'integers'}.",
        )
    too_large = HttpError(
        422, f"Input {name!r} has values that are outside the range of {datatype}.", fix="send values within the range."
    )
    try:
        tensor = torch.tensor(flat, dtype=dtype).reshape(tuple(shape))
    except (RuntimeError, OverflowError, ValueError) as error:
        raise too_large from error
    if dtype.is_floating_point and not tensor.isfinite().all():
        raise too_large
    return tensor


def from_binary(name: str, datatype: str, shape: Sequence[int], data: bytes) -> Values:
    """Convert binary data to a tensor or array of the given shape.

    Values are in row-major order. Numbers are little-endian. Each text is UTF-8 after its length in four bytes.

    Raises:
        HttpError: The number of bytes does not match the shape, or the values are invalid.
    """
    count = _elements(name, shape)
    if datatype == "BYTES":
        texts = _unpacked(name, data)
        if len(texts) != count:
            raise HttpError(
                422,
                f"Input {name!r} has {len(texts)} texts, but its shape {list(shape)} requires {count}.",
                fix="send as many texts as the shape requires.",
            )
        return as_texts(texts, shape)
    dtype = _DTYPES[datatype]
    if count * dtype.itemsize != len(data):
        raise HttpError(
            422,
            f"Input {name!r} has {len(data)} bytes, but {datatype} with the shape {list(shape)} requires {count * dtype.itemsize}.",
            fix="send as many bytes as the shape requires.",
        )  # fmt: skip
    if not data:
        return torch.empty(tuple(shape), dtype=dtype)
    array = np.frombuffer(data, dtype=np.uint8).copy()
    if dtype == torch.bool and array.max() > 1:
        raise HttpError(
            422,
            f"Input {name!r} has the datatype BOOL, but some bytes are not 0 or 1.",
            fix="send only the bytes 0 and 1.",
        )
    tensor = torch.from_numpy(array).view(dtype).reshape(tuple(shape))
    if dtype.is_floating_point and tensor.isnan().any():
        # Infinity is allowed, because attention masks may contain it.
        place = tensor.isnan().nonzero()[0].tolist()
        raise HttpError(400, f"Input {name!r} contains NaN at the index {place}.", fix="send numbers instead of NaN.")
    return tensor


def as_texts(texts: Sequence[str], shape: Sequence[int]) -> Texts:
    """Return texts as a NumPy object array of the given shape."""
    array = np.empty(len(texts), dtype=object)
    array[:] = texts
    return array.reshape(tuple(shape))


def to_binary(values: Values) -> bytes:
    """Convert a tensor or array to binary data, in the format that `from_binary` reads."""
    if isinstance(values, torch.Tensor):
        return values.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
    encoded = [str(text).encode() for text in values.reshape(-1)]
    return b"".join(part for text in encoded for part in (struct.pack("<I", len(text)), text))


def _elements(name: str, shape: Sequence[int]) -> int:
    if any(size < 0 for size in shape):
        raise HttpError(
            422,
            f"Input {name!r} has the shape {list(shape)}, which contains a negative size.",
            fix="use sizes of at least 0.",
        )
    return math.prod(shape)


def _flat(values: list[Any]) -> list[Any]:
    """Flatten nested lists."""
    while values and isinstance(values[0], list):
        if not all(isinstance(value, list) for value in values):
            return [None, *values]  # lists mixed with values: the added None makes the caller raise
        values = [value for part in values for value in part]
    return values


def _unpacked(name: str, data: bytes) -> list[str]:
    texts: list[str] = []
    at = 0
    try:
        while at < len(data):
            (size,) = struct.unpack_from("<I", data, at)
            at += 4 + size
            if at > len(data):
                raise struct.error
            texts.append(data[at - size : at].decode("utf-8"))
    except (struct.error, UnicodeDecodeError) as error:
        raise HttpError(
            422,
            f"The binary data of input {name!r} is not valid for the datatype BYTES.",
            fix="send each text as its length in 4 bytes (little-endian), followed by its UTF-8 bytes.",
        ) from error
    return texts
