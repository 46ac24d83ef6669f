"""Layers that lose accuracy go back to float: ranked by the error of each, as few of them as the constraints allow."""

from __future__ import annotations

import itertools
import logging
import math
import shutil
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import torch

from .. import progress
from ..artifact.manifest import Artifact
from ..backends.plan import RunSettings, make_plan
from ..errors import AccelError
from ..interfaces.protocols import Feeds
from ..measuring.accuracy.evaluation import EvaluationSet
from ..models.base import ORTModel
from .candidates import Recipe
from .jobs import build
from .search import Search
from .subject import Subject, Tried

logger = logging.getLogger(__name__)

_PROBE_ROWS = 64
_PROBE_BATCHES = 4


class FloatLayers:
    """Quantized candidates; where none fits, candidates with some layers in float.

    Args:
        search: The search that they take part in.
        subject: Its subject.
        artifact: What is quantized.
        prepared: The rows that accuracy is measured on.
        calibration: Batches for schemes that need activation ranges.
        backend: Who runs what is made; its own choice when `None`.
        work: Folder for artifacts that are needed for a moment.

    Attributes:
        attempts: What was tried, in order: the recipe, the layers put back to float, the candidate (`None` where it failed), and the
            seconds that it took.
        fitting: Candidates that fit, in order; only their artifacts are kept.
        sensitivity: By scheme, the error that each layer causes when it alone is quantized, most harmful first.
    """

    def __init__(
        self,
        search: Search,
        subject: Subject,
        artifact: Artifact,
        prepared: EvaluationSet,
        calibration: Iterable[Feeds] | None,
        backend: str | None,
        work: Path,
    ) -> None:
        self._search, self._subject, self._artifact, self._prepared = search, subject, artifact, prepared
        self._calibration, self._backend, self._work = calibration, backend, work
        self.attempts: list[tuple[Recipe, tuple[str, ...], Tried | None, float]] = []
        self.fitting: list[Tried] = []
        self.sensitivity: dict[str, dict[str, float]] = {}

    def run(self, recipes: Sequence[Recipe]) -> None:
        """Try every recipe; where none has fitted yet, put layers of it back to float."""
        for recipe in recipes:
            tried, layers = self._attempt(recipe)
            if tried is not None and not self.fitting and len(layers) > 1:
                self._fall_back(recipe, layers)

    def _attempt(self, recipe: Recipe, layers: Sequence[str] = ()) -> tuple[Tried | None, list[str]]:
        """Build and measure a recipe with these layers in float: the candidate, and the layers that it quantizes."""
        started = time.perf_counter()
        exclude = {"exclude": (*recipe.settings.get("exclude", ()), *layers)} if layers else {}
        tried = self._search.attempt(replace(recipe, settings={**recipe.settings, **exclude}), self._backend)
        seconds = round(time.perf_counter() - started, 2)
        self.attempts.append((recipe, tuple(layers), tried, seconds))
        if tried is None:
            return None, []
        quantized = Artifact.load(tried.made.path).manifest.steps[-1].report.get("layers", ())
        if self._search.fits(tried):
            self.fitting.append(tried)
        else:
            _remove(tried)
        return tried, list(dict.fromkeys(quantized))

    def _fall_back(self, recipe: Recipe, layers: Sequence[str]) -> None:
        """Put the most harmful layers back to float: 1, 2, 4, ... of them, then the fewest that still fit.

        At most half of the layers: beyond that too little is left to be worth it.
        """
        ranked = self._rank(recipe, layers)
        limit = max(1, len(layers) // 2)
        outside, count = 0, 1
        while not self.fitting:
            if outside == limit or self._attempt(recipe, ranked[:count])[0] is None:
                return
            if not self.fitting:
                outside, count = count, min(2 * count, limit)
        while count - outside > 1:
            middle = (count + outside) // 2
            self._attempt(recipe, ranked[:middle])
            if len(self.fitting) > 1:
                # The same recipe with more layers in float.
                _remove(self.fitting.pop(0))
                count = middle
            else:
                outside = middle

    def _rank(self, recipe: Recipe, layers: Sequence[str]) -> list[str]:
        """Layers by the error that each causes when it alone is quantized, most harmful first.

        The error is that of the outputs relative to the float artifact's, on 64 rows: much finer than a metric, and not
        blind, as leaving one layer out would be, where two layers do harm.
        """
        rows = list(range(len(self._prepared.predictor.encoded)))
        rows = rows[:: max(1, len(rows) // _PROBE_ROWS)][:_PROBE_ROWS]
        expected = self._outputs(self._artifact, None, rows)
        calibration = None if self._calibration is None else _First(self._calibration, _PROBE_BATCHES)
        excluded = recipe.settings.get("exclude", ())
        harm: dict[str, float] = {}
        for layer in progress.track(layers, f"ranking layers ({recipe.setting})"):
            others = tuple(name for name in layers if name != layer)
            folder = self._work / "probe"
            alone = replace(recipe, settings={**recipe.settings, "exclude": (*excluded, *others)})
            try:
                with progress.listening(_silent):
                    build(alone, self._artifact, folder, self._subject.model, calibration)
                    harm[layer] = _distance(self._outputs(Artifact.load(folder), self._backend, rows), expected)
            except AccelError as error:
                logger.info("layer %s alone cannot be measured: %s", layer, error.message)
                harm[layer] = math.inf
            finally:
                shutil.rmtree(folder, ignore_errors=True)
        ranked = sorted(layers, key=lambda layer: -harm[layer])
        self.sensitivity[recipe.setting] = {layer: harm[layer] for layer in ranked if math.isfinite(harm[layer])}
        return ranked

    def _outputs(self, artifact: Artifact, backend: str | None, rows: Sequence[int]) -> list[torch.Tensor]:
        """All floating-point outputs on some rows, without what belongs to padding."""
        model = ORTModel.from_plan(make_plan(artifact, RunSettings(backend=backend)))
        outputs: list[torch.Tensor] = []
        try:
            for _, feeds, output in self._prepared.predictor.batches(model, "ranking layers", rows):
                mask = feeds.get("attention_mask")
                for value in output.values():
                    if not isinstance(value, torch.Tensor) or not value.is_floating_point():
                        continue
                    if mask is not None and value.ndim >= 2 and value.shape[:2] == mask.shape:
                        value = value[mask.bool()]
                    outputs.append(value.double().cpu().flatten())
        finally:
            model.close()
        return outputs


def _remove(tried: Tried) -> None:
    shutil.rmtree(tried.made.path, ignore_errors=True)


class _First:
    """The first batches of an iterable, again and again."""

    def __init__(self, batches: Iterable[Feeds], count: int) -> None:
        self._batches = batches
        self._count = count

    def __iter__(self) -> Iterator[Feeds]:
        return itertools.islice(iter(self._batches), self._count)

    @property
    def parts(self) -> dict[str, Sequence[Feeds]]:
        """The first batches of each graph, where the batches have them."""
        return {name: batches[: self._count] for name, batches in getattr(self._batches, "parts", {}).items()}


def _silent(what: str, done: int, total: int | None) -> None:
    """Steps inside a step do not report."""


def _distance(values: Sequence[torch.Tensor], expected: Sequence[torch.Tensor]) -> float:
    """Squared error relative to the squares of the expected values; infinite when a value is not finite."""
    wrong = sum(float((a - b).square().sum()) for a, b in zip(values, expected, strict=True))
    scale = sum(float(b.square().sum()) for b in expected)
    error = wrong / scale if scale else wrong
    return error if math.isfinite(error) else math.inf
