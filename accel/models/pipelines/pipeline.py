"""`accel.pipeline`: transformers' pipelines over our models, with length-sorted batches, and those that it removed."""

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
from ...errors import ConfigError, TaskError, did_you_mean
from ...interfaces.task_registry import all_tasks, load_task, specs_for, task_spec, without_languages
from ...interfaces.task_spec import TaskSpec
from ..arguments import LoadingArguments, device_name, read_arguments
from ..base import ORTModel, model_class
from ..processors import companion_of, opened_processors
from .empty_inputs import ChecksEmpty
from .length_sorted_batches import LengthSorted
from .pipeline_arguments import check_known_arguments, check_model, loading_arguments
from .window_classifiers import ClassifiesWindows, classifies_windows

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
    """A pipeline over an accelerated model.

    Batched calls sort by length inside a window and restore the order. `question-answering`, which transformers 5
    removed, works as it did.

    Args:
        task: A pipeline task; the model's own when `None`.
        model: Hub id, folder, or a model (ours or transformers'); transformers' usual one for the task when `None`.
        backend: For an id or folder, as in `from_pretrained`.
        device: Likewise; a model that is there moves to it.
        tokenizer, image_processor, feature_extractor: Those beside the model when `None`.
        batch_size: Inputs a call of the model.
        revision, token, trust_remote_code: For an id or folder, as in transformers.
        model_kwargs: More arguments of `from_pretrained`.
        **kwargs: Arguments of the stock pipeline and of `from_pretrained`.

    Raises:
        ConfigError: No model was given, and the task has no usual one; or an argument that neither has, or that cannot be.
        ArtifactNotFoundError: A model or tokenizer that is not there.
        TaskError: The task is unknown, or the model does another one.
    """
    check_model(model)
    check_number("batch_size", batch_size, 1)
    check_number("num_workers", kwargs.get("num_workers"), 0)
    if model is None:
        model, revision = usual_model(task, revision)
    if kwargs.get("framework") in (None, "pt"):
        # transformers 4 had others.
        kwargs.pop("framework", None)
    loading = {name: kwargs.pop(name) for name in loading_arguments() & kwargs.keys()}
    if task is not None:
        check_known_arguments(task, pipeline_class(task), kwargs)
    if isinstance(model, str | os.PathLike):
        given = {"backend": backend, "device": device, **(model_kwargs or {})}
        hub = {"revision": revision, "token": token, "trust_remote_code": trust_remote_code}
        model = _load(task, model, read_arguments(**{**hub, **loading, **given}))
    elif loads := _set(backend=backend, revision=revision, token=token, model_kwargs=model_kwargs, **loading):
        raise ConfigError(
            f"{', '.join(f'{name}=...' for name in loads)}: for a model given by id or folder.",
            fix="load the model with it (from_pretrained), and pass the model.",
        )
    elif device is not None:
        model.to(device_name(device) or "cpu")
    if task is None:
        if not isinstance(model, ORTModel):
            raise TaskError("The task of a model from transformers must be named.", fix="pass task=...")
        task = _pipeline_of(task_spec(model.artifact.task))
    if isinstance(model, ORTModel):
        _check_model(task, model)
        own = task_spec(model.artifact.task)
        if task in own.synonyms and own.own_pipelines:
            # Another word for what this model does, and stock pipelines of that word are for other models.
            task = _pipeline_of(own)
    ours = _ours(task)
    impl: Any = pipeline_class(task)
    check_known_arguments(task, impl, kwargs)
    given = opened_processors(
        {
            "tokenizer": tokenizer, "image_processor": image_processor, "feature_extractor": feature_extractor,
            "processor": kwargs.pop("processor", None),
        },
        token=token, trust_remote_code=trust_remote_code,
    )  # fmt: skip
    if isinstance(model, ORTModel):
        given |= _processors(model, impl, given)
    if batch_size is not None:
        given["batch_size"] = batch_size
    if ours is not None:
        needed = "image_processor" if "image" in task_spec(task).modalities else "tokenizer"
        if needed not in given:
            raise ConfigError(f"The pipeline {task!r} needs a {needed.replace('_', ' ')}.", fix=f"pass {needed}=...")
        return ours(model=model, task=task, **given, **kwargs)
    made: Pipeline = transformers.pipeline(task, model=model, pipeline_class=sorted_class(impl), **given, **kwargs)
    return made


@functools.cache
def sorted_class(impl: type[Pipeline]) -> type[Pipeline]:
    """The stock pipeline with sorted batches, under its own name."""
    how = ClassifiesWindows if classifies_windows(impl) else LengthSorted
    # True, "maybe" (None) or False, in transformers' words.
    senses = any(
        getattr(impl, f"_load_{name}", False) is not False for name in ("feature_extractor", "image_processor")
    )
    bases: tuple[type, ...] = (ChecksEmpty, how, impl) if senses else (how, impl)
    members: dict[str, Any] = {
        "__module__": __name__,
        "__doc__": impl.__doc__,
        "__reduce_ex__": _reduced,
        "_stock_class": impl,
    }
    return type(impl.__name__, bases, members)


def _reduced(made: Any, _protocol: int) -> tuple[Any, ...]:
    """For pickle and copies: the stock class, which has a name to import it by, and what the pipeline holds."""
    return _empty_pipeline, (made._stock_class,), vars(made)  # noqa: SLF001  # set in `sorted_class`


def _empty_pipeline(impl: Any) -> Pipeline:
    cls: Any = sorted_class(impl)
    made: Pipeline = cls.__new__(cls)
    return made


def usual_model(task: str | None, revision: str | None) -> tuple[str, str]:
    """transformers' default model of a task and the revision that is meant, or the one asked for.

    Raises:
        ConfigError: No task either, or transformers has no model for it.
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
            f"No model was given{f', and transformers has none for {task!r}' if task else ''}.",
            fix="pass model=<Hub id or folder>.",
        ) from error
    logger.warning("No model was given: taking %s at %s, transformers' usual one.", name, revision or usual)
    return name, revision or usual


def _processors(model: ORTModel, impl: type[Pipeline], given: Container[str]) -> dict[str, Any]:
    """The tokenizer and so on beside a model, as far as its inputs need them, or its answers as this pipeline gives them, and the
    caller gave none.
    """
    if getattr(impl, "_load_processor", False) is True:
        # One for images and texts together.
        return {} if "processor" in given else {"processor": companion_of(model, "AutoProcessor")}
    needed = {}
    main, reads = model.main_input_name, model.input_names
    sounds = {"input_values", "input_features"} & {main, *reads}
    if "input_ids" in reads or model.can_generate() or (sounds and getattr(impl, "_load_tokenizer", False)):
        needed["tokenizer"] = "AutoTokenizer"
    if _IMAGES & set(reads):
        needed["image_processor"] = "AutoImageProcessor"
    if sounds:
        needed["feature_extractor"] = "AutoFeatureExtractor"
    return {name: companion_of(model, auto) for name, auto in needed.items() if name not in given}


def pipeline_tasks(model: ORTModel) -> tuple[str, ...]:
    """Every pipeline task that a model serves, its own first."""
    return tuple(name for name in _pipelines_of(task_spec(model.artifact.task)) if _has_what_it_needs(name, model))


def _pipelines_of(spec: TaskSpec) -> tuple[str, ...]:
    known = set(PIPELINE_REGISTRY.get_supported_tasks())
    return tuple(name for name in spec.serves if name in spec.own_pipelines or name in known)


def _has_what_it_needs(task: str, model: ORTModel) -> bool:
    """Whether a model of a task that serves a pipeline reads what it gives, and has what it looks for."""
    impl: Any = pipeline_class(task)
    if getattr(impl, "_load_image_processor", False) is True and not _IMAGES & set(model.input_names):
        return False
    return load_task(model.artifact.task).can_serve(task, model.config)


def _pipeline_of(spec: TaskSpec) -> str:
    """The pipeline task for a model's task: itself, or the first one that there is a pipeline for."""
    return next(iter(_pipelines_of(spec)), spec.name)


def _ours(task: str) -> type[Pipeline] | None:
    """The class of a pipeline that transformers 5 removed and accel brings back; `None` for the others."""
    word = without_languages(task)
    spec = next((spec for spec in all_tasks() if word in spec.own_pipelines), None)
    return load_task(spec.name).pipeline(word) if spec is not None else None


def pipeline_class(task: str) -> type[Pipeline]:
    """The class of a pipeline task: ours, or transformers'."""
    return _ours(task) or _stock(task)


def _set(**values: Any) -> list[str]:
    return sorted(name for name, value in values.items() if value is not None and value != {})


def _load(task: str | None, model: str | os.PathLike[str], arguments: LoadingArguments) -> ORTModel:
    """Open a model for a pipeline: by the one class that serves the task, or by the class of the model's own task."""
    if task is None or has_several_classes(task):
        cls, arguments = ORTModel, replace(arguments, task=arguments.task or task)
    else:
        cls = model_class(task)
    return cls.from_plan(cls.plan(model, arguments), config=arguments.config, use_cache=arguments.use_cache)


def has_several_classes(task: str) -> bool:
    """Whether a pipeline task is served by several classes, so that the model decides: speech recognition by two kinds of models."""
    return len({model_class(spec.name) for spec in specs_for(task)}) > 1


def _stock(task: str) -> type[Pipeline]:
    """The stock class of a pipeline task.

    Raises:
        TaskError: transformers has none, or accel does not serve it.
    """
    try:
        _, targeted, _ = PIPELINE_REGISTRY.check_task(task)
    except KeyError as error:
        serves = {word for spec in all_tasks() for word in (*spec.serves, *spec.synonyms)}
        known = sorted(serves & set(PIPELINE_REGISTRY.get_supported_tasks()))
        raise TaskError(
            f"There is no pipeline {task!r}.{did_you_mean(task, known)}", fix=f"use one of {', '.join(known)}."
        ) from error
    impl = targeted["impl"]
    # transformers 5.2x names its classes by dotted path; a registered one is the class itself.
    found: type[Pipeline] = pkgutil.resolve_name(impl) if isinstance(impl, str) else impl
    return found


def _check_model(task: str, model: ORTModel) -> None:
    wanted = task_spec(task)
    if model.opens_any_graph() and wanted.embeds:
        # Whoever opens any graph says himself what its first output is.
        return
    if not any(isinstance(model, model_class(spec.name)) for spec in specs_for(task)):
        raise TaskError(
            f"{type(model).__name__} does not serve the pipeline {task!r}.",
            fix=f"use {model_class(wanted.name).__name__}, or another task.",
        )
