"""What `accel.pipeline` was called with, checked before anything is loaded."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

from ...artifact.companions import open_companion
from ...errors import ConfigError, TaskError

_LOADERS = {
    "tokenizer": "AutoTokenizer",
    "image_processor": "AutoImageProcessor",
    "feature_extractor": "AutoFeatureExtractor",
    "processor": "AutoProcessor",
}


def check_given(
    task: Any, model: Any, *, batch_size: Any = None, model_kwargs: Any = None, num_workers: Any = None
) -> None:
    """Refuse arguments of kinds that nothing later understands.

    Raises:
        TaskError: The task is no name.
        ConfigError: Another one is of the wrong kind, or a number that cannot be.
    """
    if task is not None and not isinstance(task, str):
        raise TaskError(
            f"A task is called by its name, not by {task!r:.100}.", fix="pass a string such as 'text-classification'."
        )
    if model is not None and not isinstance(model, str | os.PathLike) and not hasattr(model, "forward"):
        raise ConfigError(f"{model!r:.100} is not a model.", fix="pass a Hub id, a folder, or a model that is loaded.")
    if model_kwargs is not None and not isinstance(model_kwargs, Mapping):
        raise ConfigError(
            f"model_kwargs is {model_kwargs!r:.100}, which is no mapping.", fix="pass a dict of arguments by name."
        )
    check_count("batch_size", batch_size, 1)
    check_count("num_workers", num_workers, 0)


def check_count(name: str, value: Any, least: int) -> None:
    """Refuse what is no whole number, or too small; `None` is no value.

    Raises:
        ConfigError: With the value.
    """
    if value is not None and (not isinstance(value, int) or isinstance(value, bool) or value < least):
        raise ConfigError(
            f"{name} is {value!r:.100}; it is a whole number of at least {least}.",
            fix=f"pass such a number as {name}=...",
        )


def opened_processors(given: Mapping[str, Any], **arguments: Any) -> dict[str, Any]:
    """Tokenizers and processors as they were given, those given by folder or Hub id opened; `None` is left out.

    Args:
        given: By name of the argument.
        **arguments: More arguments of transformers' `from_pretrained`.

    Raises:
        ConfigError: One that is none.
        ArtifactNotFoundError: No such folder or id.
        IntegrityError: A damaged one.
    """
    found = {}
    for name, value in given.items():
        if isinstance(value, str | os.PathLike):
            found[name] = open_companion(_LOADERS[name], value, local_files_only=False, **arguments)
        # transformers also takes an id with its options.
        elif callable(value) or isinstance(value, tuple):
            found[name] = value
        elif value is not None:
            raise ConfigError(
                f"{value!r:.100} is no {name.replace('_', ' ')}.",
                fix=f"pass one that transformers.{_LOADERS[name]}.from_pretrained(...) returned, its folder or Hub id.",
            )
    return found
