"""Base class of predictors that compare model outputs with the pixels of images, post-processed by the image processor."""

from __future__ import annotations

import abc
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any, ClassVar

import torch

from ...data.image_rows import images_of
from ...errors import InputError
from .predictors import Model, Predictor


class PicturePredictor(Predictor):
    """Base class of image predictors. Outputs are reduced to numbers row by row, because pixel maps are too large to keep."""

    use: ClassVar[str] = ""

    def _references(self) -> list[Any]:
        # `predict` reads the reference images when it needs them: pixel maps are too large to keep in memory.
        return [None] * len(self.rows)

    def predict(self, model: Model, what: str) -> list[Any]:
        """Return the numbers of each row (`_counted`), from which metrics compute their values."""
        assert self.encoded.media is not None
        images = self.encoded.media[0]
        truths = images_of(self.rows, self.use) if self.use else [None] * len(self.rows)
        predictions: list[Any] = [None] * len(self.rows)
        for part, feeds, output in self.batches(model, what):
            # Image processors read outputs as attributes, and need tensors on the host.
            outputs = SimpleNamespace(
                **{k: v.float().cpu() for k, v in output.items() if isinstance(v, torch.Tensor)},
                scale=_scale(output, feeds),
            )
            sizes = [(images[i].height, images[i].width) for i in part]
            for i, answer, size in zip(part, self._answers(outputs, sizes), sizes, strict=True):
                predictions[i] = self._counted(answer, truths[i], size, i)
        return predictions

    @abc.abstractmethod
    def _answers(self, output: Any, sizes: Sequence[tuple[int, int]]) -> Sequence[Any]:
        """Post-process a batch's outputs for images of the given heights and widths."""

    @abc.abstractmethod
    def _counted(self, answer: Any, truth: Any, size: tuple[int, int], row: int) -> Any:
        """Return the numbers that a metric needs from a row's post-processed output."""

    def agreement(self, first: Sequence[Any], second: Sequence[Any]) -> float | None:
        """Return `None`: numbers of a row cannot be compared as equal or different predictions."""
        return None


def _scale(output: Any, feeds: Any) -> int:
    """Return the scale factor from input size to output image size, of a model that outputs images; 0 for all other models."""
    image = output.get("reconstruction")
    return 0 if image is None else int(image.shape[-1]) // int(feeds["pixel_values"].shape[-1])


def sizes_differ(what: str, row: int, have: Sequence[int], want: Sequence[int]) -> InputError:
    """Return the error for a reference picture whose size differs from the size of its image."""
    return InputError(
        f"The {what} of row {row} has {have[0]} x {have[1]} pixels; {want[0]} x {want[1]} were expected.",
        fix="give pictures of the same size.",
    )
