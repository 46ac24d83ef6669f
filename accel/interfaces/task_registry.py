"""Registry of the installed tasks. It finds a task by its name, by a synonym, or from a model's config."""

from __future__ import annotations

import functools
import logging
import pkgutil
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from ..artifact.json_reading import read_json
from ..artifact.sentence_settings import sentence_kind
from ..errors import ArtifactNotFoundError, IntegrityError, PluginError, TaskError, did_you_mean
from .entry_points import entry_points
from .task import Task
from .task_spec import TaskSpec

_ADAPTER = "adapter_config.json"
logger = logging.getLogger(__name__)

_MOST_LABELS = 1_000_000
_LANGUAGES = re.compile(r"_\w+_to_\w+\Z")
"""Matches the languages in the name of a translation task, such as `_en_to_de` in `translation_en_to_de`."""


def task_spec(name: str) -> TaskSpec:
    """Return the spec of a task by the task's name, a synonym, or the name of a pipeline.

    Raises:
        TaskError: No installed package defines a task with this name.
        PluginError: The entry point of the task does not refer to a `TaskSpec` with the same name, or two packages define the name.
    """
    if not isinstance(name, str):
        raise TaskError(
            f"The task is {name!r}, which is not a string.", fix="pass the task's name, such as 'text-classification'."
        )
    specs = _words(_installed())
    spec = specs.get(without_languages(name))
    if spec is None:
        if error := _loaded(_installed())[1].get(name):
            raise error
        names = [task.name for task in all_tasks()]
        raise TaskError(
            f"The task {name!r} does not exist.{did_you_mean(name, specs)}",
            fix=f"use one of {', '.join(names)}. If another package defines the task, install that package.",
        )
    return spec


def without_languages(word: str) -> str:
    """Return the name of a task without languages: `translation` for `translation_en_to_de`."""
    return _LANGUAGES.sub("", word)


def any_graph_task() -> str:
    """Return the name of the task for graphs with any inputs and outputs."""
    return next(spec.name for spec in all_tasks() if spec.any_graph)


def text_decoder_task() -> str:
    """Return the name of the task for decoder-only models whose only input is text."""
    return next(s.name for s in all_tasks() if s.generates and s.encoder_decoder is False and s.modalities == ("text",))


def features_task() -> str:
    """Return the name of the task whose models return hidden states without a head and without pooling."""
    return next(spec.name for spec in all_tasks() if spec.embeds and not spec.pooling)


def load_task(name: str) -> Task:
    """Return the `Task` object for a task's name, a synonym, or the name of a pipeline. The first call imports the task's module.

    Raises:
        TaskError: No installed package defines a task with this name.
        PluginError: `TaskSpec.impl` cannot be imported, or is not a subclass of `Task`.
    """
    return _implemented(task_spec(name))


@functools.lru_cache
def _implemented(spec: TaskSpec) -> Task:
    if not spec.impl:
        return Task(spec)
    impl = _resolved(spec.name, spec.impl)
    if not (isinstance(impl, type) and issubclass(impl, Task)):
        raise PluginError(
            f"TaskSpec.impl of the task {spec.name!r} is {spec.impl!r}, which is not a subclass of accel's class Task.",
            fix="set TaskSpec.impl to 'package.module:Class' of a subclass of Task, or uninstall the package that defines the task.",
        )
    return impl(spec)


def _resolved(task: str, path: str) -> Any:
    try:
        return pkgutil.resolve_name(path)
    # Plugin code may raise any exception at import.
    except Exception as error:
        raise PluginError(
            f"The task {task!r} cannot be imported from {path!r}: {type(error).__name__}: {error}",
            fix="correct or uninstall the package that defines the task.",
        ) from error


def measured_tasks() -> list[str]:
    """Return the names of the tasks whose models can be measured."""
    return [task.spec.name for task in working_tasks() if task.measured]


def specs_for(word: str) -> tuple[TaskSpec, ...]:
    """Return all tasks that have `word` as name, synonym or pipeline. The task with this name comes first.

    There may be several tasks. For example, two kinds of models can be used in the speech recognition pipeline.

    Raises:
        TaskError: No task has this name, synonym or pipeline.
    """
    first = task_spec(word)
    return (first, *(spec for spec in all_tasks() if spec is not first and word in (*spec.serves, *spec.synonyms)))


def fitting_task(word: str, config: Mapping[str, Any]) -> str:
    """Return the name of the task that has `word` as name, synonym or pipeline, and that fits a model with this config.

    The task with the name `word` is preferred. If this task does not list the model's architecture, another task with this synonym or
    pipeline is returned that lists the architecture.

    Raises:
        TaskError: No task has this name, synonym or pipeline.
    """
    first, *others = specs_for(word)
    # Models for sentence embeddings and for feature extraction have the same architectures, so only `word` decides between the two tasks.
    if _closeness(first, config) is not None or not (first.listed or first.suffixes or first.generates):
        return first.name
    return next((spec.name for spec in others if _closeness(spec, config) is not None), first.name)


def _closeness(spec: TaskSpec, config: Mapping[str, Any]) -> tuple[bool, int, int] | None:
    """Return a rank of how well a task fits the architecture in a config, or `None` if the task does not fit.

    `infer_task` chooses the task with the highest rank. A task ranks highest if transformers lists the architecture for the task's auto
    class. Next in rank are tasks that require certain config fields, and then the task with the longest matching suffix.
    """
    name = str((config.get("architectures") or [""])[0])
    has_encoder = bool(config.get("is_encoder_decoder", False))
    if spec.listed and spec.encoder_decoder in (None, has_encoder):
        from ..upstream.auto_models import architectures  # imports PyTorch

        if name in architectures(spec.auto_models):
            return (True, 0, len(name))
    if not set(spec.fields) <= set(config) or (spec.marks and not set(spec.marks) & set(config)):
        return None
    lengths = [len(suffix) for suffix in spec.suffixes if name.endswith(suffix)]
    return (False, len(spec.fields) + bool(spec.marks), max(lengths)) if lengths else None


def all_tasks() -> tuple[TaskSpec, ...]:
    """Return the specs of all installed tasks. accel's tasks come first, then tasks of other packages, each sorted by name.

    Tasks with an invalid entry point are left out.
    """
    return _loaded(_installed())[0]


def broken_tasks() -> dict[str, PluginError]:
    """Return the errors of installed tasks that cannot be imported, by task name. This function imports all tasks of other packages."""
    broken = dict(_loaded(_installed())[1])
    for spec in all_tasks():
        if not spec.impl.startswith("accel."):
            try:
                _implemented(spec)
            except PluginError as error:
                broken[spec.name] = error
    return broken


def working_tasks() -> Iterator[Task]:
    """Yield the `Task` objects of all installed tasks. A task that cannot be imported is skipped with a warning."""
    for spec in all_tasks():
        try:
            yield _implemented(spec)
        except PluginError as error:
            logger.warning("%s", error)


def _installed() -> tuple[tuple[str, str], ...]:
    entries = {(entry.name, entry.value) for entry in entry_points("tasks")}
    return tuple(sorted(entries, key=lambda entry: (not entry[1].startswith("accel."), entry)))


@functools.lru_cache(maxsize=2)
def _loaded(entries: tuple[tuple[str, str], ...]) -> tuple[tuple[TaskSpec, ...], Mapping[str, PluginError]]:
    """Return the task specs of the entry points, and the errors of invalid entry points by task name.

    An invalid package does not affect the tasks of other packages.
    """
    specs: dict[str, TaskSpec] = {}
    broken: dict[str, PluginError] = {}
    for name, value in entries:
        try:
            specs[name] = _spec_at(name, value, [other for claimed, other in entries if claimed == name])
        except PluginError as error:
            broken[name] = error
            logger.warning("%s", error)
    return tuple(specs.values()), broken


def _spec_at(name: str, value: str, claims: list[str]) -> TaskSpec:
    """Return the `TaskSpec` to which an entry point refers."""
    if len(claims) > 1:
        raise PluginError(
            f"Several installed packages define the task {name!r}, with the entry points {', '.join(claims)}.",
            fix="uninstall all of these packages except one.",
        )
    spec = _resolved(name, value)
    if not isinstance(spec, TaskSpec) or spec.name != name:
        raise PluginError(
            f"The entry point {name!r} = {value!r} of the group accel.tasks does not refer to a TaskSpec with the name {name!r}.",
            fix="correct the entry point in the pyproject.toml of the package that defines the task, or uninstall that package.",
        )
    return spec


@functools.lru_cache(maxsize=2)
def _words(entries: tuple[tuple[str, str], ...]) -> Mapping[str, TaskSpec]:
    """Return a mapping of all task names, pipelines and synonyms to task specs.

    A task's name has precedence over a pipeline or synonym of another task. A pipeline or synonym of several tasks is mapped to the
    first of these tasks.
    """
    specs, _ = _loaded(entries)
    words = {spec.name: spec for spec in specs}
    for spec in specs:
        for word in (*spec.serves, *spec.synonyms):
            words.setdefault(word, spec)
    return words


def missing_config(folder: Path) -> ArtifactNotFoundError:
    """Return the error for a model folder without `config.json`."""
    return ArtifactNotFoundError(
        f"The folder {folder} contains no config.json, which has the architecture, the labels and the sizes of the model.",
        fix="copy the config.json of the original model into this folder, or pass config=... to from_pretrained. If the model is not a "
        "transformers model, load it with accel.ORTModelForCustomTasks.from_pretrained(...), and pass its attribute `artifact` to "
        "accel.optimize or accel.quantize.",
    )


def infer_task(config: Mapping[str, Any], folder: Path | None = None) -> str:
    """Infer the task of a model from its `config.json`, or from `modules.json` of a sentence-transformers folder.

    Raises:
        ArtifactNotFoundError: The folder has no config.
        TaskError: The config contains no architecture, or no task supports the architecture.
    """
    if folder is not None and (kind := sentence_kind(folder)):
        task = next((spec.name for spec in all_tasks() if kind in spec.sentence_kinds), None)
        if task is None:
            raise TaskError(
                f"{folder} contains a sentence-transformers model of the kind {kind!r}, which accel does not support.",
                fix="run the model with sentence-transformers, or pass task='feature-extraction' or task='fill-mask' to get the outputs of "
                "the transformers model without the modules of sentence-transformers.",
            )
        return task
    architectures = config.get("architectures") or []
    if not architectures:
        if folder is not None and not config and not (folder / "config.json").exists():
            raise missing_config(folder)
        raise TaskError(
            "accel cannot infer the task of the model, because its config.json has no 'architectures'.",
            fix="pass task=..., such as task='text-classification'.",
        )
    name = str(architectures[0])
    fits = [(closeness, spec.name) for spec in all_tasks() if (closeness := _closeness(spec, config)) is not None]
    best, task = max(fits, default=((False, 0, 0), ""))
    # The name `GPT2LMHeadModel` ends with `Model`, which is also the suffix of models without a head. This model has a head, so the task
    # for models without a head does not fit.
    if not task or (best == (False, 0, len("Model")) and name.endswith(("HeadModel", "HeadsModel"))):
        raise TaskError(
            f"accel cannot infer the task of the architecture {name}, or it does not support this architecture.",
            fix=f"pass task=... with one of {', '.join(spec.name for spec in all_tasks())}.",
        )
    return task


def read_config(folder: Path) -> dict[str, Any]:
    """Return the content of a folder's `config.json`, or an empty dict if the file does not exist.

    Raises:
        IntegrityError: The file is not a regular file, is not a JSON object, is too large, or has too many labels.
    """
    path = folder / "config.json"
    if not path.exists():
        return {}
    values = read_json(path)
    # transformers creates a name for each label, also in nested configs. A very large `num_labels` would fill the memory.
    labels = [part.get("num_labels") for part in (values, *values.values()) if isinstance(part, dict)]
    if any(isinstance(count, int) and count > _MOST_LABELS for count in labels):
        raise IntegrityError(
            f"num_labels in {path} is larger than {_MOST_LABELS:,}, so the file is probably damaged.",
            fix="download the model's config.json again.",
        )
    return values


def is_adapter(folder: Path) -> bool:
    """Return whether a folder contains a PEFT adapter instead of a complete model."""
    return (folder / _ADAPTER).is_file()


def infer_adapter_task(folder: Path) -> str:
    """Return the task of a PEFT adapter from its `adapter_config.json`.

    If `adapter_config.json` contains no known task, the task for hidden states is returned.
    """
    settings = read_json(folder / _ADAPTER)
    word = settings.get("task_type") or ""
    return next((spec.name for spec in all_tasks() if word and spec.adapter == word), features_task())
