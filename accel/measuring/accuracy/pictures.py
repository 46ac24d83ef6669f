"""What models see in images, in the form that `image_metrics` compares: boxes, areas, depths and pixels, counted row by row."""

from __future__ import annotations

import abc
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any, ClassVar

import numpy as np
import torch

from ...data.batches import Encoded, images_of
from ...data.labels import texts
from ...data.pictures import Box, beside, boxes, categories, check_boxes, one_channel, pixels, with_each
from ...data.rows import Rows
from ...errors import InputError
from ...interfaces.family_registry import family_of
from .predictors import Model, Predictor

IGNORED = 255
"""The class of pixels that are not measured."""
_MOST_DECIBELS = 100.0  # of images that are equal, whose ratio has no bound


class Candidates(Predictor):
    """The likeliest of the data's classes for an image, by their names alone.

    Attributes:
        template: What transformers' pipeline makes of a candidate.
        output: The model's output `(rows, candidates)`.
    """

    kind = "classes"
    template: ClassVar[str] = "This is a photo of {}."
    output: ClassVar[str] = "logits_per_image"

    def _references(self) -> list[Any]:
        """The place of each row's class among the names.

        Raises:
            InputError: Classes without names.
        """
        assert self.rows.sample.columns is not None
        column = self.rows.sample.columns["label"]
        names = getattr(self.rows.dataset.features[column], "names", None)
        values = self.rows.column("label")
        if names:
            self.names = list(names)
            if any(value is None or not 0 <= value < len(names) for value in values):
                raise InputError(f"Rows of {self.rows.sample.source} have no label.", fix="use a labelled split.")
            return list(values)
        if not all(isinstance(value, str) for value in values):
            raise InputError(
                f"The labels in the column {column!r} are numbers without names, which are what rows are compared with.",
                fix="give the names of the classes.",
            )
        self.names = sorted(set(texts(self.rows, "label")))
        return [self.names.index(value) for value in values]

    def _encode(self) -> Encoded:
        candidates = [self.template.format(name) for name in self.names]
        return self._beside(self.rows, self.processor, candidates, self.max_length)

    def _beside(self, rows: Rows, processor: Any, candidates: Sequence[str], max_length: int | None) -> Encoded:
        return beside(rows, processor, candidates, max_length)

    def predict(self, model: Model, what: str) -> list[Any]:
        """Places among the names."""
        predictions: list[Any] = [None] * len(self.rows)
        for part, _, output in self.batches(model, what):
            for i, value in zip(part, output[self.output].float().argmax(-1).tolist(), strict=True):
                predictions[i] = value
        return predictions


class _Pictures(Predictor):
    """Base of what is counted on an image's own pixels, through the processor that made the inputs."""

    use: ClassVar[str] = ""

    def _references(self) -> list[Any]:
        # Read when they are compared with: maps are large.
        return [None] * len(self.rows)

    def predict(self, model: Model, what: str) -> list[Any]:
        """What was counted, a row each."""
        assert self.encoded.images is not None
        images = self.encoded.images[0]
        truths = images_of(self.rows, self.use) if self.use else [None] * len(self.rows)
        predictions: list[Any] = [None] * len(self.rows)
        for part, feeds, output in self.batches(model, what):
            # Processors read attributes, on the host.
            found = SimpleNamespace(
                **{k: v.float().cpu() for k, v in output.items() if isinstance(v, torch.Tensor)},
                scale=_scale(output, feeds),
            )
            sizes = [(images[i].height, images[i].width) for i in part]
            for i, answer, size in zip(part, self._answers(found, sizes), sizes, strict=True):
                predictions[i] = self._counted(answer, truths[i], size, i)
        return predictions

    @abc.abstractmethod
    def _answers(self, output: Any, sizes: Sequence[tuple[int, int]]) -> Sequence[Any]:
        """What the processor makes of a batch's outputs for images of these heights and widths."""

    @abc.abstractmethod
    def _counted(self, answer: Any, truth: Any, size: tuple[int, int], row: int) -> Any:
        """What is kept of a row's answer."""

    def agreement(self, first: Sequence[Any], second: Sequence[Any]) -> float | None:
        """Of counts, none is known."""
        return None


def _scale(output: Any, feeds: Any) -> int:
    """How many times larger an image that a model made is than the one that it was given; 0 where it made none."""
    made = output.get("reconstruction")
    return 0 if made is None else int(made.shape[-1]) // int(feeds["pixel_values"].shape[-1])


class Detections(_Pictures):
    """Boxes in an image: `(label, score, left, top, right, bottom)`, whatever their scores."""

    kind = "boxes"

    def _references(self) -> list[Any]:
        self._objects: list[list[Box]] = boxes(self.rows, self.config)
        return [[(box.label, *box.corners, int(box.crowd)) for box in row] for row in self._objects]

    def predict(self, model: Model, what: str) -> list[Any]:
        """Boxes, a list a row."""
        self._sizes: list[tuple[int, int]] = [(0, 0)] * len(self.rows)
        found = super().predict(model, what)
        check_boxes(self._objects, self._sizes, self.rows.sample.source)
        return found

    def _answers(self, output: Any, sizes: Sequence[tuple[int, int]]) -> Sequence[Any]:
        found: Sequence[Any] = self.processor.post_process_object_detection(
            output, threshold=0.0, target_sizes=torch.tensor(sizes)
        )
        return found

    def _counted(self, answer: Any, truth: Any, size: tuple[int, int], row: int) -> Any:
        self._sizes[row] = size[::-1]
        together = zip(answer["labels"].tolist(), answer["scores"].tolist(), answer["boxes"].tolist(), strict=True)
        return [(label, score, *corners) for label, score, corners in together]


class DetectionsByName(Detections):
    """The same of the data's classes, by their names alone: an image and a name at a time."""

    def _references(self) -> list[Any]:
        self._names = categories(self.rows)
        numbers = {name: number for number, name in enumerate(self._names)}
        self.config = SimpleNamespace(label2id=numbers, id2label=dict(enumerate(self._names)), num_labels=len(numbers))
        return super()._references()

    def _encode(self) -> Encoded:
        return self._encoded_for(self._names[0])

    def _encoded_for(self, name: str) -> Encoded:
        # Padding changes which of its tokens Grounding DINO takes for one phrase.
        return with_each(self.rows, self.processor, [name], self.max_length)

    def predict(self, model: Model, what: str) -> list[Any]:
        """Boxes, a list a row."""
        found: list[list[Any]] = [[] for _ in range(len(self.rows))]
        for number, name in enumerate(self._names):
            self.encoded = self._encoded_for(name)
            for row, boxes_of_row in zip(found, super().predict(model, what), strict=True):
                row += [(number, *box[1:]) for box in boxes_of_row]
        return found

    def _answers(self, output: Any, sizes: Sequence[tuple[int, int]]) -> Sequence[Any]:
        found: Sequence[Any] = self.processor.image_processor.post_process_object_detection(
            output, threshold=0.0, target_sizes=torch.tensor(sizes)
        )
        return found


class Segments(_Pictures):
    """Classes of an image's pixels, counted: `(class, pixels that are right, that were predicted, that are true)`."""

    kind = "areas"
    use = "mask"

    def _answers(self, output: Any, sizes: Sequence[tuple[int, int]]) -> Sequence[Any]:
        found: Sequence[Any] = self.processor.post_process_semantic_segmentation(output, target_sizes=list(sizes))
        return found

    def _counted(self, answer: Any, truth: Any, size: tuple[int, int], row: int) -> Any:
        true = one_channel(truth, row, "classes").astype(np.int64)
        if true.shape != size:
            raise _sizes_differ("mask", row, true.shape, size)
        if getattr(self.processor, "do_reduce_labels", False):
            # ADE20K's 0 is none of its classes, which the model counts from 0.
            true = np.where(true == 0, IGNORED, true - 1)
        counted = true != IGNORED
        found = answer.numpy()[counted]
        true = true[counted]
        known = int(self.config.num_labels)
        if true.size and not 0 <= true.min() <= true.max() < known:
            raise InputError(
                f"The mask of row {row} holds the classes {sorted(set(np.unique(true)) - set(range(known)))[:5]}; the model has "
                f"{known}, from 0.",
                fix=f"use masks with the model's classes; {IGNORED} marks pixels that are not measured.",
            )
        right, predicted, wanted = (
            np.bincount(values, minlength=known) for values in (found[found == true], found, true)
        )
        return [(int(c), int(right[c]), int(predicted[c]), int(wanted[c])) for c in np.flatnonzero(predicted + wanted)]


class Depths(_Pictures):
    """How far an image's depths are from the true ones: relative error, share within a quarter, squared error.

    Depths are compared in the data's unit, where the model estimates them (`depth_estimation_type` "metric", GLPN, ZoeDepth,
    DepthPro). Models of relative depth (MiDaS' DPT, Depth Anything) return the inverse of depth up to a factor and a summand,
    which are fitted to each row first, as Ranftl et al. (2020), Towards Robust Monocular Depth Estimation, do.
    """

    kind = "depths"
    use = "depth"

    def _answers(self, output: Any, sizes: Sequence[tuple[int, int]]) -> Sequence[Any]:
        found = self.processor.post_process_depth_estimation(output, list(sizes))
        return [one["predicted_depth"] for one in found]

    def _counted(self, answer: Any, truth: Any, size: tuple[int, int], row: int) -> Any:
        picture = one_channel(truth, row, "depths")
        true = picture.astype(np.float64)
        relative = _estimates_relative_depth(self.config)
        if picture.dtype.kind in "iu" and not relative:
            raise InputError(
                f"The depths of row {row} are whole numbers, whose unit is not known; the model estimates metres.",
                fix="give floating-point depths in metres.",
            )
        if true.shape != size:
            raise _sizes_differ("depth map", row, true.shape, size)
        seen = np.isfinite(true) & (true > 0)
        if not seen.any():
            raise InputError(f"No pixel of the depth map of row {row} has a depth.", fix="leave the row out.")
        found, true = answer.numpy().astype(np.float64)[seen], true[seen]
        if relative:
            found = _fitted(found, true)
        ratio = np.divide(found, true)
        within = (ratio < 1.25) & (ratio > 1 / 1.25)
        return (float(np.abs(ratio - 1).mean()), float(within.mean()), float(((found - true) ** 2).mean()))


def _estimates_relative_depth(config: Any) -> bool:
    said = getattr(config, "depth_estimation_type", None)
    return said == "relative" if said is not None else not family_of(config).metric_depth


def _fitted(inverse: np.ndarray, true: np.ndarray) -> np.ndarray:
    """Depths of relative inverse depths, by the factor and the summand that fit the true ones best; none is farther than these."""
    columns = np.stack([inverse, np.ones_like(inverse)], 1)
    (factor, summand), *_ = np.linalg.lstsq(columns, 1 / true, rcond=None)
    depths: np.ndarray = 1 / np.maximum(factor * inverse + summand, 1 / true.max())
    return depths


class Pixels(_Pictures):
    """How close an image is to the one that was wanted: its peak signal-to-noise ratio in decibels."""

    kind = "pixels"
    use = "target"

    def _answers(self, output: Any, sizes: Sequence[tuple[int, int]]) -> Sequence[Any]:
        times = output.scale
        return [
            one[:, : height * times, : width * times].clamp(0, 1)
            for one, (height, width) in zip(output.reconstruction, sizes, strict=True)
        ]

    def _counted(self, answer: Any, truth: Any, size: tuple[int, int], row: int) -> Any:
        true = pixels(truth.convert("RGB") if hasattr(truth, "convert") else truth).astype(np.float64) / 255
        found = np.moveaxis(answer.numpy(), 0, -1)
        if true.shape != found.shape:
            raise _sizes_differ("target", row, true.shape[:2], found.shape[:2])
        error = float(((found - true) ** 2).mean())
        return min(-10 * float(np.log10(error)), _MOST_DECIBELS) if error > 0 else _MOST_DECIBELS


def _sizes_differ(what: str, row: int, have: Sequence[int], want: Sequence[int]) -> InputError:
    return InputError(
        f"The {what} of row {row} has {have[0]} x {have[1]} pixels; {want[0]} x {want[1]} were expected.",
        fix="give pictures of the same size.",
    )
