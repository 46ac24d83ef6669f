"""Rows for evaluation and calibration: loading from memory, a file or the Hub, and drawing reproducible samples."""

from __future__ import annotations

import csv
import hashlib
import os
import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from ..artifact.hub import http_errors, hub_reason, hub_timeout_s, is_outage
from ..capture import one_thread_at_a_time
from ..errors import ArtifactNotFoundError, ConfigError, InputError, did_you_mean
from ..upstream.output_silencing import quiet
from ..upstream.pipeline_internals import fingerprint_of

_READERS = {
    ".csv": "csv",
    ".tsv": "csv",
    ".json": "json",
    ".jsonl": "json",
    ".ndjson": "json",
    ".parquet": "parquet",
    ".txt": "text",
}
TABLES = tuple(suffix for suffix, reader in _READERS.items() if reader != "text")
"""File suffixes of formats with named columns."""
_HUB_REVISION = re.compile(r"@([0-9a-f]{40})/")


@dataclass(frozen=True, slots=True, kw_only=True)
class SampledRowsRecord:
    """Description of the rows that were used, as recorded in manifests.

    Attributes:
        source: Hub id, file name, or the builder name of a data set in memory.
        split: Split of the data set, if any.
        config: Configuration of the Hub data set, if any.
        revision: Commit of the Hub data set, when known.
        fingerprint: `datasets`' hash of the content and its processing.
        sha256: SHA-256 checksum of the file.
        total: Number of rows before sampling.
        n: Number of rows used.
        seed: Seed of the sampling; `None` if all rows were used.
        columns: Column name by use. A use is the role of a column in the task: `text`, `label`, ...
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
        """Return the fields as JSON values, without fields that are `None`."""
        return {key: value for key, value in asdict(self).items() if value is not None}


@dataclass(frozen=True, slots=True)
class DatasetRows:
    """A `datasets.Dataset` with a record of its source."""

    dataset: Any
    sample: SampledRowsRecord

    def __len__(self) -> int:
        return len(self.dataset)

    def name_of(self, use: str) -> str:
        """Return the name of the data set's column that is mapped to a use of the task, such as `text` or `label`.

        Raises:
            ConfigError: No column is mapped to the use.
        """
        if not self.has(use):
            raise ConfigError(
                f"No column of {self.sample.source} is mapped to {use!r}; columns are mapped to "
                f"{', '.join(self.sample.columns or ())}.",
                fix=f"map a column to {use!r} with columns={{{use!r}: '<column>'}}. For a task of your own, add a Column with this "
                "use to TaskSpec.columns.",
            )
        return dict(self.sample.columns or {})[use]

    def lazy_column(self, use: str) -> Sequence[Any]:
        """Return the values of the column for a use (`text`, `label`, ...), as a sequence that loads each value on access."""
        values: Sequence[Any] = self.dataset[self.name_of(use)]
        return values

    def column(self, use: str) -> list[Any]:
        """Return all values of the column for a use of the task, such as `text` or `label`."""
        return list(self.lazy_column(use)[:])

    def feature(self, use: str) -> Any:
        """Return the `datasets` feature type of the column for a use of the task, such as `text` or `label`."""
        return self.dataset.features[self.name_of(use)]

    def has(self, use: str) -> bool:
        """Return whether the data has a column for a role that the task defines, such as `text` or `label`."""
        return use in (self.sample.columns or {})


def is_rows(data: object, inputs: Collection[str] = ()) -> bool:
    """Return whether `data` contains rows for `load_rows`.

    If not, `data` contains batches: dictionaries of tensors or arrays, by the names of the graph's inputs.
    """
    if isinstance(data, str | os.PathLike):
        return True
    if isinstance(data, Sequence) and data and isinstance(data[0], Mapping):
        import numpy as np
        import torch

        # Rows may also hold arrays (images or sounds); only arrays under the name of a graph input mark a batch.
        return not any(
            isinstance(value, torch.Tensor) or (name in inputs and isinstance(value, np.ndarray))
            for name, value in data[0].items()
        )
    return type(data).__module__.partition(".")[0] == "datasets"


def load_rows(
    data: Any,
    *,
    split: str | None = None,
    config: str | None = None,
    revision: str | None = None,
    token: str | bool | None = None,
) -> DatasetRows:
    """Load rows from memory, a file, a folder or the Hub.

    Args:
        data: A `datasets.Dataset` or `DatasetDict`, a list of dictionaries, a `.csv`, `.tsv`, `.json`, `.jsonl` or
            `.parquet` file, a folder written by `Dataset.save_to_disk` or with one folder of images a label, or the
            name of a data set on the Hub.
        split: Split of the data set. `None` works if the data has only one split.
        config: Configuration of a Hub data set.
        revision: Branch, tag or commit of a Hub data set.
        token: Access token for a private Hub data set.

    Raises:
        ArtifactNotFoundError: There is no such file, and no data set of that name can be reached on the Hub.
        ConfigError: The split is unknown, or the file format is not supported.
        InputError: The data has no rows or an unsupported type.
    """
    import datasets

    sha256: str | None = None
    if isinstance(data, str | os.PathLike):
        path = Path(data).expanduser()
        with quiet():
            if path.is_file():
                if split is not None:
                    raise ConfigError(
                        f"The data file {path.name} has no splits, but split is {split!r}.", fix="leave split out."
                    )
                loaded, source, sha256 = read_files([path]), path.name, _sha256(path)
            elif path.is_dir():
                loaded, source = _read_folder(path), path.name
            else:
                loaded, source = _download(os.fspath(data), split, config, revision, token), os.fspath(data)
                split = None if isinstance(loaded, datasets.Dataset) else split
        loaded = _one_split(loaded, split, source)
    elif isinstance(data, Sequence) and not isinstance(data, str | bytes):
        if not data:
            raise InputError("The data has no rows.", fix="pass at least one row.")
        if not all(isinstance(row, Mapping) for row in data):
            raise InputError(
                f"The first row of the data is of type {type(data[0]).__name__}, but every row must be a dictionary.",
                fix="pass a list of dictionaries such as {'text': ..., 'label': ...}.",
            )
        loaded, source = datasets.Dataset.from_list([dict(row) for row in data]), "rows"
    elif isinstance(data, datasets.Dataset | datasets.DatasetDict):
        loaded = _one_split(data, split, "The data set")
        source = loaded.info.dataset_name or loaded.info.builder_name or "dataset"
    else:
        raise InputError(
            f"The data is of type {type(data).__name__}, which accel cannot read.",
            fix="pass a datasets.Dataset, a CSV, JSON or Parquet file, or the name of a data set on the Hub. Convert an "
            "IterableDataset with Dataset.from_list(list(data.take(n))).",
        )
    if len(loaded) == 0:
        raise InputError(f"The data set {source} has no rows.", fix="pass data with at least one row.")
    info = loaded.info
    return DatasetRows(
        loaded,
        SampledRowsRecord(
            source=source,
            split=str(loaded.split) if loaded.split is not None and sha256 is None else None,
            config=None if sha256 or info.config_name in (None, "default") else info.config_name,
            revision=_commit(info) or revision,
            fingerprint=fingerprint_of(loaded),
            sha256=sha256,
            total=len(loaded),
            n=len(loaded),
        ),
    )


def read_files(paths: Sequence[Path], *, as_text: bool = False) -> Any:
    """Load data files of one format as one data set.

    Args:
        paths: Files to concatenate.
        as_text: Whether all CSV columns are read as text. By default, columns of numbers are read as numbers.

    Returns:
        A `datasets.Dataset`.

    Raises:
        ConfigError: The file format is not supported.
        InputError: The files have no rows or cannot be parsed.
    """
    import datasets

    path = paths[0]
    reader = _READERS.get(path.suffix.lower())
    if reader is None:
        raise ConfigError(
            f"accel cannot read the data file {path.name}: the file type {path.suffix!r} is not supported.",
            fix=f"use a file of one of the types {', '.join(sorted(_READERS))}.",
        )
    if all(file.stat().st_size == 0 for file in paths):
        raise InputError(f"The data file {path.name} is empty.", fix="pass a file with at least one row.")
    options: dict[str, Any] = {}
    try:
        if reader == "csv":
            names = _head(path)
            # Only an empty CSV field is missing: pandas by default also drops texts such as "null", "NA" and "None".
            options = {
                "keep_default_na": False,
                "na_values": [""],
                "sep": "\t" if path.suffix.lower() == ".tsv" else ",",
            }
            if as_text:
                options["features"] = datasets.Features(dict.fromkeys(names, datasets.Value("string")))
        with quiet():
            loaded = datasets.load_dataset(reader, data_files=[str(file) for file in paths], split="train", **options)
    except InputError:
        raise
    except (datasets.exceptions.DatasetGenerationError, ValueError, OSError, csv.Error) as error:
        cause = error.__cause__ or error
        if "corresponds to no data" in str(cause):
            raise InputError(
                f"The data file {path.name} has no rows.", fix="pass a file with at least one row."
            ) from error
        raise InputError(
            f"The data file {path.name} cannot be read as {reader}: {cause}", fix="check the content of the file."
        ) from error
    if len(loaded) == 0:
        raise InputError(f"The data file {path.name} has no rows.", fix="pass a file with at least one row.")
    return loaded


def _head(path: Path) -> list[str]:
    """Return the column names of a CSV file.

    Raises:
        InputError: A column name occurs twice, or the separator is not the expected one.
    """
    tabs = path.suffix.lower() == ".tsv"
    with path.open(newline="", encoding="utf-8-sig") as file:
        names = next(csv.reader(file, delimiter="\t" if tabs else ",", strict=True), [])
    repeated = next((name for name in names if names.count(name) > 1), None)
    if repeated is not None:
        raise InputError(
            f"The data file {path.name} has two columns named {repeated!r}.", fix="rename one of the two columns."
        )
    separator = next((character for character in ";\t|" if len(names) == 1 and character in names[0]), None)
    if separator is not None:
        kind = "tabs" if separator == "\t" else repr(separator)
        raise InputError(
            f"The data file {path.name} separates its columns with {kind} instead of {'tabs' if tabs else 'commas'}: "
            f"its first line is {names[0]!r}.",
            fix="save the file with commas between columns, or as a .tsv file with tabs between columns.",
        )
    return names


def _read_folder(path: Path) -> Any:
    import datasets

    if (path / "state.json").is_file() or (path / "dataset_dict.json").is_file():
        return datasets.load_from_disk(str(path))
    try:
        return datasets.load_dataset("imagefolder", data_dir=str(path))
    except (datasets.exceptions.DatasetsError, ValueError, OSError) as error:
        raise InputError(
            f"The folder {path} contains no data set that accel can read: {error}",
            fix="pass a file, a folder written by Dataset.save_to_disk, or a folder with one subfolder of images per label.",
        ) from error


def _download(name: str, split: str | None, config: str | None, revision: str | None, token: str | bool | None) -> Any:
    import datasets
    import huggingface_hub
    from huggingface_hub import constants

    if name.startswith((".", "/", "~")) or Path(name).suffix.lower() in _READERS or name.count("/") > 1 or not name:
        raise ArtifactNotFoundError(f"The data file {name!r} does not exist.", fix="check the path.")
    outage = None
    if not constants.HF_HUB_OFFLINE:
        # Ask the Hub first: `load_dataset` retries for half a minute and gives a less precise error.
        try:
            huggingface_hub.HfApi(token=token).dataset_info(name, revision=revision, timeout=hub_timeout_s())
        except http_errors(huggingface_hub.errors.HFValidationError) as error:
            if not is_outage(error):
                raise _unavailable(name, error, revision) from error
            outage = error
    try:
        with _cache_only() if outage is not None else nullcontext():
            return datasets.load_dataset(name, config, split=split, revision=revision, token=token)
    except http_errors(datasets.exceptions.DatasetsError, OSError, ValueError, RuntimeError) as error:
        if outage is not None:
            raise _unavailable(name, outage, revision) from outage
        raise ArtifactNotFoundError(
            f"{name!r} is not a local file, and no data set of this name can be downloaded from the Hub: {error}",
            fix="check the name, the configuration and the split of the data set, or pass a local file.",
        ) from error


def _unavailable(name: str, error: Exception, revision: str | None) -> ArtifactNotFoundError:
    reason, fix = hub_reason(error, name=name, kind="data set", revision=revision)
    return ArtifactNotFoundError(f"There is no local file {name!r}. {reason}", fix=fix)


@contextmanager
def _cache_only() -> Iterator[None]:
    """Make `datasets` read only its cache while the context is open; `load_dataset` has no argument for this."""
    import datasets
    from huggingface_hub import constants

    with one_thread_at_a_time():
        before = datasets.config.HF_HUB_OFFLINE, constants.HF_HUB_OFFLINE
        datasets.config.HF_HUB_OFFLINE = constants.HF_HUB_OFFLINE = True
        try:
            yield
        finally:
            datasets.config.HF_HUB_OFFLINE, constants.HF_HUB_OFFLINE = before


def _one_split(data: Any, split: str | None, source: str) -> Any:
    import datasets

    if isinstance(data, datasets.Dataset):
        if split is not None and str(data.split) != split:
            raise ConfigError(
                f"split is {split!r}, but {source} contains only the split {str(data.split)!r}.", fix="leave split out."
            )
        return data
    if split is None and len(data) == 1:
        return next(iter(data.values()))
    if split not in data:
        problem = (
            f"no split {split!r}.{did_you_mean(split, data)} Its splits are" if split is not None else "several splits:"
        )
        raise ConfigError(f"{source} has {problem} {', '.join(data)}.", fix="choose a split with split=... (--split).")
    return data[split]


def _commit(info: Any) -> str | None:
    """Return the commit of a Hub data set, parsed from the URLs of its files."""
    for url in info.download_checksums or {}:
        if match := _HUB_REVISION.search(str(url)):
            return match[1]
    return None


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def take(rows: DatasetRows, n: int | None, seed: int = 0) -> DatasetRows:
    """Return `n` randomly drawn rows in their original order. If `n` is `None` or there are at most `n` rows, return all rows.

    Raises:
        ConfigError: `n` is below 1.
    """
    if n is not None and n < 1:
        raise ConfigError(f"The number of rows is {n}, but it must be at least 1.", fix="use at least 1 row.")
    if n is None or n >= len(rows):
        return rows
    import numpy as np

    chosen = np.sort(np.random.default_rng(seed).choice(len(rows), size=n, replace=False))
    return DatasetRows(rows.dataset.select(chosen), replace(rows.sample, n=n, seed=seed))
