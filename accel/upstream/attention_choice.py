"""The attention implementation of a transformers model.

`config._attn_implementation` is private (seen in transformers 5.23 and 5.24). `set_attn_implementation` is public, but there
is no public way to read the implementation.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any


@contextmanager
def attention_of(model: Any, name: str | None) -> Iterator[None]:
    """Use another attention implementation for a while. Does nothing for `None` or for a model without a choice."""
    before = getattr(model.config, "_attn_implementation", None)
    if name is None or before in (None, name):
        yield
        return
    model.set_attn_implementation(name)
    try:
        yield
    finally:
        model.set_attn_implementation(before)
