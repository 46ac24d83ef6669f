"""Measure what reduces the error of an artifact: other options, another backend, layers in float, another quantization."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from .. import capture
from ..artifact.atomic_folder_writing import scratch
from ..artifact.hub import HubOptions
from ..artifact.manifest import Artifact
from ..artifact.resolved_model import ResolvedModel
from ..backends import registry
from ..backends.plan import RunPreferences, make_plan
from ..backends.sessions import open_plan
from ..config import QuantizeConfig, SessionOptions
from ..errors import AccelError
from ..interfaces.layer_traces import LayerValues
from ..stages.export import export
from ..stages.optimize import optimize
from ..stages.quantize import quantize
from .causes import Cause
from .layer_errors import PlaceError, relative

logger = logging.getLogger(__name__)

_EXCLUDED = (1, 3)
Feeds = Mapping[str, torch.Tensor]


@dataclass(frozen=True, slots=True, kw_only=True)
class Remedy:
    """A change and the error that remains.

    Attributes:
        name: The change, in the words of the arguments that make it.
        error: The error that remains, relative to the output; `None` if the change was not possible.
        before: The error without the change.
        note: Why the change was not possible.
    """

    name: str
    error: float | None
    before: float
    note: str = ""

    def back(self) -> str:
        """Return the part of the error that the change gives back, as text."""
        if self.error is None or not self.before:
            return ""
        return f" ({max(0.0, 1 - self.error / self.before):.0%})"


class Remedies:
    """Runs an artifact with changes.

    Args:
        artifact: The artifact.
        settings: Backend, device and options of the comparison.
        hub: Options for downloads.
        feeds: Inputs by component.
        results: Function that computes the expected outputs of a component.
    """

    def __init__(
        self,
        artifact: Artifact,
        settings: RunPreferences,
        hub: HubOptions,
        feeds: Mapping[str, Feeds],
        results: Callable[[str, Feeds], Mapping[str, torch.Tensor]],
    ) -> None:
        self._artifact, self._settings, self._hub = artifact, settings, hub
        self._feeds = feeds
        self._expected = {name: results(name, values) for name, values in feeds.items()}

    def values_of_session(
        self, artifact: Artifact | None = None, settings: RunPreferences | None = None
    ) -> dict[str, LayerValues]:
        """Return the outputs of a usual session."""
        model = ResolvedModel.of_artifact(artifact or self._artifact, self._hub)
        opened = open_plan(make_plan(model, settings or self._settings), probes=False)
        values = {}
        try:
            for name, session in opened.sessions.items():
                if name not in self._feeds:
                    continue
                feeds = self._feeds[name]
                names = {spec.name for spec in session.inputs if spec.pair is None}
                stateful = any(spec.pair is not None for spec in session.inputs) or bool(
                    getattr(session, "stateful", False)
                )
                state = session.new_state(next(iter(feeds.values())).shape[0]) if stateful else None
                outputs = session.run({n: v for n, v in feeds.items() if n in names}, state=state)
                values[name] = LayerValues(results={n: v.detach().cpu() for n, v in outputs.items()})
        finally:
            opened.close()
        return values

    def error_of(self, values: Mapping[str, LayerValues]) -> float:
        """Return the largest error of an output, as root mean square relative to the expected output, without padding."""
        errors = [0.0]
        for component, actual in values.items():
            mask = self._feeds[component].get("attention_mask")
            for name, expected in self._expected[component].items():
                value = actual.results.get(name)
                if value is None or not expected.is_floating_point() or value.numel() != expected.numel():
                    continue
                value = value.reshape(expected.shape).double()
                real = expected.double()
                if mask is not None and mask.ndim == 2 and real.shape[:2] == mask.shape:
                    value, real = value[mask.bool()], real[mask.bool()]
                errors.append(relative(value - real, real))
        return max(errors)

    def measure(
        self,
        before: float,
        source: capture.Source | None,
        causes: Sequence[tuple[float, Cause]],
        places: Sequence[PlaceError],
    ) -> list[Remedy]:
        """Measure all remedies that apply, smallest remaining error first."""
        remedies = [self._tried(name, before, settings=settings) for name, settings in self._runs()]
        quantization = next((step for step in self._artifact.manifest.steps if step.stage == "quantize"), None)
        half = self._artifact.dtype in ("float16", "bfloat16")
        if source is not None and (quantization is not None or half):
            with scratch() as folder:
                try:
                    parent = export(
                        source.model, folder / "float", task=self._artifact.task, format=self._artifact.format
                    )
                except AccelError as error:
                    logger.info("no remedies with new artifacts: %s", error.message)
                    parent = None
                if parent is not None:
                    remedies.append(self._tried("float32 instead", before, artifact=parent))
                    if quantization is not None:
                        config = QuantizeConfig.from_dict(quantization.config)
                        remedies += self._quantized(parent, config, quantization.report, before, places, folder)
                    elif half:
                        remedies.append(self._islands(parent, before, folder))
        return sorted(remedies, key=lambda remedy: (remedy.error is None, remedy.error or 0.0))

    def _runs(self) -> Iterator[tuple[str, RunPreferences]]:
        """Yield other ways to open the artifact."""
        options = self._settings.options or SessionOptions()
        plan = make_plan(ResolvedModel.of_artifact(self._artifact, self._hub), self._settings)
        if options.compute_dtype != "float32" and (self._artifact.dtype != "float32" or plan.options.compute_dtype):
            yield "compute_dtype='float32'", replace(self._settings, options=replace(options, compute_dtype="float32"))
        if options.graph_optimization == "all" and self._artifact.format == "onnx":
            yield (
                "graph_optimization='none'",
                replace(self._settings, options=replace(options, graph_optimization="none")),
            )
        for spec in registry.describe_all()[0]:
            capability = spec.capability("run", self._artifact.format)
            if (
                capability is None
                or plan.backend is None
                or spec.name == plan.backend.name
                or not capability.dynamic_shapes
            ):
                continue
            if registry.probe(spec).available:
                yield f"backend={spec.name!r}", RunPreferences(backend=spec.name)

    def _tried(
        self, name: str, before: float, *, artifact: Artifact | None = None, settings: RunPreferences | None = None
    ) -> Remedy:
        try:
            return Remedy(name=name, error=self.error_of(self.values_of_session(artifact, settings)), before=before)
        except AccelError as error:
            return Remedy(name=name, error=None, before=before, note=error.message)

    def _islands(self, parent: Artifact, before: float, folder: Path) -> Remedy:
        name = "float16 with operators in float32 where these inputs need them (optimize level='O4', calibration=...)"
        try:
            return self._tried(
                name, before, artifact=optimize(parent, folder / "islands", level="O4", calibration=self._batches())
            )
        except AccelError as error:
            return Remedy(name=name, error=None, before=before, note=error.message)

    def _quantized(
        self,
        parent: Artifact,
        config: QuantizeConfig,
        report: Mapping[str, Any],
        before: float,
        places: Sequence[PlaceError],
        folder: Path,
    ) -> Iterator[Remedy]:
        """Quantize the float artifact again, with one change each."""
        layers = list(dict.fromkeys(report.get("layers", ())))
        ranked = [place.place for place in sorted(places, key=lambda place: -place.made) if place.place in layers]
        changes: list[tuple[str, QuantizeConfig]] = [("the same settings again", config)]
        worst = [tuple(ranked[:count]) for count in _EXCLUDED if count < len(ranked)]
        changes += [(f"exclude={names!r}", replace(config, exclude=(*config.exclude, *names))) for names in worst]
        if config.scheme == "static-int8" and config.smooth_quant is None:
            changes.append(("smooth_quant=0.5", replace(config, smooth_quant=0.5)))
        if config.scheme == "static-int8":
            changes.append(("calibration='percentile'", replace(config, calibration="percentile")))
        changes += [
            (f"scheme={scheme!r}", QuantizeConfig(scheme=scheme, preset=config.preset))
            for scheme in ("dynamic-int8", "weight-int8")
            if scheme != config.scheme
        ]
        for number, (name, changed) in enumerate(changes):
            static = changed.scheme == "static-int8"
            try:
                other = quantize(
                    parent,
                    folder / f"quantized-{number}",
                    config=changed,
                    calibration=self._batches() if static else None,
                )
                yield self._tried(name, before, artifact=other)
            except AccelError as error:
                yield Remedy(name=name, error=None, before=before, note=error.message)

    def _batches(self) -> list[Feeds]:
        return list(self._feeds.values())[:1]
