"""Lookup of the family of a model type in the entry point group `accel.families`. Only the module of this family is imported."""

from __future__ import annotations

import functools
import pkgutil
from collections.abc import Mapping
from typing import Any

from .entry_points import entry_points
from .family import Family


def family_of(config: Any) -> Family:
    """Return the family for a transformers config, or for the content of a `config.json`.

    Model types without a family get the default family.
    """
    kind = config.get("model_type") if isinstance(config, Mapping) else getattr(config, "model_type", None)
    return _family(kind) if isinstance(kind, str) else _GENERAL


_GENERAL = Family()


@functools.cache
def _family(model_type: str) -> Family:
    for entry in entry_points("families"):
        if module := entry.load().get(model_type):
            family: Family = pkgutil.resolve_name(f"{entry.module}.{module}:FAMILY")
            return family
    return _GENERAL


def max_text_sizes(config: Mapping[str, Any]) -> dict[str, int]:
    """Return the longest sequence as `{"sequence": n}` for a model with learned absolute position embeddings, else an empty dict.

    `config` is the content of a `config.json`.
    """
    limit = config.get("max_position_embeddings")
    rotary = "rope_theta" in config or "rope_parameters" in config or config.get("position_biased_input") is False
    if not isinstance(limit, int) or rotary:
        return {}
    return {"sequence": limit - family_of(config).first_position(config)}
