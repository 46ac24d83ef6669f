"""What every backend's `run` and states check, with the same errors everywhere: a session's contract.

A session calls them on the way of its slow path, and keeps a fast path for calls that are plainly right: declared names,
declared types, shapes that passed before (`ShapeCheck`).
"""

from .feeds import (
    ShapeCheck,
    check_buffer_shape,
    check_buffers,
    check_fits,
    check_readable,
    read_feeds,
    session_closed,
    tensor_dtypes,
    wanted_outputs,
    wrong_names,
)
from .step_check import StepCheck, check_state, no_state
from .values import FiniteCheck, MaskCheck, ValueCheck, check_filled

__all__ = [
    "FiniteCheck",
    "MaskCheck",
    "ShapeCheck",
    "StepCheck",
    "ValueCheck",
    "check_buffer_shape",
    "check_buffers",
    "check_filled",
    "check_fits",
    "check_readable",
    "check_state",
    "no_state",
    "read_feeds",
    "session_closed",
    "tensor_dtypes",
    "wanted_outputs",
    "wrong_names",
]
