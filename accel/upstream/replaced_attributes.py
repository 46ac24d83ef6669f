"""Temporary replacement of attributes of other libraries' objects."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any


@contextmanager
def replaced_attributes(replacements: Iterable[tuple[Any, str, Any]]) -> Iterator[None]:
    """Set attributes of objects, classes or modules within the block, and restore them afterwards, also after an error.

    An attribute that an owner inherits from its class or a base class is deleted from the owner after the block.

    Args:
        replacements: Owner, name and temporary value of each attribute.
    """
    with ExitStack() as stack:
        for owner, name, value in replacements:
            if name not in vars(owner) and (isinstance(owner, type) or hasattr(type(owner), name)):
                stack.callback(delattr, owner, name)
            else:
                stack.callback(setattr, owner, name, getattr(owner, name))
            setattr(owner, name, value)
        yield
