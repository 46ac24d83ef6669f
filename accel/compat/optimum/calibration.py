"""Settings of calibration, and rows to calibrate with: a data set that is tokenized already."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from enum import Enum
from typing import Any

from ...artifact.manifest import Artifact
from ...errors import ConfigError, InputError

logger = logging.getLogger(__name__)


class CalibrationMethod(Enum):
    """How activation ranges are found."""

    MinMax = 0
    Entropy = 1
    Percentile = 2


def member(kind: type[Enum], value: Any) -> Any:
    """A member by its name; ONNX Runtime's own, which have the same names, are kept."""
    name = value if isinstance(value, str) else str(getattr(value, "name", value))
    if name not in kind.__members__:
        raise ConfigError(f"{value!r} is no {kind.__name__}.", fix=f"use {', '.join(kind.__members__)}.")
    return kind[value] if isinstance(value, str) else value


@dataclass
class CalibrationConfig:
    """Optimum's settings of calibration.

    Attributes:
        dataset_name: The data set, for the record.
        dataset_config_name: Its configuration.
        dataset_split: Its split.
        dataset_num_samples: Its rows.
        method: How activation ranges are found.
        num_bins: Chosen here by method.
        num_quantized_bins: Likewise.
        percentile: For `Percentile`: the share of values kept, in percent.
        moving_average: For `MinMax`: averages of the batches' ranges.
        averaging_constant: Chosen here.
    """

    dataset_name: str | None
    dataset_config_name: str | None
    dataset_split: str | None
    dataset_num_samples: int
    method: Any
    num_bins: int | None = None
    num_quantized_bins: int | None = None
    percentile: float | None = None
    moving_average: bool | None = None
    averaging_constant: float | None = None

    def __post_init__(self) -> None:
        self.method = member(CalibrationMethod, self.method)

    def to_accel(self) -> dict[str, Any]:
        """The same in our settings."""
        for name in ("num_bins", "num_quantized_bins", "averaging_constant"):
            if getattr(self, name) is not None:
                logger.debug("%s=%r changes nothing here.", name, getattr(self, name))
        method = self.method.name.lower()
        if method == "minmax" and self.moving_average:
            method = "moving_average"
        values: dict[str, Any] = {"calibration": method}
        if method == "percentile" and self.percentile is not None:
            values["percentile"] = self.percentile
        return values


class AutoCalibrationConfig:
    """Settings of calibration by method."""

    @staticmethod
    def minmax(dataset: Any, moving_average: bool = False, averaging_constant: float = 0.01) -> CalibrationConfig:
        """The smallest and the largest value."""
        if moving_average and not 0 <= averaging_constant <= 1:
            raise ConfigError(f"averaging_constant is {averaging_constant}.", fix="use a number from 0 to 1.")
        return _described(
            dataset,
            method=CalibrationMethod.MinMax,
            moving_average=moving_average,
            averaging_constant=averaging_constant,
        )

    @staticmethod
    def entropy(dataset: Any, num_bins: int = 128, num_quantized_bins: int = 128) -> CalibrationConfig:
        """The range that loses the least information."""
        _check_bins(num_bins, num_quantized_bins)
        return _described(
            dataset, method=CalibrationMethod.Entropy, num_bins=num_bins, num_quantized_bins=num_quantized_bins
        )

    @staticmethod
    def percentiles(dataset: Any, num_bins: int = 2048, percentile: float = 99.999) -> CalibrationConfig:
        """The range that holds a share of the values, in percent."""
        _check_bins(num_bins)
        if not 0 <= percentile <= 100:
            raise ConfigError(f"percentile is {percentile}.", fix="use a number from 0 to 100.")
        return _described(dataset, method=CalibrationMethod.Percentile, num_bins=num_bins, percentile=percentile)


def _check_bins(*counts: int) -> None:
    for count in counts:
        if count <= 0:
            raise ConfigError(f"A histogram has {count} bins.", fix="use at least 1.")


def _described(dataset: Any, **settings: Any) -> CalibrationConfig:
    info = getattr(dataset, "info", None)
    return CalibrationConfig(
        dataset_name=getattr(info, "builder_name", None),
        dataset_config_name=getattr(info, "config_name", None),
        dataset_split=str(getattr(dataset, "split", None)),
        dataset_num_samples=len(dataset),
        **settings,
    )


@dataclass(frozen=True)
class CalibrationRanges:
    """What `ORTQuantizer.fit` returns: the rows to calibrate with and how; ranges are computed where they are used.

    Attributes:
        batches: Inputs by name, `(batch, ...)` each.
        config: How ranges are found.
    """

    batches: tuple[dict[str, Any], ...]
    config: CalibrationConfig


class Recorded(list[dict[str, Any]]):
    """Batches that say in the manifest what they are."""

    def __init__(self, ranges: CalibrationRanges) -> None:
        super().__init__(ranges.batches)
        config = ranges.config
        self.record = {"data": config.dataset_name, "split": config.dataset_split, "rows": config.dataset_num_samples}


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
