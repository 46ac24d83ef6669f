"""What an operation reads of a row of a table: which columns, and how they become the engine's inputs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from ...errors import ConfigError, InputError, TaskError, did_you_mean
from ..operations import Operation
from .table_files import Broken


def find_columns(
    operation: Operation, columns: Sequence[str], named: Mapping[str, str] | None = None
) -> dict[str, str]:
    """Column by use: those that the caller named, then names that tables often have, then the only column.

    Raises:
        ConfigError: A use or a column that is not there.
        InputError: No column is clearly the one.
        TaskError: The operation reads no table.
    """
    if not operation.reads:
        raise TaskError(f"{operation.name!r} is not asked of tables of texts.", fix="name another operation.")
    uses, every = operation.reads, (*operation.reads, *operation.may_read)
    found: dict[str, str] = {}
    for use, name in (named or {}).items():
        if use not in every:
            raise ConfigError(
                f"{operation.name} has no use for a column called {use!r}.{did_you_mean(use, every)}",
                fix=f"map {', '.join(every)}.",
            )
        if name not in columns:
            raise ConfigError(
                f"The data has no column {name!r}.{did_you_mean(name, columns)}",
                fix=f"use one of {', '.join(columns)}.",
            )
        found[use] = name
    for use, names in uses.items():
        if use in found:
            continue
        free = [name for name in columns if name not in found.values()]
        known = [name for name in names if name in free]
        if not free or (not known and len(free) > 1):
            raise InputError(
                f"None of the columns {', '.join(columns)} is clearly the {use}.",
                fix=f"say which: --column {use}=NAME.",
            )
        found[use] = known[0] if known else free[0]
    return found


def inputs_of(operation: Operation, row: Mapping[str, Any], columns: Mapping[str, str]) -> Any:
    """The engine's inputs of a row, or `Broken` with what is wrong with it.

    Args:
        operation: What is asked.
        row: With the columns that are read.
        columns: Column by use.
    """
    values = {}
    for use, name in columns.items():
        value = row.get(name)
        if value is None:
            return Broken(f"{name!r} is missing")
        if use in operation.lists:
            if not isinstance(value, list) or not value or not all(isinstance(item, str) for item in value):
                return Broken(f"{name!r} is {_shown(value)}, not a list of texts")
        elif not isinstance(value, str):
            return Broken(f"{name!r} is {_shown(value)}, not a text")
        values[use] = value
    return operation.inputs(values)


def check_needed(operation: Operation, options: Mapping[str, Any]) -> None:
    """Refuse to begin without what the operation needs.

    Raises:
        ConfigError: It is missing.
    """
    missing = [name for name in operation.needs if not options.get(name)]
    if missing:
        raise ConfigError(
            f"{operation.name} needs {', '.join(missing)}.", fix=f'pass --option \'{missing[0]}=["a", "b"]\'.'
        )


def _shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 40 else text[:37] + "..."
