"""Convert labels of a data set to label ids of the model, and read columns of numbers and texts. Missing values are errors."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from ..errors import InputError
from .columns import inner
from .rows import DatasetRows

_SHOWN = 5
IGNORED = -100
"""Label id of words that the metric ignores. The value is the default of `ignore_index` in PyTorch's losses."""


def label_ids(rows: DatasetRows, use: str, config: Any) -> list[Any]:
    """Return the labels of the rows as label ids of the model, nested like the column.

    Label names are looked up in the model's `label2id`. Integers are used as label ids, with one exception: for a
    `ClassLabel` column whose names are all in `label2id`, the names are looked up, because data sets and models often number
    their classes differently.

    Args:
        rows: The data with mapped columns.
        use: Use of the column, `label` or `tags`.
        config: The model's config.

    Raises:
        InputError: A row has no label, or the model does not have the label.
    """
    values = rows.column(use)
    nested = use == "tags"
    flat = [item for value in values for item in (value or [])] if nested else values
    if nested and any(value is None or len(value) == 0 for value in values):
        empty = sum(value is None or len(value) == 0 for value in values)
        raise InputError(
            f"{empty} of {len(values)} rows have no value in the {use!r} column.",
            fix="remove these rows, or add their labels.",
        )
    feature = rows.feature(use)
    translate = translation(flat, inner(feature) if nested else feature, config, rows)
    return [[translate(item) for item in value] for value in values] if nested else [translate(v) for v in values]


def translation(flat: Sequence[Any], feature: Any, config: Any, rows: DatasetRows) -> Callable[[Any], int]:
    """Return a function that maps a label of the data to the model's label id, after checking that every label has an id."""
    label2id = {str(name): int(i) for name, i in (getattr(config, "label2id", None) or {}).items()}
    count = int(getattr(config, "num_labels", len(label2id)))
    unlabelled = sum(value is None or value == -1 for value in flat)
    if unlabelled:
        raise InputError(
            f"{unlabelled} of {len(flat)} labels in {rows.sample.source} are missing (empty or -1).",
            fix="use a split with labels, or remove the rows without a label.",
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
                f"The label column of {rows.sample.source} mixes label names and label ids: {_some(sorted(set(flat)))}.",
                fix="use only names or only ids in the whole column.",
            )
        unknown = sorted({value for value in flat if key(value) not in by_name})
        if unknown:
            raise InputError(
                f"{rows.sample.source} has labels that are not in the label2id of the model's config: {_some(unknown)}. The labels "
                f"of the model are {_some(list(label2id))}.",
                fix="use data with the labels of the model, or add the label names to the model's config (id2label, label2id).",
            )
        return lambda value: by_name[key(value)]
    if not all(isinstance(value, int | float) and float(value).is_integer() for value in flat):
        raise InputError(
            f"The labels of {rows.sample.source} must be label names or whole numbers, but they are "
            f"{_some(sorted(set(map(str, flat))))}.",
            fix="map another column: columns={'label': '<column>'}, or --column label=<column>.",
        )
    outside = sorted({int(value) for value in flat if not 0 <= value < count and value != IGNORED})
    if outside:
        raise InputError(
            f"{rows.sample.source} has the label ids {_some(outside)}, but the model has only the ids 0 to {count - 1}.",
            fix="use data with the labels of the model.",
        )
    return int


def numbers(rows: DatasetRows, use: str) -> list[float]:
    """Return a column of numbers.

    Raises:
        InputError: A value is missing or not finite.
    """
    import math

    values = rows.column(use)
    bad = sum(value is None or not math.isfinite(value) for value in values)
    if bad:
        raise InputError(
            f"{bad} of {len(values)} rows have no finite number in the {use!r} column.",
            fix="remove these rows, or add the missing numbers.",
        )
    return [float(value) for value in values]


def texts(rows: DatasetRows, use: str) -> list[str]:
    """Return a column of texts.

    Raises:
        InputError: A text is missing.
    """
    values = rows.column(use)
    bad = sum(not isinstance(value, str) for value in values)
    if bad:
        raise InputError(
            f"{bad} of {len(values)} rows of {rows.sample.source} have no text in the {use!r} column.",
            fix="remove these rows, or add the missing texts.",
        )
    return values


def accepted_answers(value: Any, rows: DatasetRows) -> list[str]:
    """Return the accepted answers of a question.

    The value is `{"text": [...]}` as in SQuAD, a list of texts, or one text. The result is empty if the question has no answer.
    """
    if isinstance(value, Mapping):
        value = value.get("text")
    if isinstance(value, str):
        return [value]
    if isinstance(value, Sequence) and all(isinstance(text, str) for text in value):
        return list(value)
    raise InputError(
        f"An answer in {rows.sample.source} is {value!r}, which accel cannot read.",
        fix="use a text, a list of texts, or {'text': [...]} as in SQuAD.",
    )


def candidate_texts(rows: DatasetRows, names_in: Callable[[Mapping[str, Any]], list[str]] | None = None) -> list[str]:
    """Return the candidate texts that a zero-shot model compares its inputs with, without duplicates.

    They come from the data's column of texts or, without such a column, from the class names of the data.

    Args:
        rows: The data with mapped columns.
        names_in: Function that returns the class names from the features of the data; by default, the names of the first
            `ClassLabel` column.

    Raises:
        InputError: The data has neither texts nor class names.
    """
    features = rows.dataset.features
    if rows.has("text"):
        candidates = texts(rows, "text")
    elif names_in is not None:
        candidates = names_in(features)
    else:
        candidates = next(
            (list(names) for feature in features.values() if (names := getattr(feature, "names", None))), []
        )
    if not candidates:
        raise InputError(
            f"{rows.sample.source} has no column of candidate texts and no class names. A zero-shot model compares its inputs with "
            "such texts.",
            fix="name the column with the texts: columns={'text': '<column>'}, or --column text=<column>.",
        )
    return list(dict.fromkeys(candidates))


def _some(values: Sequence[Any]) -> str:
    shown = ", ".join(repr(value) for value in values[:_SHOWN])
    return shown if len(values) <= _SHOWN else f"{shown} and {len(values) - _SHOWN} more"
