"""Checks of each model of a repository: its folder, its configuration, its files and what its graph says."""

from __future__ import annotations

import ast
import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from ....artifact.reading import read_json
from ....errors import AccelError, ArtifactNotFoundError, ConfigError, IntegrityError
from ....interfaces.shape_profiles import read_profile
from ..graphs import BACKENDS
from ..messages import CONFIG, TYPES, kind_name, read, type_name
from ..profiles import read_shapes
from ..repository import SETTINGS
from .contents import Declared, Tensors, read_graph
from .dry_runs import check_runs, written_as
from .findings import AGAIN, Finding, Model
from .links import check_links

_NUMBER = re.compile(r"[1-9][0-9]*\Z", re.ASCII)
# What ONNX Runtime's backend can be told to run on top, and in which precisions TensorRT does.
_ACCELERATORS = {"gpu": ("tensorrt", "cuda"), "cpu": ("openvino",)}
_PRECISIONS = ("FP32", "FP16", "INT8")


def check(repository: str | os.PathLike[str]) -> tuple[Finding, ...]:
    """Everything that is wrong with a model repository, as far as its files show it.

    Args:
        repository: The folder; one written by hand, or by another tool, is checked as well.

    Raises:
        ArtifactNotFoundError: There is no such folder.
        BackendUnavailableError: The extra `triton` is not installed.
    """
    root = Path(repository).expanduser().absolute()
    if not root.is_dir():
        raise ArtifactNotFoundError(f"There is no folder {root}.", fix="check the path.")
    models, found = read_models(root)
    if not models and not found:
        fix = f"name the folder that holds the models' folders, each with a {CONFIG}; or {AGAIN}"
        return (Finding(root.name, "empty", "it holds no model.", fix),)
    for model in models.values():
        found += _check_model(model)
        found += check_links(model, models)
        found += check_runs(model, models)
    return tuple(sorted(set(found), key=lambda one: (one.model, one.code, one.message)))


def read_models(root: Path) -> tuple[dict[str, Model], list[Finding]]:
    """The models of a repository by name, and what is wrong with those that cannot be read."""
    models: dict[str, Model] = {}
    found: list[Finding] = []
    for folder in sorted(path for path in root.iterdir() if path.is_dir() and not path.name.startswith(".")):
        path = folder / CONFIG
        if not path.is_file():
            found.append(Finding(folder.name, "config-missing", f"it has no {CONFIG}.", f"write one, or {AGAIN}"))
            continue
        try:
            config = read(path)
        except ConfigError as error:
            found.append(Finding(folder.name, "config-unreadable", error.message, str(error.fix)))
            continue
        versions = _served(folder, config)
        told = versions[-1] / SETTINGS if versions else folder
        try:
            settings: dict[str, Any] = read_json(told) if told.is_file() else {}
        except AccelError as error:
            found.append(Finding(folder.name, "settings-unreadable", error.message, AGAIN))
            settings = {}
        models[folder.name] = Model(folder, config, tuple(versions), settings)
    return models, found


def _numbered(folder: Path) -> list[int]:
    names = [path.name for path in folder.iterdir() if path.is_dir()]
    return sorted(int(name) for name in names if _NUMBER.match(name))


def _served(folder: Path, config: Any) -> list[Path]:
    """The folders of the versions that the policy serves."""
    numbers, policy = _numbered(folder), config.version_policy
    if policy.HasField("specific"):
        numbers = [number for number in numbers if number in set(policy.specific.versions)]
    elif not policy.HasField("all"):
        numbers = numbers[-(policy.latest.num_versions or 1) :]
    return [folder / str(number) for number in numbers]


def _check_model(model: Model) -> Iterator[Finding]:
    config = model.config
    if config.name and config.name != model.name:
        yield model.found(
            "name",
            f"the folder is {model.name!r} and the configuration's name is {config.name!r}.",
            f"rename the folder, or set name: {model.name!r}.",
        )
    yield from _check_versions(model)
    if model.backend not in (*BACKENDS, "ensemble"):
        known = ", ".join(BACKENDS)
        yield model.found(
            "backend", f"the backend {model.backend!r} is not one that is known here.", f"use {known}, or ensemble."
        )
    yield from _check_names(model)
    yield from _check_labels(model)
    yield from _check_batching(model)
    yield from _check_instances(model)
    yield from _check_accelerators(model)
    if model.backend in BACKENDS:
        for version in model.versions:
            yield from _check_version(model, version)


def _check_versions(model: Model) -> Iterator[Finding]:
    wrong = [
        path.name
        for path in model.folder.iterdir()
        if path.is_dir() and not path.name.startswith(".") and path.name not in map(str, _numbered(model.folder))
    ]
    for name in sorted(wrong):
        yield model.found(
            "version-name", f"the folder {name!r} is no version: Triton reads numbers from 1.", "rename it to 1."
        )
    if not model.versions:
        yield model.found("version-missing", "no version in it is served.", "put the model's files into a folder 1.")
    elif model.config.version_policy.HasField("specific"):
        there = {int(path.name) for path in model.versions}
        for number in sorted(set(model.config.version_policy.specific.versions) - there):
            yield model.found(
                "version-missing", f"version {number} is to be served, and there is no such folder.", "add or drop it."
            )


def _check_names(model: Model) -> Iterator[Finding]:
    """Tensors that are named twice, and sizes that none can have."""
    for side in ("input", "output"):
        tensors = list(getattr(model.config, side))
        names = [one.name for one in tensors]
        for name in sorted({name for name in names if names.count(name) > 1}):
            yield model.found("twice", f"the {side} {name!r} stands there more than once.", "keep one.")
        for one in tensors:
            if any(size < 1 and size != -1 for size in one.dims):
                yield model.found(
                    "dims",
                    f"the {side} {one.name!r} has dims {list(one.dims)}.",
                    "write positive sizes, and -1 for one that varies.",
                )
    if model.config.max_batch_size < 0:
        yield model.found(
            "batch",
            f"max_batch_size is {model.config.max_batch_size}.",
            "set it to 0 where the graph has no free batch.",
        )


def _check_labels(model: Model) -> Iterator[Finding]:
    for output in model.config.output:
        if not output.label_filename:
            continue
        path = model.folder / output.label_filename
        if not path.is_file():
            yield model.found(
                "labels-missing",
                f"{output.name} has its labels in {path.name}, which is missing.",
                f"add it, or {AGAIN}",
            )
            continue
        count = len(path.read_text(encoding="utf-8", errors="replace").splitlines())
        size = output.dims[-1] if output.dims else -1
        if size not in (-1, count):
            yield model.found(
                "labels",
                f"{path.name} has {count} labels, and {output.name} has {size} values.",
                "write one label a line, in the order of the outputs.",
            )


def _check_batching(model: Model) -> Iterator[Finding]:
    config = model.config
    if not config.HasField("dynamic_batching"):
        return
    most, batching = config.max_batch_size, config.dynamic_batching
    if most < 1:
        yield model.found(
            "batching", f"it has dynamic_batching, and max_batch_size is {most}.", "set max_batch_size: 32, or drop it."
        )
    above = [size for size in batching.preferred_batch_size if size > most]
    if most and above:
        yield model.found(
            "batching",
            f"preferred_batch_size {above[0]} is above max_batch_size {most}.",
            "raise max_batch_size, or prefer less.",
        )
    if batching.HasField("default_queue_policy") or batching.priority_queue_policy:
        yield model.found(
            "queue-policy",
            "it has a queue policy, with which Triton loses throughput over time, down to a stall (server issue 8870).",
            "drop default_queue_policy, and give clients timeouts of their own.",
        )


def _check_instances(model: Model) -> Iterator[Finding]:
    backend = BACKENDS.get(model.backend)
    for group in model.config.instance_group:
        if group.count < 0:
            yield model.found("instances", f"count is {group.count}.", "use at least 1.")
        if kind_name(group.kind) == "KIND_GPU" and backend is not None and "cuda" not in backend.devices:
            yield model.found(
                "instances", f"its instances are on GPUs, where {model.backend} does not run.", "use kind: KIND_CPU."
            )
        if kind_name(group.kind) == "KIND_CPU" and backend is not None and "cpu" not in backend.devices:
            yield model.found(
                "instances", f"its instances are on CPUs, where {model.backend} does not run.", "use kind: KIND_GPU."
            )
        if kind_name(group.kind) == "KIND_CPU" and group.gpus:
            yield model.found("instances", "instances of KIND_CPU name GPUs.", "drop gpus, or use kind: KIND_GPU.")


def _check_accelerators(model: Model) -> Iterator[Finding]:
    """What runs on top of ONNX Runtime, and whether it is there where the instances are."""
    if model.backend != "onnxruntime":
        return
    every = model.config.optimization.execution_accelerators
    for side, known in _ACCELERATORS.items():
        for one in getattr(every, f"{side}_execution_accelerator"):
            if one.name not in known:
                yield model.found(
                    "accelerator",
                    f"{side}_execution_accelerator is {one.name!r}, which is none of ONNX Runtime's.",
                    f"use {' or '.join(known)}.",
                )
            precision = one.parameters.get("precision_mode", "FP32")
            if one.name == "tensorrt" and precision not in _PRECISIONS:
                yield model.found("accelerator", f"precision_mode is {precision!r}.", f"use {', '.join(_PRECISIONS)}.")
            groups = {kind_name(group.kind) for group in model.config.instance_group}
            if side == "gpu" and groups == {"KIND_CPU"}:
                yield model.found(
                    "accelerator", f"{one.name} is for GPUs, and all instances are on CPUs.", "use kind: KIND_GPU."
                )


def _check_version(model: Model, version: Path) -> Iterator[Finding]:
    file = version / (model.config.default_model_filename or BACKENDS[model.backend].file)
    if not file.is_file():
        yield model.found("file-missing", f"version {version.name} has no {file.name}.", f"copy it there, or {AGAIN}")
        return
    if model.backend == "tensorrt":
        yield from _check_engine(model)
        return
    if model.backend == "python":
        yield from _check_code(model, file)
        graph = model.settings.get("graph", "")
        ours = written_as(version) in ("graph", "generator")
        # The graph of a front is another model; one of a file's name is beside the code.
        if not ours and (not isinstance(graph, str) or not graph.endswith(".onnx") or "service" in model.settings):
            return
        if not isinstance(graph, str) or not graph:
            yield model.found("settings", f"its {SETTINGS} names no graph.", AGAIN)
            return
        file = version / graph
        if not file.is_file():
            yield model.found("file-missing", f"version {version.name} has no {graph}.", f"copy it there, or {AGAIN}")
            return
    try:
        inputs, outputs, beside = read_graph(file)
    except IntegrityError as error:
        yield model.found("file-unreadable", error.message, str(error.fix))
        return
    for name in beside:
        if not (version / name).is_file():
            yield model.found(
                "file-missing", f"{file.name} needs {name}, which is not beside it.", f"copy it there, or {AGAIN}"
            )
    if model.config.model_transaction_policy.decoupled:
        return
    yield from _check_tensors(model, "input", inputs)
    yield from _check_tensors(model, "output", outputs)
    yield from _check_profiles(model, inputs)
    yield from _check_warmup(model, inputs)


def _check_code(model: Model, file: Path) -> Iterator[Finding]:
    """The modules that code names beside it, and so on."""
    seen, open_ = set(), [file]
    while open_:
        path = open_.pop()
        if path in seen:
            continue
        seen.add(path)
        if not path.is_file():
            yield model.found("file-missing", f"its code needs {path.name}, which is missing.", AGAIN)
            continue
        try:
            tree = ast.parse(path.read_text(encoding="utf-8"))
        except (SyntaxError, ValueError) as error:
            yield model.found("file-unreadable", f"{path.name} is not Python: {error}.", AGAIN)
            continue
        named = (node.module for node in ast.walk(tree) if isinstance(node, ast.ImportFrom) and node.level == 1)
        open_ += [path.with_name(f"{module}.py") for module in named if module]


def _check_tensors(model: Model, side: str, graph: Tensors) -> Iterator[Finding]:
    """Names, types and sizes of a configuration beside those of the graph."""
    config, most = model.config, model.config.max_batch_size
    given = {one.name: one for one in getattr(config, side)}
    if not given:
        # Triton fills in what the graph says.
        return
    for name in sorted(set(given) - set(graph)):
        yield model.found(
            f"{side}-unknown",
            f"the graph has no {side} {name!r}, only {', '.join(sorted(graph))}.",
            f"rename the {side}.",
        )
    if side == "input":
        for name in sorted(set(graph) - set(given)):
            yield model.found(
                "input-missing", f"the graph takes {name!r}, which the configuration does not name.", "add the input."
            )
    for name in sorted(set(given) & set(graph)):
        one, declared = given[name], graph[name]
        if (wanted := TYPES.get(declared.dtype, declared.dtype)) != type_name(one.data_type):
            yield model.found(
                "dtype",
                f"{side} {name!r} is {type_name(one.data_type)}, and in the graph {wanted}.",
                f"write {wanted}.",
            )
        yield from _check_dims(model, side, one, declared, most)


def _check_dims(model: Model, side: str, one: Any, declared: Declared, most: int) -> Iterator[Finding]:
    given = tuple(one.reshape.shape) if one.HasField("reshape") else tuple(one.dims)
    graph = declared.dims[1:] if most else declared.dims
    if most and declared.dims[:1] not in ((-1,), ()):
        yield model.found(
            "batch",
            f"max_batch_size is {most}, and {side} {one.name!r} has a batch of {declared.dims[0]} in the graph.",
            "set max_batch_size: 0 and write whole dims, or export the graph with a free batch.",
        )
    fits = len(given) == len(graph) and all(a == b or b == -1 for a, b in zip(given, graph, strict=True))
    if not fits:
        yield model.found(
            "dims",
            f"{side} {one.name!r} has dims {list(given)}, and the graph {list(graph)}"
            f"{' behind the batch' if most else ''}.",
            f"write dims: {list(graph)}.",
        )


def _check_profiles(model: Model, inputs: Tensors) -> Iterator[Finding]:
    """Whether the accelerator's profiles hold every request that the server lets through."""
    accelerators = model.config.optimization.execution_accelerators.gpu_execution_accelerator
    for one in (one for one in accelerators if one.name == "tensorrt"):
        texts = {word: one.parameters.get(f"trt_profile_{word}_shapes", "") for word in ("min", "opt", "max")}
        if not any(texts.values()):
            continue
        shapes = {word: read_shapes(text) for word, text in texts.items()}
        for name, declared in inputs.items():
            sizes = [shapes[word].get(name) for word in ("min", "opt", "max")]
            if -1 in declared.dims and any(size is None or len(size) != len(declared.dims) for size in sizes):
                yield model.found(
                    "profile", f"the profiles have no shapes of {name!r}.", "name every input in all three."
                )
                continue
            least, usual, top = (size or () for size in sizes)
            if any(not a <= b <= c for a, b, c in zip(least, usual, top, strict=True)):
                yield model.found(
                    "profile", f"the shapes of {name!r} do not rise: {least}, {usual}, {top}.", "use min <= opt <= max."
                )
            most = model.config.max_batch_size
            if most and top and (least[0] > 1 or top[0] < most):
                yield model.found(
                    "profile",
                    f"the profile of {name!r} has {least[0]} to {top[0]} rows, and requests 1 to {most}.",
                    f"use 1 in trt_profile_min_shapes and {most} in trt_profile_max_shapes, or a smaller max_batch_size.",
                )


def _check_engine(model: Model) -> Iterator[Finding]:
    """The profile that an engine was built with, as it was recorded when it was deployed."""
    text = model.config.parameters["accel_profile"].string_value if "accel_profile" in model.config.parameters else ""
    try:
        rows = read_profile(text).get("batch")
    except ConfigError as error:
        yield model.found("profile", error.message, str(error.fix))
        return
    most = model.config.max_batch_size
    if rows is not None and most and (rows.least > 1 or rows.most < most):
        yield model.found(
            "profile",
            f"the engine was built for {rows.least} to {rows.most} rows, and requests have 1 to {most}.",
            f"set max_batch_size: {rows.most}, or build the engine again.",
        )


def _check_warmup(model: Model, inputs: Tensors) -> Iterator[Finding]:
    most = model.config.max_batch_size
    for sample in model.config.model_warmup:
        missing = sorted(set(inputs) - set(sample.inputs))
        if missing:
            yield model.found(
                "warmup", f"the warm-up {sample.name!r} has no {', '.join(missing)}.", "give it every input."
            )
        if sample.batch_size > max(most, 1):
            yield model.found(
                "warmup",
                f"the warm-up {sample.name!r} has {sample.batch_size} rows, above max_batch_size.",
                "use fewer rows.",
            )
        for name, one in sorted(sample.inputs.items()):
            if name not in inputs:
                yield model.found(
                    "warmup", f"the warm-up {sample.name!r} has {name!r}, which the graph does not take.", "drop it."
                )
                continue
            yield from _check_sample(model, sample.name, name, one, inputs[name])


def _check_sample(model: Model, sample: str, name: str, one: Any, declared: Declared) -> Iterator[Finding]:
    """One input of a warm-up beside the graph's."""
    wanted, dims = TYPES.get(declared.dtype, declared.dtype), tuple(one.dims)
    own = declared.dims[1:] if model.config.max_batch_size else declared.dims
    if type_name(one.data_type) != wanted:
        yield model.found(
            "warmup",
            f"{name!r} of the warm-up {sample!r} is {type_name(one.data_type)}, and in the graph {wanted}.",
            f"write {wanted}.",
        )
    if len(dims) != len(own) or any(b not in (-1, a) or a < 1 for a, b in zip(dims, own, strict=True)):
        yield model.found(
            "warmup",
            f"{name!r} of the warm-up {sample!r} has dims {list(dims)}, and the graph {list(own)}.",
            "give it sizes that the graph takes.",
        )
    chosen = one.WhichOneof("input_data_type")
    if chosen is None:
        yield model.found("warmup", f"{name!r} of the warm-up {sample!r} has no data.", "write zero_data: true.")
    elif chosen == "input_data_file" and not (model.folder / "warmup" / one.input_data_file).is_file():
        yield model.found(
            "warmup",
            f"the warm-up {sample!r} reads warmup/{one.input_data_file}, which is missing.",
            "add it, or write zero_data: true.",
        )
