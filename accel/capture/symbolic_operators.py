"""Custom operators in a trace: ONNX nodes while an ONNX graph is made, PyTorch custom operators in all other cases."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

import torch

_symbolic: ContextVar[bool] = ContextVar("accel_symbolic_operators", default=False)


@contextmanager
def symbolic_operators() -> Iterator[None]:
    """Trace accel's custom operators as ONNX nodes."""
    token = _symbolic.set(True)
    try:
        yield
    finally:
        _symbolic.reset(token)


def leaves_nodes() -> bool:
    """Return whether custom operators become ONNX nodes in the current trace."""
    # torch.compile needs PyTorch operators, and before PyTorch 2.13 it cannot trace a context variable.
    return not torch.compiler.is_dynamo_compiling() and _symbolic.get()
