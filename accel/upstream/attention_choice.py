"""Which implementation of attention a transformers model computes with.

`config._attn_implementation` is private (seen in transformers 5.23 and 5.24). `set_attn_implementation` is public and has no counterpart
that reads it.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any


@contextmanager
def attention_of(model: Any, name: str | None) -> Iterator[None]:
    """The model with another implementation of attention, and its own again afterwards; nothing happens to models without a choice."""
    before = getattr(model.config, "_attn_implementation", None)
    if name is None or before in (None, name):
        yield
        return
    model.set_attn_implementation(name)
    try:
        yield
    finally:
        model.set_attn_implementation(before)
