"""Write valid JSON for NaN and infinite numbers. Python's JSON writer emits `NaN` and `Infinity`, which are invalid
JSON.
"""

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
    """Return the JSON text of a value. NaN and infinity become `null`.

    Args:
        value: The value to write, of types that JSON supports.
        indent: Number of spaces of indentation; one line without indentation when `None`.
        ensure_ascii: Whether characters outside ASCII are escaped.
        default: Function that converts values of other types.
    """
    try:
        return json.dumps(value, indent=indent, ensure_ascii=ensure_ascii, default=default, allow_nan=False)
    except ValueError:
        return json.dumps(finite(value), indent=indent, ensure_ascii=ensure_ascii, default=default, allow_nan=False)


def finite(value: Any) -> Any:
    """Return a copy of a JSON value in which NaN and infinite numbers are `None`."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, dict):
        return {name: finite(item) for name, item in value.items()}
    return [finite(item) for item in value] if isinstance(value, list | tuple) else value
