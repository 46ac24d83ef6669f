"""Choose the table columns that an operation reads, and convert a row to inputs of the engine."""

from __future__ import annotations

import reprlib
from collections.abc import Mapping, Sequence
from typing import Any

from ...errors import ConfigError, InputError, TaskError, did_you_mean
from ..operations import Operation
from .table_files import FailedRow


def find_columns(
    operation: Operation, columns: Sequence[str], named: Mapping[str, str] | None = None
) -> dict[str, str]:
    """Return the name of the table column for each input of an operation.

    The caller's choice comes first, then a column with a common name for the input, then the only remaining column.

    Raises:
        ConfigError: The caller named an unknown input or column.
        InputError: It is not clear which column to read for an input.
        TaskError: The operation cannot run on tables.
    """
    if not operation.reads:
        raise TaskError(
            f"The operation {operation.name!r} cannot run on the rows of a table.",
            fix="choose another operation: operation=... (--operation).",
        )
    uses, every = operation.reads, (*operation.reads, *operation.may_read)
    chosen: dict[str, str] = {}
    for use, name in (named or {}).items():
        if use not in every:
            raise ConfigError(
                f"The operation {operation.name!r} has no input {use!r}.{did_you_mean(use, every)}",
                fix=f"name a column for one of the inputs {', '.join(every)}.",
            )
        if name not in columns:
            raise ConfigError(
                f"The data has no column {name!r}.{did_you_mean(name, columns)}",
                fix=f"use one of {', '.join(columns)}.",
            )
        chosen[use] = name
    for use, names in uses.items():
        if use in chosen:
            continue
        free = [name for name in columns if name not in chosen.values()]
        candidates = [name for name in names if name in free]
        if not free or (not candidates and len(free) > 1):
            raise InputError(
                f"It is not clear which of the columns {', '.join(columns)} contains the input {use!r} of the operation "
                f"{operation.name!r}.",
                fix=f"name the column: --column {use}=NAME.",
            )
        chosen[use] = candidates[0] if candidates else free[0]
    return chosen


def inputs_of(operation: Operation, row: Mapping[str, Any], columns: Mapping[str, str]) -> Any:
    """Return the engine's inputs for a row of a table, or a `FailedRow` object with the reason.

    Args:
        operation: The operation.
        row: Values of the row by column name.
        columns: Name of the table column for each input.
    """
    values = {}
    for use, name in columns.items():
        value = row.get(name)
        if value is None:
            return FailedRow(f"{name!r} is missing")
        if use in operation.lists:
            if not isinstance(value, list) or not value or not all(isinstance(item, str) for item in value):
                return FailedRow(f"{name!r} is {reprlib.repr(value)}, not a list of texts")
        elif not isinstance(value, str):
            return FailedRow(f"{name!r} is {reprlib.repr(value)}, not a text")
        values[use] = value
    return operation.inputs(values)
