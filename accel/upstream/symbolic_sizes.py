"""Symbolic sizes and fake tensors while PyTorch traces a model.

| name | seen in | public alternative |
|---|---|---|
| `torch._subclasses.fake_tensor.is_fake` and `DataDependentOutputException` | torch 2.11 to 2.13 | none |
| `torch.fx.experimental.symbolic_shapes`: `statically_known_true`, `GuardOnDataDependentSymNode` | torch 2.11 to 2.13 | none |
| `torch.SymInt.node`: `expr`, `hint`, `has_hint` | torch 2.11 to 2.13 | none: `torch.SymInt` hides its formula |
"""

from __future__ import annotations

from typing import Any

import torch
from torch._subclasses.fake_tensor import DataDependentOutputException
from torch._subclasses.fake_tensor import is_fake as is_fake
from torch.fx.experimental.symbolic_shapes import GuardOnDataDependentSymNode
from torch.fx.experimental.symbolic_shapes import statically_known_true as statically_known_true

DATA_DEPENDENT = (DataDependentOutputException, GuardOnDataDependentSymNode)
"""Errors that the tracer raises if the model's code branches on the values of a tensor."""


def formula(size: torch.SymInt) -> Any:
    """Return the sympy expression of a symbolic size."""
    return size.node.expr


def hint(size: Any) -> int | None:
    """Return the value that a symbolic size has for the example inputs. `None` if the size depends on the values of a tensor."""
    return int(size.node.hint) if isinstance(size, torch.SymInt) and size.node.has_hint() else None
