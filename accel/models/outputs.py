"""Output objects of transformers' classes, created without the field checks of these classes."""

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
# `fast_output` does not call the constructor and the item assignment of `ModelOutput`, which check every field in every call. With cold
# processor caches, an output object then takes 20 instead of 80 microseconds. Unset fields have the default of their class, `None`.
_set_item = OrderedDict.__setitem__


def fast_output(kind: Any, values: Mapping[str, Any]) -> Any:
    """Create an output object of class `kind` with these fields, without checks."""
    output = kind.__new__(kind)
    for name, value in values.items():
        _set_item(output, name, value)
    output.__dict__.update(values)
    return output


_Method = TypeVar("_Method", bound=Callable[..., Any])


def numpy_too(method: _Method) -> _Method:
    """Decorate a method that accepts tensors, so that it also accepts NumPy arrays and then returns NumPy arrays."""

    @functools.wraps(method)
    def wrapper(self: Any, *args: Any, **kwargs: Any) -> Any:
        if np.ndarray not in map(type, args) and np.ndarray not in map(type, kwargs.values()):
            return method(self, *args, **kwargs)
        arrays = {name: as_tensor(name, value) for name, value in kwargs.items() if isinstance(value, np.ndarray)}
        first = (as_tensor("input", value) if isinstance(value, np.ndarray) else value for value in args)
        values = method(self, *first, **{**kwargs, **arrays})
        if isinstance(values, ModelOutput):
            return fast_output(type(values), {name: _as_array(value) for name, value in values.items()})
        return _as_array(values)

    return wrapper  # type: ignore[return-value]


def as_tensor(name: str, value: Any) -> torch.Tensor:
    """Convert an input to a tensor, sharing its memory if possible.

    Raises:
        InputError: The value does not contain numbers, or has rows of different length.
    """
    try:
        # `order="C"` copies arrays with negative strides, which torch does not support.
        return (
            torch.from_numpy(np.asarray(value, order="C")) if isinstance(value, np.ndarray) else torch.as_tensor(value)
        )
    except (TypeError, ValueError, RuntimeError) as error:
        kind = f"a NumPy array of {value.dtype}" if isinstance(value, np.ndarray) else f"a {type(value).__name__}"
        raise InputError(
            f"{name} is {kind} that cannot be converted to a tensor: {error}",
            fix="call the tokenizer or processor with return_tensors='pt', and pass its output by name: model(**inputs).",
        ) from error


def _as_array(value: Any) -> Any:
    if isinstance(value, tuple):
        return tuple(_as_array(item) for item in value)
    return value.cpu().numpy() if isinstance(value, torch.Tensor) else value


@dataclass
class SentenceEmbeddingOutput(ModelOutput):  # type: ignore[misc]  # transformers is untyped here
    """Output of a model whose graph includes pooling.

    Attributes:
        sentence_embedding: Embeddings `(batch, hidden)`. Embeddings of a sparse encoder have the size of the vocabulary.
        last_hidden_state: Hidden states `(batch, sequence, hidden)`.
        query_embedding, document_embedding: Embeddings of the router's path that is not its default path.
        multi_vector_embedding: One vector per token, `(batch, sequence, size)`.
        token_weights: One weight per token, `(batch, sequence)`.
    """

    sentence_embedding: torch.Tensor | None = None
    last_hidden_state: torch.Tensor | None = None
    query_embedding: torch.Tensor | None = None
    document_embedding: torch.Tensor | None = None
    multi_vector_embedding: torch.Tensor | None = None
    token_weights: torch.Tensor | None = None


def indexed(names: Sequence[str]) -> dict[str, list[str]]:
    """Group output names such as `hidden_states.0` and `hidden_states.1` by field name; names without an index are left out."""
    groups: dict[str, list[str]] = {}
    for name in names:
        if match := _INDEXED.match(name):
            groups.setdefault(match["field"], []).append(name)
    return groups


def grouped(values: Mapping[str, Any], groups: Mapping[str, list[str]]) -> dict[str, Any]:
    """Return the outputs with each group of indexed outputs merged into one tuple."""
    members = {name for names in groups.values() for name in names}
    result = {name: value for name, value in values.items() if name not in members}
    return result | {field: tuple(values[name] for name in names) for field, names in groups.items()}
