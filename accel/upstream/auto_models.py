"""What the auto classes of transformers have: names of architectures and of processors.

Seen in transformers 5.23 and 5.24: `AutoModelForX._model_mapping._model_mapping`, class names by model type (the public
`MODEL_FOR_X_MAPPING.values()` imports every model), and `PROCESSOR_MAPPING_NAMES`, which has no public alternative.
"""

from __future__ import annotations

import functools
from typing import Any


@functools.cache
def architectures(auto_models: tuple[str, ...]) -> frozenset[str]:
    """Class names of all models that these auto classes load."""
    import transformers

    names: set[str] = set()
    for auto_model in auto_models:
        for listed in getattr(transformers, auto_model)._model_mapping._model_mapping.values():
            names |= {listed} if isinstance(listed, str) else set(listed)
    return frozenset(names)


def classes_for(auto_class: Any, config: Any) -> frozenset[str]:
    """Names of the classes that an auto class has for a config; none where it has no class for it."""
    found = auto_class._model_mapping.get(type(config), None)
    return frozenset(
        cls.__name__ for cls in (found if isinstance(found, list | tuple) else (found,)) if cls is not None
    )


def model_type_of(processor: Any) -> str | None:
    """The model type that a processor belongs to; `None` where transformers has no such processor."""
    from transformers.models.auto.processing_auto import PROCESSOR_MAPPING_NAMES

    name = type(processor).__name__
    return next((kind for kind, known in PROCESSOR_MAPPING_NAMES.items() if known == name), None)
