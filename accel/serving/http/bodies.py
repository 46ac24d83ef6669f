"""Parse and validate request bodies. Error messages are one sentence with the field, its value and the expected values."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, ClassVar, TypeVar

from pydantic import BaseModel, ConfigDict, ValidationError

from ...errors import did_you_mean
from ..non_finite import find_non_finite
from .replies import HttpError

_MAY_BE_INFINITE = re.compile(rb"NaN|Infinity|[0-9][eE]\+?[0-9]{3}")
_MOST_FIELDS = 12
"""Greatest number of field names in an error message."""
_LONGEST_VALUE = 60

Model = TypeVar("Model", bound=BaseModel)
Path = tuple[str | int, ...]


class Body(BaseModel):
    """Base class of request bodies; unknown fields are errors.

    Attributes:
        ignored: Accepted fields that do not change the response, with the reason.
        refused: Fields of the protocol that are not supported, with advice what to do instead.
        remedies: Advice for unsupported values, by field.
    """

    model_config = ConfigDict(extra="forbid", protected_namespaces=())

    ignored: ClassVar[Mapping[str, str]] = {}
    refused: ClassVar[Mapping[str, str]] = {}
    remedies: ClassVar[Mapping[str, str]] = {}


def parse(model: type[Model], content: bytes) -> Model:
    """Parse and validate the body of a request.

    Raises:
        HttpError: 400 if the body is not JSON or contains NaN or infinity; 422 if a field is invalid.
    """
    if _MAY_BE_INFINITE.search(content):
        _check_finite(content)
    try:
        return model.model_validate_json(content)
    except ValidationError as error:
        (first, *_) = error.errors(include_url=False, include_context=False, include_input=False)
        if first["type"] == "json_invalid":
            raise HttpError(
                400, f"The request body is not valid JSON: {first['msg']}.", kind="invalid_json",
                fix="send a JSON object; see the accepted fields at /docs.",
            ) from error  # fmt: skip
        raise invalid(error, model, json.loads(content)) from error


def _check_finite(content: bytes) -> None:
    try:
        body = json.loads(content)
        place = find_non_finite(body)
    except (ValueError, RecursionError):
        # The caller parses the body again and raises the error.
        return
    if place is not None:
        fields = body.items() if isinstance(body, dict) else ()
        param = next((name[:100] for name, value in fields if find_non_finite(value) is not None), None)
        raise HttpError(
            400, f"The request body contains NaN or a number that is too large: {place}.", param=param,
            fix="send only finite numbers.",
        )  # fmt: skip


def invalid(error: ValidationError, model: type[BaseModel], value: Any) -> HttpError:
    """Return the HTTP error that describes pydantic's validation errors in words.

    Args:
        error: The validation error of pydantic.
        model: The pydantic model of the body.
        value: The parsed body.
    """
    groups: dict[Path, list[Mapping[str, Any]]] = {}
    for item in error.errors(include_url=False, include_input=False):
        groups.setdefault(_real_path(item["loc"], value, missing=item["type"] == "missing"), []).append(item)
    schema = model.model_json_schema()
    paths = []
    for head in dict.fromkeys(path[:1] for path in groups):
        # For a union type, pydantic reports the errors of each alternative. The error to report is the deepest path at which all
        # alternatives fail.
        depth = max(len(path) for path in groups if path[:1] == head)
        deepest = [path for path in groups if path[:1] == head and len(path) == depth]
        agreed = [path for path in deepest if _is_agreed(groups[path], _at(schema, path, schema))]
        path = agreed[0] if agreed else deepest[0][:-1] if depth > 1 else deepest[0]
        groups.setdefault(path, groups[deepest[0]])
        paths.append(path)
    first = str(paths[0][0]) if paths[0] else None
    sentences = [_sentence(path, groups[path], model, schema, value) for path in paths[:3]]
    refused: Mapping[str, str] = {**getattr(model, "remedies", {}), **getattr(model, "refused", {})}
    fix = refused.get(first or "", "see the accepted fields and values at /docs.")
    return HttpError(422, " ".join(sentences), fix=fix, param=first and first[:100])


def _real_path(location: Sequence[str | int], value: Any, *, missing: bool) -> Path:
    """Return the path of an error in the body, without the names of union alternatives that pydantic adds."""
    path: list[str | int] = []
    for i, part in enumerate(location):
        inside = isinstance(value, dict) and part in value
        if inside or (isinstance(value, list) and isinstance(part, int) and part < len(value)):
            value = value[part]
        elif not (missing and i == len(location) - 1):
            continue
        path.append(part)
    return tuple(path)


_ALONE = {"missing", "extra_forbidden", "value_error"}


def _is_agreed(errors: Sequence[Mapping[str, Any]], alternatives: Sequence[Any]) -> bool:
    """Return whether every alternative of a union type has an error."""
    return len(errors) >= len(alternatives) or not _ALONE.isdisjoint(error["type"] for error in errors)


def _sentence(
    path: Path,
    errors: Sequence[Mapping[str, Any]],
    model: type[BaseModel],
    schema: Mapping[str, Any],
    value: Any,
) -> str:
    name, kinds = shown_path(path), {error["type"] for error in errors}
    fields = list(
        dict.fromkeys(field for part in _at(schema, path[:-1], schema) for field in part.get("properties", ()))
    )
    if kinds == {"extra_forbidden"}:
        field = str(path[-1])
        if field in getattr(model, "refused", {}) and len(path) == 1:
            return f"{name} is not supported."
        listed = ", ".join(fields) if len(fields) <= _MOST_FIELDS else ", ".join((*fields[:_MOST_FIELDS], "..."))
        return f"{name} is unknown.{did_you_mean(field, fields)} The fields are {listed}."
    expected = " or ".join(dict.fromkeys(words for part in _at(schema, path, schema) for words in _words(part, schema)))
    if "missing" in kinds:
        return f"{name} is missing: expected {expected or 'a value'}."
    value_error = next((error for error in errors if error["type"] == "value_error"), None)
    if value_error is not None:
        reason = str(value_error["ctx"]["error"]) if "ctx" in value_error else value_error["msg"]
        if reason.startswith("must "):
            return f"{name} {reason}."
        return f"{name}: {reason}." if path else f"{reason[:1].upper()}{reason[1:]}."
    for part in path:
        value = value[part]
    return f"{name} is {shown_value(value)}; expected {expected or errors[0]['msg']}."


def shown_path(path: Path) -> str:
    """Return a path in a body as text, such as `` `messages[0].content` ``."""
    text = "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in path).removeprefix(".")
    return f"`{text[:100]}`" if text else "The body"


def shown_value(value: Any) -> str:
    """Return a value as JSON, shortened if it is long."""
    text = json.dumps(value, ensure_ascii=False)
    return text if len(text) <= _LONGEST_VALUE else f"{text[: _LONGEST_VALUE - 3]}..."


# The functions below describe JSON schemas in words.


def _alternatives(schema: Mapping[str, Any], root: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:
    if "$ref" in schema:
        yield from _alternatives(root["$defs"][schema["$ref"].rpartition("/")[2]], root)
    elif "anyOf" in schema:
        for alternative in schema["anyOf"]:
            yield from _alternatives(alternative, root)
    else:
        yield schema


def _at(schema: Mapping[str, Any], path: Path, root: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """Return the JSON schemas that describe the value at a path in the request body."""
    schemas = list(_alternatives(schema, root))
    for part in path:
        if isinstance(part, int):
            inner = [branch["items"] for branch in schemas if "items" in branch]
        else:
            inner = [branch["properties"][part] for branch in schemas if part in branch.get("properties", {})]
            inner += [
                branch["additionalProperties"]
                for branch in schemas
                if isinstance(branch.get("additionalProperties"), dict)
            ]
        schemas = [each for branch in inner for each in _alternatives(branch, root)]
    return schemas


_NAMES = {
    "string": ("a text", "texts"), "integer": ("a whole number", "whole numbers"), "number": ("a number", "numbers"),
    "boolean": ("true or false", "true or false"), "null": ("null", "null"), "object": ("an object", "objects"),
    "array": ("a list", "lists"),
}  # fmt: skip
_BOUNDS = {
    "minimum": "from {}", "exclusiveMinimum": "above {}", "maximum": "up to {}", "exclusiveMaximum": "below {}",
    "minLength": "of at least {} characters", "maxLength": "of at most {} characters", "minItems": "with at least {} items",
    "maxItems": "with at most {} items", "maxProperties": "with at most {} fields",
}  # fmt: skip


def _words(schema: Mapping[str, Any], root: Mapping[str, Any], *, many: bool = False) -> Iterator[str]:
    """Yield descriptions of the values that a schema allows."""
    for alternative in _alternatives(schema, root):
        if "const" in alternative or "enum" in alternative:
            yield " or ".join(json.dumps(value) for value in alternative.get("enum", [alternative.get("const")]))
            continue
        if "type" not in alternative:
            yield "any value"
            continue
        words = _NAMES[alternative["type"]][many]
        if alternative["type"] == "array":
            inner = list(dict.fromkeys(_words(alternative.get("items", {}), root, many=True)))
            if alternative.get("maxItems") == 0:
                yield "an empty list"
                continue
            words += f" of {' or '.join(inner)}" if inner != ["any value"] else ""
        if alternative["type"] == "object" and "properties" in alternative:
            words += f" with {', '.join(alternative.get('required', alternative['properties']))}"
        if alternative.get("minLength") == 1 or alternative.get("minItems") == 1:
            words = words.replace("a text", "a text that is not empty").replace("a list", "a list that is not empty", 1)
        least = ("minLength", "minItems")
        bounds = [
            text.format(alternative[name])
            for name, text in _BOUNDS.items()
            if name in alternative and (name not in least or alternative[name] > 1)
        ]
        yield " ".join([words, *bounds])
