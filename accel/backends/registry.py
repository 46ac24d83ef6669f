"""Finds backends, and the one that does a stage.

Three steps, each costlier than the one before: *list* reads entry-point metadata, *describe* imports a plugin's spec,
*probe* imports the vendor's library. A plugin that fails in a step is reported and never breaks the others.
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
import logging
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatch
from importlib import metadata
from typing import Any

from ..errors import BackendUnavailableError, ConfigError, PluginError, UnknownBackendError, did_you_mean
from ..interfaces.entry_points import BACKENDS, entry_points
from ..interfaces.folder_reader import FolderReader
from ..interfaces.protocols import Backend
from ..interfaces.specs import API_VERSION, BackendSpec, Capability, Probe, Reason, Stage
from ..upstream.tested_versions import TESTED, warn_of_untested_versions

logger = logging.getLogger(__name__)

ALLOW_LIST_VARIABLE = "ACCEL_PLUGINS"
BASELINE = "pytorch"
"""The backend that everything is compared with: what it needs is what the core needs, and no allow-list leaves it out."""


def installed() -> dict[str, tuple[metadata.EntryPoint, ...]]:
    """Plugins by name, read from entry-point metadata; nothing is imported. More than one entry is a conflict."""
    allowed = os.environ.get(ALLOW_LIST_VARIABLE)
    names = None if allowed is None else {BASELINE, *(name.strip() for name in allowed.split(","))}
    found: dict[str, dict[str, metadata.EntryPoint]] = {}
    for entry in entry_points(BACKENDS):
        if names is None or entry.name in names:
            found.setdefault(entry.name, {})[entry.value] = entry
    return {name: tuple(entries.values()) for name, entries in sorted(found.items())}


@functools.cache
def _describe(name: str, value: str) -> BackendSpec:
    module_name, _, attribute = value.partition(":")
    try:
        spec = getattr(importlib.import_module(module_name), attribute)
    # A plugin is foreign code: whatever its import raises, an exit of the process too, becomes a report about this one plugin.
    except (Exception, SystemExit) as error:
        raise PluginError(
            f"The plugin {name!r} cannot be loaded from {value!r}: {type(error).__name__}: {error}",
            fix=f"reinstall or remove it, or leave it out of {ALLOW_LIST_VARIABLE}.",
        ) from error
    if not isinstance(spec, BackendSpec):
        raise PluginError(f"The entry point {name!r} = {value!r} is a {type(spec).__name__}, not a BackendSpec.")
    if spec.name != name:
        raise PluginError(f"The entry point {name!r} holds a spec named {spec.name!r}; both names must agree.")
    if spec.api[0] != API_VERSION[0] or spec.api[1] > API_VERSION[1]:
        raise PluginError(
            f"The plugin {name!r} is written for plugin API {spec.api[0]}.{spec.api[1]}; this accel has "
            f"{API_VERSION[0]}.{API_VERSION[1]}.",
            fix="install versions of accel-transformers and of the plugin that agree.",
        )
    return spec


def describe(name: str) -> BackendSpec:
    """The spec of one backend, by name or by an alias such as `CUDAExecutionProvider`.

    Raises:
        UnknownBackendError: No plugin has that name.
        PluginError: It exists but cannot be loaded, or two distributions claim the name.
    """
    return inventory().spec(name)


def _spec(name: str, entries: Sequence[metadata.EntryPoint]) -> BackendSpec:
    if len(entries) > 1:
        claims = ", ".join(f"{e.value} ({e.dist.name if e.dist else 'unknown'})" for e in entries)
        raise PluginError(
            f"More than one plugin is called {name!r}: {claims}.",
            fix=f"uninstall one of them, or list the plugins you want in {ALLOW_LIST_VARIABLE}.",
        )
    return _describe(name, entries[0].value)


def describe_all() -> tuple[tuple[BackendSpec, ...], dict[str, Reason]]:
    """Every loadable spec, and for each plugin that is not, why."""
    specs, broken = [], {}
    for name, entries in installed().items():
        try:
            specs.append(_spec(name, entries))
        except PluginError as error:
            broken[name] = Reason("broken", error.message, error.fix or "")
    return tuple(specs), broken


@dataclass(frozen=True, slots=True, kw_only=True)
class Inventory:
    """The backends to choose among: their specs, and the facts that a choice asks for.

    Attributes:
        specs: All that can be loaded.
        probe: What a backend finds on this machine; imports its vendor's library.
        missing: The packages that a backend requires and that are not installed; `None` if there are none.
        broken: Why the other plugins cannot be loaded.
    """

    specs: tuple[BackendSpec, ...]
    probe: Callable[[BackendSpec], Probe]
    missing: Callable[[BackendSpec], Reason | None]
    broken: Mapping[str, Reason] = field(default_factory=dict)

    def spec(self, name: str) -> BackendSpec:
        """The spec of one backend, by name or by an alias such as `CUDAExecutionProvider`.

        Raises:
            UnknownBackendError: No plugin has that name.
            PluginError: It exists but cannot be loaded, or two distributions claim the name.
        """
        if not isinstance(name, str):
            raise ConfigError(
                f"A backend is called by its name, not by {name!r}.", fix="`accel doctor` shows the names."
            )
        if name in self.broken:
            raise PluginError(self.broken[name].message, fix=self.broken[name].remedy or None)
        found = next((spec for spec in self.specs if name == spec.name), None)
        found = found or next((spec for spec in self.specs if name in spec.aliases), None)
        if found is not None:
            return found
        known = [*(s.name for s in self.specs), *self.broken, *(alias for s in self.specs for alias in s.aliases)]
        raise UnknownBackendError(
            f"There is no backend {name!r}.{did_you_mean(name, known)} Installed: {', '.join(s.name for s in self.specs)}.",
            fix="use one of the names above; `accel doctor` shows what each of them needs.",
        )


def inventory() -> Inventory:
    """The backends that are installed here."""
    specs, broken = describe_all()
    return Inventory(specs=specs, probe=probe, missing=missing, broken=broken)


@functools.cache
def tell_broken() -> None:
    """Say once, before something is chosen, which plugins cannot be: another one does their work.

    Raises:
        BackendUnavailableError: There are no plugins at all.
    """
    specs, broken = describe_all()
    for name, reason in broken.items():
        logger.warning(
            "The backend %r is left out, others may do its work: %s Fix: %s", name, reason.message, reason.remedy
        )
    if not specs and not broken:
        raise BackendUnavailableError(
            "No backend is registered, not even accel's own: its entry points are missing.",
            fix="install the package (`pip install accel-transformers`, or `pip install -e .` in a checkout): the folder on "
            f"the path alone does not register them; or check {ALLOW_LIST_VARIABLE}.",
        )


@functools.cache
def _instance(impl: str) -> Any:
    module_name, _, attribute = impl.partition(":")
    return getattr(importlib.import_module(module_name), attribute)()


def load(spec: BackendSpec) -> Backend:
    """The backend's implementation; imports the vendor's library.

    Raises:
        BackendUnavailableError: What it needs is not installed.
    """
    reason = missing(spec)
    if reason:
        raise BackendUnavailableError(reason.message, fix=reason.remedy)
    backend: Backend = _imported(spec, spec.impl)
    return backend


def _imported(spec: BackendSpec, impl: str) -> Any:
    """An object of a plugin's class, made once a process."""
    try:
        warn_of_untested_versions((*TESTED, *spec.tested))
        return _instance(impl)
    except (Exception, SystemExit) as error:
        raise BackendUnavailableError(
            f"The backend {spec.name!r} cannot be imported: {type(error).__name__}: {error}",
            fix=_install(spec)
            if isinstance(error, ModuleNotFoundError)
            else "repair that installation; its packages are there, in the versions that `accel doctor` shows.",
        ) from error


def worker(spec: BackendSpec, stage: Stage) -> Any:
    """The exporter, optimizer, quantizer or preparer of a backend.

    Raises:
        BackendUnavailableError: What the backend needs is not installed.
        PluginError: It declares the stage and has no object for it.
    """
    name = {"export": "exporter", "optimize": "optimizer", "quantize": "quantizer", "prepare": "preparer"}[stage]
    make = getattr(load(spec), name, None)
    made = make() if make is not None else None
    if made is None:
        raise PluginError(f"The backend {spec.name!r} declares the stage {stage!r} and offers no {name}.")
    return made


def _install(spec: BackendSpec) -> str:
    target = f"accel-transformers[{spec.extra}]" if spec.impl.startswith("accel_plugins.") else spec.extra
    return f'pip install "{target}"'


def missing(spec: BackendSpec) -> Reason | None:
    """The packages that a backend requires and that are not installed; `None` if there are none."""
    absent = [name for name in spec.requires if importlib.util.find_spec(name) is None]
    if not absent:
        return None
    return Reason("not-installed", f"{', '.join(absent)} is not installed", _install(spec))


@functools.cache
def probe(spec: BackendSpec) -> Probe:
    """What the backend found on this machine; asked once a process, never raises."""
    reason = missing(spec)
    if reason:
        return Probe(reasons=(reason,))
    try:
        return load(spec).probe()
    # Same as in `_describe`: foreign code.
    except (Exception, SystemExit) as error:  # noqa: BLE001
        message = f"its probe failed: {type(error).__name__}: {error}"
        return Probe(reasons=(Reason("probe-failed", message, "report it to the plugin's author"),))


def missing_domains(
    spec: BackendSpec, capability: Capability, domains: Sequence[str] | None, specs: Iterable[BackendSpec]
) -> Reason | None:
    """Why a backend cannot read a graph with operators of these domains, and what to do instead; `None` when it can.

    Args:
        spec: The backend.
        capability: What it is to do.
        domains: Domains of the graph's operators; `None` where they are unknown.
        specs: All backends, of which the remedy names those that have the operators.
    """
    missing = capability.foreign(domains)
    if not missing:
        return None
    format = capability.consumes
    remedies = []
    if spec.capability("optimize", format, produces=format) is not None:
        remedies.append(
            f"make the graph without them: `accel optimize EXPORT OUT --backend {spec.name}`, from the artifact as it was "
            "exported"
        )
    elif spec.capability("export") is not None:
        remedies.append(f"export the model for it: `accel export MODEL OUT --backend {spec.name}`")
    else:
        remedies.append("take the artifact as it was exported, before it was optimized or quantized")
    able = [
        one.name
        for one in specs
        if (found := one.capability(capability.stage, format)) is not None and not found.foreign(domains)
    ]
    if able:
        remedies.append(f"or use the backend {' or '.join(able)}")
    return Reason(
        "operators", f"it has no operators of {', '.join(missing)}, which this graph uses", ", ".join(remedies)
    )


def owner(
    stage: Stage,
    format: str,
    backend: str | None = None,
    *,
    scheme: str | None = None,
    domains: Sequence[str] | None = None,
    among: Inventory | None = None,
) -> BackendSpec:
    """The backend that does `stage` for artifacts of `format`: the one named, or the owner of the format.

    For `export`, `format` is what it produces; for `prepare`, that of PyTorch models. `domains` are those of the graph's
    operators, where they are known. The choice is `among` the backends that are installed, when `None`.

    Raises:
        UnknownBackendError: `backend` names no plugin.
        BackendUnavailableError: Nobody does this here, or not for a graph with such operators.
    """
    consumes = None if stage in ("prepare", "export") else format
    produces = format if stage == "export" else None

    def fitting(spec: BackendSpec) -> Capability | None:
        return next(
            (
                one
                for one in spec.capabilities
                if one.stage == stage
                and consumes in (None, one.consumes)
                and produces in (None, one.produces)
                and (scheme is None or scheme in one.schemes)
            ),
            None,
        )

    if among is None and backend is None:
        tell_broken()
    among = among or inventory()
    specs = among.specs if backend is None else (among.spec(backend),)
    able = {spec: capability for spec in specs if (capability := fitting(spec)) is not None}
    ready = [spec for spec in able if among.missing(spec) is None]
    if ready:
        # Whoever exports a format owns it; a backend that only rewrites it for its own hardware is asked by name.
        found = max(
            ready, key=lambda spec: (bool(spec.capability("export", produces=format)), spec.auto, spec.priority)
        )
        if reason := missing_domains(found, able[found], domains, among.specs):
            raise BackendUnavailableError(
                f"The backend {found.name!r} cannot {stage} this graph: {reason.message}.", fix=f"{reason.remedy}."
            )
        return found
    what = f"{'No backend can' if backend is None else f'Backend {backend!r} cannot'} {stage} {format}"
    if able:
        why = "; ".join(f"{spec.name}: {among.missing(spec)}" for spec in able)
        raise BackendUnavailableError(f"{what} here. {why}.", fix=_install(next(iter(able))))
    doing = [c for spec in specs for c in spec.capabilities if c.stage == stage]
    taken = sorted({c.consumes for c in doing if c.consumes is not None})
    offered = sorted({s for c in doing if consumes in (None, c.consumes) for s in c.schemes})
    others = [spec.name for spec in among.specs if stage == "prepare" and fitting(spec) is not None]
    if others:
        fix = f"use backend={' or '.join(map(repr, others))}, or leave it out."
    elif consumes is not None and taken and consumes not in taken:
        raise BackendUnavailableError(f"{what}.", fix=f"start from a model in the format {' or '.join(taken)}.")
    else:
        fix = f"use one of {', '.join(offered)}." if offered else "run `accel doctor` to see what each backend does."
    with_scheme = f" with scheme {scheme!r}.{did_you_mean(scheme, offered)}" if scheme else "."
    raise BackendUnavailableError(f"{what}{with_scheme}", fix=fix)


def folder_reader(files: Iterable[str]) -> FolderReader | None:
    """The reader of the first backend whose declared layouts match one of the files of a folder, by their relative names.

    Raises:
        BackendUnavailableError: What it imports is not installed.
    """
    names = list(files)
    for spec in _reading_specs():
        if any(_matches(name, pattern) for pattern in spec.layouts for name in names):
            return _reader(spec)
    return None


def first_folder_reader() -> FolderReader | None:
    """The reader that reports what is missing in a folder that no reader matches; `None` where no backend reads folders."""
    specs = _reading_specs()
    return _reader(specs[0]) if specs else None


def _reading_specs() -> list[BackendSpec]:
    return [spec for spec in describe_all()[0] if spec.folder_reader]


def _matches(name: str, pattern: str) -> bool:
    return name.count("/") == pattern.count("/") and fnmatch(name, pattern)


def _reader(spec: BackendSpec) -> FolderReader:
    reader: FolderReader = _imported(spec, spec.folder_reader)
    return reader
