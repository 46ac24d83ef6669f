"""What is counted on an image's own pixels, through the processor that made the model's inputs."""

from __future__ import annotations

import abc
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any, ClassVar

import torch

from ...data.batches import images_of
from ...errors import InputError
from .predictors import Model, Predictor


class PicturePredictor(Predictor):
    """Base of the predictors of images, whose answers are counted row by row: maps are too large to be kept."""

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


def sizes_differ(what: str, row: int, have: Sequence[int], want: Sequence[int]) -> InputError:
    """The error for a picture of another size than the image's."""
    return InputError(
        f"The {what} of row {row} has {have[0]} x {have[1]} pixels; {want[0]} x {want[1]} were expected.",
        fix="give pictures of the same size.",
    )
