"""Read JSON files of untrusted folders with limits on size and depth, and check the types of values."""

from __future__ import annotations

import functools
import json
import re
import reprlib
from collections.abc import Mapping
from dataclasses import MISSING, fields
from pathlib import Path
from stat import S_ISREG
from typing import Any, TypeVar, get_type_hints

from ..config import WrongTypeError, fitted
from ..errors import IntegrityError, SchemaError

_MAX_BYTES = 64 << 20
_MAX_DEPTH = 64
_HALF_A_LETTER = re.compile(rb"\\u[dD][89a-fA-F]")
_AGAIN = "create the artifact again, or copy the file again from the original folder."

Kind = TypeVar("Kind")


def read_json(path: Path) -> dict[str, Any]:
    """Return the JSON object of a file of at most 64 MiB.

    Raises:
        IntegrityError: The file cannot be read, is too large or nested too deeply, or is not a JSON object.
    """
    return read_bytes_and_json(path)[1]


def read_json_list(path: Path) -> list[dict[str, Any]]:
    """Return the JSON list of objects of a file of at most 64 MiB.

    Raises:
        IntegrityError: The file cannot be read, is too large or nested too deeply, or is not a list of objects.
    """
    values = _parsed(_read(path), path)
    if not isinstance(values, list) or not all(isinstance(item, dict) for item in values):
        raise IntegrityError(
            f"{path} contains {_named(values)}, but it must contain a JSON list of objects.", fix=_AGAIN
        )
    return values


def _read(path: Path) -> bytes:
    try:
        if not S_ISREG(path.stat().st_mode):
            # Refuse pipes and devices, because reading a pipe may never end.
            raise IntegrityError(f"{path} is not a regular file.", fix=_AGAIN)
        with path.open("rb") as file:
            content = file.read(_MAX_BYTES + 1)
    except (OSError, ValueError) as error:
        raise IntegrityError(f"{path} cannot be read: {error}.", fix=_AGAIN) from error
    if len(content) > _MAX_BYTES:
        raise IntegrityError(
            f"The JSON file {path} is larger than {_MAX_BYTES >> 20} MiB, the largest size that accel reads.",
            fix=_AGAIN,
        )
    return content


def _parsed(content: bytes, path: Path) -> Any:
    """Return the JSON value in the content of a file."""
    try:
        values = json.loads(content.decode("utf-8"))
        if _HALF_A_LETTER.search(content):
            # Encoding raises an error for a lone surrogate, which valid text never contains.
            json.dumps(values, ensure_ascii=False).encode("utf-8")
    except (ValueError, RecursionError) as error:
        why = "it is nested too deeply" if isinstance(error, RecursionError) else str(error)
        raise IntegrityError(f"{path} is not valid JSON: {why}.", fix=_AGAIN) from error
    if _depth(values) > _MAX_DEPTH:
        raise IntegrityError(
            f"The JSON values in {path} are nested more than {_MAX_DEPTH} levels deep, which accel does not read.",
            fix=_AGAIN,
        )
    return values


def _depth(value: Any) -> int:
    """Return the nesting depth of a JSON value. It is counted level by level, because recursion fails on very deep
    values.
    """
    depth, level = 0, [value]
    while level and depth <= _MAX_DEPTH:
        depth += 1
        level = [
            inner
            for item in level
            if isinstance(item, dict | list)
            for inner in (item.values() if isinstance(item, dict) else item)
        ]
    return depth


def read_bytes_and_json(path: Path) -> tuple[bytes, dict[str, Any]]:
    """Return the content of a file and the JSON object in it, with the limits and errors of `read_json`."""
    content = _read(path)
    values = _parsed(content, path)
    if not isinstance(values, dict):
        raise IntegrityError(f"{path} contains {_named(values)}, but it must contain a JSON object.", fix=_AGAIN)
    return content, values


def build(kind: type[Kind], values: Mapping[str, Any], where: str) -> Kind:
    """Make an instance of a dataclass from JSON values, and check their types.

    Args:
        kind: The dataclass.
        values: Values by field name; lists become tuples.
        where: The file and field of the values, for error messages.

    Raises:
        SchemaError: A field is unknown or missing, or has the wrong type.
    """
    if not isinstance(values, Mapping):
        raise SchemaError(f"{where} is {_named(values)}, but it must be a JSON object.", fix=_AGAIN)
    declared = _declared(kind)  # type: ignore[arg-type]  # a class is hashable
    unknown = sorted(set(values) - set(declared))
    if unknown:
        raise SchemaError(f"{where} contains the unknown field {unknown[0]!r}.", fix=_AGAIN)
    missing = sorted(name for name, (_, required) in declared.items() if required and name not in values)
    if missing:
        raise SchemaError(f"{where} has no field {missing[0]!r}.", fix=_AGAIN)
    try:
        return kind(
            **{name: fitted(f"{where}.{name}", value, declared[name][0], build) for name, value in values.items()}
        )
    except WrongTypeError as error:
        raise SchemaError(f"{error}, but it must be {error.expected}.", fix=_AGAIN) from None


@functools.cache
def _declared(kind: type[Any]) -> dict[str, tuple[Any, bool]]:
    """Return the type of each field of a dataclass, and whether the field is required."""
    hints = get_type_hints(kind)
    return {
        field.name: (hints[field.name], field.default is MISSING and field.default_factory is MISSING)
        for field in fields(kind)
    }


def _named(value: Any) -> str:
    return f"{type(value).__name__} {reprlib.repr(value)}"
