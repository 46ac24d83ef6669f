"""Candidates of searches, derived from the capabilities that installed backends declare. New plugins need no code here.

A candidate is an artifact, built by a chain of steps (export, optimize, quantize), together with the way to run it. No code in this
module names a backend, a format, a level or a scheme.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any, Literal

from ..backends import registry
from ..config import SessionOptions, available_processors
from ..interfaces.specs import BackendSpec, Capability, DeviceSpec

_DTYPES = ("float32", "bfloat16", "float16")


@dataclass(frozen=True, slots=True, kw_only=True)
class Recipe:
    """One step that builds an artifact, and the recipe of the artifact that the step starts from.

    Attributes:
        stage: Stage of the step.
        backend: Backend that executes the step.
        format: Format of the built artifact.
        setting: Dtype of an export, level of an optimization, or scheme of a quantization.
        settings: More settings of the step.
        parent: Recipe of the artifact that the step starts from; `None` for an export of the model. An export may also start from
            quantized PyTorch weights.
    """

    stage: Literal["export", "optimize", "quantize"]
    backend: str
    format: str
    setting: str
    settings: Mapping[str, Any] = field(default_factory=dict)
    parent: Recipe | None = None

    def __str__(self) -> str:
        more = "".join(f" {name}={value}" for name, value in self.settings.items())
        if self.parent is None:
            return f"{self.format} {self.setting}{more}"
        # Name the backend only if it differs from the backend of the previous step.
        who = f"{self.backend} " if self.backend != self.parent.backend else ""
        if self.stage == "export":
            return f"{self.parent} > {self.format}{more}"
        return f"{self.parent} > {who}{self.setting}{more}"

    @property
    def quantizes(self) -> bool:
        """Whether one of the steps quantizes."""
        return self.stage == "quantize" or (self.parent is not None and self.parent.quantizes)

    @property
    def steps(self) -> int:
        """Number of steps, including all parents."""
        return 1 + (self.parent.steps if self.parent is not None else 0)

    @property
    def exported_dtype(self) -> str:
        """Dtype of the first export."""
        return self.parent.exported_dtype if self.parent is not None else self.setting


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidate:
    """A recipe, and the way to run the artifact that it builds.

    Attributes:
        recipe: Recipe of the artifact.
        backend: Backend that runs the artifact; empty for the automatic choice.
        device: Device that runs the artifact; empty for the backend's choice.
        options: Session options.
        provider_options: Options that only this backend has.
    """

    recipe: Recipe
    backend: str
    device: str
    options: SessionOptions = SessionOptions()
    provider_options: Mapping[str, Any] = field(default_factory=dict)

    def __str__(self) -> str:
        options = self.options
        parts = [
            *(f"{name} {value}" for name, value in self.provider_options.items()),
            options.compute_dtype or "",
            f"buckets {','.join(map(str, options.buckets))}" if options.buckets else "",
            f"threads {options.threads}" if options.threads is not None else "",
        ]
        how = ", ".join(part for part in parts if part)
        where = "" if self.device in ("", "cpu") else f" on {self.device}"
        backend = f"{self.backend}{where}: " if self.backend else ""
        return f"{backend}{self.recipe}{f' ({how})' if how else ''}"

    @property
    def complexity(self) -> tuple[int, ...]:
        """Sort key that prefers simple candidates; among equally good candidates, the one with the smallest key wins.

        Float comes before quantized, float32 before other dtypes; then follow fewer run options (buckets, threads, options of the
        backend), fewer steps, fewer settings, and fewer layers in float.
        """
        other_dtype = self.options.compute_dtype not in (None, "float32") or self.recipe.exported_dtype != "float32"
        return (
            int(self.recipe.quantizes),
            int(other_dtype),
            len(_changed(self.options)) + len(self.provider_options),
            self.recipe.steps,
            sum(name != "exclude" for name in self.recipe.settings),
            len(self.recipe.settings.get("exclude", ())),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class SkippedCandidate:
    """Name of a declared candidate that is not tried, and the reason."""

    name: str
    reason: str


def _usable(backends: Sequence[str] | None) -> tuple[list[BackendSpec], list[BackendSpec], list[SkippedCandidate]]:
    """Return the backends to try, the backends that were not requested, and all skipped backends with the reason."""
    specs, broken = registry.describe_all()
    skipped = [SkippedCandidate(name=name, reason=str(reason)) for name, reason in broken.items()]
    requested = None if backends is None else {registry.describe(name).name for name in backends}
    good, others = [], []
    for spec in specs:
        if requested is not None and spec.name not in requested:
            others.append(spec)
            skipped.append(SkippedCandidate(name=spec.name, reason="it is not one of the requested backends"))
            continue
        probe = registry.probe(spec)
        if probe.available:
            good.append(spec)
        else:
            why = "; ".join(str(reason) for reason in probe.reasons) or "it found no device that it can use"
            skipped.append(SkippedCandidate(name=spec.name, reason=why))
    return good, others, skipped


class SearchSpace:
    """The candidates that the installed backends declare for a task.

    Args:
        task: The task.
        device: Device type that runs the candidates; `None` for all device types that a backend finds.
        backends: Names of the backends to search. If they can run but not export a format, another backend exports it.
        half_exports: Include half-precision exports for the CPU, where they are smaller but not faster.
        calibrated: Whether there is calibration data.

    Attributes:
        skipped: Declared candidates that are not tried, with the reasons.
    """

    def __init__(
        self, *, task: str, device: str | None, backends: Sequence[str] | None, half_exports: bool, calibrated: bool
    ) -> None:
        self._task = task
        self._device = DeviceSpec.parse(device) if device is not None else None
        self._half = half_exports
        self._calibrated = calibrated
        self._specs, self._others, self.skipped = _usable(backends)

    def _fits(self, capability: Capability) -> bool:
        if not capability.does(self._task):
            return False
        # Exports do not depend on the device that runs them.
        return capability.stage == "export" or self._device is None or self._device.type in capability.devices

    def _offers(self, stage: str, consumes: str | None) -> Iterator[tuple[BackendSpec, Capability]]:
        for spec in self._specs:
            for capability in spec.capabilities:
                if capability.stage == stage and capability.consumes == consumes and self._fits(capability):
                    yield spec, capability

    def exports(self) -> list[Recipe]:
        """Return one export for each format and dtype that an available backend can run, by the first backend that exports the format."""
        recipes: dict[tuple[str, str], Recipe] = {}
        for spec, capability in (*self._offers("export", None), *self._lent()):
            format = capability.produces
            if format is None or not any(self._offers("run", format)):
                continue
            if not capability.searched:
                self._skip(f"{spec.name}: {format}", "another format runs the same kernels without a compiled package")
                continue
            on_host = all(device.type == "cpu" for _, device in self.runners(format, "float32"))
            for dtype in capability.dtypes:
                if dtype == "float32" or self._half or not on_host:
                    recipes.setdefault(
                        (format, dtype), Recipe(stage="export", backend=spec.name, format=format, setting=dtype)
                    )
                else:
                    self._skip(
                        f"{spec.name}: {format} {dtype}", "half precision makes files smaller but not faster on a CPU"
                    )
        return list(recipes.values())

    def _lent(self) -> Iterator[tuple[BackendSpec, Capability]]:
        """Yield exports by backends that were not requested, for formats that requested backends can run but not export."""
        exported = {capability.produces for _, capability in self._offers("export", None)}
        for spec in self._others:
            for capability in spec.capabilities:
                if capability.stage != "export" or capability.produces in exported or not self._fits(capability):
                    continue
                if any(self._offers("run", capability.produces)) and registry.probe(spec).available:
                    yield spec, capability

    def optimizations(self, recipe: Recipe, dtype: str) -> list[Recipe]:
        """Return the recipes that optimize the artifact of a recipe, one for each level."""
        return [
            Recipe(stage="optimize", backend=spec.name, format=capability.produces or recipe.format, setting=level,
                   parent=recipe)
            for spec, capability in self._offers("optimize", recipe.format)
            if dtype in capability.dtypes and not self._is_detour(spec, capability)
            for level in capability.schemes
        ]  # fmt: skip

    def _is_detour(self, spec: BackendSpec, capability: Capability) -> bool:
        """Return whether a step converts to a format that can also be exported directly."""
        produces = capability.produces
        if produces in (None, capability.consumes) or produces not in {export.format for export in self.exports()}:
            return False
        why = f"a direct export from PyTorch to {produces} gives better graphs"
        self._skip(f"{spec.name}: {capability.consumes} to {produces}", why)
        return True

    def quantizations(self, recipe: Recipe, dtype: str) -> list[Recipe]:
        """Return the recipes that quantize the artifact of a recipe: one recipe for each scheme, and
        one more for each of the settings that the backend declares for the scheme (`SchemeSettings.trials`).
        """
        recipes = []
        for spec, capability in self._offers("quantize", recipe.format):
            if dtype not in capability.dtypes or self._is_detour(spec, capability):
                continue
            for step in self.schemes(spec, capability, recipe):
                runs = spec.capability("run", step.format) is not None
                recipes += [step] if runs else self._exports_of(step)
        return recipes

    def schemes(
        self,
        spec: BackendSpec,
        capability: Capability,
        parent: Recipe,
        settings: Mapping[str, Any] | None = None,
        *,
        same_speed: bool = False,
    ) -> list[Recipe]:
        """Return the schemes of one quantizer, fastest first as declared, each also with the settings in `SchemeSettings.trials`.

        Args:
            spec: Backend of the quantizer.
            capability: Declared capability of the quantizer.
            parent: Recipe of the artifact to quantize.
            settings: Settings that all recipes share; they are not varied.
            same_speed: Also try settings that change accuracy but not speed.
        """
        chosen = settings or {}
        recipes = []
        for scheme in capability.schemes:
            if scheme.startswith("static") and not self._calibrated:
                self._skip(f"{spec.name}: {scheme}", "it needs calibration data (pass --calibration FILE)")
                continue
            step = Recipe(stage="quantize", backend=spec.name, format=capability.produces or parent.format, setting=scheme,
                          settings=chosen, parent=parent)  # fmt: skip
            trials = [
                t
                for t in capability.scheme_trials(scheme, self._task)
                if t.name not in chosen and (same_speed or not t.same_speed)
            ]
            recipes += [step, *(replace(step, settings={**chosen, t.name: t.value}) for t in trials)]
        return recipes

    def _exports_of(self, recipe: Recipe) -> list[Recipe]:
        """Return exports of a quantized artifact to other formats, for a quantizer whose backend cannot run its own format."""
        return [
            replace(export, parent=recipe)
            for export in self.exports()
            if export.format != recipe.format and export.setting == "float32"
        ]

    def runners(self, format: str, dtype: str) -> list[tuple[BackendSpec, DeviceSpec]]:
        """Return (backend, device) pairs that can run a format with this dtype."""
        runners = []
        for spec, capability in self._offers("run", format):
            if dtype not in capability.dtypes:
                continue
            # Skip `auto`: it selects one of the other devices.
            runners += [
                (spec, device)
                for device in registry.probe(spec).devices
                if device.type in capability.devices
                and device.type != "auto"
                and (self._device is None or self._device.type == device.type)
            ]
        return runners

    def candidates(self, recipe: Recipe, dtype: str) -> list[Candidate]:
        """Return the ways to run an artifact with default options.

        If a backend optimized or quantized the graph and can run its format, only this backend runs it, because the graph is made for
        its kernels.
        """
        runners = self.runners(recipe.format, dtype)
        if recipe.parent is not None and any(spec.name == recipe.backend for spec, _ in runners):
            runners = [(spec, device) for spec, device in runners if spec.name == recipe.backend]
        return [Candidate(recipe=recipe, backend=spec.name, device=str(device)) for spec, device in runners]

    def variations(
        self, candidate: Candidate, *, dtype: str, lengths: Iterable[int], masked: bool, threads: int | None = None
    ) -> list[Candidate]:
        """Return copies of the candidate with one changed run option: compute dtype, buckets, threads, or an option of the backend.

        Options without effect are skipped: buckets if all calls have the same length, unless the backend has faster kernels for fixed
        shapes, and the number of threads that is already the default.

        Args:
            candidate: The candidate to vary.
            dtype: Dtype of its artifact.
            lengths: Sequence lengths of the calls.
            masked: Whether its graph has an attention mask input, so that sequences can be padded.
            threads: Default number of threads; `None` for all processors that the process may use.
        """
        capability = registry.describe(candidate.backend).capability("run", candidate.recipe.format)
        assert capability is not None, "a candidate's backend runs its format"
        options = candidate.options
        changed = []
        if options.compute_dtype is None:
            words = [d for d in capability.dtypes if d in _DTYPES and d != dtype]
            changed += [replace(options, compute_dtype=d) for d in words]  # type: ignore[arg-type]  # one of the literals
        sizes = set(lengths)
        if not options.buckets and masked and (len(sizes) > 1 or capability.fixed_shapes):
            changed.append(replace(options, buckets=buckets_for(sizes)))
        elif not options.buckets and masked:
            self._skip(
                f"{candidate.backend}: buckets",
                "all calls have the same length, and the backend has no faster kernels for fixed lengths",
            )
        if options.threads is None and candidate.device == "cpu":
            changed += [replace(options, threads=n) for n in thread_counts() if n != threads]
        kind = DeviceSpec.parse(candidate.device).type
        others = [
            replace(candidate, provider_options={trial.name: trial.value})
            for trial in capability.run_trials(self._task, kind)
            if not candidate.provider_options
        ]
        return [*(replace(candidate, options=one_change) for one_change in changed), *others]

    def _skip(self, name: str, reason: str) -> None:
        skipped = SkippedCandidate(name=name, reason=reason)
        if skipped not in self.skipped:
            self.skipped.append(skipped)


def combined(changes: Sequence[Candidate]) -> Candidate:
    """Combine candidates that each change a different run option of the same candidate."""
    options: dict[str, Any] = {}
    provider_options: dict[str, Any] = {}
    for change in changes:
        options |= _changed(change.options)
        provider_options |= change.provider_options
    return replace(changes[0], options=SessionOptions(**options), provider_options=provider_options)


def _changed(options: SessionOptions) -> dict[str, Any]:
    """Return the session options that differ from the defaults."""
    default = SessionOptions()
    values = {field.name: getattr(options, field.name) for field in fields(options)}
    return {name: value for name, value in values.items() if value != getattr(default, name)}


def buckets_for(lengths: Iterable[int]) -> tuple[int, ...]:
    """Return bucket lengths: powers of two from 8 to the longest length, and all lengths themselves if there are at most 8.

    With these buckets, padding at most doubles the length of a call.
    """
    distinct_lengths = sorted(set(lengths))
    longest = distinct_lengths[-1]
    powers = [2**i for i in range(3, 20) if 2**i < longest]
    return tuple(sorted({*powers, longest, *(distinct_lengths if len(distinct_lengths) <= 8 else ())}))


def thread_counts() -> list[int]:
    """Return all powers of two below the number of processors."""
    processors = available_processors()
    return [2**i for i in range(12) if 2**i < processors]
