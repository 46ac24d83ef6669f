"""Names of the KV cache in the installed version of transformers."""

from __future__ import annotations

import dataclasses
import inspect
from typing import Any

from transformers.modeling_outputs import CausalLMOutputWithPast

_FIELDS = {field.name for field in dataclasses.fields(CausalLMOutputWithPast)}

CACHE_NAME = "cache" if "cache" in _FIELDS else "past_key_values"
"""Name of the cache in a model's arguments and outputs: `cache` since transformers 5.24, `past_key_values` before."""

CACHE_NAMES = (CACHE_NAME, *({"cache_params", "past_key_values"} - {CACHE_NAME}))
"""All names of the cache, including those of other versions: before 5.24, Mamba-like models named it `cache_params`."""


def cache_argument(model: Any) -> str:
    """Return the name of the cache argument of a model's `forward`."""
    parameters = inspect.signature(model.forward).parameters
    return next((name for name in CACHE_NAMES if name in parameters), CACHE_NAME)
