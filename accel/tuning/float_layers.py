"""Keep the layers in float whose quantization costs most accuracy: rank layers by their error, and keep as few as necessary."""

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
from ..backends.plan import RunPreferences, make_plan
from ..errors import AccelError
from ..interfaces.protocols import Feeds
from ..measuring.accuracy.evaluation import EvaluationSet
from ..models.base import ORTModel
from .candidates import Candidate, Recipe
from .jobs import build
from .search import Preset, Proposal, Search
from .search_data import SearchSubject, TriedCandidate

logger = logging.getLogger(__name__)

_PROBE_ROWS = 64
_PROBE_BATCHES = 4


class FloatLayerSearch:
    """Tries quantized candidates. If no candidate meets the constraints, it tries candidates with some layers in float.

    Args:
        search: The search that builds and measures the candidates.
        subject: The model and the machine of the search.
        artifact: The artifact to quantize.
        prepared: Rows to measure accuracy on.
        calibration: Batches for schemes that need activation ranges.
        backend: Backend that runs the candidates; `None` for the automatic choice.
        work: Folder for temporary artifacts.

    Attributes:
        attempts: All attempts in order, each with its recipe, the layers kept in float, the candidate (`None` if the attempt
            failed), and the time in seconds.
        fitting: Candidates that meet the constraints, in order. The artifacts of all other candidates are removed.
        sensitivity: For each scheme and layer, the error if only this layer is quantized; largest error first.
    """

    def __init__(
        self,
        search: Search,
        subject: SearchSubject,
        artifact: Artifact,
        prepared: EvaluationSet,
        calibration: Iterable[Feeds] | None,
        backend: str | None,
        work: Path,
    ) -> None:
        self._search, self._subject, self._artifact, self._prepared = search, subject, artifact, prepared
        self._calibration, self._backend, self._work = calibration, backend, work
        self.attempts: list[tuple[Recipe, tuple[str, ...], TriedCandidate | None, float]] = []
        self.fitting: list[TriedCandidate] = []
        self.sensitivity: dict[str, dict[str, float]] = {}

    def proposals(self, recipes: Sequence[Recipe]) -> Preset[None]:
        """Try every recipe. If no candidate meets the constraints yet, try the recipe again with some layers in float."""
        for recipe in recipes:
            tried, layers = yield from self._attempt(recipe)
            if tried is not None and not self.fitting and len(layers) > 1:
                yield from self._fall_back(recipe, layers)

    def _attempt(self, recipe: Recipe, layers: Sequence[str] = ()) -> Preset[tuple[TriedCandidate | None, list[str]]]:
        """Build and measure a recipe with the given layers in float; return the candidate, and the layers that it quantizes."""
        started = time.perf_counter()
        built = yield Proposal(stage="quantize", action="build", items=[with_float_layers(recipe, layers)])
        group = [TriedCandidate(Candidate(recipe=b.recipe, backend=self._backend or "", device=""), b) for b in built]
        graded = yield Proposal(stage="measure accuracy", action="accuracy", items=group)
        tried: TriedCandidate | None = graded[0] if graded else None
        seconds = round(time.perf_counter() - started, 2)
        self.attempts.append((recipe, tuple(layers), tried, seconds))
        if tried is None:
            return None, []
        quantized = Artifact.load(tried.artifact.path).manifest.steps[-1].report.get("layers", ())
        if self._search.fits(tried):
            self.fitting.append(tried)
        else:
            _remove(tried)
        return tried, list(dict.fromkeys(quantized))

    def _fall_back(self, recipe: Recipe, layers: Sequence[str]) -> Preset[None]:
        """Keep the 1, 2, 4, ... most harmful layers in float until the constraints are met; then find the smallest such number.

        At most half of the layers are kept in float, because a model with fewer quantized layers gains too little.
        """
        ranked = self._rank(recipe, layers)
        limit = max(1, len(layers) // 2)
        outside, count = 0, 1
        while not self.fitting:
            if outside == limit or (yield from self._attempt(recipe, ranked[:count]))[0] is None:
                return
            if not self.fitting:
                outside, count = count, min(2 * count, limit)
        while count - outside > 1:
            middle = (count + outside) // 2
            yield from self._attempt(recipe, ranked[:middle])
            if len(self.fitting) > 1:
                # Remove the earlier candidate, which has the same recipe but more layers in float than the new candidate.
                _remove(self.fitting.pop(0))
                count = middle
            else:
                outside = middle

    def _rank(self, recipe: Recipe, layers: Sequence[str]) -> list[str]:
        """Return the layers, sorted by the error that each causes if it alone is quantized; largest error first.

        The error is the difference of the outputs from the float artifact's outputs, on 64 rows, which is much more precise than a metric.
        The opposite test (quantize all layers but one) would show no difference if two layers are harmful.
        """
        rows = list(range(len(self._prepared.predictor.encoded)))
        rows = rows[:: max(1, len(rows) // _PROBE_ROWS)][:_PROBE_ROWS]
        expected = self._outputs(self._artifact, None, rows)
        calibration = None if self._calibration is None else _FirstBatches(self._calibration, _PROBE_BATCHES)
        harm: dict[str, float] = {}
        for layer in progress.track(layers, f"ranking layers ({recipe.setting})"):
            others = tuple(name for name in layers if name != layer)
            folder = self._work / "probe"
            alone = with_float_layers(recipe, others)
            try:
                with progress.listening(_silent):
                    build(alone, self._artifact, folder, self._subject.model, calibration)
                    harm[layer] = _distance(self._outputs(Artifact.load(folder), self._backend, rows), expected)
            except AccelError as error:
                logger.info("the error of quantizing only the layer %s cannot be measured: %s", layer, error.message)
                harm[layer] = math.inf
            finally:
                shutil.rmtree(folder, ignore_errors=True)
        ranked = sorted(layers, key=lambda layer: -harm[layer])
        self.sensitivity[recipe.setting] = {layer: harm[layer] for layer in ranked if math.isfinite(harm[layer])}
        return ranked

    def _outputs(self, artifact: Artifact, backend: str | None, rows: Sequence[int]) -> list[torch.Tensor]:
        """Return all floating-point outputs for some rows, without padding positions."""
        model = ORTModel.from_plan(make_plan(artifact, RunPreferences(backend=backend)))
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


def with_float_layers(recipe: Recipe, layers: Sequence[str]) -> Recipe:
    """Return a copy of the recipe that keeps these layers in float."""
    if not layers:
        return recipe
    return replace(recipe, settings={**recipe.settings, "exclude": (*recipe.settings.get("exclude", ()), *layers)})


def _remove(tried: TriedCandidate) -> None:
    shutil.rmtree(tried.artifact.path, ignore_errors=True)


class _FirstBatches:
    """The first batches of an iterable; can be iterated several times."""

    def __init__(self, batches: Iterable[Feeds], count: int) -> None:
        self._batches = batches
        self._count = count

    def __iter__(self) -> Iterator[Feeds]:
        return itertools.islice(iter(self._batches), self._count)

    @property
    def parts(self) -> dict[str, Sequence[Feeds]]:
        """The first calibration batches of each graph, for models of several graphs."""
        return {name: batches[: self._count] for name, batches in getattr(self._batches, "parts", {}).items()}


def _silent(description: str, done: int, total: int | None) -> None:
    """Progress listener that ignores all reports. It hides the progress of steps inside another step."""


def _distance(values: Sequence[torch.Tensor], expected: Sequence[torch.Tensor]) -> float:
    """Return the sum of squared errors relative to the sum of squared expected values; infinity if a value is not finite."""
    wrong = sum(float((a - b).square().sum()) for a, b in zip(values, expected, strict=True))
    scale = sum(float(b.square().sum()) for b in expected)
    error = wrong / scale if scale else wrong
    return error if math.isfinite(error) else math.inf
