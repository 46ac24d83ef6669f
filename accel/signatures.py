"""Arguments of public functions, held against their signatures before anything is done with them."""

from __future__ import annotations

import functools
import inspect
import numbers
import reprlib
import types
import typing
from collections.abc import Callable
from typing import Any, Literal, ParamSpec, TypeVar, Union, get_args, get_origin

from .errors import ConfigError

_P = ParamSpec("_P")
_T = TypeVar("_T")
# NumPy's numbers are numbers.
_NUMBERS: dict[type, type] = {int: numbers.Integral, float: numbers.Real}
_NAMES = {numbers.Integral: "a whole number", numbers.Real: "a number", type(None): "None"}


def checked_arguments(function: Callable[_P, _T]) -> Callable[_P, _T]:
    """The function, which refuses arguments that are of none of the types in its signature, and texts that no system takes.

    A hint that says nothing at run time (`Any`, a type variable, a name that is imported for type checkers alone) allows everything;
    what is inside a sequence or a mapping is not looked at.
    """
    signature = inspect.signature(function)

    @functools.cache
    def allowed() -> dict[str, tuple[type, ...] | None]:
        return {
            name: None
            if parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD)
            else _types(parameter.annotation, function)
            for name, parameter in signature.parameters.items()
        }

    @functools.wraps(function)
    def call(*args: _P.args, **kwargs: _P.kwargs) -> _T:
        try:
            given = signature.bind(*args, **kwargs).arguments
        except TypeError:
            # One is missing or one too many: Python's own words.
            return function(*args, **kwargs)
        for name, value in given.items():
            _check(function.__qualname__, name, value, allowed()[name])
        return function(*args, **kwargs)

    return call


def _types(hint: Any, function: Callable[..., object]) -> tuple[type, ...] | None:
    """The classes that a hint allows; `None` for all."""
    if isinstance(hint, str):
        names = {**vars(typing), **inspect.unwrap(function).__globals__}
        try:
            hint = eval(hint, names)
        except NameError:
            return None
    found: list[type] = []
    for option in get_args(hint) if get_origin(hint) in (Union, types.UnionType) else (hint,):
        if get_origin(option) is Literal:
            found += [type(value) for value in get_args(option)]
            continue
        kind = type(None) if option is None else get_origin(option) or option
        unsaid = kind in (Any, object, inspect.Parameter.empty)
        if unsaid or not isinstance(kind, type) or getattr(kind, "_is_protocol", False):
            return None
        found.append(_NUMBERS.get(kind, kind))
    return tuple(dict.fromkeys(found))


def _check(function: str, name: str, value: object, allowed: tuple[type, ...] | None) -> None:
    # `True` is an int to Python, and not a number of rows.
    if allowed is not None and (not isinstance(value, allowed) or (isinstance(value, bool) and bool not in allowed)):
        words = [_NAMES.get(kind, kind.__name__) for kind in allowed]
        raise ConfigError(
            f"{name} is {reprlib.repr(value)}, which {function} does not take.", fix=f"pass {' or '.join(words)}."
        )
    if isinstance(value, str) and "\0" in value:
        raise ConfigError(f"{name} is {value!r}: {function} takes no text with a NUL in it.", fix="leave it out.")
