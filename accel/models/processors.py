"""Loading of tokenizers and processors from a model's folder, or from a folder or Hub id that the caller passes."""

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
    """Load a tokenizer or processor from a model's folder with a transformers class.

    Python code in the folder runs only if the model was loaded with `trust_remote_code=True`. Errors are the same as those of
    `open_companion`.

    Args:
        model: An `ORTModel`.
        loader: Name of the transformers class, such as `AutoTokenizer`.
    """
    trusted = bool(getattr(model, "_trust_remote_code", False))
    return open_companion(loader, model.artifact.path, trust_remote_code=trusted)


def kept_companion_of(model: Any, loader: str) -> Any:
    """Load a processor like `companion_of`, but only once per model and thread, because loading takes longer than a short call.

    Each thread has its own processor, because a fast tokenizer stores settings between calls and cannot be shared by threads.
    """
    companions = _KEPT.by_model.setdefault(model, {})
    if loader not in companions:
        companions[loader] = companion_of(model, loader)
    return companions[loader]


def opened_processors(passed: Mapping[str, Any], **arguments: Any) -> dict[str, Any]:
    """Load tokenizers and processors that the caller passed as a folder or Hub id.

    The result also contains the processors that the caller passed as loaded objects. Values that are `None` are left out.

    Args:
        passed: Processors, folders or Hub ids by argument name.
        **arguments: Further arguments of transformers' `from_pretrained`.

    Raises:
        ConfigError: A value is not a processor.
        ArtifactNotFoundError: A folder or Hub id does not exist.
        IntegrityError: A processor is damaged.
    """
    processors = {}
    for name, value in passed.items():
        if isinstance(value, str | os.PathLike):
            processors[name] = open_companion(_LOADERS[name], value, local_files_only=False, **arguments)
        # transformers also accepts a tuple of an id and options.
        elif callable(value) or isinstance(value, tuple):
            processors[name] = value
        elif value is not None:
            raise ConfigError(
                f"The argument {name} is {value!r:.100}, which is neither a loaded {name.replace('_', ' ')} nor a folder or Hub id.",
                fix=f"pass the result of transformers.{_LOADERS[name]}.from_pretrained(...), or a folder or Hub id.",
            )
    return processors
