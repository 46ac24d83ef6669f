"""Find the installed backends and load them.

There are three steps of increasing cost: *list* reads entry-point metadata, *describe* imports a plugin's spec, *probe*
imports the vendor's library. A plugin that fails is reported and does not affect other plugins.
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
from ..interfaces.entry_points import entry_points
from ..interfaces.folder_reader import FolderReader
from ..interfaces.folder_writer import FolderWriter
from ..interfaces.protocols import Backend
from ..interfaces.specs import API_VERSION, BackendSpec, Probe, Reason
from ..upstream.tested_versions import TESTED, warn_of_untested_versions

logger = logging.getLogger(__name__)

ALLOW_LIST_VARIABLE = "ACCEL_PLUGINS"
BASELINE = "pytorch"
"""Name of the backend with which all comparisons are made. It is always installed, and `ACCEL_PLUGINS` cannot exclude it."""


def installed() -> dict[str, tuple[metadata.EntryPoint, ...]]:
    """Return the entry points of plugins by name, from package metadata; nothing is imported. Several entry points of
    one name are a conflict.
    """
    allowed = os.environ.get(ALLOW_LIST_VARIABLE)
    names = None if allowed is None else {BASELINE, *(name.strip() for name in allowed.split(","))}
    entries_by_name: dict[str, dict[str, metadata.EntryPoint]] = {}
    for entry in entry_points("backends"):
        if names is None or entry.name in names:
            entries_by_name.setdefault(entry.name, {})[entry.value] = entry
    return {name: tuple(entries.values()) for name, entries in sorted(entries_by_name.items())}


@functools.cache
def _describe(name: str, value: str) -> BackendSpec:
    module_name, _, attribute = value.partition(":")
    try:
        spec = getattr(importlib.import_module(module_name), attribute)
    # A plugin may raise any exception, even `SystemExit`. Only this plugin is then reported as broken.
    except (Exception, SystemExit) as error:
        raise PluginError(
            f"The plugin {name!r} cannot be loaded from {value!r}: {type(error).__name__}: {error}",
            fix=f"reinstall or uninstall the plugin, or leave {name} out of the environment variable {ALLOW_LIST_VARIABLE}.",
        ) from error
    if not isinstance(spec, BackendSpec):
        raise PluginError(
            f"The entry point {name!r} of a backend plugin refers to {value!r}, which is a {type(spec).__name__}, not a "
            "BackendSpec."
        )
    if spec.name != name:
        raise PluginError(
            f"The entry point {name!r} of a backend plugin refers to a BackendSpec with the name {spec.name!r}. Both names must "
            "be equal."
        )
    if spec.api[0] != API_VERSION[0] or spec.api[1] > API_VERSION[1]:
        raise PluginError(
            f"The plugin {name!r} was written for version {spec.api[0]}.{spec.api[1]} of the plugin API, but this version of "
            f"accel has version {API_VERSION[0]}.{API_VERSION[1]}.",
            fix="install versions of accel-transformers and of the plugin that have the same version of the plugin API.",
        )
    return spec


def describe(name: str) -> BackendSpec:
    """Return the spec of a backend by name, or by an alias such as `CUDAExecutionProvider`. Errors as in
    `Inventory.spec`.
    """
    return inventory().spec(name)


def _spec(name: str, entries: Sequence[metadata.EntryPoint]) -> BackendSpec:
    if len(entries) > 1:
        claims = ", ".join(f"{e.value} ({e.dist.name if e.dist else 'unknown'})" for e in entries)
        raise PluginError(
            f"Several installed plugins have the name {name!r}: {claims}.",
            fix="uninstall all of these plugins except one.",
        )
    return _describe(name, entries[0].value)


def describe_all() -> tuple[tuple[BackendSpec, ...], dict[str, Reason]]:
    """Return the specs of all plugins that can be loaded, and the reason for each plugin that cannot."""
    specs, broken = [], {}
    for name, entries in installed().items():
        try:
            specs.append(_spec(name, entries))
        except PluginError as error:
            broken[name] = Reason("broken", error.message, error.fix or "")
    return tuple(specs), broken


@dataclass(frozen=True, slots=True, kw_only=True)
class Inventory:
    """The available backends.

    Attributes:
        specs: Specs of all backends that can be loaded.
        probe: Function that probes a backend on this machine, which imports the vendor's library.
        missing: Function that returns a reason if required packages of a backend are not installed, and `None` if all
            are installed.
        broken: The reason why each other plugin cannot be loaded.
    """

    specs: tuple[BackendSpec, ...]
    probe: Callable[[BackendSpec], Probe]
    missing: Callable[[BackendSpec], Reason | None]
    broken: Mapping[str, Reason] = field(default_factory=dict)

    def spec(self, name: str) -> BackendSpec:
        """Return the spec of a backend by name or by an alias such as `CUDAExecutionProvider`.

        Raises:
            UnknownBackendError: No plugin has that name.
            PluginError: The plugin cannot be loaded, or two distributions claim the name.
        """
        if not isinstance(name, str):
            raise ConfigError(
                f"The backend is {name!r}, but it must be the name of a backend.",
                fix="run `accel doctor` to see the names of the backends.",
            )
        if name in self.broken:
            raise PluginError(self.broken[name].message, fix=self.broken[name].remedy or None)
        named_spec = next((spec for spec in self.specs if name == spec.name), None)
        named_spec = named_spec or next((spec for spec in self.specs if name in spec.aliases), None)
        if named_spec is not None:
            return named_spec
        names = [*(s.name for s in self.specs), *self.broken, *(alias for s in self.specs for alias in s.aliases)]
        raise UnknownBackendError(
            f"There is no backend {name!r}.{did_you_mean(name, names)} Installed backends: "
            f"{', '.join(s.name for s in self.specs)}.",
            fix="use the name of an installed backend, or run `accel doctor` to see what each backend requires.",
        )


def inventory() -> Inventory:
    """Return the inventory of installed backends."""
    specs, broken = describe_all()
    return Inventory(specs=specs, probe=probe, missing=missing, broken=broken)


@functools.cache
def tell_broken() -> None:
    """Warn once about plugins that cannot be loaded, before a backend is chosen without them.

    Raises:
        BackendUnavailableError: No plugin is installed.
    """
    specs, broken = describe_all()
    for name, reason in broken.items():
        logger.warning(
            "The backend %r is ignored, and another backend may be chosen: %s Fix: %s",
            name,
            reason.message,
            reason.remedy,
        )
    if not specs and not broken:
        raise BackendUnavailableError(
            "No backend is registered, because the entry points of accel-transformers are missing. Adding its folder to the "
            "Python path does not register them.",
            fix="install the package: `pip install accel-transformers`, or `pip install -e .` in a checkout.",
        )


@functools.cache
def _instance(impl: str) -> Any:
    module_name, _, attribute = impl.partition(":")
    return getattr(importlib.import_module(module_name), attribute)()


def load(spec: BackendSpec) -> Backend:
    """Return a backend's implementation. This imports the vendor's library.

    Raises:
        BackendUnavailableError: A required package is not installed.
    """
    reason = missing(spec)
    if reason:
        raise BackendUnavailableError(reason.message, fix=reason.remedy)
    backend: Backend = _imported(spec, spec.impl)
    return backend


def _imported(spec: BackendSpec, impl: str) -> Any:
    """Return the instance of a plugin's class; one instance per process."""
    try:
        warn_of_untested_versions((*TESTED, *spec.tested))
        return _instance(impl)
    except (Exception, SystemExit) as error:
        raise BackendUnavailableError(
            f"The backend {spec.name!r} cannot be imported: {type(error).__name__}: {error}",
            fix=_install(spec)
            if isinstance(error, ModuleNotFoundError)
            else "reinstall the packages of this backend. `accel doctor` shows their versions.",
        ) from error


def _install(spec: BackendSpec) -> str:
    target = f"accel-transformers[{spec.extra}]" if spec.impl.startswith("accel_plugins.") else spec.extra
    return f'pip install "{target}"'


def missing(spec: BackendSpec) -> Reason | None:
    """Return the reason if required packages of a backend are not installed; `None` if all are installed."""
    absent = [name for name in spec.requires if importlib.util.find_spec(name) is None]
    if not absent:
        return None
    return Reason(
        "not-installed", f"{', '.join(absent)} {'is' if len(absent) == 1 else 'are'} not installed", _install(spec)
    )


@functools.cache
def probe(spec: BackendSpec) -> Probe:
    """Return the devices of a backend on this machine, or the reasons why it has no device. The backend is probed once per
    process, and errors of the probe become reasons.
    """
    reason = missing(spec)
    if reason:
        return Probe(reasons=(reason,))
    try:
        return load(spec).probe()
    # A plugin may raise any exception, even `SystemExit`.
    except (Exception, SystemExit) as error:  # noqa: BLE001
        message = f"the search for devices of this backend failed: {type(error).__name__}: {error}"
        return Probe(reasons=(Reason("probe-failed", message, "report the error to the author of the plugin"),))


def folder_reader(files: Iterable[str]) -> FolderReader | None:
    """Return the folder reader of the first backend with a layout pattern that matches a file name, relative to the
    folder; `None` without a match.

    Raises:
        BackendUnavailableError: A library that the reader imports is not installed.
    """
    names = list(files)
    for spec in _reading_specs():
        if any(_matches(name, pattern) for pattern in spec.layouts for name in names):
            return _reader(spec)
    return None


def first_folder_reader() -> FolderReader | None:
    """Return the reader that reports missing files if no reader matches a folder; `None` if no backend reads folders."""
    specs = _reading_specs()
    return _reader(specs[0]) if specs else None


def _reading_specs() -> list[BackendSpec]:
    return [spec for spec in describe_all()[0] if spec.folder_reader]


def _matches(name: str, pattern: str) -> bool:
    return name.count("/") == pattern.count("/") and fnmatch(name, pattern)


def _reader(spec: BackendSpec) -> FolderReader:
    reader: FolderReader = _imported(spec, spec.folder_reader)
    return reader


def written_layouts() -> dict[str, BackendSpec]:
    """Return the names of the folder layouts that installed backends write, each with the spec of the first backend that writes it."""
    layouts: dict[str, BackendSpec] = {}
    for spec in describe_all()[0]:
        for name, _ in spec.written_layouts:
            layouts.setdefault(name, spec)
    return layouts


def folder_writer(layout: str) -> tuple[BackendSpec, FolderWriter]:
    """Return the backend that writes a layout, and the writer.

    Raises:
        ConfigError: No installed backend writes the layout. The message has the names of all layouts.
        BackendUnavailableError: A library that the backend needs is not installed.
    """
    layouts = written_layouts()
    if layout not in layouts:
        raise ConfigError(
            f"There is no layout {layout!r}.{did_you_mean(layout, layouts)}",
            fix=f"use one of {', '.join(layouts)}."
            if layouts
            else "install a backend that writes layouts of other libraries.",
        )
    spec = layouts[layout]
    load(spec)
    writer: FolderWriter = _imported(spec, dict(spec.written_layouts)[layout])
    return spec, writer
