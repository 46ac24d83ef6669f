"""Compare a model repository with the state that `deploy` wrote, without a server. All differences are reported, each with a fix."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ...artifact.checksums import sha256
from ...artifact.json_reading import read_json
from ...errors import ArtifactNotFoundError, ConfigError, IntegrityError
from .graph_models import BACKENDS
from .model_config import CONFIG, read, type_name
from .repository import SETTINGS

AGAIN = "deploy again: accel deploy triton ARTIFACT OUT."


@dataclass(frozen=True, slots=True)
class Finding:
    """A difference between a model repository and the state that `deploy` wrote.

    Attributes:
        model: Name of the model's folder.
        code: Machine-readable kind of the difference.
        message: Description of the difference, with the actual and the expected value.
        fix: Advice how to fix the difference.
    """

    model: str
    code: str
    message: str
    fix: str = AGAIN

    def __str__(self) -> str:
        return f"{self.model}: {self.message}\n  Fix: {self.fix}"


@dataclass(frozen=True, slots=True)
class _Model:
    """A model in a repository: its folder, its configuration, and the folders of its versions, the latest last."""

    folder: Path
    config: Any
    versions: tuple[Path, ...]

    def finding(self, code: str, message: str, fix: str = AGAIN) -> Finding:
        return Finding(self.folder.name, code, message, fix)


def check(repository: str | os.PathLike[str]) -> tuple[Finding, ...]:
    """Compare a model repository with the state that `deploy` wrote.

    Model configurations may be edited. But the tensors in a configuration must match the graph, and models that call each other must be
    compatible.

    Args:
        repository: Folder of the repository.

    Raises:
        ArtifactNotFoundError: There is no such folder.
        BackendUnavailableError: The extra `triton` is not installed.
    """
    root = Path(repository).expanduser().absolute()
    if not root.is_dir():
        raise ArtifactNotFoundError(f"There is no folder {root}.", fix="check the path.")
    models: dict[str, _Model] = {}
    findings: list[Finding] = []
    for folder in sorted(path for path in root.iterdir() if path.is_dir() and not path.name.startswith(".")):
        if not (folder / CONFIG).is_file():
            findings.append(Finding(folder.name, "config-missing", f"it has no {CONFIG}."))
            continue
        try:
            config = read(folder / CONFIG)
        except ConfigError as error:
            findings.append(Finding(folder.name, "config-unreadable", error.message, str(error.fix)))
            continue
        numbers = sorted(int(path.name) for path in folder.iterdir() if path.name.isdecimal() and path.is_dir())
        models[folder.name] = _Model(folder, config, tuple(folder / str(number) for number in numbers))
    if not models and not findings:
        fix = f"name the folder that holds the models' folders, each with a {CONFIG}; or {AGAIN}"
        return (Finding(root.name, "empty", "it holds no model.", fix),)
    for model in models.values():
        findings += _check_model(model, models)
    return tuple(sorted(set(findings), key=lambda one: (one.model, one.code, one.message)))


def _check_model(model: _Model, models: Mapping[str, _Model]) -> Iterator[Finding]:
    config = model.config
    if config.name and config.name != model.folder.name:
        yield model.finding(
            "name",
            f"the folder is {model.folder.name!r} and the configuration's name is {config.name!r}.",
            f"rename the folder, or set name: {model.folder.name!r}.",
        )
    if not model.versions:
        yield model.finding("version-missing", "it has no version.", "put the model's files into a folder 1.")
    for output in config.output:
        if output.label_filename and not (model.folder / output.label_filename).is_file():
            yield model.finding(
                "labels-missing", f"{output.name} has its labels in {output.label_filename}, which is missing."
            )
    if config.platform == "ensemble":
        for step in config.ensemble_scheduling.step:
            yield from _check_member(model, models, step.model_name, config.max_batch_size)
    elif config.backend not in BACKENDS:
        yield model.finding("backend", f"deploy writes no model for the backend {config.backend!r}.")
    else:
        for version in model.versions:
            yield from _check_version(model, models, version)


def _check_version(model: _Model, models: Mapping[str, _Model], version: Path) -> Iterator[Finding]:
    """Check the files of a model version, the tensors of its graph, and the model that it calls."""
    try:
        settings = read_json(version / SETTINGS)
        files, graph = dict(settings["files"]), str(settings["graph"])
        tensors = {side: {one["name"]: one for one in ones} for side, ones in settings.get("tensors", {}).items()}
    except (IntegrityError, LookupError, TypeError, ValueError, AttributeError) as error:
        yield model.finding("settings-unreadable", f"{SETTINGS} of version {version.name} cannot be used: {error!r}.")
        return
    needed = {model.config.default_model_filename or BACKENDS[model.config.backend].file}
    needed |= set() if "service" in settings else {graph}
    for name in sorted({*files, *needed}):
        path = version / name
        if not path.is_file():
            yield model.finding("file-missing", f"version {version.name} has no {name}.", f"copy it there, or {AGAIN}")
        elif name in files and sha256(path) != files[name]:
            yield model.finding(
                "changed",
                f"{name} of version {version.name} is not as it was written.",
                f"{AGAIN[:-1]}; or, where the change is meant, take {name} out of files in {SETTINGS}.",
            )
    if "service" in settings:
        yield from _check_member(model, models, graph, settings.get("max_rows", 0))
        for side, key in (("input", "inputs"), ("output", "outputs")) if graph in models else ():
            there = {one.name for one in getattr(models[graph].config, side)}
            for name in sorted(set(settings.get(key, ())) - there):
                yield model.finding("settings", f"it uses {name!r}, and {graph!r} has no such {side}.")
    elif not model.config.model_transaction_policy.decoupled:
        for side in ("input", "output"):
            yield from _check_tensors(model, side, tensors.get(side, {}))


def _check_member(model: _Model, models: Mapping[str, _Model], name: str, rows: int) -> Iterator[Finding]:
    """Check that the model called by another model exists and accepts the same number of rows."""
    if name not in models:
        yield model.finding("member-missing", f"it calls {name!r}, which is no model of this repository.")
        return
    most = models[name].config.max_batch_size
    if 0 < most < rows:
        yield model.finding(
            "batch", f"it calls {name!r} with up to {rows} rows, which takes {most}.", "use the smaller number in both."
        )


def _check_tensors(model: _Model, side: str, graph: Mapping[str, Mapping[str, Any]]) -> Iterator[Finding]:
    """Compare tensor names, data types and sizes in the configuration with those of the graph when it was deployed."""
    config, batched = model.config, model.config.max_batch_size > 0
    declared = {one.name: one for one in getattr(config, side)}
    for name in sorted(set(declared) - set(graph)):
        yield model.finding(f"{side}-unknown", f"the graph has no {side} {name!r}, only {', '.join(sorted(graph))}.")
    for name in sorted(set(graph) - set(declared) if side == "input" else ()):
        yield model.finding("input-missing", f"the graph takes {name!r}, which the configuration does not name.")
    for name in sorted(set(declared) & set(graph)):
        one, expected, shape = declared[name], graph[name]["data_type"], list(graph[name]["dims"])
        if type_name(one.data_type) != expected:
            yield model.finding(
                "dtype",
                f"{side} {name!r} is {type_name(one.data_type)}, and in the graph {expected}.",
                f"write {expected}.",
            )
        if batched and shape[:1] != [-1]:
            yield model.finding(
                "batch",
                f"max_batch_size is {config.max_batch_size}, and the graph has a batch of {shape[0]}.",
                "set max_batch_size: 0 and write whole dims, or export the graph with a free batch.",
            )
        dims, sizes = list(one.dims), shape[1:] if batched else shape
        if len(dims) != len(sizes) or any(b not in (-1, a) for a, b in zip(sizes, dims, strict=True)):
            yield model.finding(
                "dims", f"{side} {name!r} has dims {dims}, and the graph {sizes}.", f"write dims: {sizes}."
            )
