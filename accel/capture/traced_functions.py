"""PyTorch's functions as a trace needs them, with the same results as in every other call.

While a model is traced they stand in for the originals, in the whole process; tensors that are not being traced get the originals'
results.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch

from ..upstream.symbolic_sizes import formula, hint, is_fake, statically_known_true

# So many places along a side has no map of an image that is pooled.
_WIDEST = 512

Function = Callable[..., Any]


def _squeeze(original: Function) -> Function:
    """Without axes it drops those that are 1 in every call: a graph would drop the rows of a batch of one, too (mBART's shift of its
    tokens); the model broadcasts them again, but graphs compute with the ranks of the trace.
    """

    def squeeze(self: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        if args or kwargs:
            return original(self, *args, **kwargs)
        # Axes that vary are symbols here, also where the sample's size is 1.
        return original(self, tuple(i for i, n in enumerate(self.shape) if isinstance(n, int) and n == 1))

    return squeeze


def _getitem(original: Function) -> Function:
    """What is cut off the end may be nothing, which `[:, :-n]` does not say (LED's padding to whole windows)."""

    def getitem(self: torch.Tensor, index: Any) -> Any:
        if isinstance(index, tuple) and all(isinstance(one, slice) for one in index):
            index = tuple(
                slice(one.start, self.shape[i] + one.stop, one.step) if _counts_from_the_end(one.stop) else one
                for i, one in enumerate(index)
            )
        return original(self, index)

    return getitem


def _counts_from_the_end(stop: Any) -> bool:
    """Whether the end of a slice is minus something that varies."""
    return isinstance(stop, torch.SymInt) and bool(formula(stop).as_coeff_Mul()[0] < 0)


def _length(original: Function) -> Function:
    """The sample's, which Python wants as a number, without holding the axis to it: RT-DETR asks, and never reads the answer; a graph
    that did would differ from the reference cases, whose sizes are others.
    """

    def length(self: torch.Tensor) -> Any:
        size: Any = self.shape[0] if self.ndim else 0
        # Of a size that depends on data, the original says what is wrong.
        known = hint(size)
        return original(self) if known is None else known

    return length


def _item(original: Function, answers: list[bool]) -> Function:
    """Booleans that a model reads from its data are what they were in other calls; see `steady_answers`."""

    def item(self: torch.Tensor) -> Any:
        branch = vars(self).get("branch")
        if branch is not None:
            return branch
        return answers.pop(0) if answers and self.dtype == torch.bool else original(self)

    return item


def _div(original: Function) -> Function:
    """Two sizes divided stay a size: a tensor of one could be anything (Longformer's chunks)."""

    def div(input: Any, other: Any, *args: Any, **kwargs: Any) -> Any:
        sizes = isinstance(input, int | torch.SymInt) and isinstance(other, int | torch.SymInt)
        if sizes and kwargs.get("rounding_mode") in ("trunc", "floor"):
            return input // other
        return original(input, other, *args, **kwargs)

    return div


def _gather(original: Function) -> Function:
    """What is gathered from has no more rows beside the axis than the indices, which OpenVINO (2026.4) holds graphs to
    (EfficientLoFTR's windows); they are chosen by number, as it drops slices before GatherElements.
    """

    def gather(input: torch.Tensor, dim: int, index: torch.Tensor, **kwargs: Any) -> Any:
        for i, (size, count) in enumerate(zip(input.shape, index.shape, strict=True)):
            if i != dim % input.ndim and statically_known_true(count < size):
                input = input.index_select(i, torch.arange(count, device=input.device))
        return original(input, dim, index, **kwargs)

    return gather


def _one_hot(original: Function) -> Function:
    """A code of as many classes as something is long has that length, not the sample's (LongT5's global tokens)."""

    def one_hot(tensor: torch.Tensor, num_classes: Any = -1) -> Any:
        if not isinstance(num_classes, torch.SymInt):
            return original(tensor, num_classes)
        classes: Any = num_classes
        return (tensor.unsqueeze(-1) == torch.arange(classes, device=tensor.device)).to(torch.int64)

    return one_hot


def _pool2d(original: Function, whole: Function) -> Function:
    """A window larger than any image pools all of it (EfficientNet's has as many places along a side as there are channels), which
    OpenVINO refuses where sizes vary, or reads beyond the image. `whole` pools an image.
    """

    def pool2d(
        input: torch.Tensor, kernel_size: Any, stride: Any = None, padding: Any = 0, *args: Any, **kwargs: Any
    ) -> Any:
        if is_fake(input) and _pools_all(input, kernel_size, padding):
            return whole(input, (-2, -1), keepdim=True)
        return original(input, kernel_size, stride, padding, *args, **kwargs)

    return pool2d


def _pools_all(image: torch.Tensor, kernel_size: Any, padding: Any) -> bool:
    """Whether a window of 2-D pooling holds all of any image `(..., height, width)`."""
    sides = kernel_size if isinstance(kernel_size, tuple) else (kernel_size, kernel_size)
    return padding in (0, (0, 0)) and all(map(_covers, sides, image.shape[-2:]))


def _covers(side: Any, size: Any) -> bool:
    if isinstance(side, torch.SymInt):
        # transformers' exporter for OpenVINO has cut the window: to the smaller of its side and the image's.
        limits = [int(one) for one in formula(side).args if one.is_Integer]
        return formula(side).func.__name__ == "Min" and min(limits, default=0) >= _WIDEST
    return bool(side >= _WIDEST or (isinstance(size, int) and side >= size))


def _overflows(original: Function) -> Function:
    """`isfinite` and `isinf`: what a layer in float16 cuts off where a number overflowed is cut off in every call, which changes numbers
    between 64,504 and 65,504 where none did (BART's). Layers that select by the answer as a tensor (T5's) read the right one.
    """

    def overflows(tensor: torch.Tensor) -> Any:
        found = original(tensor)
        if is_fake(tensor) and tensor.dtype == torch.float16:
            found.all = functools.partial(_decided, torch.Tensor.all, found, False)
            found.any = functools.partial(_decided, torch.Tensor.any, found, True)
        return found

    return overflows


def _decided(reduce: Function, found: torch.Tensor, answer: bool) -> Any:
    """A reduced tensor that decides a branch in one way, whatever it holds."""
    decided: Any = reduce(found)
    decided.branch = answer
    return decided


def _bool(original: Function) -> Function:
    """A replacement of `bool(tensor)` that returns the answer which `_decided` attached to the tensor."""

    def truth(self: torch.Tensor) -> bool:
        branch: bool | None = vars(self).get("branch")
        return original(self) if branch is None else branch

    return truth


StandIn = tuple[Any, str, Callable[[Function], Function]]
"""Whose function it is, its name, and what makes the stand-in of the original."""

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


@contextmanager
def traceable(answers: Sequence[bool] = ()) -> Iterator[None]:
    """Put the stand-ins in their places until the trace ends.

    Args:
        answers: What the model's questions about its data are answered with, in order; see `steady_answers`.
    """
    chosen: list[StandIn] = [*_STAND_INS]
    chosen.append((torch.Tensor, "item", functools.partial(_item, answers=list(answers))))
    with ExitStack() as stack:
        for owner, name, make in chosen:
            original = getattr(owner, name)
            stack.callback(setattr, owner, name, original)
            setattr(owner, name, make(original))
        yield


def steady_answers(calls: Sequence[Callable[[], object]]) -> tuple[bool, ...]:
    """The booleans that a model reads from its tensors, where they are the same in all calls; else none.

    A trace cannot branch on data. What Longformer asks, whether any token attends to all, its head has settled: the first
    one does. An answer that differs on other inputs would show in the comparison with the reference cases.
    """
    original = torch.Tensor.item
    heard: list[list[bool]] = []

    def item(self: torch.Tensor) -> Any:
        value = original(self)
        if self.dtype == torch.bool:
            heard[-1].append(bool(value))
        return value

    torch.Tensor.item = item  # type: ignore[method-assign, assignment]
    try:
        for call in calls:
            heard.append([])
            call()
    finally:
        torch.Tensor.item = original  # type: ignore[method-assign]
    return tuple(heard[0]) if all(one == heard[0] for one in heard) else ()
