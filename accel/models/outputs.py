"""What a call returns: transformers' output classes, filled without their checks."""

from __future__ import annotations

import functools
import re
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np
import torch
from transformers.utils import ModelOutput

from ..errors import InputError

_INDEXED = re.compile(r"(?P<field>\w+)\.(?P<index>\d+)\Z")
# A `ModelOutput` is filled without its constructor and its item assignment, which check every field on every call:
# 20 microseconds instead of 80 with cold caches. Fields that are not set read as `None`, their class default.
_set_item = OrderedDict.__setitem__


def fast_output(kind: Any, values: Mapping[str, Any]) -> Any:
    """A `ModelOutput` of a class with these fields, none checked."""
    output = kind.__new__(kind)
    for name, value in values.items():
        _set_item(output, name, value)
    output.__dict__.update(values)
    return output


_Method = TypeVar("_Method", bound=Callable[..., Any])


def numpy_too(method: _Method) -> _Method:
    """A method of tensors that also takes NumPy arrays, and then returns such."""

    @functools.wraps(method)
    def wrapper(self: Any, *args: Any, **kwargs: Any) -> Any:
        if np.ndarray not in map(type, args) and np.ndarray not in map(type, kwargs.values()):
            return method(self, *args, **kwargs)
        given = {name: _as_tensor(value, name) for name, value in kwargs.items()}
        values = method(self, *map(_as_tensor, args), **given)
        if isinstance(values, ModelOutput):
            return fast_output(type(values), {name: _as_array(value) for name, value in values.items()})
        return _as_array(values)

    return wrapper  # type: ignore[return-value]


def _as_tensor(value: Any, name: str = "input") -> Any:
    if not isinstance(value, np.ndarray):
        return value
    try:
        # torch reads no negative strides.
        return torch.from_numpy(np.asarray(value, order="C"))
    except TypeError as error:
        raise InputError(
            f"{name} is an array of {value.dtype}, not of numbers.",
            fix="pass the tokenizer's output, padded to one length.",
        ) from error


def _as_array(value: Any) -> Any:
    if isinstance(value, tuple):
        return tuple(_as_array(one) for one in value)
    return value.cpu().numpy() if isinstance(value, torch.Tensor) else value


@dataclass
class SentenceEmbeddingOutput(ModelOutput):  # type: ignore[misc]  # transformers is untyped here
    """What a model with pooling in its graph returns.

    Attributes:
        sentence_embedding: `(batch, hidden)`
        last_hidden_state: `(batch, sequence, hidden)`
    """

    sentence_embedding: torch.Tensor | None = None
    last_hidden_state: torch.Tensor | None = None


def indexed(names: Sequence[str]) -> dict[str, list[str]]:
    """Outputs called `hidden_states.0`, `hidden_states.1`, ... by field; empty when there are none."""
    groups: dict[str, list[str]] = {}
    for name in names:
        if match := _INDEXED.match(name):
            groups.setdefault(match["field"], []).append(name)
    return groups


def grouped(values: Mapping[str, Any], groups: Mapping[str, list[str]]) -> dict[str, Any]:
    """The outputs with each group as one tuple."""
    members = {name for names in groups.values() for name in names}
    result = {name: value for name, value in values.items() if name not in members}
    return result | {field: tuple(values[name] for name in names) for field, names in groups.items()}
