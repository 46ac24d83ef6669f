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
    """Set another attention implementation of a model within the block. Does nothing if the implementation is `None`, or if
    the model has only one implementation.
    """
    before = getattr(model.config, "_attn_implementation", None)
    if name is None or before in (None, name):
        yield
        return
    model.set_attn_implementation(name)
    try:
        yield
    finally:
        model.set_attn_implementation(before)
