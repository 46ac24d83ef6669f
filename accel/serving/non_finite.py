"""Find NaN and infinity in outputs and results. JSON cannot contain such numbers, so they are reported as errors of the model."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch

from ..errors import NotFiniteError

_FIX = (
    "run the model in float32, and check its weights for NaN. In float16, numbers above 65504 become infinite, and the activations of "
    "some models are larger."
)


def not_finite_error(subject: str, place: str) -> NotFiniteError:
    """Return an error with the operation and the location of the NaN or infinity, such as `[0].score is nan`."""
    return NotFiniteError(f"The model computed NaN or infinity for {subject}: {place}.", fix=_FIX)


def find_non_finite(value: Any, path: str = "") -> str | None:
    """Return the location and value of the first NaN or infinity in nested lists, mappings, arrays and tensors, or `None`."""
    if isinstance(value, float | np.floating):
        return None if math.isfinite(value) else f"{path or 'the value'} is {float(value)}"
    if isinstance(value, torch.Tensor):
        if not value.is_floating_point() or bool(value.isfinite().all()):
            return None
        value = value.detach().float().cpu().numpy()
    if isinstance(value, np.ndarray):
        if value.dtype.kind != "f" or bool(np.isfinite(value).all()):
            return None
        place = tuple(int(i) for i in np.argwhere(~np.isfinite(value))[0])
        return f"{path}{list(place) if place else ''} is {float(value[place])}"
    if isinstance(value, Mapping):
        items = ((f"{path}.{name}" if path else str(name), item) for name, item in value.items())
    elif isinstance(value, Sequence) and not isinstance(value, str | bytes):
        # Computing a sum is many times faster than checking each number. If the sum overflows, each number is checked.
        if value and isinstance(value[0], float) and _adds_up(value):
            return None
        items = ((f"{path}[{i}]", item) for i, item in enumerate(value))
    else:
        return None
    return next((text for name, item in items if (text := find_non_finite(item, name)) is not None), None)


def _adds_up(values: Sequence[Any]) -> bool:
    try:
        return math.isfinite(sum(values))
    except TypeError:
        return False


def find_nan(output: Any) -> str | None:
    """Return the name of the first output that contains NaN, or `None`.

    Infinity is allowed, because some heads use it to mask impossible choices.
    """
    named = output.items() if isinstance(output, Mapping) else [("the output", output)]
    for name, value in named:
        if isinstance(value, np.ndarray):
            value = torch.from_numpy(value)
        if isinstance(value, torch.Tensor) and value.is_floating_point() and bool(value.isnan().any()):
            return str(name)
    return None


def check_outputs(operation: str, outputs: Sequence[Sequence[Any]]) -> None:
    """Raise if a model output contains NaN, because a result computed from it can look valid.

    Args:
        operation: Name of the engine's operation.
        outputs: The model's outputs, one list for each input.

    Raises:
        NotFiniteError: An output contains NaN; the error names the input and the output.
    """
    for number, rows in enumerate(outputs):
        for row in rows:
            name = find_nan(row)
            if name is not None:
                raise not_finite_error(f"{operation} of input {number}", f"{name} contains NaN")


def check_answer(operation: str, answer: Any) -> None:
    """Raise if a result contains NaN or infinity.

    Raises:
        NotFiniteError: The result contains NaN or infinity; the error gives the location.
    """
    place = find_non_finite(answer)
    if place is not None:
        raise not_finite_error(operation, f"{place} in the result")
