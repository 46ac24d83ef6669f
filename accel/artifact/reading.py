"""JSON of folders that may come from anyone: read within limits, and held against what it has to be."""

from __future__ import annotations

import functools
import json
import re
import types
from collections.abc import Mapping
from dataclasses import MISSING, fields, is_dataclass
from pathlib import Path
from stat import S_ISREG
from typing import Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

from ..errors import IntegrityError, SchemaError

_MAX_BYTES = 64 << 20
_MAX_ITEMS = 100_000
_MAX_DEPTH = 64
_HALF_A_LETTER = re.compile(rb"\\u[dD][89a-fA-F]")
_AGAIN = "make the artifact again, or copy the file again from where it came."

Kind = TypeVar("Kind")


def read_json(path: Path) -> dict[str, Any]:
    """The JSON object in a file of at most 64 MiB.

    Raises:
        IntegrityError: It cannot be read, is not JSON, too large, nested too deeply, or no object.
    """
    return parse_json(_read(path), path)


def read_json_list(path: Path) -> list[dict[str, Any]]:
    """The JSON list of objects in a file of at most 64 MiB.

    Raises:
        IntegrityError: It cannot be read, is not JSON, too large, nested too deeply, or something else than such a list.
    """
    values = _parsed(_read(path), path)
    if not isinstance(values, list) or not all(isinstance(one, dict) for one in values):
        raise IntegrityError(f"{path} holds {_named(values)} where a list of objects belongs.", fix=_AGAIN)
    return values


def _read(path: Path) -> bytes:
    try:
        if not S_ISREG(path.stat().st_mode):
            # A pipe would be read for ever.
            raise IntegrityError(f"{path} is no regular file.", fix=_AGAIN)
        with path.open("rb") as file:
            content = file.read(_MAX_BYTES + 1)
    except (OSError, ValueError) as error:
        raise IntegrityError(f"{path} cannot be read: {error}.", fix=_AGAIN) from error
    if len(content) > _MAX_BYTES:
        raise IntegrityError(f"{path} has more than {_MAX_BYTES >> 20} MiB, which no such file has.", fix=_AGAIN)
    return content


def parse_json(content: bytes, path: Path) -> dict[str, Any]:
    """The JSON object in the content of a file, which errors name; see `read_json`."""
    values = _parsed(content, path)
    if not isinstance(values, dict):
        raise IntegrityError(f"{path} holds {_named(values)} where an object belongs.", fix=_AGAIN)
    return values


def _parsed(content: bytes, path: Path) -> Any:
    """The JSON value in the content of a file."""
    try:
        values = json.loads(content.decode("utf-8"))
        if _HALF_A_LETTER.search(content):
            # A half of a letter outside of the first 65,536, which no file's name and no text has alone.
            json.dumps(values, ensure_ascii=False).encode("utf-8")
    except (ValueError, RecursionError) as error:
        why = "it is nested too deeply" if isinstance(error, RecursionError) else str(error)
        raise IntegrityError(f"{path} is not valid JSON: {why}.", fix=_AGAIN) from error
    if _depth(values) > _MAX_DEPTH:
        raise IntegrityError(f"{path} is not valid JSON for a model: it is nested too deeply.", fix=_AGAIN)
    return values


def _depth(value: Any) -> int:
    """How deeply a JSON value is nested; counted level by level, as what is too deep cannot be followed."""
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
    """A file's content as it is, and the JSON object in it; see `read_json`."""
    content = _read(path)
    return content, parse_json(content, path)


def build(kind: type[Kind], values: Mapping[str, Any], where: str) -> Kind:
    """A dataclass from JSON values, each of the type that its field declares.

    Args:
        kind: The dataclass.
        values: Values by name of field; lists become tuples.
        where: What errors call it.

    Raises:
        SchemaError: A field that is unknown, missing, or of another type.
    """
    if not isinstance(values, Mapping):
        raise SchemaError(f"{where} is {_named(values)} where an object belongs.", fix=_AGAIN)
    declared = _declared(kind)  # type: ignore[arg-type]  # a class is hashable
    unknown = sorted(set(values) - set(declared))
    if unknown:
        raise SchemaError(f"{where} has {unknown[0]!r}, which nothing here knows.", fix=_AGAIN)
    missing = sorted(name for name, (_, required) in declared.items() if required and name not in values)
    if missing:
        raise SchemaError(f"{where} has no {missing[0]!r}.", fix=_AGAIN)
    return kind(**{name: _fitted(value, declared[name][0], f"{where}.{name}") for name, value in values.items()})


@functools.cache
def _declared(kind: type[Any]) -> dict[str, tuple[Any, bool]]:
    """Type of each field, and whether it has to be given."""
    hints = get_type_hints(kind)
    return {
        one.name: (hints[one.name], one.default is MISSING and one.default_factory is MISSING) for one in fields(kind)
    }


def _fitted(value: Any, hint: Any, where: str) -> Any:
    """A value as its type wants it, or a `SchemaError`."""
    origin, arguments = get_origin(hint), get_args(hint)
    if hint is Any:
        return value
    if origin in (Union, types.UnionType):
        return _one_of(value, arguments, where)
    if origin is Literal:
        if isinstance(value, str) and value in arguments:
            return value
    elif origin is tuple:
        if isinstance(value, list | tuple) and len(value) <= _MAX_ITEMS:
            kinds = arguments[:1] * len(value) if arguments[-1] is Ellipsis else arguments
            if len(kinds) == len(value):
                found = zip(value, kinds, strict=True)
                return tuple(_fitted(item, kind, f"{where}[{i}]") for i, (item, kind) in enumerate(found))
    elif origin is not None and issubclass(origin, Mapping):
        if isinstance(value, Mapping) and len(value) <= _MAX_ITEMS:
            return {key: _fitted(item, arguments[1], f"{where}.{key}") for key, item in value.items()}
    elif is_dataclass(hint):
        return build(hint, value, where)  # type: ignore[arg-type]
    elif hint is float:
        if isinstance(value, int | float) and not isinstance(value, bool):
            return value
    elif isinstance(value, hint) and (hint is bool or not isinstance(value, bool)):
        return value
    raise SchemaError(f"{where} is {_named(value)} where {_word(hint)} belongs.", fix=_AGAIN)


def _one_of(value: Any, hints: tuple[Any, ...], where: str) -> Any:
    if value is None and types.NoneType in hints:
        return None
    left = [hint for hint in hints if hint is not types.NoneType]
    for hint in left[:-1]:
        try:
            return _fitted(value, hint, where)
        except SchemaError:
            continue
    return _fitted(value, left[-1], where)


def _named(value: Any) -> str:
    text = repr(value)
    return f"{type(value).__name__} {text if len(text) <= 60 else text[:60] + '…'}"


def _word(hint: Any) -> str:
    return getattr(hint, "__name__", None) if isinstance(hint, type) else str(hint).replace("typing.", "")  # type: ignore[return-value]
