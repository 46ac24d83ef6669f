"""Tensors as the Open Inference Protocol writes them."""

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
"""The protocol's words for element types."""

Texts = np.ndarray[Any, Any]
"""Of objects, which are texts."""

_DTYPES = {word: getattr(torch, name) for name, word in DATATYPES.items() if word != "BYTES"}
_LIMITS = {"INT8": 8, "UINT8": 8, "INT16": 16, "INT32": 32, "INT64": 64}


def _dtype(name: str, datatype: str) -> torch.dtype:
    found: torch.dtype | None = _DTYPES.get(datatype)
    if found is None:
        raise HttpError(422, f"Input {name!r} has the datatype {datatype[:20]!r}.", fix=f"use {', '.join(_DTYPES)}.")
    return found


def _elements(name: str, shape: Sequence[int]) -> int:
    if any(size < 0 for size in shape):
        raise HttpError(422, f"Input {name!r} has the shape {list(shape)}.", fix="use sizes of at least 0.")
    return math.prod(shape)


def from_json(name: str, datatype: str, shape: Sequence[int], data: list[Any] | None) -> torch.Tensor:
    """A tensor of numbers, flat or nested.

    Raises:
        HttpError: They are none, too many or too few, or too large for their type.
    """
    dtype, count = _dtype(name, datatype), _elements(name, shape)
    flat = _flat(data or [])
    if len(flat) != count:
        raise HttpError(422, f"Input {name!r} has {len(flat)} values and the shape {list(shape)}.", fix="send as many.")
    whole = (bool,) if datatype == "BOOL" else (int,) if datatype in _LIMITS else (int, float)
    if not all(isinstance(value, whole) and (datatype == "BOOL" or not isinstance(value, bool)) for value in flat):
        raise HttpError(422, f"Input {name!r} has values that are no {datatype}.", fix="send numbers of that type.")
    try:
        made = torch.tensor(flat, dtype=dtype).reshape(tuple(shape))
    except (RuntimeError, OverflowError, ValueError) as error:
        raise HttpError(422, f"Input {name!r} does not fit {datatype}.", fix="send smaller values.") from error
    if dtype.is_floating_point and not made.isfinite().all():
        raise HttpError(422, f"Input {name!r} does not fit {datatype}.", fix="send smaller values.")
    return made


def _flat(values: list[Any]) -> list[Any]:
    """Nested lists as one."""
    while values and isinstance(values[0], list):
        if not all(isinstance(value, list) for value in values):
            return [None, *values]  # no tensor: some are lists and some are not
        values = [value for part in values for value in part]
    return values


def from_binary(name: str, datatype: str, shape: Sequence[int], data: bytes) -> torch.Tensor:
    """A tensor of bytes, little-endian, row by row.

    Raises:
        HttpError: Too many, or too few.
    """
    dtype, count = _dtype(name, datatype), _elements(name, shape)
    if count * dtype.itemsize != len(data):
        raise HttpError(
            422, f"Input {name!r} has {len(data)} bytes; {datatype} of the shape {list(shape)} has {count * dtype.itemsize}.",
            fix="send as many.",
        )  # fmt: skip
    if not data:
        return torch.empty(tuple(shape), dtype=dtype)
    array = np.frombuffer(data, dtype=np.uint8).copy()
    if dtype == torch.bool and array.max() > 1:
        raise HttpError(422, f"Input {name!r} has values that are no BOOL.", fix="send 0 and 1.")
    made = torch.from_numpy(array).view(dtype).reshape(tuple(shape))
    if dtype.is_floating_point and made.isnan().any():
        # Infinity may be a mask's.
        place = made.isnan().nonzero()[0].tolist()
        raise HttpError(400, f"Input {name!r} holds NaN at {place}.", fix="send numbers.")
    return made


def texts_from_json(name: str, shape: Sequence[int], data: list[Any] | None) -> Texts:
    """Texts, flat or nested, as an array of objects.

    Raises:
        HttpError: They are none, too many or too few.
    """
    flat = _flat(data or [])
    if len(flat) != _elements(name, shape):
        raise HttpError(422, f"Input {name!r} has {len(flat)} values and the shape {list(shape)}.", fix="send as many.")
    if not all(isinstance(value, str) for value in flat):
        raise HttpError(422, f"Input {name!r} has values that are no texts.", fix="send strings.")
    return _shaped(flat, shape)


def texts_from_binary(name: str, shape: Sequence[int], data: bytes) -> Texts:
    """Texts in UTF-8, each behind its length in four bytes, little-endian.

    Raises:
        HttpError: They are none, too many or too few.
    """
    found: list[str] = []
    at = 0
    try:
        while at < len(data):
            (size,) = struct.unpack_from("<I", data, at)
            at += 4 + size
            if at > len(data):
                raise struct.error
            found.append(data[at - size : at].decode("utf-8"))
    except (struct.error, UnicodeDecodeError) as error:
        raise HttpError(
            422, f"Input {name!r} is no BYTES.", fix="send UTF-8, each text behind its length in 4 bytes."
        ) from error
    if len(found) != _elements(name, shape):
        raise HttpError(422, f"Input {name!r} has {len(found)} texts and the shape {list(shape)}.", fix="send as many.")
    return _shaped(found, shape)


def _shaped(texts: list[str], shape: Sequence[int]) -> Texts:
    made = np.empty(len(texts), dtype=object)
    made[:] = texts
    return made.reshape(tuple(shape))


def array_to_binary(array: np.ndarray[Any, Any]) -> bytes:
    """Its bytes; texts in UTF-8, each behind its length."""
    if array.dtype != object:
        return array.astype(array.dtype.newbyteorder("<")).tobytes()
    encoded = [str(one).encode() for one in array.reshape(-1)]
    return b"".join(part for one in encoded for part in (struct.pack("<I", len(one)), one))


def to_binary(tensor: torch.Tensor) -> bytes:
    """Its bytes, little-endian, row by row."""
    return tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()


def to_json_data(values: torch.Tensor | np.ndarray[Any, Any]) -> list[Any]:
    """Its values, flat."""
    found: list[Any] = values.reshape(-1).tolist()
    return found
