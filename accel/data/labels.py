"""Labels as the model's numbers, numbers and texts, checked."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from ..errors import InputError
from .columns import inner
from .rows import Rows

_SHOWN = 5
IGNORED = -100
"""The tag of words that are not measured, as in PyTorch's losses."""


def label_ids(rows: Rows, use: str, config: Any) -> list[Any]:
    """The labels of rows as the model's numbers, nested as the column is.

    Names are looked up in the model's `label2id`. Numbers are taken as they are, except those of a `ClassLabel` whose
    names the model knows: these go by name, since data sets and models often number the same classes differently.

    Args:
        rows: The data, its columns mapped.
        use: `label` or `tags`.
        config: The model's config.

    Raises:
        InputError: Rows without a label, or labels that the model does not know.
    """
    values = rows.column(use)
    nested = use == "tags"
    flat = [item for value in values for item in (value or [])] if nested else values
    if nested and any(value is None or len(value) == 0 for value in values):
        empty = sum(value is None or len(value) == 0 for value in values)
        raise InputError(f"{empty} of {len(values)} rows have no {use}.", fix="remove them, or label them.")
    assert rows.sample.columns is not None
    feature = rows.dataset.features[rows.sample.columns[use]]
    translate = translation(flat, inner(feature) if nested else feature, config, rows)
    return [[translate(item) for item in value] for value in values] if nested else [translate(v) for v in values]


def translation(flat: Sequence[Any], feature: Any, config: Any, rows: Rows) -> Callable[[Any], int]:
    """From a label in the data to the model's number, after checking that every label has one."""
    label2id = {str(name): int(i) for name, i in (getattr(config, "label2id", None) or {}).items()}
    count = int(getattr(config, "num_labels", len(label2id)))
    unlabelled = sum(value is None or value == -1 for value in flat)
    if unlabelled:
        raise InputError(
            f"{unlabelled} of {len(flat)} labels of {rows.sample.source} are missing (empty or -1).",
            fix="use a labelled split, or remove these rows.",
        )
    folded = {name.casefold(): i for name, i in label2id.items()}
    by_name = folded if len(folded) == len(label2id) else label2id

    def key(name: Any) -> str:
        return str(name).casefold() if by_name is folded else str(name)

    names = list(getattr(feature, "names", None) or [])
    if names and all(key(name) in by_name for name in names):
        return lambda value: value if value == IGNORED else by_name[key(names[value])]
    if all(isinstance(value, str) for value in flat):
        if any(key(value) in by_name for value in flat) and any(
            value.isdecimal() and key(value) not in by_name for value in flat
        ):
            raise InputError(
                f"The labels of {rows.sample.source} are names and numbers mixed: {_some(sorted(set(flat)))}.",
                fix="use one or the other in the whole column.",
            )
        unknown = sorted({value for value in flat if key(value) not in by_name})
        if unknown:
            raise InputError(
                f"{_some(unknown)} in {rows.sample.source} are labels that the model does not know; it knows "
                f"{_some(list(label2id))}.",
                fix="use data with the model's labels, or put the names into the model's config (id2label, label2id).",
            )
        return lambda value: by_name[key(value)]
    if not all(isinstance(value, int | float) and float(value).is_integer() for value in flat):
        raise InputError(
            f"The labels of {rows.sample.source} are neither names nor whole numbers: {_some(sorted(set(map(str, flat))))}.",
            fix="map another column: columns={'label': '<column>'}, or --column label=<column>.",
        )
    outside = sorted({int(value) for value in flat if not 0 <= value < count and value != IGNORED})
    if outside:
        raise InputError(
            f"{_some(outside)} in {rows.sample.source} are labels that the model does not know; it has {count}, from 0.",
            fix="use data with the model's labels.",
        )
    return int


def numbers(rows: Rows, use: str) -> list[float]:
    """A column of numbers.

    Raises:
        InputError: One is missing or not finite.
    """
    import math

    values = rows.column(use)
    bad = sum(value is None or not math.isfinite(value) for value in values)
    if bad:
        raise InputError(f"{bad} of {len(values)} rows have no {use}.", fix="remove them, or fill them in.")
    return [float(value) for value in values]


def texts(rows: Rows, use: str) -> list[str]:
    """A column of text.

    Raises:
        InputError: One is missing.
    """
    values = rows.column(use)
    bad = sum(not isinstance(value, str) for value in values)
    if bad:
        raise InputError(
            f"{bad} of {len(values)} rows of {rows.sample.source} have no {use}.", fix="remove them, or fill them in."
        )
    return values


def accepted_answers(value: Any, rows: Rows) -> list[str]:
    """Accepted answers of a row: `{"text": [...]}` as in SQuAD, a list, or one text; empty for unanswerable."""
    if isinstance(value, Mapping):
        value = value.get("text")
    if isinstance(value, str):
        return [value]
    if isinstance(value, Sequence) and all(isinstance(text, str) for text in value):
        return list(value)
    raise InputError(
        f"An answer of {rows.sample.source} is {value!r}.",
        fix="give a text, a list of texts, or {'text': [...]} as SQuAD does.",
    )


def candidate_texts(rows: Rows, names_in: Callable[[Mapping[str, Any]], list[str]] | None = None) -> list[str]:
    """Texts that a model compares its inputs with: a column of texts, else the names of the data's classes, each once.

    Args:
        rows: The data, its columns mapped.
        names_in: Finds the names of classes among features, where they are not those of a column.

    Raises:
        InputError: The data has neither.
    """
    features = rows.dataset.features
    if rows.has("text"):
        found = texts(rows, "text")
    elif names_in is not None:
        found = names_in(features)
    else:
        found = next((list(names) for one in features.values() if (names := getattr(one, "names", None))), [])
    if not found:
        raise InputError(
            f"{rows.sample.source} holds no texts to compare with, and no classes with names.",
            fix="say which column holds texts: columns={'text': '<column>'}, or --column text=<column>.",
        )
    return list(dict.fromkeys(found))


def _some(values: Sequence[Any]) -> str:
    shown = ", ".join(repr(value) for value in values[:_SHOWN])
    return shown if len(values) <= _SHOWN else f"{shown} and {len(values) - _SHOWN} more"
