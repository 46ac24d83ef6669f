"""Replacements of PyTorch functions that a trace cannot follow correctly.

During a trace, they replace the originals in the whole process. For tensors that are not traced, results do not change.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import torch

from ..upstream.replaced_attributes import replaced_attributes
from ..upstream.symbolic_sizes import formula, hint, is_fake, statically_known_true

# Feature maps that are pooled have fewer positions along a side than this.
_WIDEST = 512

Function = Callable[..., Any]


def _squeeze(original: Function) -> Function:
    """Drop only axes that are always 1 when `squeeze` has no arguments.

    A graph would also drop the batch axis of a batch of one (mBART's shift of its tokens). The model broadcasts it again, but
    graphs compute with the ranks of the trace.
    """

    def squeeze(self: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        if args or kwargs:
            return original(self, *args, **kwargs)
        # Variable axes are symbols here, even if the sample's size is 1.
        return original(self, tuple(i for i, n in enumerate(self.shape) if isinstance(n, int) and n == 1))

    return squeeze


def _getitem(original: Function) -> Function:
    """Make `[:, :-n]` correct for a variable `n` of 0, which would remove all columns (LED pads to whole windows)."""

    def getitem(self: torch.Tensor, index: Any) -> Any:
        if isinstance(index, tuple) and all(isinstance(one, slice) for one in index):
            index = tuple(
                slice(one.start, self.shape[i] + one.stop, one.step) if _counts_from_the_end(one.stop) else one
                for i, one in enumerate(index)
            )
        return original(self, index)

    return getitem


def _counts_from_the_end(stop: Any) -> bool:
    """Return whether the end of a slice is a negative variable size."""
    return isinstance(stop, torch.SymInt) and bool(formula(stop).as_coeff_Mul()[0] < 0)


def _length(original: Function) -> Function:
    """Return the sample's length from `len(tensor)`, because Python needs an int, without fixing the axis.

    RT-DETR calls `len` but ignores the result. If a graph used the result, the reference cases, which have other sizes, would
    detect it.
    """

    def length(self: torch.Tensor) -> Any:
        size: Any = self.shape[0] if self.ndim else 0
        # For a data-dependent size, the original raises the appropriate error.
        known = hint(size)
        return original(self) if known is None else known

    return length


def _div(original: Function) -> Function:
    """Return a size from the division of two sizes, not a tensor, whose value a trace does not know (Longformer's chunks)."""

    def div(input: Any, other: Any, *args: Any, **kwargs: Any) -> Any:
        sizes = isinstance(input, int | torch.SymInt) and isinstance(other, int | torch.SymInt)
        if sizes and kwargs.get("rounding_mode") in ("trunc", "floor"):
            return input // other
        return original(input, other, *args, **kwargs)

    return div


def _gather(original: Function) -> Function:
    """Cut the input to the size of the indices on all other axes, as OpenVINO (2026.4) requires (EfficientLoFTR's windows).

    Rows are selected by `index_select`, because OpenVINO drops slices before GatherElements.
    """

    def gather(input: torch.Tensor, dim: int, index: torch.Tensor, **kwargs: Any) -> Any:
        for i, (size, count) in enumerate(zip(input.shape, index.shape, strict=True)):
            if i != dim % input.ndim and statically_known_true(count < size):
                input = input.index_select(i, torch.arange(count, device=input.device))
        return original(input, dim, index, **kwargs)

    return gather


def _one_hot(original: Function) -> Function:
    """Use a variable number of classes, not the number in the sample (LongT5's global tokens)."""

    def one_hot(tensor: torch.Tensor, num_classes: Any = -1) -> Any:
        if not isinstance(num_classes, torch.SymInt):
            return original(tensor, num_classes)
        classes: Any = num_classes
        return (tensor.unsqueeze(-1) == torch.arange(classes, device=tensor.device)).to(torch.int64)

    return one_hot


def _pool2d(original: Function, whole: Function) -> Function:
    """Pool the whole image by `whole` if the pooling window is larger than any image.

    EfficientNet's window has as many positions along a side as there are channels. OpenVINO rejects such a window for variable
    sizes, or reads outside the image.
    """

    def pool2d(
        input: torch.Tensor, kernel_size: Any, stride: Any = None, padding: Any = 0, *args: Any, **kwargs: Any
    ) -> Any:
        if is_fake(input) and _pools_all(input, kernel_size, padding):
            return whole(input, (-2, -1), keepdim=True)
        return original(input, kernel_size, stride, padding, *args, **kwargs)

    return pool2d


def _pools_all(image: torch.Tensor, kernel_size: Any, padding: Any) -> bool:
    """Return whether a 2-D pooling window covers any image `(..., height, width)`."""
    sides = kernel_size if isinstance(kernel_size, tuple) else (kernel_size, kernel_size)
    return padding in (0, (0, 0)) and all(map(_covers, sides, image.shape[-2:]))


def _covers(side: Any, size: Any) -> bool:
    if isinstance(side, torch.SymInt):
        # transformers' exporter for OpenVINO replaced the window's side by min(window side, image side).
        limits = [int(one) for one in formula(side).args if one.is_Integer]
        return formula(side).func.__name__ == "Min" and min(limits, default=0) >= _WIDEST
    return bool(side >= _WIDEST or (isinstance(size, int) and side >= size))


def _overflows(original: Function) -> Function:
    """Replace `isfinite().all()` and `isinf().any()` in a float16 trace: assume that some values overflowed.

    Layers then clamp in every call, which changes values between 64,504 and 65,504 (BART). Layers that use the result as a tensor
    (T5) get the correct result.
    """

    def overflows(tensor: torch.Tensor) -> Any:
        found = original(tensor)
        if is_fake(tensor) and tensor.dtype == torch.float16:
            found.all = functools.partial(_decided, torch.Tensor.all, found, False)
            found.any = functools.partial(_decided, torch.Tensor.any, found, True)
        return found

    return overflows


def _decided(reduce: Function, found: torch.Tensor, answer: bool) -> Any:
    """Reduce a tensor, and fix the branch that `bool()` of the result takes."""
    decided: Any = reduce(found)
    decided.branch = answer
    return decided


def _bool(original: Function) -> Function:
    """Return the value that `_decided` attached to a tensor from `bool(tensor)`."""

    def truth(self: torch.Tensor) -> bool:
        branch: bool | None = vars(self).get("branch")
        return original(self) if branch is None else branch

    return truth


StandIn = tuple[Any, str, Callable[[Function], Function]]
"""Owner of a function, its name, and a function that makes the replacement from the original."""

_STAND_INS: tuple[StandIn, ...] = (
    (torch.Tensor, "squeeze", _squeeze),
    (torch.Tensor, "__getitem__", _getitem),
    (torch.Tensor, "__len__", _length),
    (torch, "div", _div),
    (torch, "gather", _gather),
    (torch, "isfinite", _overflows),
    (torch, "isinf", _overflows),
    (torch.Tensor, "__bool__", _bool),
    (torch.nn.functional, "one_hot", _one_hot),
    (torch.nn.functional, "avg_pool2d", functools.partial(_pool2d, whole=torch.mean)),
    (torch.nn.functional, "max_pool2d", functools.partial(_pool2d, whole=torch.amax)),
)


def traceable() -> AbstractContextManager[None]:
    """Install the replacements until the trace ends."""
    return replaced_attributes((owner, name, make(getattr(owner, name))) for owner, name, make in _STAND_INS)
