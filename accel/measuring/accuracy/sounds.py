"""What models that read sounds predict: transcripts, a class for each frame, whether two voices are one."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from ...data.batches import Encoded
from ...data.labels import label_ids, numbers, texts
from ...data.rows import Rows
from ...data.sounds import sounds_beside
from ...errors import InputError
from .pictures import Candidates
from .predictors import Cosines, Model, Predictor


class Transcripts(Predictor):
    """The likeliest letters of a row, by its processor."""

    kind = "transcripts"

    def _longest(self, limit: int | None, asked: int | None) -> int | None:
        return None

    def _references(self) -> list[Any]:
        return texts(self.rows, "text")

    def predict(self, model: Model, what: str) -> list[Any]:
        """Texts."""
        return self._by_row(model, what, lambda logits, _: self.processor.batch_decode(logits.argmax(-1)))


class Frames(Predictor):
    """The likeliest class of each frame, as its number."""

    kind = "frames"

    def _references(self) -> list[Any]:
        return label_ids(self.rows, "tags", self.config)

    def predict(self, model: Model, what: str) -> list[Any]:
        """Class numbers, one list a row.

        Raises:
            InputError: A row has another number of labels than of frames.
        """
        return self._by_row(model, what, self._frames)

    def _frames(self, logits: torch.Tensor, part: Sequence[int]) -> list[list[int]]:
        for row in part:
            if len(self.references[row]) != logits.shape[1]:
                raise InputError(
                    f"Row {row} has {len(self.references[row])} labels, and the model answers with {logits.shape[1]} frames.",
                    fix="give one label for each of the model's frames.",
                )
        found: list[list[int]] = logits.argmax(-1).tolist()
        return found

    def agreement(self, first: Sequence[Any], second: Sequence[Any]) -> float | None:
        """Share of frames."""
        return super().agreement([one for row in first for one in row], [one for row in second for one in row])


class Voices(Cosines):
    """The cosine of the embeddings of a row's two voices; what is right is 1 for one speaker and 0 for two."""

    kind = "voices"

    def _references(self) -> list[Any]:
        found = numbers(self.rows, "label")
        if set(found) - {0.0, 1.0}:
            raise InputError(
                f"The labels of {self.rows.sample.source} are not 0 and 1 alone.",
                fix="give 1 for two sounds of one speaker, 0 for those of two.",
            )
        return found


class SoundCandidates(Candidates):
    """The likeliest of the data's classes for a sound, by their names alone."""

    template = "This is a sound of {}."
    output = "logits_per_audio"

    def _beside(self, rows: Rows, processor: Any, candidates: Sequence[str], max_length: int | None) -> Encoded:
        return sounds_beside(rows, processor, candidates, max_length)
