"""What the installed transformers calls the cache of a model."""

from __future__ import annotations

import dataclasses
import inspect
from typing import Any

from transformers.modeling_outputs import CausalLMOutputWithPast

_FIELDS = {field.name for field in dataclasses.fields(CausalLMOutputWithPast)}

CACHE_NAME = "cache" if "cache" in _FIELDS else "past_key_values"
"""The cache among a model's arguments and in what it returns: `cache` since transformers 5.24, `past_key_values` before."""

CACHE_NAMES = (CACHE_NAME, *({"cache_params", "past_key_values"} - {CACHE_NAME}))
"""With the names that code of other versions has: Mamba's kind called it `cache_params` before 5.24."""


def cache_argument(model: Any) -> str:
    """How a model's `forward` calls what it kept."""
    parameters = inspect.signature(model.forward).parameters
    return next((name for name in CACHE_NAMES if name in parameters), CACHE_NAME)
