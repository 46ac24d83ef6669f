"""Choice between two forms of accel's custom operators: ONNX nodes in a trace for ONNX, and PyTorch custom operators otherwise."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

import torch

_symbolic: ContextVar[bool] = ContextVar("accel_symbolic_operators", default=False)


@contextmanager
def symbolic_operators() -> Iterator[None]:
    """Let accel's custom operators become ONNX nodes in traces while the context is open."""
    token = _symbolic.set(True)
    try:
        yield
    finally:
        _symbolic.reset(token)


def leaves_nodes() -> bool:
    """Return whether custom operators become ONNX nodes in the current trace."""
    # torch.compile needs PyTorch operators, and in PyTorch before 2.13 it cannot read a context variable.
    return not torch.compiler.is_dynamo_compiling() and _symbolic.get()
