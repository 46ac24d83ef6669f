"""Map the columns of a data set to their uses in a task (`text`, `label`, ...).

The caller names the columns, or `map_columns` finds them by their name or type.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from ..errors import ConfigError, InputError, PluginError, did_you_mean
from ..interfaces.task_registry import measured_tasks, task_spec
from ..interfaces.task_spec import Column, Holds, TaskSpec
from .rows import DatasetRows


def _is_media(feature: Any) -> bool:
    return type(feature).__name__ in ("Image", "Audio", "Video")


def is_text(feature: Any) -> bool:
    """Return whether a column holds text and not media (image, audio or video)."""
    return getattr(feature, "dtype", "") in ("string", "large_string") and not _is_media(feature)


def _is_label(feature: Any) -> bool:
    dtype = str(getattr(feature, "dtype", ""))
    return type(feature).__name__ in ("ClassLabel", "Value") and dtype.startswith(
        ("int", "uint", "string", "large_string", "bool", "float")
    )


def _is_number(feature: Any) -> bool:
    return type(feature).__name__ == "Value" and str(feature.dtype).startswith(("int", "uint", "float"))


def _is_map(feature: Any) -> bool:
    """Return whether a column holds images, or arrays with at least two axes."""
    return type(feature).__name__ in ("Image", "Array2D", "Array3D") or inner(inner(feature)) is not None


def inner(feature: Any) -> Any:
    """Return the feature type of the items of a list column, or `None` for other columns."""
    if isinstance(feature, list):
        return feature[0]
    return getattr(feature, "feature", None) if type(feature).__name__ in ("List", "LargeList", "Sequence") else None


def _is_sound(feature: Any) -> bool:
    if isinstance(feature, Mapping):
        return {"array", "sampling_rate"} <= set(feature)
    return type(feature).__name__ == "Audio" or is_text(feature) or _is_number(inner(feature))


def _is_video(feature: Any) -> bool:
    """Return whether a column holds videos: lists of images, or arrays with four axes."""
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
"""For each value of `Column.holds`: a check of the column's feature type, and a description for messages."""


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


def map_columns(
    rows: DatasetRows, task: str, columns: Mapping[str, str] | None = None, *, answers: bool = True
) -> DatasetRows:
    """Find the data column for each use of a task. The uses of text classification, for example, are `text` and `label`.

    The caller's mapping has priority. For other uses, a column with a usual name is chosen (`sentence` for `text`). If there is no
    such column, the only remaining column of the right type is chosen.

    Args:
        rows: The data.
        task: The task; its `TaskSpec.columns` list the uses.
        columns: Column name by use (such as `text` or `label`). The other uses are mapped automatically.
        answers: Whether references (labels, tags, answers or scores) are needed. Calibration needs none.

    Raises:
        ConfigError: `columns` contains a column or a use that does not exist.
        InputError: No column, or more than one, fits a use; the message lists the columns.
    """
    spec = task_spec(task)
    if not spec.columns:
        raise InputError(
            f"The task {spec.name!r} does not declare data columns, so accel cannot read rows for it.",
            fix="pass batches of inputs instead: an iterable of dictionaries of tensors."
            if not answers
            else f"use one of the tasks whose accuracy accel measures: {', '.join(measured_tasks())}.",
        )
    features = dict(rows.dataset.features)
    mapping = _checked(columns or {}, spec, features)
    uses = {column.use for column in spec.columns}
    if "text" in uses and "text" not in mapping:
        pair = next((p for p in _PAIRS if all(is_text(features.get(name)) for name in p)), None)
        if pair is not None and not {"label", *mapping.values()} & set(pair):
            mapping |= {use: name for use, name in zip(("text", "text_pair"), pair, strict=True) if use in uses}
    for column in spec.columns:
        if column.use not in mapping and (name := _guess(column, features, mapping, spec.columns)) is not None:
            mapping[column.use] = name
    for column in spec.columns:
        needed = column.needed == "always" or (answers and column.needed == "measuring")
        if column.use not in mapping and needed:
            raise _unmapped(rows, column, features, mapping)
    unread = set() if answers else {column.use for column in spec.columns if column.answer}
    return DatasetRows(
        rows.dataset, replace(rows.sample, columns={use: c for use, c in mapping.items() if use not in unread})
    )


def _checked(columns: Mapping[str, str], spec: TaskSpec, features: Mapping[str, Any]) -> dict[str, str]:
    """Check and return the caller's mapping from use to column name.

    Raises:
        ConfigError: A use or a column is unknown, or a column has the wrong type.
    """
    uses = {column.use: column for column in spec.columns}
    for use, name in columns.items():
        if use not in uses:
            raise ConfigError(
                f"columns maps {use!r}, which the task {spec.name!r} does not use.{did_you_mean(use, uses)}",
                fix=f"map only {', '.join(uses)}.",
            )
        if name not in features:
            raise ConfigError(
                f"The data has no column {name!r}.{did_you_mean(name, features)} Its columns are {_listing(features)}.",
                fix=f"map {use!r} to a column of the data.",
            )
        fits, holds = _kind_of(uses[use])
        if not fits(features[name]):
            raise ConfigError(
                f"{use!r} must be a column of {holds}, but the column {name!r} has the type {features[name]}.",
                fix=f"map {use!r} to another column of the data: {_listing(features)}.",
            )
    return dict(columns)


def _kind_of(column: Column) -> tuple[Callable[[Any], bool], str]:
    """Return the function that checks the type of a data column, and a description of the accepted types.

    Raises:
        PluginError: The `Column` in the task's `TaskSpec` has an unknown value of `holds`.
    """
    if column.holds not in _FITS:
        raise PluginError(
            f"The TaskSpec declares the column {column.use!r} with the unknown value holds={column.holds!r}."
            f"{did_you_mean(column.holds, _FITS)}",
            fix=f"use one of {', '.join(_FITS)} in `Column(holds=...)`.",
        )
    return _FITS[column.holds]


def _guess(
    column: Column, features: Mapping[str, Any], mapping: Mapping[str, str], columns: Sequence[Column]
) -> str | None:
    if column.needed == "named":
        return None
    fits, _ = _kind_of(column)
    free = {name: feature for name, feature in features.items() if name not in mapping.values()}
    for name in column.known:
        if name in free and fits(free[name]):
            return name
    if column.use in ("text_pair", "audio_pair") or column.needed == "known":
        return None
    # Do not choose between several matching columns, and skip columns whose name is usual for another use.
    others = {name for other in columns if other is not column for name in other.known}
    left = [name for name, feature in free.items() if fits(feature) and name not in others]
    return left[0] if len(left) == 1 else None


def _unmapped(rows: DatasetRows, column: Column, features: Mapping[str, Any], mapping: Mapping[str, str]) -> InputError:
    mapped = f" Mapped columns: {', '.join(f'{use} = {name}' for use, name in mapping.items())}." if mapping else ""
    return InputError(
        f"accel cannot decide which column of {rows.sample.source} is the {column.use!r} column ({_kind_of(column)[1]}). "
        f"The columns are {_listing(features)}.{mapped}",
        fix=f"name the column: columns={{{column.use!r}: '<column>'}}, or --column {column.use}=<column>.",
    )


def _listing(features: Mapping[str, Any]) -> str:
    return ", ".join(f"{name} ({_kind(feature)})" for name, feature in features.items())


def _kind(feature: Any) -> str:
    item = inner(feature)
    if item is not None:
        return f"list of {_kind(item)}"
    dtype = str(getattr(feature, "dtype", type(feature).__name__))
    return {"large_string": "string"}.get(dtype, "label" if type(feature).__name__ == "ClassLabel" else dtype)
