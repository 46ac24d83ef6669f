"""What an operation reads of a row of a table: which columns, and how they become the engine's inputs.

A load test and offline inference ask the same things of the same tables. An operation that they should know is a line in `ASKED`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ...errors import ConfigError, InputError, TaskError, did_you_mean
from .table_files import Broken, Row

_KNOWN: Mapping[str, tuple[str, ...]] = {
    "text": ("text", "sentence", "content", "prompt", "input", "query", "question"),
    "question": ("question", "query"),
    "context": ("context", "passage", "paragraph", "text"),
    "query": ("query", "question", "anchor"),
    "documents": ("documents", "passages", "candidates"),
}
"""Names that columns often have, the likeliest first."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """An operation of an engine as it is asked of rows.

    Attributes:
        uses: What is read.
        may: What is read where the caller names a column for it.
        inputs: The engine's inputs, of values by use.
        needed: Options without which it does nothing.
    """

    uses: tuple[str, ...] = ("text",)
    may: tuple[str, ...] = ()
    inputs: Callable[[Mapping[str, Any]], Any]
    needed: tuple[str, ...] = ()


def _text(values: Mapping[str, Any]) -> Any:
    return values["text"]


def _text_or_pair(values: Mapping[str, Any]) -> Any:
    return dict(values) if "text_pair" in values else values["text"]


ASKED: Mapping[str, Asked] = {
    "text-classification": Asked(may=("text_pair",), inputs=_text_or_pair),
    "token-classification": Asked(inputs=_text),
    "question-answering": Asked(uses=("question", "context"), inputs=dict),
    "zero-shot-classification": Asked(inputs=_text, needed=("candidate_labels",)),
    "fill-mask": Asked(inputs=_text),
    "feature-extraction": Asked(inputs=_text),
    "embed": Asked(inputs=_text),
    "rank": Asked(uses=("query", "documents"), inputs=lambda values: (values["query"], values["documents"])),
    "tokenize": Asked(inputs=lambda values: [values["text"]]),
    "summarization": Asked(inputs=_text),
    "translation": Asked(inputs=_text),
    "generate": Asked(inputs=_text),
}
_LISTS = ("documents",)


def asked(operation: str) -> Asked:
    """How an operation is asked.

    Raises:
        TaskError: Of no table of texts.
    """
    if operation not in ASKED:
        raise TaskError(
            f"{operation!r} is not asked of tables of texts.{did_you_mean(operation, ASKED)}",
            fix=f"use one of {', '.join(ASKED)}.",
        )
    return ASKED[operation]


def find_columns(operation: str, columns: Sequence[str], named: Mapping[str, str] | None = None) -> dict[str, str]:
    """Column by use: those that the caller named, then names that tables often have, then the only column.

    Raises:
        ConfigError: A use or a column that is not there.
        InputError: No column is clearly the one.
    """
    one = asked(operation)
    found: dict[str, str] = {}
    for use, name in (named or {}).items():
        if use not in (*one.uses, *one.may):
            raise ConfigError(
                f"{operation} has no use for a column called {use!r}.{did_you_mean(use, one.uses)}",
                fix=f"map {', '.join((*one.uses, *one.may))}.",
            )
        if name not in columns:
            raise ConfigError(
                f"The data has no column {name!r}.{did_you_mean(name, columns)}",
                fix=f"use one of {', '.join(columns)}.",
            )
        found[use] = name
    for use in one.uses:
        if use in found:
            continue
        free = [name for name in columns if name not in found.values()]
        known = [name for name in _KNOWN[use] if name in free]
        if not free or (not known and len(free) > 1):
            raise InputError(
                f"None of the columns {', '.join(columns)} is clearly the {use}.",
                fix=f"say which: --column {use}=NAME.",
            )
        found[use] = known[0] if known else free[0]
    return found


def inputs_of(operation: str, row: Row, columns: Mapping[str, str]) -> Any:
    """The engine's inputs of a row, or `Broken` with what is wrong with it.

    Args:
        operation: One of `ASKED`.
        row: With the columns that are read.
        columns: Column by use.
    """
    if isinstance(row, Broken):
        return row
    values = {}
    for use, name in columns.items():
        value = row.get(name)
        if value is None:
            return Broken(f"{name!r} is missing")
        if use in _LISTS:
            if not isinstance(value, list) or not value or not all(isinstance(item, str) for item in value):
                return Broken(f"{name!r} is {_shown(value)}, not a list of texts")
        elif not isinstance(value, str):
            return Broken(f"{name!r} is {_shown(value)}, not a text")
        values[use] = value
    return asked(operation).inputs(values)


def check_options(operation: str, options: Mapping[str, Any]) -> None:
    """Refuse to begin without what the operation needs.

    Raises:
        ConfigError: It is missing.
    """
    missing = [name for name in asked(operation).needed if not options.get(name)]
    if missing:
        raise ConfigError(f"{operation} needs {', '.join(missing)}.", fix=f'pass --option \'{missing[0]}=["a", "b"]\'.')


def _shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 40 else text[:37] + "..."
