"""Check of a model repository without a server: report all differences from the state that `deploy` wrote, each with a fix."""

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

AGAIN = "write the repository again with `accel deploy triton ARTIFACT OUT`."


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

    Users may edit model configurations, so a changed configuration is not a finding in itself. The tensors in a configuration must match
    the graph, and models that call each other must be compatible.

    Args:
        repository: Folder of the repository.

    Raises:
        ArtifactNotFoundError: The folder does not exist.
        BackendUnavailableError: The extra `triton` is not installed.
    """
    root = Path(repository).expanduser().absolute()
    if not root.is_dir():
        raise ArtifactNotFoundError(
            f"The folder of the model repository, {root}, does not exist.", fix="correct the path of the repository."
        )
    models: dict[str, _Model] = {}
    findings: list[Finding] = []
    for folder in sorted(path for path in root.iterdir() if path.is_dir() and not path.name.startswith(".")):
        if not (folder / CONFIG).is_file():
            findings.append(Finding(folder.name, "config-missing", f"the model's folder has no file {CONFIG}."))
            continue
        try:
            config = read(folder / CONFIG)
        except ConfigError as error:
            findings.append(Finding(folder.name, "config-unreadable", error.message, str(error.fix)))
            continue
        numbers = sorted(int(path.name) for path in folder.iterdir() if path.name.isdecimal() and path.is_dir())
        models[folder.name] = _Model(folder, config, tuple(folder / str(number) for number in numbers))
    if not models and not findings:
        fix = f"pass the folder that contains the models' folders, each with a {CONFIG}, or {AGAIN}"
        return (Finding(root.name, "empty", "the folder contains no model.", fix),)
    for model in models.values():
        findings += _check_model(model, models)
    return tuple(sorted(set(findings), key=lambda finding: (finding.model, finding.code, finding.message)))


def _check_model(model: _Model, models: Mapping[str, _Model]) -> Iterator[Finding]:
    config = model.config
    if config.name and config.name != model.folder.name:
        yield model.finding(
            "name",
            f"the model's folder is named {model.folder.name!r}, but the name in {CONFIG} is {config.name!r}.",
            f'rename the folder, or write name: "{model.folder.name}" in {CONFIG}.',
        )
    if not model.versions:
        yield model.finding(
            "version-missing",
            "the model's folder has no version folder.",
            "move the model's files into a subfolder named 1.",
        )
    for output in config.output:
        if output.label_filename and not (model.folder / output.label_filename).is_file():
            yield model.finding(
                "labels-missing",
                f"the file {output.label_filename} with the labels of the output {output.name!r} is missing.",
            )
    if config.platform == "ensemble":
        for step in config.ensemble_scheduling.step:
            yield from _check_member(model, models, step.model_name, config.max_batch_size)
    elif config.backend not in BACKENDS:
        yield model.finding(
            "backend", f"the backend in {CONFIG} is {config.backend!r}, for which `accel deploy` does not write models."
        )
    else:
        for version in model.versions:
            yield from _check_version(model, models, version)


def _check_version(model: _Model, models: Mapping[str, _Model], version: Path) -> Iterator[Finding]:
    """Check the files of a model version, the tensors of its graph, and the model that it calls."""
    try:
        settings = read_json(version / SETTINGS)
        files, graph = dict(settings["files"]), str(settings["graph"])
        tensors = {side: {spec["name"]: spec for spec in specs} for side, specs in settings.get("tensors", {}).items()}
    except (IntegrityError, LookupError, TypeError, ValueError, AttributeError) as error:
        yield model.finding("settings-unreadable", f"{SETTINGS} of version {version.name} is invalid: {error!r}.")
        return
    needed = {model.config.default_model_filename or BACKENDS[model.config.backend].file}
    needed |= set() if "service" in settings else {graph}
    for name in sorted({*files, *needed}):
        path = version / name
        if not path.is_file():
            yield model.finding(
                "file-missing",
                f"the file {name} of version {version.name} is missing.",
                f"copy {name} into the folder {version.name}, or {AGAIN}",
            )
        elif name in files and sha256(path) != files[name]:
            yield model.finding(
                "changed",
                f"the file {name} of version {version.name} was changed after `accel deploy` wrote it.",
                f"{AGAIN[:-1]}; if the change is intended, remove {name} from the entry files in {SETTINGS}.",
            )
    if "service" in settings:
        yield from _check_member(model, models, graph, settings.get("max_rows", 0))
        for side, key in (("input", "inputs"), ("output", "outputs")) if graph in models else ():
            names = {spec.name for spec in getattr(models[graph].config, side)}
            for name in sorted(set(settings.get(key, ())) - names):
                yield model.finding(
                    "settings", f"the model uses the {side} {name!r} of {graph!r}, which does not exist."
                )
    elif not model.config.model_transaction_policy.decoupled:
        for side in ("input", "output"):
            yield from _check_tensors(model, side, tensors.get(side, {}))


def _check_member(model: _Model, models: Mapping[str, _Model], name: str, rows: int) -> Iterator[Finding]:
    """Check that the model `name`, which another model calls, exists and accepts calls with that many rows."""
    if name not in models:
        yield model.finding("member-missing", f"the model calls the model {name!r}, which is not in this repository.")
        return
    most = models[name].config.max_batch_size
    if 0 < most < rows:
        yield model.finding(
            "batch",
            f"the model calls {name!r} with up to {rows} rows, but max_batch_size of {name!r} is {most}.",
            f"set the same max_batch_size in the {CONFIG} of both models.",
        )


def _check_tensors(model: _Model, side: str, graph: Mapping[str, Mapping[str, Any]]) -> Iterator[Finding]:
    """Compare tensor names, data types and sizes in the configuration with the graph's tensors that `deploy` recorded."""
    config, batched = model.config, model.config.max_batch_size > 0
    declared = {spec.name: spec for spec in getattr(config, side)}
    for name in sorted(set(declared) - set(graph)):
        yield model.finding(
            f"{side}-unknown",
            f"{CONFIG} has the {side} {name!r}, but the graph has only the {side}s {', '.join(sorted(graph))}.",
        )
    for name in sorted(set(graph) - set(declared) if side == "input" else ()):
        yield model.finding("input-missing", f"the graph has the input {name!r}, which is missing in {CONFIG}.")
    for name in sorted(set(declared) & set(graph)):
        spec, expected, shape = declared[name], graph[name]["data_type"], list(graph[name]["dims"])
        if type_name(spec.data_type) != expected:
            yield model.finding(
                "dtype",
                f"the {side} {name!r} is {type_name(spec.data_type)} in {CONFIG}, but {expected} in the graph.",
                f"write data_type: {expected} for {name!r} in {CONFIG}.",
            )
        if batched and shape[:1] != [-1]:
            yield model.finding(
                "batch",
                f"max_batch_size in {CONFIG} is {config.max_batch_size}, but the graph has a fixed batch of {shape[0]}.",
                f"set max_batch_size: 0 and write the complete dims in {CONFIG}, or export the graph with a dynamic batch axis.",
            )
        dims, sizes = list(spec.dims), shape[1:] if batched else shape
        if len(dims) != len(sizes) or any(b not in (-1, a) for a, b in zip(sizes, dims, strict=True)):
            yield model.finding(
                "dims",
                f"the {side} {name!r} has the dims {dims} in {CONFIG}, but {sizes} in the graph.",
                f"write dims: {sizes} for {name!r} in {CONFIG}.",
            )
