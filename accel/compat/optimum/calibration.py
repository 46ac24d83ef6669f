"""Rows to calibrate with, as Optimum's quantizers take them: a data set that is tokenized already."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from ...artifact.manifest import Artifact
from ...errors import ConfigError, InputError


def calibration_rows(
    artifact: Artifact,
    dataset_name: str,
    *,
    num_samples: int | None,
    name: str | None,
    split: str | None,
    preprocess: Callable[..., Any] | None,
    batched: bool,
    seed: int,
    token: bool | str | None,
) -> Any:
    """A data set, shuffled, cut, preprocessed, with the graph's inputs alone.

    Raises:
        ConfigError: No split was named, and there are several.
    """
    import datasets

    loaded = datasets.load_dataset(dataset_name, name=name, split=split, token=token)
    if not isinstance(loaded, datasets.Dataset):
        raise ConfigError(
            f"{dataset_name} has the splits {', '.join(map(str, loaded))}.",
            fix="pass dataset_split=... with one of them.",
        )
    if num_samples is not None:
        loaded = loaded.shuffle(seed=seed).select(range(min(num_samples, len(loaded))))
    if preprocess is not None:
        loaded = loaded.map(preprocess, batched=batched)
    return only_inputs(artifact, loaded)


def only_inputs(artifact: Artifact, dataset: Any) -> Any:
    """A data set with the graph's inputs alone."""
    inputs = {spec.name for spec in artifact.components[0].inputs}
    return dataset.remove_columns([name for name in dataset.column_names if name not in inputs])


def batches_of(artifact: Artifact, dataset: Any, batch_size: int) -> Iterator[dict[str, Any]]:
    """Rows of a `datasets.Dataset`, or dictionaries, as batches of tensors by the graph's names.

    Raises:
        InputError: No column is an input, or rows of one batch are of unequal length.
    """
    import torch

    types = {spec.name: getattr(torch, spec.dtype) for spec in artifact.components[0].inputs if spec.pair is None}
    rows: list[dict[str, Any]] = []

    def batch() -> dict[str, Any]:
        names = [name for name in types if name in rows[0]]
        if not names:
            raise InputError(
                f"The rows have {sorted(rows[0])}; the graph takes {sorted(types)}.",
                fix="preprocess them: dataset.map(lambda row: tokenizer(row['text'])).",
            )
        try:
            return {name: torch.tensor([row[name] for row in rows], dtype=types[name]) for name in names}
        except ValueError as error:
            raise InputError(
                f"Rows of one batch are of unequal length: {error}", fix="pad them to one, or pass batch_size=1."
            ) from error

    for row in dataset:
        rows.append(row)
        if len(rows) == batch_size:
            yield batch()
            rows = []
    if rows:
        yield batch()
