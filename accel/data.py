"""Rows to measure and to calibrate with: where they come from, what their columns mean, and which were used.

`load_rows` reads a data set in memory, a file or a Hub data set; `map_columns` finds out which column is the text, the
label and so on from the task; `take` draws a sample that can be drawn again; `label_ids` translates labels into the
model's numbers.
"""

from __future__ import annotations

import hashlib
import os
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from .errors import ArtifactNotFoundError, ConfigError, InputError, did_you_mean
from .tasks import task_spec

_READERS = {
    ".csv": "csv",
    ".tsv": "csv",
    ".json": "json",
    ".jsonl": "json",
    ".ndjson": "json",
    ".parquet": "parquet",
    ".txt": "text",
}
_HUB_REVISION = re.compile(r"@([0-9a-f]{40})/")
_SHOWN = 5
IGNORED = -100
"""The tag of words that are not measured, as in PyTorch's losses."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """Which rows were used, as manifests record it.

    Attributes:
        source: Hub id, file name, or the builder of a data set in memory.
        split: Its split, where it has one.
        config: Its configuration on the Hub, where it has one.
        revision: Its commit on the Hub, when known.
        fingerprint: What `datasets` calls this content and its processing.
        sha256: Of a file.
        total: Rows before sampling.
        n: Rows used.
        seed: Of the choice of rows; `None` when all were used.
        columns: Column by what it was used as.
    """

    source: str
    split: str | None = None
    config: str | None = None
    revision: str | None = None
    fingerprint: str | None = None
    sha256: str | None = None
    total: int
    n: int
    seed: int | None = None
    columns: Mapping[str, str] | None = None

    def to_dict(self) -> dict[str, Any]:
        """As JSON values, without what is not known."""
        return {key: value for key, value in asdict(self).items() if value is not None}


@dataclass(frozen=True, slots=True)
class Rows:
    """A `datasets.Dataset` and where it came from."""

    dataset: Any
    sample: Sample

    def __len__(self) -> int:
        return len(self.dataset)

    def column(self, name: str) -> list[Any]:
        """The values of the column that is used as `name`."""
        assert self.sample.columns is not None, "columns are mapped first"
        values: list[Any] = self.dataset[self.sample.columns[name]][:]
        return values

    def has(self, name: str) -> bool:
        """Whether a column is used as `name`."""
        return name in (self.sample.columns or {})


@contextmanager
def _no_bars() -> Iterator[None]:
    """Without `datasets`' own progress bars; the command line shows one of ours."""
    import datasets

    shown = datasets.is_progress_bar_enabled()
    datasets.disable_progress_bars()
    try:
        yield
    finally:
        if shown:
            datasets.enable_progress_bars()


def is_rows(data: object) -> bool:
    """Whether `load_rows` reads this, as opposed to batches of tensors."""
    if isinstance(data, str | os.PathLike):
        return True
    if isinstance(data, Sequence) and data and isinstance(data[0], Mapping):
        import torch

        return not any(isinstance(value, torch.Tensor) for value in data[0].values())
    return type(data).__module__.partition(".")[0] == "datasets"


def load_rows(
    data: Any,
    *,
    split: str | None = None,
    config: str | None = None,
    revision: str | None = None,
    token: str | bool | None = None,
) -> Rows:
    """Read rows.

    Args:
        data: A `datasets.Dataset` or `DatasetDict`, a list of dictionaries, a `.csv`, `.tsv`, `.json`, `.jsonl` or
            `.parquet` file, a folder written by `Dataset.save_to_disk` or with one folder of images a label, or the
            name of a data set on the Hub.
        split: Its split; the only one when `None`.
        config: Configuration of a Hub data set.
        revision: Branch, tag or commit of a Hub data set.
        token: For a private one.

    Raises:
        ArtifactNotFoundError: No such file, and no data set of that name that can be reached.
        ConfigError: An unknown split, or a kind of file that is not read.
        InputError: It holds no rows.
    """
    import datasets

    sha256: str | None = None
    if isinstance(data, str | os.PathLike):
        path = Path(data).expanduser()
        with _no_bars():
            if path.is_file():
                loaded, source, sha256 = _read_file(path, split), path.name, _sha256(path)
                split = None
            elif path.is_dir():
                loaded, source = _read_folder(path), path.name
            else:
                loaded, source = _download(os.fspath(data), split, config, revision, token), os.fspath(data)
                split = None if isinstance(loaded, datasets.Dataset) else split
        loaded = _one_split(loaded, split, source)
    elif isinstance(data, Sequence) and not isinstance(data, str | bytes):
        if not data:
            raise InputError("The data holds no rows.", fix="pass at least one row.")
        if not all(isinstance(row, Mapping) for row in data):
            raise InputError(
                f"The rows are {type(data[0]).__name__}, not dictionaries.",
                fix="pass dictionaries such as {'text': ..., 'label': ...}.",
            )
        loaded, source = datasets.Dataset.from_list([dict(row) for row in data]), "rows"
    elif isinstance(data, datasets.Dataset | datasets.DatasetDict):
        loaded = _one_split(data, split, "The data set")
        source = loaded.info.dataset_name or loaded.info.builder_name or "dataset"
    else:
        raise InputError(
            f"A {type(data).__name__} is not data that accel reads.",
            fix="pass a datasets.Dataset (of an iterable one, Dataset.from_list(list(data.take(n)))), "
            "a CSV, JSON or Parquet file, or the name of a data set on the Hub.",
        )
    if len(loaded) == 0:
        raise InputError(f"{source} holds no rows.", fix="pass data with at least one row.")
    info = loaded.info
    return Rows(
        loaded,
        Sample(
            source=source,
            split=str(loaded.split) if loaded.split is not None and sha256 is None else None,
            config=None if sha256 or info.config_name in (None, "default") else info.config_name,
            revision=_commit(info) or revision,
            fingerprint=loaded._fingerprint,  # noqa: SLF001  # the field's own name for a data set's content
            sha256=sha256,
            total=len(loaded),
            n=len(loaded),
        ),
    )


def _read_file(path: Path, split: str | None) -> Any:
    import datasets

    if split is not None:
        raise ConfigError(f"{path.name} is one file and has no split {split!r}.", fix="leave split out.")
    reader = _READERS.get(path.suffix.lower())
    if reader is None:
        raise ConfigError(
            f"{path.name} is not a kind of file that accel reads.", fix=f"use one of {', '.join(sorted(_READERS))}."
        )
    if path.stat().st_size == 0:
        raise InputError(f"{path.name} is empty.", fix="pass a file with at least one row.")
    options: dict[str, Any] = {}
    if reader == "csv":
        # Only an empty cell is missing: pandas' default also drops texts such as "null", "NA" and "None".
        options = {"keep_default_na": False, "na_values": [""]}
        if path.suffix.lower() == ".tsv":
            options["sep"] = "\t"
    try:
        return datasets.load_dataset(reader, data_files=str(path), split="train", **options)
    except (datasets.exceptions.DatasetGenerationError, ValueError, OSError) as error:
        cause = error.__cause__ or error
        raise InputError(f"{path.name} cannot be read as {reader}: {cause}", fix="check the file.") from error


def _read_folder(path: Path) -> Any:
    import datasets

    if (path / "state.json").is_file() or (path / "dataset_dict.json").is_file():
        return datasets.load_from_disk(str(path))
    try:
        return datasets.load_dataset("imagefolder", data_dir=str(path))
    except (datasets.exceptions.DatasetsError, ValueError, OSError) as error:
        raise InputError(
            f"{path} is a folder that holds no data set: {error}",
            fix="pass a file, a folder written by Dataset.save_to_disk, or one with a folder of images for each label.",
        ) from error


def _download(name: str, split: str | None, config: str | None, revision: str | None, token: str | bool | None) -> Any:
    import datasets

    if name.startswith((".", "/", "~")) or Path(name).suffix.lower() in _READERS or name.count("/") > 1 or not name:
        raise ArtifactNotFoundError(f"There is no file {name!r}.", fix="check the path.")
    try:
        return datasets.load_dataset(name, config, split=split, revision=revision, token=token)
    except (datasets.exceptions.DatasetsError, OSError, ValueError, RuntimeError) as error:
        raise ArtifactNotFoundError(
            f"{name!r} is neither a file here nor a data set that can be fetched from the Hub: {error}",
            fix="check the name, the configuration and split, and the network; or pass a local file.",
        ) from error


def _one_split(data: Any, split: str | None, what: str) -> Any:
    import datasets

    if isinstance(data, datasets.Dataset):
        if split is not None and str(data.split) != split:
            raise ConfigError(f"{what} is one split already, {data.split}.", fix="leave split out.")
        return data
    if split is None and len(data) == 1:
        return next(iter(data.values()))
    if split not in data:
        asked = f"no split {split!r}.{did_you_mean(split, data)} It has" if split is not None else "several splits:"
        raise ConfigError(f"{what} has {asked} {', '.join(data)}.", fix="name one of them with split=... (--split).")
    return data[split]


def _commit(info: Any) -> str | None:
    """The commit that a Hub data set's files were downloaded from, which their addresses name."""
    for url in info.download_checksums or {}:
        if found := _HUB_REVISION.search(str(url)):
            return found[1]
    return None


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def take(rows: Rows, n: int | None, seed: int = 0) -> Rows:
    """`n` rows drawn without replacement, in their order in the data; all when `n` is `None` or as many.

    Raises:
        ConfigError: `n` below 1.
    """
    if n is not None and n < 1:
        raise ConfigError(f"{n} rows were asked for.", fix="ask for at least one.")
    if n is None or n >= len(rows):
        return rows
    import numpy as np

    chosen = np.sort(np.random.default_rng(seed).choice(len(rows), size=n, replace=False))
    return Rows(rows.dataset.select(chosen), replace(rows.sample, n=n, seed=seed))


# Columns


def _is_text(feature: Any) -> bool:
    return getattr(feature, "dtype", "") in ("string", "large_string") and not _is_media(feature)


def _is_media(feature: Any) -> bool:
    return type(feature).__name__ in ("Image", "Audio", "Video")


def _is_label(feature: Any) -> bool:
    dtype = str(getattr(feature, "dtype", ""))
    return type(feature).__name__ in ("ClassLabel", "Value") and dtype.startswith(
        ("int", "uint", "string", "large_string", "bool", "float")
    )


def _is_number(feature: Any) -> bool:
    return type(feature).__name__ == "Value" and str(feature.dtype).startswith(("int", "uint", "float"))


def _inner(feature: Any) -> Any:
    """The feature of a list's items, or `None`."""
    if isinstance(feature, list):
        return feature[0]
    return getattr(feature, "feature", None) if type(feature).__name__ in ("List", "LargeList", "Sequence") else None


def _is_words(feature: Any) -> bool:
    return _is_text(_inner(feature))


def _is_tags(feature: Any) -> bool:
    inner = _inner(feature)
    return inner is not None and _is_label(inner)


def _is_image(feature: Any) -> bool:
    return type(feature).__name__ == "Image" or _is_text(feature)


@dataclass(frozen=True, slots=True)
class _Role:
    """What a column can be used as: names it often has, and what it must hold."""

    name: str
    known: tuple[str, ...]
    fits: Callable[[Any], bool]
    holds: str
    answer: bool = False  # needed to measure, not to calibrate


_LABEL = _Role(
    "label",
    ("label", "labels", "category", "intent", "class", "target", "sentiment", "coarse_label", "fine_label"),
    _is_label,
    "labels",
    answer=True,
)
_TEXT = _Role(
    "text",
    ("text", "sentence", "query", "utterance", "content", "review", "tweet", "document", "input", "question"),
    _is_text,
    "text",
)
_FIRST = _Role("text", ("sentence1", "sentence_1", "text1", "text_a", "anchor"), _is_text, "text")
_SECOND = _Role("text_pair", ("sentence2", "sentence_2", "text2", "text_b", "positive"), _is_text, "text")
_ROLES: Mapping[str, tuple[_Role, ...]] = {
    "text-classification": (_LABEL, _TEXT),
    "token-classification": (
        _Role("tags", ("ner_tags", "tags", "labels", "label", "pos_tags"), _is_tags, "lists of labels", answer=True),
        _Role("words", ("tokens", "words"), _is_words, "lists of words"),
    ),
    "question-answering": (
        _Role("answers", ("answers", "answer"), lambda _: True, "answers", answer=True),
        _Role("question", ("question", "query"), _is_text, "questions"),
        _Role("context", ("context", "passage", "paragraph", "text"), _is_text, "contexts"),
    ),
    "image-classification": (
        _LABEL,
        _Role("image", ("image", "img", "pixel_values", "file", "path", "image_path"), _is_image, "images"),
    ),
    "sentence-similarity": (
        _Role("score", ("score", "similarity_score", "similarity", "label"), _is_number, "numbers", answer=True),
        _FIRST,
        _SECOND,
    ),
    "fill-mask": (_TEXT,),
    "text-generation": (_TEXT,),
}
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
        task: `text-classification` needs `text` (with `text_pair` where there are two) and `label`;
            `token-classification` `words` and `tags`; `question-answering` `question`, `context` and `answers`;
            `image-classification` `image` and `label`; `sentence-similarity` and `feature-extraction` `text`,
            `text_pair` and `score`; `fill-mask` and `text-generation` `text`.
        columns: Column by use, for those that are not to be guessed.
        answers: Whether labels, tags, answers or scores are needed, which calibration does without.

    Raises:
        ConfigError: `columns` names a column or a use that does not exist.
        InputError: A use for which no column, or more than one, fits; the message lists the columns.
    """
    task = task_spec(task).name
    roles = _roles(task, answers)
    features = dict(rows.dataset.features)
    found = _checked(columns or {}, roles, task, features)
    if task in ("text-classification", "fill-mask") and "text" not in found:
        pair = next((p for p in _PAIRS if all(_is_text(features.get(name)) for name in p)), None)
        if pair is not None and not {"label", *found.values()} & set(pair):
            found |= {"text": pair[0], "text_pair": pair[1]}
    for role in roles:
        if role.name not in found and (name := _guess(role, features, found, roles)) is not None:
            found[role.name] = name
    for role in roles:
        if role.name not in found and (answers or not role.answer):
            if not answers and role.name == "text_pair":
                continue
            raise _unmapped(rows, role, features, found)
    found = {name: column for name, column in found.items() if answers or name not in _answers(roles)}
    return Rows(rows.dataset, replace(rows.sample, columns=found))


def _roles(task: str, answers: bool) -> tuple[_Role, ...]:
    if task == "feature-extraction":
        task = "sentence-similarity"
    if task not in _ROLES:
        raise InputError(
            f"accel does not know which columns {task} needs.",
            fix="pass batches of inputs instead: an iterable of dictionaries of tensors."
            if not answers
            else f"measure one of {', '.join(_ROLES)}.",
        )
    # One text is enough to calibrate an embedder, whatever its column is called.
    if task == "sentence-similarity" and not answers:
        return (_Role("text", (*_TEXT.known, *_FIRST.known), _is_text, "text"), _SECOND)
    return _ROLES[task]


def _answers(roles: Sequence[_Role]) -> set[str]:
    return {role.name for role in roles if role.answer}


def _checked(
    columns: Mapping[str, str], roles: Sequence[_Role], task: str, features: Mapping[str, Any]
) -> dict[str, str]:
    """The caller's own mapping, checked.

    Raises:
        ConfigError: A use or a column that does not exist, or one that holds something else.
    """
    uses = {role.name: role for role in roles}
    if task == "text-classification":
        uses["text_pair"] = _SECOND
    for use, column in columns.items():
        if use not in uses:
            raise ConfigError(
                f"{task} has no use for a column called {use!r}.{did_you_mean(use, uses)}",
                fix=f"map {', '.join(uses)}.",
            )
        if column not in features:
            raise ConfigError(
                f"The data has no column {column!r}.{did_you_mean(column, features)} It has {_listing(features)}.",
                fix=f"name one of them for {use!r}.",
            )
        if not uses[use].fits(features[column]):
            raise ConfigError(
                f"The column {column!r} does not hold {uses[use].holds}: {features[column]}.",
                fix=f"name another one for {use!r}: {_listing(features)}.",
            )
    return dict(columns)


def _guess(role: _Role, features: Mapping[str, Any], found: Mapping[str, str], roles: Sequence[_Role]) -> str | None:
    free = {name: feature for name, feature in features.items() if name not in found.values()}
    for name in role.known:
        if name in free and role.fits(free[name]):
            return name
    if role.name == "text_pair":
        return None
    # Of several columns that could be a label, none is taken on a guess; a column known to be the text is no label.
    others = {name for other in roles if other is not role for name in other.known}
    left = [name for name, feature in free.items() if role.fits(feature) and name not in others]
    return left[0] if len(left) == 1 else None


def _unmapped(rows: Rows, role: _Role, features: Mapping[str, Any], found: Mapping[str, str]) -> InputError:
    mapped = f" Found: {', '.join(f'{use} = {column}' for use, column in found.items())}." if found else ""
    return InputError(
        f"None of the columns of {rows.sample.source} is clearly the {role.name} ({role.holds}): "
        f"{_listing(features)}.{mapped}",
        fix=f"say which one it is: columns={{{role.name!r}: '<column>'}}, or --column {role.name}=<column>.",
    )


def _listing(features: Mapping[str, Any]) -> str:
    return ", ".join(f"{name} ({_kind(feature)})" for name, feature in features.items())


def _kind(feature: Any) -> str:
    inner = _inner(feature)
    if inner is not None:
        return f"list of {_kind(inner)}"
    word = str(getattr(feature, "dtype", type(feature).__name__))
    return {"large_string": "string"}.get(word, "label" if type(feature).__name__ == "ClassLabel" else word)


# Labels


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
    translate = _translation(flat, _inner(feature) if nested else feature, config, rows)
    return [[translate(item) for item in value] for value in values] if nested else [translate(v) for v in values]


def _translation(flat: Sequence[Any], feature: Any, config: Any, rows: Rows) -> Callable[[Any], int]:
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


def _some(values: Sequence[Any]) -> str:
    shown = ", ".join(repr(value) for value in values[:_SHOWN])
    return shown if len(values) <= _SHOWN else f"{shown} and {len(values) - _SHOWN} more"
