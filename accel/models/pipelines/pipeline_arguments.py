"""Arguments of `accel.pipeline`: arguments for loading the model, and arguments that a pipeline accepts."""

from __future__ import annotations

import functools
import inspect
import os
from collections.abc import Iterable, Mapping
from typing import Any

import transformers
from transformers import PreTrainedTokenizerBase
from transformers.pipelines.base import Pipeline

from ...config import check_names
from ...errors import ConfigError
from ...upstream.pipeline_internals import reader_of_options
from ..loading_arguments import ARGUMENTS, EXPORT_SETTINGS, OTHER_ARGUMENTS

_OF_BOTH = frozenset(("use_cache", "batch_size"))
"""Arguments that both `from_pretrained` and pipeline calls have; `accel.pipeline` uses them for calls and not for loading."""
_ALWAYS = frozenset(("batch_size", "num_workers"))
"""Options that every pipeline accepts in addition to the parameters of its signature."""


@functools.cache
def loading_arguments() -> frozenset[str]:
    """Return the arguments that `accel.pipeline` passes to `from_pretrained`, including arguments that `from_pretrained` rejects."""
    return frozenset((*ARGUMENTS, *EXPORT_SETTINGS, *OTHER_ARGUMENTS)) - _OF_BOTH


def check_model(model: Any) -> None:
    """Raise if an object is not a model name, a folder, or a model.

    Raises:
        ConfigError: The object is of another type; the message shows the object.
    """
    if model is not None and not isinstance(model, str | os.PathLike) and not hasattr(model, "forward"):
        raise ConfigError(
            f"The argument model is {model!r:.100}, which is not a model.",
            fix="pass a Hub id, a folder, or a loaded model.",
        )


def known_options(impl: type[Pipeline]) -> frozenset[str] | None:
    """Return the names of the options that calls of a pipeline accept.

    The result is `None` if the pipeline, `generate` or a processor raises for unknown options. Tokenizers, and pipelines that read only a
    few names from `kwargs`, ignore unknown options silently; for these pipelines, callers check options with this function.
    """
    sanitize: Any = reader_of_options(impl)
    parameters = inspect.signature(sanitize).parameters
    rest = next((p for p in parameters.values() if p.kind is inspect.Parameter.VAR_KEYWORD), None)
    read: Iterable[str] = ()
    if rest is not None and rest.name == "tokenizer_kwargs":
        read = _named(PreTrainedTokenizerBase.__call__).keys() - {"self", "text"}
    elif rest is not None and rest.name == "kwargs" and rest.annotation is inspect.Parameter.empty:
        # The option names that the pipeline reads from `kwargs` are string constants in its bytecode.
        read = [name for name in sanitize.__code__.co_consts if isinstance(name, str) and name.isidentifier()]
    elif rest is not None:
        return None
    return frozenset((*parameters, *read, *_ALWAYS)) - {"self", *(() if rest is None else (rest.name,))}


def check_known_arguments(task: str, impl: type[Pipeline], arguments: Iterable[str]) -> None:
    """Raise for arguments that a pipeline would silently ignore.

    Raises:
        ConfigError: An argument is unknown.
    """
    unknown = unknown_arguments(impl, arguments)
    if unknown:
        supported = (known_options(impl) or frozenset()) - _of_making(impl)
        check_names(f"The pipeline {task!r}", "argument", unknown, sorted({*supported, *ARGUMENTS, *EXPORT_SETTINGS}))


def unknown_arguments(impl: type[Pipeline], arguments: Iterable[str]) -> list[str]:
    """Return the arguments that a pipeline would silently ignore, judged from its signature."""
    options = known_options(impl)
    return [] if options is None else sorted(set(arguments) - options - _of_making(impl))


def _of_making(impl: type[Pipeline]) -> set[str]:
    """Return the arguments of a pipeline's constructor, which are accepted in addition to the options of its calls."""
    return {*_named(transformers.pipeline), *_named(Pipeline.__init__), *_named(impl.__init__)} - {"pipeline_class"}


def _named(function: Any) -> Mapping[str, inspect.Parameter]:
    parameters = inspect.signature(function).parameters
    return {name: p for name, p in parameters.items() if p.kind is not inspect.Parameter.VAR_KEYWORD}
