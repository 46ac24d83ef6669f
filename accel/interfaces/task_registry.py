"""All tasks, the one that a word stands for, and the one that a model's config names."""

from __future__ import annotations

import functools
import logging
import pkgutil
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from ..artifact.reading import read_json
from ..artifact.sentence_settings import sentence_kind
from ..errors import ArtifactNotFoundError, IntegrityError, PluginError, TaskError, did_you_mean
from .entry_points import TASKS, entry_points
from .task import Task
from .task_spec import TaskSpec

_ADAPTER = "adapter_config.json"
logger = logging.getLogger(__name__)

_MOST_LABELS = 1_000_000
_LANGUAGES = re.compile(r"_\w+_to_\w+\Z")
"""Behind a task's name, the languages of a translation: `translation_en_to_de`."""


def task_spec(name: str) -> TaskSpec:
    """The task of that name, synonym or pipeline.

    Raises:
        TaskError: There is none.
        PluginError: Its entry point holds no `TaskSpec` of its name, or two distributions claim the name.
    """
    if not isinstance(name, str):
        raise TaskError(
            f"A task is called by its name, not by {name!r}.", fix="pass a string such as 'text-classification'."
        )
    known = _words(_installed())
    found = known.get(without_languages(name))
    if found is None:
        if error := _loaded(_installed())[1].get(name):
            raise error
        names = [spec.name for spec in all_tasks()]
        raise TaskError(
            f"{name!r} is not a task that accel knows.{did_you_mean(name, known)}",
            fix=f"use one of {', '.join(names)}.",
        )
    return found


def without_languages(word: str) -> str:
    """The word for a task without the languages that it may name."""
    return _LANGUAGES.sub("", word)


def any_graph_task() -> str:
    """The task of graphs that nothing is known about."""
    return next(spec.name for spec in all_tasks() if spec.any_graph)


def text_decoder_task() -> str:
    """The task of decoders that read texts alone."""
    return next(s.name for s in all_tasks() if s.generates and s.encoder_decoder is False and s.modalities == ("text",))


def features_task() -> str:
    """The task of hidden states alone."""
    return next(spec.name for spec in all_tasks() if spec.embeds and not spec.pooling)


def load_task(name: str) -> Task:
    """The task of that name, synonym or pipeline at work; imports its module at the first call.

    Raises:
        TaskError: There is none.
        PluginError: Its `TaskSpec.impl` holds no `Task`.
    """
    return _implemented(task_spec(name))


@functools.lru_cache
def _implemented(spec: TaskSpec) -> Task:
    if not spec.impl:
        return Task(spec)
    try:
        impl = pkgutil.resolve_name(spec.impl)
    # Foreign code, whose import may raise anything.
    except Exception as error:
        raise PluginError(f"The task {spec.name!r} cannot be loaded from {spec.impl!r}: {error}") from error
    if not (isinstance(impl, type) and issubclass(impl, Task)):
        raise PluginError(f"The task {spec.name!r} has the class {spec.impl!r}, which is no subclass of Task.")
    return impl(spec)


def measured_tasks() -> list[str]:
    """Names of the tasks whose models can be measured."""
    return [task.spec.name for task in working_tasks() if task.measured]


def specs_for(word: str) -> tuple[TaskSpec, ...]:
    """Every task that a name, synonym or pipeline stands for, the one of that name first: speech recognition is one pipeline of two
    kinds of models.

    Raises:
        TaskError: There is none.
    """
    first = task_spec(word)
    return (first, *(spec for spec in all_tasks() if spec is not first and word in (*spec.serves, *spec.synonyms)))


def fitting_task(word: str, config: Mapping[str, Any]) -> str:
    """The task that a word stands for with a model of this config: the one of that name, or where that one's architectures are others,
    one that this is among.

    Raises:
        TaskError: There is none.
    """
    first, *others = specs_for(word)
    # Embeddings are told from features by their task's name alone.
    if _closeness(first, config) is not None or not (first.listed or first.suffixes or first.generates):
        return first.name
    return next((spec.name for spec in others if _closeness(spec, config) is not None), first.name)


def _closeness(spec: TaskSpec, config: Mapping[str, Any]) -> tuple[bool, int, int] | None:
    """How closely a task describes the architecture of a config; `None` for another architecture. Of several tasks the largest is meant:
    transformers' table of architectures, then fields of the config, then the longest ending.
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
    """All installed tasks: those that come with `accel` first, each group in the order of names. A broken one is left out."""
    return _loaded(_installed())[0]


def working_tasks() -> Iterator[Task]:
    """All installed tasks at work; imports the module of each. A task whose module cannot be imported is left out with a warning."""
    for spec in all_tasks():
        try:
            yield _implemented(spec)
        except PluginError as error:
            logger.warning("%s", error)


def _installed() -> tuple[tuple[str, str], ...]:
    entries = {(entry.name, entry.value) for entry in entry_points(TASKS)}
    return tuple(sorted(entries, key=lambda entry: (not entry[1].startswith("accel."), entry)))


@functools.lru_cache(maxsize=2)
def _loaded(entries: tuple[tuple[str, str], ...]) -> tuple[tuple[TaskSpec, ...], Mapping[str, PluginError]]:
    """The tasks of these entry points, and errors by the names of the others: one broken distribution disturbs no other."""
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
    """The spec that an entry point names."""
    if len(claims) > 1:
        raise PluginError(
            f"Several entry points claim the task {name!r}: {', '.join(claims)}.", fix="uninstall all but one of them."
        )
    try:
        spec = pkgutil.resolve_name(value)
    # Foreign code, whose import may raise anything.
    except Exception as error:
        raise PluginError(
            f"The task {name!r} cannot be loaded from {value!r}: {type(error).__name__}: {error}"
        ) from error
    if not isinstance(spec, TaskSpec) or spec.name != name:
        raise PluginError(f"The entry point {name!r} = {value!r} holds no TaskSpec of that name.")
    return spec


@functools.lru_cache(maxsize=2)
def _words(entries: tuple[tuple[str, str], ...]) -> Mapping[str, TaskSpec]:
    """Every word for a task: its name, else its pipelines and synonyms. If two tasks have one word, it means the first."""
    specs, _ = _loaded(entries)
    words = {spec.name: spec for spec in specs}
    for spec in specs:
        for word in (*spec.serves, *spec.synonyms):
            words.setdefault(word, spec)
    return words


def missing_config(folder: Path) -> ArtifactNotFoundError:
    """The error for a model whose folder holds no `config.json`."""
    return ArtifactNotFoundError(
        f"{folder} holds no config.json, which names the model's architecture, labels and sizes.",
        fix="copy the config.json of the original model into it, or pass config=... to from_pretrained. A graph of another model "
        "opens with accel.ORTModelForCustomTasks.from_pretrained(...), whose `artifact` optimize and quantize take.",
    )


def infer_task(config: Mapping[str, Any], folder: Path | None = None) -> str:
    """The task of a model from its `config.json` (and `modules.json` of a sentence-transformers folder).

    Raises:
        ArtifactNotFoundError: The folder holds no config.
        TaskError: The config names no architecture, or one without a task here.
    """
    if folder is not None and (kind := sentence_kind(folder)):
        task = next((spec.name for spec in all_tasks() if spec.sentence_kind == kind), None)
        if task is None:
            raise TaskError(
                f"{folder} holds a {kind} of sentence-transformers, which accel does not run yet.",
                fix="use sentence-transformers for it, or pass task='feature-extraction' (or 'fill-mask') for the model's own outputs.",
            )
        return task
    architectures = config.get("architectures") or []
    if not architectures:
        if folder is not None and not config and not (folder / "config.json").exists():
            raise missing_config(folder)
        raise TaskError("The model's config names no architecture to infer the task from.", fix="pass task=...")
    name = str(architectures[0])
    fits = [(closeness, spec.name) for spec in all_tasks() if (closeness := _closeness(spec, config)) is not None]
    best, task = max(fits, default=((False, 0, 0), ""))
    # `GPT2LMHeadModel` also ends with `Model`, the suffix of an encoder without a head; its head would be dropped.
    if not task or (best == (False, 0, len("Model")) and name.endswith(("HeadModel", "HeadsModel"))):
        raise TaskError(
            f"The task of a {name} cannot be inferred, or accel does not support it yet.",
            fix=f"pass task=..., one of {', '.join(spec.name for spec in all_tasks())}.",
        )
    return task


def read_config(folder: Path) -> dict[str, Any]:
    """The `config.json` of a folder; empty when there is none.

    Raises:
        IntegrityError: It is no regular file, not a JSON object, too large, or has more labels than any model.
    """
    path = folder / "config.json"
    if not path.exists():
        return {}
    values = read_json(path)
    # transformers makes a name for each label, of the configs inside of it as well.
    labels = [one.get("num_labels") for one in (values, *values.values()) if isinstance(one, dict)]
    if any(isinstance(count, int) and count > _MOST_LABELS for count in labels):
        raise IntegrityError(
            f"{path} has more than {_MOST_LABELS:,} labels, which no model has.",
            fix="copy the file again from where it came.",
        )
    return values


def is_adapter(folder: Path) -> bool:
    """Whether a folder holds a PEFT adapter, and not a whole model."""
    return (folder / _ADAPTER).is_file()


def infer_adapter_task(folder: Path) -> str:
    """The task of a PEFT adapter from its `adapter_config.json`; features where it names none."""
    settings = read_json(folder / _ADAPTER)
    word = settings.get("task_type") or ""
    return next((spec.name for spec in all_tasks() if word and spec.adapter == word), features_task())
