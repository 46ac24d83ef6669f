"""Base class of predictors for images. The image processor post-processes the model's outputs before the comparison."""

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
    """Base class of image predictors, which convert each row's output to a few numbers, because pixel maps are too large to keep."""

    use: ClassVar[str] = ""

    def _references(self) -> list[Any]:
        # `predict` reads each reference image when it is needed, because all reference images together need too much memory.
        return [None] * len(self.rows)

    def predict(self, model: Model, what: str) -> list[Any]:
        """Return the numbers of each row (`_counted`), from which metrics compute their values."""
        assert self.encoded.media is not None
        images = self.encoded.media[0]
        truths = images_of(self.rows, self.use) if self.use else [None] * len(self.rows)
        predictions: list[Any] = [None] * len(self.rows)
        for part, feeds, output in self.batches(model, what):
            # The post-processing functions of image processors read the outputs as attributes, and need CPU tensors.
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
        """Return `None`, because the numbers of a row are never equal for two models, so the fraction of equal rows means nothing."""
        return None


def _scale(output: Any, feeds: Any) -> int:
    """Return the scale factor from input size to output image size, of a model that outputs images; 0 for all other models."""
    image = output.get("reconstruction")
    return 0 if image is None else int(image.shape[-1]) // int(feeds["pixel_values"].shape[-1])


def sizes_differ(content: str, row: int, have: Sequence[int], want: Sequence[int]) -> InputError:
    """Return the error for a reference image (`content`) whose height and width `have` differ from the expected size `want`."""
    return InputError(
        f"The {content} of row {row} has {have[0]} x {have[1]} pixels (height x width), but it must have {want[0]} x {want[1]} pixels.",
        fix=f"resize the {content} of each row to the size of the model's output for the row's image.",
    )
