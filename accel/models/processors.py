"""Tokenizers, processors and generation configs next to our models, and those that a caller names."""

from __future__ import annotations

import os
import threading
from collections.abc import Mapping
from typing import Any
from weakref import WeakKeyDictionary

from ..artifact.companions import open_companion
from ..errors import ConfigError

_LOADERS = {
    "tokenizer": "AutoTokenizer",
    "image_processor": "AutoImageProcessor",
    "feature_extractor": "AutoFeatureExtractor",
    "processor": "AutoProcessor",
}


class _Kept(threading.local):
    """What one thread has opened, for as long as the models live."""

    def __init__(self) -> None:
        self.by_model: WeakKeyDictionary[Any, dict[str, Any]] = WeakKeyDictionary()


_KEPT = _Kept()


def companion_of(model: Any, loader: str) -> Any:
    """What transformers' class of that name opens of a model's folder; code in it runs where the model's own may.

    Args:
        model: One of our models.
        loader: As in `open_companion`, whose errors it has.
    """
    trusted = bool(getattr(model, "_trust_remote_code", False))
    return open_companion(loader, model.artifact.path, trust_remote_code=trusted)


def kept_companion_of(model: Any, loader: str) -> Any:
    """The same, opened once for a model and a thread: a fast tokenizer keeps settings between calls, so that no two threads share one.

    For calls that a user makes over and over, where opening takes longer than the answer.
    """
    kept = _KEPT.by_model.setdefault(model, {})
    if loader not in kept:
        kept[loader] = companion_of(model, loader)
    return kept[loader]


def opened_processors(given: Mapping[str, Any], **arguments: Any) -> dict[str, Any]:
    """Open the tokenizers and processors that are named by folder or Hub id; others are returned as they are, `None` is left out.

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
