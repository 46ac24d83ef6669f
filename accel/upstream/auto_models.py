"""Tables of transformers' auto classes: names of architectures and of processors.

Seen in transformers 5.23 and 5.24: `AutoModelForX._model_mapping._model_mapping` contains class names by model type. (The
public `MODEL_FOR_X_MAPPING.values()` imports every model.) `PROCESSOR_MAPPING_NAMES` has no public alternative.
"""

from __future__ import annotations

import functools
from typing import Any


@functools.cache
def architectures(auto_models: tuple[str, ...]) -> frozenset[str]:
    """Return the class names of all models that the given auto classes load."""
    import transformers

    names: set[str] = set()
    for auto_model in auto_models:
        for listed in getattr(transformers, auto_model)._model_mapping._model_mapping.values():
            names |= {listed} if isinstance(listed, str) else set(listed)
    return frozenset(names)


def classes_for(auto_class: Any, config: Any) -> frozenset[str]:
    """Return the names of the classes that an auto class has for a config. Empty if it has none."""
    classes = auto_class._model_mapping.get(type(config), None)
    return frozenset(
        cls.__name__ for cls in (classes if isinstance(classes, list | tuple) else (classes,)) if cls is not None
    )


def model_type_of(processor: Any) -> str | None:
    """Return the model type that a processor belongs to, or `None` if transformers does not have the processor."""
    from transformers.models.auto.processing_auto import PROCESSOR_MAPPING_NAMES

    name = type(processor).__name__
    return next((kind for kind, processor_name in PROCESSOR_MAPPING_NAMES.items() if processor_name == name), None)
