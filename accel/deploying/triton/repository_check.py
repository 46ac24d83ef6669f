"""Check that a model repository is as `deploy` wrote it: all differences at once, each with its remedy, without a server."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ...artifact.checksums import sha256
from ...artifact.reading import read_json
from ...errors import ArtifactNotFoundError, ConfigError, IntegrityError
from .graph_files import Tensors, read_graph
from .graph_models import BACKENDS
from .model_config import CONFIG, TYPES, read, type_name
from .repository import SETTINGS

AGAIN = "deploy again: accel deploy triton ARTIFACT OUT."


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing that is wrong with a repository.

    Attributes:
        model: The folder that it is about.
        code: A word for its kind.
        message: What is wrong, with the values seen and expected.
        fix: What to do about it.
    """

    model: str
    code: str
    message: str
    fix: str = AGAIN

    def __str__(self) -> str:
        return f"{self.model}: {self.message}\n  Fix: {self.fix}"


@dataclass(frozen=True, slots=True)
class _Model:
    """A model of a repository: its folder, its configuration, and the folders of its versions, the latest last."""

    folder: Path
    config: Any
    versions: tuple[Path, ...]

    def found(self, code: str, message: str, fix: str = AGAIN) -> Finding:
        return Finding(self.folder.name, code, message, fix)


def check(repository: str | os.PathLike[str]) -> tuple[Finding, ...]:
    """Compare a model repository with what `deploy` writes.

    Configurations may be edited; the tensors of a model must stay those of its graph, and models that call each other must fit.

    Args:
        repository: The folder.

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
        yield model.found(
            "name",
            f"the folder is {model.folder.name!r} and the configuration's name is {config.name!r}.",
            f"rename the folder, or set name: {model.folder.name!r}.",
        )
    if not model.versions:
        yield model.found("version-missing", "it has no version.", "put the model's files into a folder 1.")
    for output in config.output:
        if output.label_filename and not (model.folder / output.label_filename).is_file():
            yield model.found(
                "labels-missing", f"{output.name} has its labels in {output.label_filename}, which is missing."
            )
    if config.platform == "ensemble":
        for step in config.ensemble_scheduling.step:
            yield from _check_member(model, models, step.model_name, config.max_batch_size)
    elif config.backend not in BACKENDS:
        yield model.found("backend", f"deploy writes no model for the backend {config.backend!r}.")
    elif config.backend == "python":
        for version in model.versions:
            yield from _check_code(model, models, version)
    else:
        for version in model.versions:
            file = version / (config.default_model_filename or BACKENDS[config.backend].file)
            yield from _check_graph(model, file)


def _check_code(model: _Model, models: Mapping[str, _Model], version: Path) -> Iterator[Finding]:
    """Check the files of a version in Python, its graph, and the model that it calls."""
    try:
        settings = read_json(version / SETTINGS)
        files, graph = dict(settings["files"]), str(settings["graph"])
    except (IntegrityError, LookupError, TypeError, ValueError) as error:
        yield model.found("settings-unreadable", f"{SETTINGS} of version {version.name} cannot be used: {error!r}.")
        return
    for name, written in files.items():
        path = version / Path(name).name
        if not path.is_file():
            yield model.found("file-missing", f"version {version.name} has no {name}.")
        elif sha256(path) != written:
            yield model.found(
                "changed",
                f"{name} of version {version.name} is not as it was written.",
                f"{AGAIN[:-1]}; or, where the change is meant, take {name} out of files in {SETTINGS}.",
            )
    if "service" not in settings:
        yield from _check_graph(model, version / graph)
        return
    yield from _check_member(model, models, graph, settings.get("max_rows", 0))
    if graph in models:
        for side, names in (("input", settings.get("inputs", ())), ("output", settings.get("outputs", ()))):
            there = {one.name for one in getattr(models[graph].config, side)}
            for name in sorted(set(names) - there):
                yield model.found("settings", f"it uses {name!r}, and {graph!r} has no such {side}.")


def _check_member(model: _Model, models: Mapping[str, _Model], name: str, rows: int) -> Iterator[Finding]:
    """Check that the model that another one calls is there, and takes as many rows."""
    if name not in models:
        yield model.found("member-missing", f"it calls {name!r}, which is no model of this repository.")
        return
    most = models[name].config.max_batch_size
    if 0 < most < rows:
        yield model.found(
            "batch", f"it calls {name!r} with up to {rows} rows, which takes {most}.", "use the smaller number in both."
        )


def _check_graph(model: _Model, file: Path) -> Iterator[Finding]:
    """Check that the graph and its weights are there, and that the configuration names its tensors as they are."""
    if not file.is_file():
        yield model.found(
            "file-missing", f"version {file.parent.name} has no {file.name}.", f"copy it there, or {AGAIN}"
        )
        return
    if model.config.backend == "tensorrt":
        # Only TensorRT reads an engine.
        return
    try:
        inputs, outputs, others = read_graph(file)
    except IntegrityError as error:
        yield model.found("file-unreadable", error.message, str(error.fix))
        return
    for name in others:
        if not (file.parent / name).is_file():
            yield model.found(
                "file-missing", f"{file.name} needs {name}, which is missing.", f"copy it there, or {AGAIN}"
            )
    if not model.config.model_transaction_policy.decoupled:
        yield from _check_tensors(model, "input", inputs)
        yield from _check_tensors(model, "output", outputs)


def _check_tensors(model: _Model, side: str, graph: Tensors) -> Iterator[Finding]:
    """Compare names, types and sizes in the configuration with those of the graph."""
    config, batched = model.config, model.config.max_batch_size > 0
    declared = {one.name: one for one in getattr(config, side)}
    for name in sorted(set(declared) - set(graph)):
        yield model.found(f"{side}-unknown", f"the graph has no {side} {name!r}, only {', '.join(sorted(graph))}.")
    for name in sorted(set(graph) - set(declared) if side == "input" else ()):
        yield model.found("input-missing", f"the graph takes {name!r}, which the configuration does not name.")
    for name in sorted(set(declared) & set(graph)):
        one, tensor = declared[name], graph[name]
        expected = TYPES.get(tensor.dtype, tensor.dtype)
        if type_name(one.data_type) != expected:
            yield model.found(
                "dtype",
                f"{side} {name!r} is {type_name(one.data_type)}, and in the graph {expected}.",
                f"write {expected}.",
            )
        if batched and tensor.dims[:1] != (-1,):
            yield model.found(
                "batch",
                f"max_batch_size is {config.max_batch_size}, and the graph has a batch of {tensor.dims[0]}.",
                "set max_batch_size: 0 and write whole dims, or export the graph with a free batch.",
            )
        dims, sizes = list(one.dims), list(tensor.dims[1:] if batched else tensor.dims)
        if len(dims) != len(sizes) or any(b not in (-1, a) for a, b in zip(sizes, dims, strict=True)):
            yield model.found(
                "dims", f"{side} {name!r} has dims {dims}, and the graph {sizes}.", f"write dims: {sizes}."
            )
