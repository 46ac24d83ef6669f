"""`accel.pipeline`: transformers' pipelines on accel's models with length-sorted batches, and pipelines that transformers removed."""

from __future__ import annotations

import functools
import logging
import os
import pkgutil
from collections.abc import Container, Mapping
from dataclasses import replace
from typing import Any

import torch
import transformers
from transformers.pipelines import PIPELINE_REGISTRY
from transformers.pipelines.base import Pipeline, get_default_model_and_revision

from ...config import check_number, checked_arguments
from ...errors import ConfigError, PluginError, TaskError, did_you_mean
from ...interfaces.task_registry import all_tasks, load_task, specs_for, task_spec, without_languages
from ...interfaces.task_spec import TaskSpec
from ...upstream.pipeline_internals import loads
from ..base import ORTModel, model_class
from ..loading_arguments import LoadingArguments, device_name, read_arguments
from ..processors import companion_of, opened_processors
from .bulk_text_classification import BulkTextClassification, classifies_windows
from .empty_media_check import ChecksEmpty
from .length_sorted_batches import LengthSorted
from .pipeline_arguments import check_known_arguments, check_model, loading_arguments

logger = logging.getLogger(__name__)

_IMAGES = {"pixel_values", "flattened_patches"}


@checked_arguments(device=(str, int, torch.device))
def pipeline(
    task: str | None = None,
    model: str | os.PathLike[str] | ORTModel | Any | None = None,
    *,
    backend: str | None = None,
    device: str | int | torch.device | None = None,
    tokenizer: Any = None,
    image_processor: Any = None,
    feature_extractor: Any = None,
    batch_size: int | None = None,
    revision: str | None = None,
    token: str | bool | None = None,
    trust_remote_code: bool = False,
    model_kwargs: Mapping[str, Any] | None = None,
    **kwargs: Any,
) -> Pipeline:
    """Create a pipeline with an accelerated model.

    Calls with a batch size sort the inputs by length, 64 batches at a time, and return the results in the original order. Pipelines that
    transformers 5 removed, such as `question-answering`, work as in transformers 4.

    Args:
        task: Pipeline task; the model's own task when `None`.
        model: Hub id, folder, or a loaded model of accel or transformers; transformers' default model of the task when `None`.
        backend: Backend for a model given as id or folder, as in `from_pretrained`.
        device: Device as in `from_pretrained`; a loaded model is moved to it.
        tokenizer, image_processor, feature_extractor: Loaded from the model's folder when `None`.
        batch_size: Number of inputs per call of the model.
        revision, token, trust_remote_code: As in transformers, for a model given as id or folder.
        model_kwargs: Further arguments of `from_pretrained`.
        **kwargs: Arguments of transformers' pipeline and of `from_pretrained`.

    Raises:
        ConfigError: No model was given and the task has no default model, or an argument is unknown or invalid.
        ArtifactNotFoundError: The model or tokenizer does not exist.
        TaskError: The task is unknown, or the model was made for another task.
    """
    check_model(model)
    check_number("batch_size", batch_size, 1)
    check_number("num_workers", kwargs.get("num_workers"), 0)
    if model is None:
        model, revision = usual_model(task, revision)
    if kwargs.get("framework") in (None, "pt"):
        # transformers 4 supported other frameworks.
        kwargs.pop("framework", None)
    loading = {name: kwargs.pop(name) for name in loading_arguments() & kwargs.keys()}
    if task is not None:
        check_known_arguments(task, pipeline_class(task), kwargs)
    if isinstance(model, str | os.PathLike):
        running = {"backend": backend, "device": device, **(model_kwargs or {})}
        hub = {"revision": revision, "token": token, "trust_remote_code": trust_remote_code}
        model = _load(task, model, read_arguments(**{**hub, **loading, **running}))
    elif loads := _set(backend=backend, revision=revision, token=token, model_kwargs=model_kwargs, **loading):
        raise ConfigError(
            f"The model is already loaded, so the arguments {', '.join(loads)} of accel.pipeline have no effect.",
            fix="pass these arguments to from_pretrained when you load the model, or pass the model as a Hub id or folder.",
        )
    elif device is not None:
        model.to(device_name(device) or "cpu")
    if task is None:
        if not isinstance(model, ORTModel):
            raise TaskError(
                f"accel.pipeline was called without a task, and the model is a {type(model).__name__}, which is not a model of accel and "
                "does not record its task.",
                fix="pass the task, such as accel.pipeline('text-classification', model=model).",
            )
        task = _pipeline_of(task_spec(model.artifact.task))
    if isinstance(model, ORTModel):
        _check_model(task, model)
        spec = task_spec(model.artifact.task)
        if task in spec.synonyms and spec.own_pipelines:
            # transformers has a pipeline with the name of this synonym, but for other models.
            task = _pipeline_of(spec)
    ours = _ours(task)
    impl: Any = pipeline_class(task)
    check_known_arguments(task, impl, kwargs)
    arguments = opened_processors(
        {
            "tokenizer": tokenizer, "image_processor": image_processor, "feature_extractor": feature_extractor,
            "processor": kwargs.pop("processor", None),
        },
        token=token, trust_remote_code=trust_remote_code,
    )  # fmt: skip
    if isinstance(model, ORTModel):
        arguments |= _processors(model, impl, arguments)
    if batch_size is not None:
        arguments["batch_size"] = batch_size
    if ours is not None:
        needed = "image_processor" if "image" in task_spec(task).modalities else "tokenizer"
        if needed not in arguments:
            raise ConfigError(
                f"The pipeline {task!r} requires the argument {needed}: the model is not a model of accel, so it has no folder from "
                f"which accel could load the {needed.replace('_', ' ')}.",
                fix=f"pass {needed}=<loaded object, Hub id or folder>.",
            )
        return ours(model=model, task=task, **arguments, **kwargs)
    pipe: Pipeline = transformers.pipeline(task, model=model, pipeline_class=sorted_class(impl), **arguments, **kwargs)
    return pipe


@functools.cache
def sorted_class(impl: type[Pipeline]) -> type[Pipeline]:
    """Return a subclass of a transformers pipeline class that has the same name and sorts its inputs by length before batching."""
    how = BulkTextClassification if classifies_windows(impl) else LengthSorted
    # `loads` returns transformers' three values: True, None ("maybe") and False.
    senses = any(loads(impl, part) is not False for part in ("feature_extractor", "image_processor"))
    bases: tuple[type, ...] = (ChecksEmpty, how, impl) if senses else (how, impl)
    members: dict[str, Any] = {
        "__module__": __name__,
        "__doc__": impl.__doc__,
        "__reduce_ex__": _reduced,
        "_stock_class": impl,
    }
    return type(impl.__name__, bases, members)


def _reduced(pipe: Any, _protocol: int) -> tuple[Any, ...]:
    """Return the values from which pickle and copy restore a pipeline: the transformers class on which it is based, and its attributes."""
    return _empty_pipeline, (pipe._stock_class,), vars(pipe)  # noqa: SLF001  # set in `sorted_class`


def _empty_pipeline(impl: Any) -> Pipeline:
    cls: Any = sorted_class(impl)
    pipe: Pipeline = cls.__new__(cls)
    return pipe


def usual_model(task: str | None, revision: str | None) -> tuple[str, str]:
    """Return transformers' default model of a task, and the requested revision or the default one.

    Raises:
        ConfigError: The task is missing, or transformers has no default model for it.
    """
    try:
        ours = (
            next((spec.usual_models[task] for spec in all_tasks() if task in spec.usual_models), None) if task else None
        )
        if ours is not None:
            name, usual = ours
        else:
            _, targeted, options = PIPELINE_REGISTRY.check_task(task or "")
            name, usual = get_default_model_and_revision(targeted, options)
    except (KeyError, ValueError) as error:
        raise ConfigError(
            "accel.pipeline was called without a model"
            f"{f', and transformers has no default model for the task {task!r}' if task else ' and without a task'}.",
            fix="pass model=<Hub id or folder>.",
        ) from error
    logger.warning(
        "accel.pipeline was called without a model and uses transformers' default model for the task, %s (revision %s). Pass model=... "
        "to choose a model.",
        name, revision or usual,
    )  # fmt: skip
    return name, revision or usual


def _processors(model: ORTModel, impl: type[Pipeline], passed: Container[str]) -> dict[str, Any]:
    """Load the tokenizer and processors that the pipeline needs from the model's folder, except the `passed` ones, which the caller
    passed as arguments.
    """
    if loads(impl, "processor"):
        # The pipeline uses one processor for images and texts.
        return {} if "processor" in passed else {"processor": companion_of(model, "AutoProcessor")}
    needed = {}
    main, reads = model.main_input_name, model.input_names
    sounds = {"input_values", "input_features"} & {main, *reads}
    if "input_ids" in reads or model.can_generate() or (sounds and loads(impl, "tokenizer")):
        needed["tokenizer"] = "AutoTokenizer"
    if _IMAGES & set(reads):
        needed["image_processor"] = "AutoImageProcessor"
    if sounds:
        needed["feature_extractor"] = "AutoFeatureExtractor"
    return {name: companion_of(model, auto) for name, auto in needed.items() if name not in passed}


def pipeline_tasks(model: ORTModel) -> tuple[str, ...]:
    """Return all pipeline tasks that a model supports, its own task first."""
    return tuple(name for name in _pipelines_of(task_spec(model.artifact.task)) if _has_what_it_needs(name, model))


def _pipelines_of(spec: TaskSpec) -> tuple[str, ...]:
    supported = set(PIPELINE_REGISTRY.get_supported_tasks())
    return tuple(name for name in spec.serves if name in spec.own_pipelines or name in supported)


def _has_what_it_needs(task: str, model: ORTModel) -> bool:
    """Return whether a model can be used in the pipeline of a task, judged from the graph's inputs and the model's config."""
    impl: Any = pipeline_class(task)
    if loads(impl, "image_processor") and not _IMAGES & set(model.input_names):
        return False
    return load_task(model.artifact.task).can_serve(task, model.config)


def _pipeline_of(spec: TaskSpec) -> str:
    """Return the pipeline task for a model's task: the same name, or the first supported pipeline."""
    return next(iter(_pipelines_of(spec)), spec.name)


def _ours(task: str) -> type[Pipeline] | None:
    """Return accel's class of a pipeline that transformers 5 removed; `None` for other pipelines."""
    word = without_languages(task)
    spec = next((spec for spec in all_tasks() if word in spec.own_pipelines), None)
    if spec is None:
        return None
    impl = load_task(spec.name).pipeline(word)
    if impl is None:
        raise PluginError(
            f"The task plugin {spec.name!r} lists the pipeline {word!r} in TaskSpec.own_pipelines, but its Task.pipeline({word!r}) "
            "returned None instead of a pipeline class.",
            fix=f"return the class from Task.pipeline, or remove {word!r} from TaskSpec.own_pipelines.",
        )
    return impl


def pipeline_class(task: str) -> type[Pipeline]:
    """Return the class of a pipeline task, from accel or from transformers."""
    return _ours(task) or _stock(task)


def _set(**values: Any) -> list[str]:
    return sorted(name for name, value in values.items() if value is not None and value != {})


def _load(task: str | None, model: str | os.PathLike[str], arguments: LoadingArguments) -> ORTModel:
    """Open a model for a pipeline with the model class of the pipeline's task. If several classes support the task, the class follows
    from the task that the model was exported for.
    """
    if task is None or has_several_classes(task):
        cls, arguments = ORTModel, replace(arguments, task=arguments.task or task)
    else:
        cls = model_class(task)
    return cls.from_plan(cls.plan(model, arguments), config=arguments.config, use_cache=arguments.use_cache)


def has_several_classes(task: str) -> bool:
    """Return whether several model classes support a pipeline task. Speech recognition, for example, has two kinds of models."""
    return len({model_class(spec.name) for spec in specs_for(task)}) > 1


def _stock(task: str) -> type[Pipeline]:
    """Return transformers' class of a pipeline task.

    Raises:
        TaskError: transformers has no such pipeline, or accel does not support it.
    """
    try:
        _, targeted, _ = PIPELINE_REGISTRY.check_task(task)
    except KeyError as error:
        serves = {word for spec in all_tasks() for word in (*spec.serves, *spec.synonyms)}
        supported = sorted(serves & set(PIPELINE_REGISTRY.get_supported_tasks()))
        raise TaskError(
            f"The pipeline task {task!r} does not exist.{did_you_mean(task, supported)}",
            fix=f"use one of {', '.join(supported)}.",
        ) from error
    impl = targeted["impl"]
    # transformers 5.2x stores classes as dotted paths; a registered pipeline is the class itself.
    stock_class: type[Pipeline] = pkgutil.resolve_name(impl) if isinstance(impl, str) else impl
    return stock_class


def _check_model(task: str, model: ORTModel) -> None:
    spec_of_task = task_spec(task)
    if model.opens_any_graph() and spec_of_task.embeds:
        # `ORTModelForCustomTasks` runs graphs with any outputs, so the caller must know that the first output is an embedding.
        return
    if not any(isinstance(model, model_class(spec.name)) for spec in specs_for(task)):
        raise TaskError(
            f"The pipeline {task!r} cannot use the model, whose class is {type(model).__name__}.",
            fix=f"load the model with {model_class(spec_of_task.name).__name__}.from_pretrained, or pass another task.",
        )
