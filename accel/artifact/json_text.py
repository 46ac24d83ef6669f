"""JSON that every reader takes: Python's writer has words for NaN and infinity, which JSON has not."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from typing import Any


def json_text(
    value: Any,
    *,
    indent: int | None = None,
    ensure_ascii: bool = False,
    default: Callable[[Any], Any] | None = None,
) -> str:
    """A JSON text; a number that is NaN or infinite is `null`: it was not measured.

    Args:
        value: Of JSON's types.
        indent: Of the lines; one line when `None`.
        ensure_ascii: Escape other letters.
        default: Makes a value of JSON's types from one of another.
    """
    try:
        return json.dumps(value, indent=indent, ensure_ascii=ensure_ascii, default=default, allow_nan=False)
    except ValueError:
        return json.dumps(_finite(value), indent=indent, ensure_ascii=ensure_ascii, default=default, allow_nan=False)


def _finite(value: Any) -> Any:
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, dict):
        return {name: _finite(item) for name, item in value.items()}
    return [_finite(item) for item in value] if isinstance(value, list | tuple) else value
