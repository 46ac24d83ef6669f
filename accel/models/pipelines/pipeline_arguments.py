"""The arguments of `accel.pipeline`: which are about loading the model, and which a pipeline knows."""

from __future__ import annotations

import functools
import inspect
import os
from collections.abc import Iterable, Mapping
from dataclasses import fields
from typing import Any

import transformers
from transformers import PreTrainedTokenizerBase
from transformers.pipelines.base import Pipeline

from ...config import ExportConfig
from ...errors import ConfigError, did_you_mean
from ..arguments import ARGUMENTS, OTHER_ARGUMENTS

_OF_BOTH = frozenset(("use_cache", "batch_size"))
"""Arguments of `from_pretrained`, and of a pipeline's calls, where they are meant."""
_ALWAYS = frozenset(("batch_size", "num_workers"))
"""What the base of all pipelines takes besides the parameters of its signature."""


@functools.cache
def loading_arguments() -> frozenset[str]:
    """Arguments of a pipeline that go to `from_pretrained`: all that it has, and those that it refuses with a reason."""
    return frozenset((*ARGUMENTS, *(field.name for field in fields(ExportConfig)), *OTHER_ARGUMENTS)) - _OF_BOTH


def check_model(model: Any) -> None:
    """Refuse an object that is neither a name nor a model.

    Raises:
        ConfigError: With the value.
    """
    if model is not None and not isinstance(model, str | os.PathLike) and not hasattr(model, "forward"):
        raise ConfigError(f"{model!r:.100} is not a model.", fix="pass a Hub id, a folder, or a model that is loaded.")


def known_options(impl: type[Pipeline]) -> frozenset[str] | None:
    """The options of a pipeline's calls; `None` where they are looked at later: by our own pipelines, `generate`, or a processor.

    Others pass over what they do not know: tokenizers, and pipelines that look into a dictionary for a few names.
    """
    sanitize: Any = impl._sanitize_parameters  # noqa: SLF001  # what it takes is said nowhere else
    parameters = inspect.signature(sanitize).parameters
    rest = next((one for one in parameters.values() if one.kind is inspect.Parameter.VAR_KEYWORD), None)
    read: Iterable[str] = ()
    if rest is not None and rest.name == "tokenizer_kwargs":
        read = _named(PreTrainedTokenizerBase.__call__).keys() - {"self", "text"}
    elif rest is not None and rest.name == "kwargs" and rest.annotation is inspect.Parameter.empty:
        # The names that it looks for are constants of its code.
        read = [name for name in sanitize.__code__.co_consts if isinstance(name, str) and name.isidentifier()]
    elif rest is not None:
        return None
    return frozenset((*parameters, *read, *_ALWAYS)) - {"self", *(() if rest is None else (rest.name,))}


def check_known_arguments(task: str, impl: type[Pipeline], given: Iterable[str]) -> None:
    """Refuse arguments that a pipeline would pass over.

    Raises:
        ConfigError: There are some.
    """
    unknown = unknown_arguments(impl, given)
    if unknown:
        options: Any = known_options(impl)
        known = sorted(options | loading_arguments())
        raise ConfigError(
            f"The pipeline {task!r} has no argument {unknown[0]!r}.{did_you_mean(unknown[0], known)}",
            fix=f"use one of {', '.join(sorted(options - _of_making(impl)))}, or an argument of from_pretrained.",
        )


def unknown_arguments(impl: type[Pipeline], given: Iterable[str]) -> list[str]:
    """The arguments that a pipeline would pass over, as far as it can be said beforehand."""
    options = known_options(impl)
    return [] if options is None else sorted(set(given) - options - _of_making(impl))


def _of_making(impl: type[Pipeline]) -> set[str]:
    """What making a pipeline takes besides the options of its calls."""
    return {*_named(transformers.pipeline), *_named(Pipeline.__init__), *_named(impl.__init__)} - {"pipeline_class"}


def _named(function: Any) -> Mapping[str, inspect.Parameter]:
    parameters = inspect.signature(function).parameters
    return {name: one for name, one in parameters.items() if one.kind is not inspect.Parameter.VAR_KEYWORD}
