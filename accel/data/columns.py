"""What the columns of a data set are used as: named by the caller, known by name, or the only one of their kind."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from ..errors import ConfigError, InputError, did_you_mean
from ..interfaces.task_registry import measured_tasks, task_spec
from ..interfaces.task_spec import Column, Holds, TaskSpec
from .rows import Rows


def _is_media(feature: Any) -> bool:
    return type(feature).__name__ in ("Image", "Audio", "Video")


def is_text(feature: Any) -> bool:
    """Whether a column holds text, and no media."""
    return getattr(feature, "dtype", "") in ("string", "large_string") and not _is_media(feature)


def _is_label(feature: Any) -> bool:
    dtype = str(getattr(feature, "dtype", ""))
    return type(feature).__name__ in ("ClassLabel", "Value") and dtype.startswith(
        ("int", "uint", "string", "large_string", "bool", "float")
    )


def _is_number(feature: Any) -> bool:
    return type(feature).__name__ == "Value" and str(feature.dtype).startswith(("int", "uint", "float"))


def _is_map(feature: Any) -> bool:
    """Pictures, or arrays of two axes and more."""
    return type(feature).__name__ in ("Image", "Array2D", "Array3D") or inner(inner(feature)) is not None


def inner(feature: Any) -> Any:
    """The feature of a list's items, or `None`."""
    if isinstance(feature, list):
        return feature[0]
    return getattr(feature, "feature", None) if type(feature).__name__ in ("List", "LargeList", "Sequence") else None


def _is_sound(feature: Any) -> bool:
    if isinstance(feature, Mapping):
        return {"array", "sampling_rate"} <= set(feature)
    return type(feature).__name__ == "Audio" or is_text(feature) or _is_number(inner(feature))


def _is_video(feature: Any) -> bool:
    """Lists of pictures, or arrays of four axes."""
    frame = inner(feature)
    return type(feature).__name__ == "Array4D" or type(frame).__name__ == "Image" or inner(inner(frame)) is not None


_FITS: Mapping[Holds, tuple[Callable[[Any], bool], str]] = {
    "text": (is_text, "text"),
    "texts": (lambda feature: is_text(feature) or is_text(inner(feature)), "texts"),
    "words": (lambda feature: is_text(inner(feature)), "lists of words"),
    "label": (_is_label, "labels"),
    "tags": (lambda feature: inner(feature) is not None and _is_label(inner(feature)), "lists of labels"),
    "answers": (lambda _: True, "answers"),
    "number": (_is_number, "numbers"),
    "map": (lambda feature: _is_map(feature) or is_text(feature), "pictures with a value for each pixel"),
    "objects": (lambda feature: isinstance(feature, dict) or isinstance(inner(feature), dict), "boxes with classes"),
    "image": (lambda feature: type(feature).__name__ == "Image" or is_text(feature), "images"),
    "audio": (_is_sound, "sounds"),
    "video": (_is_video, "videos as lists of frames"),
    "boxes": (
        lambda feature: _is_number(inner(inner(feature))) or type(feature).__name__ == "Array2D",
        "lists of boxes",
    ),
}
"""What a column must be to hold something, and how messages call it."""


_PAIRS = (
    ("sentence1", "sentence2"),
    ("premise", "hypothesis"),
    ("question1", "question2"),
    ("question", "sentence"),
    ("query", "passage"),
    ("query", "document"),
    ("text", "text_pair"),
    ("text_a", "text_b"),
    ("text1", "text2"),
)


def map_columns(rows: Rows, task: str, columns: Mapping[str, str] | None = None, *, answers: bool = True) -> Rows:
    """Find out which column is used as what.

    A column that the caller names wins, then names that data sets for the task often have, then the only column left that
    holds the right kind of thing.

    Args:
        rows: The data.
        task: Its `TaskSpec.columns` say which uses there are.
        columns: Column by use, for those that are not to be guessed.
        answers: Whether labels, tags, answers or scores are needed, which calibration does without.

    Raises:
        ConfigError: `columns` names a column or a use that does not exist.
        InputError: A use for which no column, or more than one, fits; the message lists the columns.
    """
    spec = task_spec(task)
    if not spec.columns:
        raise InputError(
            f"accel does not know which columns {spec.name} needs.",
            fix="pass batches of inputs instead: an iterable of dictionaries of tensors."
            if not answers
            else f"measure one of {', '.join(measured_tasks())}.",
        )
    features = dict(rows.dataset.features)
    found = _checked(columns or {}, spec, features)
    uses = {column.use for column in spec.columns}
    if "text" in uses and "text" not in found:
        pair = next((p for p in _PAIRS if all(is_text(features.get(name)) for name in p)), None)
        if pair is not None and not {"label", *found.values()} & set(pair):
            found |= {use: name for use, name in zip(("text", "text_pair"), pair, strict=True) if use in uses}
    for column in spec.columns:
        if column.use not in found and (name := _guess(column, features, found, spec.columns)) is not None:
            found[column.use] = name
    for column in spec.columns:
        needed = column.needed == "always" or (answers and column.needed == "measuring")
        if column.use not in found and needed:
            raise _unmapped(rows, column, features, found)
    unread = set() if answers else {column.use for column in spec.columns if column.answer}
    return Rows(rows.dataset, replace(rows.sample, columns={use: c for use, c in found.items() if use not in unread}))


def _checked(columns: Mapping[str, str], spec: TaskSpec, features: Mapping[str, Any]) -> dict[str, str]:
    """The caller's own mapping, checked.

    Raises:
        ConfigError: A use or a column that does not exist, or one that holds something else.
    """
    uses = {column.use: column for column in spec.columns}
    for use, name in columns.items():
        if use not in uses:
            raise ConfigError(
                f"{spec.name} has no use for a column called {use!r}.{did_you_mean(use, uses)}",
                fix=f"map {', '.join(uses)}.",
            )
        if name not in features:
            raise ConfigError(
                f"The data has no column {name!r}.{did_you_mean(name, features)} It has {_listing(features)}.",
                fix=f"name one of them for {use!r}.",
            )
        fits, holds = _FITS[uses[use].holds]
        if not fits(features[name]):
            raise ConfigError(
                f"The column {name!r} does not hold {holds}: {features[name]}.",
                fix=f"name another one for {use!r}: {_listing(features)}.",
            )
    return dict(columns)


def _guess(
    column: Column, features: Mapping[str, Any], found: Mapping[str, str], columns: Sequence[Column]
) -> str | None:
    if column.needed == "named":
        return None
    fits, _ = _FITS[column.holds]
    free = {name: feature for name, feature in features.items() if name not in found.values()}
    for name in column.known:
        if name in free and fits(free[name]):
            return name
    if column.use in ("text_pair", "audio_pair") or column.needed == "known":
        return None
    # Of several columns that could be a label, none is taken on a guess; a column known to be the text is no label.
    others = {name for other in columns if other is not column for name in other.known}
    left = [name for name, feature in free.items() if fits(feature) and name not in others]
    return left[0] if len(left) == 1 else None


def _unmapped(rows: Rows, column: Column, features: Mapping[str, Any], found: Mapping[str, str]) -> InputError:
    mapped = f" Found: {', '.join(f'{use} = {name}' for use, name in found.items())}." if found else ""
    return InputError(
        f"None of the columns of {rows.sample.source} is clearly the {column.use} ({_FITS[column.holds][1]}): "
        f"{_listing(features)}.{mapped}",
        fix=f"say which one it is: columns={{{column.use!r}: '<column>'}}, or --column {column.use}=<column>.",
    )


def _listing(features: Mapping[str, Any]) -> str:
    return ", ".join(f"{name} ({_kind(feature)})" for name, feature in features.items())


def _kind(feature: Any) -> str:
    item = inner(feature)
    if item is not None:
        return f"list of {_kind(item)}"
    word = str(getattr(feature, "dtype", type(feature).__name__))
    return {"large_string": "string"}.get(word, "label" if type(feature).__name__ == "ClassLabel" else word)
