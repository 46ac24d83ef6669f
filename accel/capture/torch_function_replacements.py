"""Replacements of PyTorch functions for which a trace would give a wrong graph or fail.

During a trace, the functions are replaced in the complete process. The results for tensors that are not traced do not change.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import torch

from ..upstream.replaced_attributes import replaced_attributes
from ..upstream.symbolic_sizes import formula, hint, is_fake, statically_known_true

# Feature maps have fewer positions along a side than this number when they are pooled. So a pooling window of this size covers them.
_WIDEST = 512

Function = Callable[..., Any]


def _squeeze(original: Function) -> Function:
    """Let `squeeze` without arguments remove only axes whose size is always 1.

    In a graph, `squeeze` would also remove the batch axis of a batch of one (in mBART's function that shifts tokens). PyTorch broadcasts
    the result to the right shape, but a graph needs the same number of axes as in the trace.
    """

    def squeeze(self: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        if args or kwargs:
            return original(self, *args, **kwargs)
        # In a trace, the size of a variable axis is a symbol and not an int, even if the size in the sample is 1.
        return original(self, tuple(i for i, n in enumerate(self.shape) if isinstance(n, int) and n == 1))

    return squeeze


def _getitem(original: Function) -> Function:
    """Let `[:, :-n]` keep all columns if the variable size `n` is 0. In a graph, `-0` would remove all columns (LED's padding)."""

    def getitem(self: torch.Tensor, index: Any) -> Any:
        if isinstance(index, tuple) and all(isinstance(part, slice) for part in index):
            index = tuple(
                slice(part.start, self.shape[i] + part.stop, part.step) if _counts_from_the_end(part.stop) else part
                for i, part in enumerate(index)
            )
        return original(self, index)

    return getitem


def _counts_from_the_end(stop: Any) -> bool:
    """Return whether the end of a slice is a negative variable size."""
    return isinstance(stop, torch.SymInt) and bool(formula(stop).as_coeff_Mul()[0] < 0)


def _length(original: Function) -> Function:
    """Let `len(tensor)` return the length in the sample, without making the axis a constant.

    Python requires an int as the result of `len`. RT-DETR calls `len` and ignores the result. If a model used the result, the graph would
    be wrong for other sizes, and the reference cases would detect the error.
    """

    def length(self: torch.Tensor) -> Any:
        size: Any = self.shape[0] if self.ndim else 0
        # For a size that depends on data, the original function raises the error of torch.export.
        length_in_sample = hint(size)
        return original(self) if length_in_sample is None else length_in_sample

    return length


def _div(original: Function) -> Function:
    """Let `torch.div` of two sizes return a size. The original returns a tensor, whose value a trace does not know (Longformer)."""

    def div(input: Any, other: Any, *args: Any, **kwargs: Any) -> Any:
        sizes = isinstance(input, int | torch.SymInt) and isinstance(other, int | torch.SymInt)
        if sizes and kwargs.get("rounding_mode") in ("trunc", "floor"):
            return input // other
        return original(input, other, *args, **kwargs)

    return div


def _gather(original: Function) -> Function:
    """Cut the input of `torch.gather` to the size of the indices on all axes except `dim`.

    OpenVINO (2026.4) requires equal sizes on these axes (in EfficientLoFTR). The function uses `index_select` and not a slice, because
    OpenVINO removes slices before the operator GatherElements.
    """

    def gather(input: torch.Tensor, dim: int, index: torch.Tensor, **kwargs: Any) -> Any:
        for i, (size, count) in enumerate(zip(input.shape, index.shape, strict=True)):
            if i != dim % input.ndim and statically_known_true(count < size):
                input = input.index_select(i, torch.arange(count, device=input.device))
        return original(input, dim, index, **kwargs)

    return gather


def _one_hot(original: Function) -> Function:
    """Let `one_hot` use a variable number of classes. The original would use the number in the sample (LongT5's global tokens)."""

    def one_hot(tensor: torch.Tensor, num_classes: Any = -1) -> Any:
        if not isinstance(num_classes, torch.SymInt):
            return original(tensor, num_classes)
        classes: Any = num_classes
        return (tensor.unsqueeze(-1) == torch.arange(classes, device=tensor.device)).to(torch.int64)

    return one_hot


def _pool2d(original: Function, reduction: Function) -> Function:
    """Replace a pooling whose window covers every image by a reduction of the complete image.

    In EfficientNet, the side of the pooling window is the number of channels. If the image size is variable, OpenVINO rejects such a
    window or reads outside of the image.
    """

    def pool2d(
        input: torch.Tensor, kernel_size: Any, stride: Any = None, padding: Any = 0, *args: Any, **kwargs: Any
    ) -> Any:
        if is_fake(input) and _pools_all(input, kernel_size, padding):
            return reduction(input, (-2, -1), keepdim=True)
        return original(input, kernel_size, stride, padding, *args, **kwargs)

    return pool2d


def _pools_all(image: torch.Tensor, kernel_size: Any, padding: Any) -> bool:
    """Return whether a 2-D pooling window is at least as large as the image `(..., height, width)`."""
    sides = kernel_size if isinstance(kernel_size, tuple) else (kernel_size, kernel_size)
    return padding in (0, (0, 0)) and all(map(_covers, sides, image.shape[-2:]))


def _covers(side: Any, size: Any) -> bool:
    if isinstance(side, torch.SymInt):
        # transformers' exporter for OpenVINO replaces the side of the window by the minimum of the window's and the image's side.
        limits = [int(argument) for argument in formula(side).args if argument.is_Integer]
        return formula(side).func.__name__ == "Min" and min(limits, default=0) >= _WIDEST
    return bool(side >= _WIDEST or (isinstance(size, int) and side >= size))


def _overflows(original: Function) -> Function:
    """Let a float16 trace follow the branch for overflowed values after `isfinite().all()` or `isinf().any()`.

    A graph has only one branch. With this branch, the layers of BART clamp their values in every call, which changes only values between
    64,504 and 65,504. Layers that use the result as a tensor (T5) get the correct result.
    """

    def overflows(tensor: torch.Tensor) -> Any:
        result = original(tensor)
        if is_fake(tensor) and tensor.dtype == torch.float16:
            result.all = functools.partial(_decided, torch.Tensor.all, result, False)
            result.any = functools.partial(_decided, torch.Tensor.any, result, True)
        return result

    return overflows


def _decided(reduce: Function, tensor: torch.Tensor, answer: bool) -> Any:
    """Reduce a tensor, and attach the value that `bool(result)` will return in the trace."""
    decided: Any = reduce(tensor)
    decided.branch = answer
    return decided


def _bool(original: Function) -> Function:
    """Let `bool(tensor)` return the value that `_decided` attached to the tensor."""

    def truth(self: torch.Tensor) -> bool:
        branch: bool | None = vars(self).get("branch")
        return original(self) if branch is None else branch

    return truth


StandIn = tuple[Any, str, Callable[[Function], Function]]
"""Object that contains a function, name of the function, and a function that creates the replacement from the original."""

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
    (torch.nn.functional, "avg_pool2d", functools.partial(_pool2d, reduction=torch.mean)),
    (torch.nn.functional, "max_pool2d", functools.partial(_pool2d, reduction=torch.amax)),
)


def traceable() -> AbstractContextManager[None]:
    """Replace the functions in `_STAND_INS` while the context is open."""
    return replaced_attributes((owner, name, make(getattr(owner, name))) for owner, name, make in _STAND_INS)
