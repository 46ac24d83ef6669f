"""Loading of tokenizers and processors from a model's folder or from a source that the caller names."""

from __future__ import annotations

import os
import threading
from collections.abc import Mapping
from typing import Any
from weakref import WeakKeyDictionary

from ..artifact.processor_loading import open_companion
from ..errors import ConfigError

_LOADERS = {
    "tokenizer": "AutoTokenizer",
    "image_processor": "AutoImageProcessor",
    "feature_extractor": "AutoFeatureExtractor",
    "processor": "AutoProcessor",
}


class _ProcessorCache(threading.local):
    """Processors that a thread has loaded; each is kept as long as its model exists."""

    def __init__(self) -> None:
        self.by_model: WeakKeyDictionary[Any, dict[str, Any]] = WeakKeyDictionary()


_KEPT = _ProcessorCache()


def companion_of(model: Any, loader: str) -> Any:
    """Load a processor from a model's folder with a transformers class. Code in the folder runs only if the model trusts remote code.

    Args:
        model: An `ORTModel`.
        loader: Name of the transformers class, as in `open_companion`, which defines the errors.
    """
    trusted = bool(getattr(model, "_trust_remote_code", False))
    return open_companion(loader, model.artifact.path, trust_remote_code=trusted)


def kept_companion_of(model: Any, loader: str) -> Any:
    """Load a processor like `companion_of`, but only once per model and thread. Threads cannot share a fast tokenizer, because it
    stores settings between calls. For repeated short calls, where loading takes longer than the computation.
    """
    kept = _KEPT.by_model.setdefault(model, {})
    if loader not in kept:
        kept[loader] = companion_of(model, loader)
    return kept[loader]


def opened_processors(given: Mapping[str, Any], **arguments: Any) -> dict[str, Any]:
    """Load tokenizers and processors that are given as folder or Hub id. Loaded ones are returned unchanged; `None` is left out.

    Args:
        given: Processors, folders or Hub ids by argument name.
        **arguments: Further arguments of transformers' `from_pretrained`.

    Raises:
        ConfigError: A value is not a processor.
        ArtifactNotFoundError: A folder or Hub id does not exist.
        IntegrityError: A processor is damaged.
    """
    processors = {}
    for name, value in given.items():
        if isinstance(value, str | os.PathLike):
            processors[name] = open_companion(_LOADERS[name], value, local_files_only=False, **arguments)
        # transformers also accepts a tuple of an id and options.
        elif callable(value) or isinstance(value, tuple):
            processors[name] = value
        elif value is not None:
            raise ConfigError(
                f"{value!r:.100} is no {name.replace('_', ' ')}.",
                fix=f"pass one that transformers.{_LOADERS[name]}.from_pretrained(...) returned, its folder or Hub id.",
            )
    return processors
