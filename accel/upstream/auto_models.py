"""Which architectures transformers has for an auto class.

Seen in transformers 5.24: `AutoModelForX._model_mapping._model_mapping` has their names by model type. The public
`MODEL_FOR_X_MAPPING.values()` imports every model.
"""

from __future__ import annotations

import functools


@functools.cache
def architectures(auto_models: tuple[str, ...]) -> frozenset[str]:
    """Class names of all models that these auto classes load."""
    import transformers

    names: set[str] = set()
    for auto_model in auto_models:
        for listed in getattr(transformers, auto_model)._model_mapping._model_mapping.values():
            names |= {listed} if isinstance(listed, str) else set(listed)
    return frozenset(names)
