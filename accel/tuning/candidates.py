"""Candidates of searches, read from the capabilities that installed backends declare; a new plugin takes part by itself.

A candidate is an artifact, made by a chain of steps (export, optimize, quantize), and the way to run it. Nothing here
names a backend, a format, a level or a scheme.
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
    """How an artifact is made: one step, and what it starts from.

    Attributes:
        stage: Of the step.
        backend: Who does it.
        format: Of the artifact.
        setting: The dtype of an export, the level of an optimization, the scheme of a quantization.
        settings: More settings of the step.
        parent: What it starts from; `None` for an export of the model itself. An export may also start from what a quantizer made
            of PyTorch weights.
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
        # A step by another backend than the one that exported is worth saying.
        who = f"{self.backend} " if self.backend != self.parent.backend else ""
        if self.stage == "export":
            return f"{self.parent} > {self.format}{more}"
        return f"{self.parent} > {who}{self.setting}{more}"

    @property
    def quantizes(self) -> bool:
        """Whether one of its steps does."""
        return self.stage == "quantize" or (self.parent is not None and self.parent.quantizes)

    @property
    def steps(self) -> int:
        """How many steps it takes."""
        return 1 + (self.parent.steps if self.parent is not None else 0)

    @property
    def exported_dtype(self) -> str:
        """The dtype of its export."""
        return self.parent.exported_dtype if self.parent is not None else self.setting


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidate:
    """A recipe and the way to run what it makes.

    Attributes:
        recipe: How the artifact is made.
        backend: The backend that runs it; the automatic choice when empty.
        device: The device; the backend's choice when empty.
        options: Session options.
        provider_options: The backend's own options.
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
        return f"{self.backend or 'chosen'}{where}: {self.recipe}{f' ({how})' if how else ''}"

    @property
    def complexity(self) -> tuple[int, ...]:
        """Order of equally good candidates; the least complex wins.

        Float comes before quantized, float32 before another dtype, then fewer run options (buckets, threads, the backend's
        own), fewer steps, fewer settings, fewer layers in float.
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
class Skipped:
    """A declared candidate that is skipped, and the reason."""

    name: str
    reason: str


def _usable(backends: Sequence[str] | None) -> tuple[list[BackendSpec], list[BackendSpec], list[Skipped]]:
    """Return the backends to try, those that were not asked for, and every skipped one with the reason."""
    specs, broken = registry.describe_all()
    skipped = [Skipped(name=name, reason=str(reason)) for name, reason in broken.items()]
    wanted = None if backends is None else {registry.describe(name).name for name in backends}
    good, others = [], []
    for spec in specs:
        if wanted is not None and spec.name not in wanted:
            others.append(spec)
            skipped.append(Skipped(name=spec.name, reason="not among the backends asked for"))
            continue
        probe = registry.probe(spec)
        if probe.available:
            good.append(spec)
        else:
            why = "; ".join(str(reason) for reason in probe.reasons) or "it found no device"
            skipped.append(Skipped(name=spec.name, reason=why))
    return good, others, skipped


class Space:
    """The candidates that the installed backends declare for a task.

    Args:
        task: The task.
        device: Device type to run on; every one that a backend finds when `None`.
        backends: Limits the search to these. What they run and none of them exports, another one exports.
        half_exports: Whether half-precision exports are worth a try on the host too: they are smaller, and no faster
            there.
        calibrated: Whether there is calibration data.

    Attributes:
        skipped: What is declared and not tried.
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
        # An export is made where there is room for it, whatever runs it.
        return capability.stage == "export" or self._device is None or self._device.type in capability.devices

    def _offers(self, stage: str, consumes: str | None) -> Iterator[tuple[BackendSpec, Capability]]:
        for spec in self._specs:
            for capability in spec.capabilities:
                if capability.stage == stage and capability.consumes == consumes and self._fits(capability):
                    yield spec, capability

    def exports(self) -> list[Recipe]:
        """One export for each format that something here can run; the first backend that makes a format makes it."""
        made: dict[tuple[str, str], Recipe] = {}
        for spec, capability in (*self._offers("export", None), *self._lent()):
            format = capability.produces
            if format is None or not any(self._offers("run", format)):
                continue
            if not capability.searched:
                self._skip(f"{spec.name}: {format}", "the same kernels are tried where they need no packing")
                continue
            on_host = all(device.type == "cpu" for _, device in self.runners(format, "float32"))
            for dtype in capability.dtypes:
                if dtype == "float32" or self._half or not on_host:
                    made.setdefault(
                        (format, dtype), Recipe(stage="export", backend=spec.name, format=format, setting=dtype)
                    )
                else:
                    self._skip(f"{spec.name}: {format} {dtype}", "on the host half-precision files save size, not time")
        return list(made.values())

    def _lent(self) -> Iterator[tuple[BackendSpec, Capability]]:
        """Exports by other backends, for formats that the requested backends run but cannot export."""
        own = {capability.produces for _, capability in self._offers("export", None)}
        for spec in self._others:
            for capability in spec.capabilities:
                if capability.stage != "export" or capability.produces in own or not self._fits(capability):
                    continue
                if any(self._offers("run", capability.produces)) and registry.probe(spec).available:
                    yield spec, capability

    def optimizations(self, recipe: Recipe, dtype: str) -> list[Recipe]:
        """The optimization levels of an artifact."""
        return [
            Recipe(stage="optimize", backend=spec.name, format=capability.produces or recipe.format, setting=level,
                   parent=recipe)
            for spec, capability in self._offers("optimize", recipe.format)
            if dtype in capability.dtypes and not self._is_detour(spec, capability)
            for level in capability.schemes
        ]  # fmt: skip

    def _is_detour(self, spec: BackendSpec, capability: Capability) -> bool:
        """Whether a step converts into a format that is exported as well."""
        produces = capability.produces
        if produces in (None, capability.consumes) or produces not in {export.format for export in self.exports()}:
            return False
        why = f"{produces} is exported from PyTorch itself, with better graphs"
        self._skip(f"{spec.name}: {capability.consumes} to {produces}", why)
        return True

    def quantizations(self, recipe: Recipe, dtype: str) -> list[Recipe]:
        """The quantization schemes of an artifact, each also with the other settings that are worth a try."""
        made = []
        for spec, capability in self._offers("quantize", recipe.format):
            if dtype not in capability.dtypes or self._is_detour(spec, capability):
                continue
            for step in self.schemes(spec, capability, recipe):
                runs = spec.capability("run", step.format) is not None
                made += [step] if runs else self._exports_of(step)
        return made

    def schemes(
        self,
        spec: BackendSpec,
        capability: Capability,
        parent: Recipe,
        settings: Mapping[str, Any] | None = None,
        *,
        same_speed: bool = False,
    ) -> list[Recipe]:
        """The schemes of one quantizer, fastest first as it declares them, each also with its trials (`SchemeSettings.trials`).

        Args:
            spec: The quantizer's backend.
            capability: What it does.
            parent: What is quantized.
            settings: Settings that all recipes share, which are not varied.
            same_speed: Whether values that change accuracy alone are tried in addition.
        """
        chosen = settings or {}
        made = []
        for scheme in capability.schemes:
            if scheme.startswith("static") and not self._calibrated:
                self._skip(f"{spec.name}: {scheme}", "it needs calibration data: pass --calibration FILE")
                continue
            step = Recipe(stage="quantize", backend=spec.name, format=capability.produces or parent.format, setting=scheme,
                          settings=chosen, parent=parent)  # fmt: skip
            trials = [
                t
                for t in capability.scheme_trials(scheme, self._task)
                if t.name not in chosen and (same_speed or not t.same_speed)
            ]
            made += [step, *(replace(step, settings={**chosen, t.name: t.value}) for t in trials)]
        return made

    def _exports_of(self, recipe: Recipe) -> list[Recipe]:
        """Exports to the other formats, for a quantizer whose backend runs nothing."""
        return [
            replace(export, parent=recipe)
            for export in self.exports()
            if export.format != recipe.format and export.setting == "float32"
        ]

    def runners(self, format: str, dtype: str) -> list[tuple[BackendSpec, DeviceSpec]]:
        """Backends, and their devices, that run a format."""
        found = []
        for spec, capability in self._offers("run", format):
            if dtype not in capability.dtypes:
                continue
            # A device that stands for the backend's own choice among the others (`auto`) measures nothing of its own.
            found += [
                (spec, device)
                for device in registry.probe(spec).devices
                if device.type in capability.devices
                and device.type != "auto"
                and (self._device is None or self._device.type == device.type)
            ]
        return found

    def candidates(self, recipe: Recipe, dtype: str) -> list[Candidate]:
        """Ways to run an artifact with default options.

        A rewritten graph runs on the backend that rewrote it, where that one runs the format: it was made for its kernels.
        """
        runners = self.runners(recipe.format, dtype)
        if recipe.parent is not None and any(spec.name == recipe.backend for spec, _ in runners):
            runners = [(spec, device) for spec, device in runners if spec.name == recipe.backend]
        return [Candidate(recipe=recipe, backend=spec.name, device=str(device)) for spec, device in runners]

    def variations(
        self, candidate: Candidate, *, dtype: str, lengths: Iterable[int], masked: bool, threads: int | None = None
    ) -> list[Candidate]:
        """The candidate with one run option changed: compute dtype, buckets, threads, or one of the backend's own.

        Options that cannot matter are not tried: buckets where all calls have one length, unless the backend's kernels for a fixed
        shape are faster, and the number of threads that is used anyway.

        Args:
            candidate: What to vary.
            dtype: Of its artifact.
            lengths: Of the calls.
            masked: Whether its sequences can be padded.
            threads: That it uses by default; what the process may use when `None`.
        """
        capability = registry.describe(candidate.backend).capability("run", candidate.recipe.format)
        assert capability is not None, "a candidate's backend runs its format"
        options = candidate.options
        made = []
        if options.compute_dtype is None:
            words = [d for d in capability.dtypes if d in _DTYPES and d != dtype]
            made += [replace(options, compute_dtype=d) for d in words]  # type: ignore[arg-type]  # one of the literals
        sizes = set(lengths)
        if not options.buckets and masked and (len(sizes) > 1 or capability.fixed_shapes):
            made.append(replace(options, buckets=buckets_for(sizes)))
        elif not options.buckets and masked:
            self._skip(f"{candidate.backend}: buckets", "all calls have one length, for which it has no faster kernels")
        if options.threads is None and candidate.device == "cpu":
            made += [replace(options, threads=n) for n in thread_counts() if n != threads]
        kind = DeviceSpec.parse(candidate.device).type
        others = [
            replace(candidate, provider_options={trial.name: trial.value})
            for trial in capability.trials
            if kind in trial.devices and not candidate.provider_options
        ]
        return [*(replace(candidate, options=changed) for changed in made), *others]

    def _skip(self, name: str, reason: str) -> None:
        found = Skipped(name=name, reason=reason)
        if found not in self.skipped:
            self.skipped.append(found)


def combined(changes: Sequence[Candidate]) -> Candidate:
    """Combine candidates that each change one run option of the same candidate."""
    options: dict[str, Any] = {}
    own: dict[str, Any] = {}
    for change in changes:
        options |= _changed(change.options)
        own |= change.provider_options
    return replace(changes[0], options=SessionOptions(**options), provider_options=own)


def _changed(options: SessionOptions) -> dict[str, Any]:
    """The options that are not the default."""
    default = SessionOptions()
    values = {field.name: getattr(options, field.name) for field in fields(options)}
    return {name: value for name, value in values.items() if value != getattr(default, name)}


def buckets_for(lengths: Iterable[int]) -> tuple[int, ...]:
    """Powers of two below the longest, from 8 on, and the lengths themselves where there are few: padding at most doubles
    a call.
    """
    known = sorted(set(lengths))
    longest = known[-1]
    powers = [2**i for i in range(3, 20) if 2**i < longest]
    return tuple(sorted({*powers, longest, *(known if len(known) <= 8 else ())}))


def thread_counts() -> list[int]:
    """Fewer threads than there are processors: powers of two."""
    processors = available_processors()
    return [2**i for i in range(12) if 2**i < processors]
