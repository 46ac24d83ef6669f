"""Optimum's calibration settings, and calibration batches from a tokenized data set."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from enum import Enum
from typing import Any

from ...artifact.manifest import Artifact
from ...config import check_number
from ...errors import ConfigError, InputError

logger = logging.getLogger(__name__)


class CalibrationMethod(Enum):
    """Methods that compute the range of activations from calibration data."""

    MinMax = 0
    Entropy = 1
    Percentile = 2


def member(kind: type[Enum], value: Any) -> Any:
    """Return the enum member with the given name. A member of ONNX Runtime's enum with the same name is returned unchanged."""
    name = value if isinstance(value, str) else str(getattr(value, "name", value))
    if name not in kind.__members__:
        raise ConfigError(
            f"{value!r} is not a member of {kind.__name__}.", fix=f"use one of {', '.join(kind.__members__)}."
        )
    return kind[value] if isinstance(value, str) else value


@dataclass
class CalibrationConfig:
    """Optimum's calibration settings.

    Attributes:
        dataset_name: Name of the data set, which is only written to the manifest.
        dataset_config_name: Configuration name of the data set.
        dataset_split: Split of the data set.
        dataset_num_samples: Number of rows in the data set.
        method: Method that computes activation ranges.
        num_bins: Ignored, because accel chooses the number for each method.
        num_quantized_bins: Ignored, because accel chooses the number for each method.
        percentile: For `Percentile`: percentage of the values that are inside of the range.
        moving_average: For `MinMax`: whether the range is a moving average of the ranges of the batches.
        averaging_constant: Ignored, because accel chooses the constant for each method.
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
        """Return the calibration settings of accel."""
        for name in ("num_bins", "num_quantized_bins", "averaging_constant"):
            if getattr(self, name) is not None:
                logger.debug("accel ignores %s=%r of Optimum's CalibrationConfig.", name, getattr(self, name))
        method = self.method.name.lower()
        if method == "minmax" and self.moving_average:
            method = "moving_average"
        values: dict[str, Any] = {"calibration": method}
        if method == "percentile" and self.percentile is not None:
            values["percentile"] = self.percentile
        return values


class AutoCalibrationConfig:
    """Functions that create calibration settings for each method."""

    @staticmethod
    def minmax(dataset: Any, moving_average: bool = False, averaging_constant: float = 0.01) -> CalibrationConfig:
        """Return settings for the range from the smallest to the largest value."""
        check_number("averaging_constant", averaging_constant if moving_average else None, 0, 1)
        return _described(
            dataset,
            method=CalibrationMethod.MinMax,
            moving_average=moving_average,
            averaging_constant=averaging_constant,
        )

    @staticmethod
    def entropy(dataset: Any, num_bins: int = 128, num_quantized_bins: int = 128) -> CalibrationConfig:
        """Return settings for the range that loses the least information (entropy calibration)."""
        check_number("num_bins", num_bins, 1)
        check_number("num_quantized_bins", num_quantized_bins, 1)
        return _described(
            dataset, method=CalibrationMethod.Entropy, num_bins=num_bins, num_quantized_bins=num_quantized_bins
        )

    @staticmethod
    def percentiles(dataset: Any, num_bins: int = 2048, percentile: float = 99.999) -> CalibrationConfig:
        """Return settings for the range that contains the given percentage of the values."""
        check_number("num_bins", num_bins, 1)
        check_number("percentile", percentile, 0, 100)
        return _described(dataset, method=CalibrationMethod.Percentile, num_bins=num_bins, percentile=percentile)


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
class DeferredCalibration:
    """Result of `ORTQuantizer.fit`: calibration data and settings. accel computes the ranges later, during the quantization.

    Attributes:
        batches: Batches of inputs by name, each of shape `(batch, ...)`.
        config: Calibration settings.
    """

    batches: tuple[dict[str, Any], ...]
    config: CalibrationConfig


class RecordedBatches(list[dict[str, Any]]):
    """Calibration batches with a record of their data set for the manifest."""

    def __init__(self, ranges: DeferredCalibration) -> None:
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
    """Load, shuffle, truncate and preprocess a data set, and keep only the columns that are inputs of the graph.

    Raises:
        ConfigError: `split` is `None`, and the data set has several splits.
    """
    import datasets

    loaded = datasets.load_dataset(dataset_name, name=name, split=split, token=token)
    if not isinstance(loaded, datasets.Dataset):
        raise ConfigError(
            f"The data set {dataset_name} has several splits, and dataset_split is None: {', '.join(map(str, loaded))}.",
            fix="pass dataset_split=... with one of these splits.",
        )
    if num_samples is not None:
        loaded = loaded.shuffle(seed=seed).select(range(min(num_samples, len(loaded))))
    if preprocess is not None:
        loaded = loaded.map(preprocess, batched=batched)
    return only_inputs(artifact, loaded)


def only_inputs(artifact: Artifact, dataset: Any) -> Any:
    """Return a data set with only the columns that are inputs of the graph."""
    inputs = {spec.name for spec in artifact.components[0].inputs}
    return dataset.remove_columns([name for name in dataset.column_names if name not in inputs])


def batches_of(artifact: Artifact, dataset: Any, batch_size: int) -> Iterator[dict[str, Any]]:
    """Yield the rows of a `datasets.Dataset` or a list of dictionaries as batches of tensors by input name.

    Raises:
        InputError: No column is an input of the graph, or rows of the same batch have different lengths.
    """
    import torch

    types = {spec.name: getattr(torch, spec.dtype) for spec in artifact.components[0].inputs if spec.pair is None}
    rows: list[dict[str, Any]] = []

    def batch() -> dict[str, Any]:
        names = [name for name in types if name in rows[0]]
        if not names:
            raise InputError(
                f"The calibration rows have the columns {sorted(rows[0])}, and none of them is an input of the graph. The inputs are "
                f"{sorted(types)}.",
                fix="tokenize the data set before calibration: dataset.map(lambda row: tokenizer(row['text'])).",
            )
        try:
            return {name: torch.tensor([row[name] for row in rows], dtype=types[name]) for name in names}
        except ValueError as error:
            raise InputError(
                f"The calibration rows of a batch have different lengths: {error}",
                fix="pad all rows to the same length, or pass batch_size=1.",
            ) from error

    for row in dataset:
        rows.append(row)
        if len(rows) == batch_size:
            yield batch()
            rows = []
    if rows:
        yield batch()
