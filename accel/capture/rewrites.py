"""What the libraries under the trace rewrite, held to what is exact."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch._subclasses.fake_tensor import is_fake
from torch.fx.experimental.symbolic_shapes import statically_known_true

if TYPE_CHECKING:
    import onnx_ir

# Models that in float16 ask at each layer whether a number overflowed, and then cut all of them off a little below the largest.
_CUT_OFF = (
    "autoformer", "bart", "bigbird_pegasus", "blenderbot-small", "informer", "led", "longt5", "marian", "mvp", "nllb-moe",
    "pix2struct", "plbart", "time_series_transformer",
)  # fmt: skip
# What ONNX Runtime's CPU provider (1.31) has no bfloat16 kernels for.
_ARITHMETIC = ("Add", "Sub", "Mul", "Div")
# So many places along a side has no map of an image that is pooled.
_WIDEST = 512
# A size that may be further below 0 is not moved above it: OpenVINO's integers are exact up to 2**24 where they are divided.
_FARTHEST = 2**20


@functools.cache
def make_rewrites_exact() -> None:
    """Let onnxscript drop `x + 0` and `x * 1` for 0 and 1 alone.

    Its rules take any number up to 1e-8 for 0 and up to 1.00001 for 1 (onnxscript 0.7). That removes the epsilon of an
    RMSNorm (Helium's is 1e-8), which makes NaN of padding, whose embeddings are zeros. Call it before its optimizer runs.
    """
    from onnxscript.rewriter.rules.common import _no_op

    for rule in _no_op.rules:
        for node in rule._target_pattern:
            for value in node.inputs:
                if hasattr(value, "_abs_tol"):
                    value._abs_tol = value._rel_tol = 0.0


@functools.cache
def parse_operators_once() -> None:
    """Let onnxscript keep the signatures of its five hundred functions for PyTorch's operators.

    `torch.onnx` (2.12) asks for all of them with each graph, and onnxscript 0.7 parses their source each time: a tenth of the
    time of a small export.
    """
    from onnxscript import TracedOnnxFunction

    parse = TracedOnnxFunction.function_ir.fget
    assert parse is not None
    TracedOnnxFunction.function_ir = property(functools.cache(parse))


@contextmanager
def traceable(config: Any = None, answers: Sequence[bool] = ()) -> Iterator[None]:
    """PyTorch's functions as a trace needs them, with the same results as in every other call.

    They stand in for the originals in the whole process until the trace ends; tensors that are not being traced get the
    originals' results.

    A squeeze that names no axes drops those that are 1 in every call: a graph would drop the rows of a batch of one, too
    (mBART's shift of its tokens); the model broadcasts them again, but graphs compute with the ranks of the trace. A division
    of two sizes with `torch.div` stays a size: a tensor of one could be anything (Longformer's chunks). A one-hot code of as
    many classes as something is long has that length, not the sample's (LongT5's global tokens). What is cut off the
    end may be nothing, which `[:, :-n]` does not say (LED's padding to whole windows). `len` of a tensor is the sample's, which
    Python wants as a number, without holding the axis to it (RT-DETR asks, and never reads the answer; a graph that did would
    differ from the reference cases, whose sizes are others). What is gathered from has no more rows beside the axis than the
    indices, which OpenVINO (2026.4) holds graphs to (EfficientLoFTR's windows); they are chosen by number, as it drops slices before
    GatherElements. What a layer in float16 cuts off where a number overflowed is cut off in every call, which changes
    numbers between 64,504 and 65,504 where none did (BART's). A window larger than any image pools all of it (EfficientNet's has as many
    places along a side as there are channels), which OpenVINO refuses where sizes vary, or reads beyond the image.

    Args:
        config: Of the transformers model.
        answers: What the model's questions about its data are answered with, in order; see `steady_answers`.
    """
    original_squeeze, original_div, original_item = torch.Tensor.squeeze, torch.div, torch.Tensor.item
    original_getitem, original_len = torch.Tensor.__getitem__, torch.Tensor.__len__
    original_gather = torch.gather
    functional: Any = torch.nn.functional
    original_one_hot, original_isfinite, original_isinf = functional.one_hot, torch.isfinite, torch.isinf
    original_mean_pool, original_max_pool = functional.avg_pool2d, functional.max_pool2d
    left = list(answers)

    def squeeze(self: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        if args or kwargs:
            return original_squeeze(self, *args, **kwargs)
        # Axes that vary are symbols here, also where the sample's size is 1.
        known = tuple(i for i, n in enumerate(self.shape) if isinstance(n, int) and n == 1)
        found: torch.Tensor = original_squeeze(self, known)
        return found

    def getitem(self: torch.Tensor, index: Any) -> torch.Tensor:
        if isinstance(index, tuple) and all(isinstance(one, slice) for one in index):
            index = tuple(
                slice(one.start, self.shape[i] + one.stop, one.step) if _counts_from_the_end(one.stop) else one
                for i, one in enumerate(index)
            )
        return original_getitem(self, index)

    def length(self: torch.Tensor) -> int:
        size: Any = self.shape[0] if self.ndim else 0
        # A size that depends on data has no hint, and then the original says what is wrong.
        hint = size.node.hint if isinstance(size, torch.SymInt) and size.node.has_hint() else None
        return original_len(self) if hint is None else int(hint)  # type: ignore[no-untyped-call]

    def div(input: Any, other: Any, *args: Any, **kwargs: Any) -> Any:
        sizes = isinstance(input, int | torch.SymInt) and isinstance(other, int | torch.SymInt)
        if sizes and kwargs.get("rounding_mode") in ("trunc", "floor"):
            return input // other
        return original_div(input, other, *args, **kwargs)

    def gather(input: torch.Tensor, dim: int, index: torch.Tensor, **kwargs: Any) -> torch.Tensor:
        for i, (size, count) in enumerate(zip(input.shape, index.shape, strict=True)):
            if i != dim % input.ndim and statically_known_true(count < size):
                input = input.index_select(i, torch.arange(count, device=input.device))
        return original_gather(input, dim, index, **kwargs)

    def one_hot(tensor: torch.Tensor, num_classes: Any = -1) -> Any:
        if not isinstance(num_classes, torch.SymInt):
            return original_one_hot(tensor, num_classes)
        classes: Any = num_classes
        return (tensor.unsqueeze(-1) == torch.arange(classes, device=tensor.device)).to(torch.int64)

    def item(self: torch.Tensor) -> Any:
        return left.pop(0) if left and self.dtype == torch.bool else original_item(self)

    def isfinite(tensor: torch.Tensor) -> Any:
        return _Overflowing() if is_fake(tensor) and tensor.dtype == torch.float16 else original_isfinite(tensor)

    def isinf(tensor: torch.Tensor) -> Any:
        return _Overflowing() if is_fake(tensor) and tensor.dtype == torch.float16 else original_isinf(tensor)

    def avg_pool2d(
        input: torch.Tensor, kernel_size: Any, stride: Any = None, padding: Any = 0, *args: Any, **kwargs: Any
    ) -> torch.Tensor:
        if is_fake(input) and _pools_all(input, kernel_size, padding):
            return input.mean((-2, -1), keepdim=True)
        found: torch.Tensor = original_mean_pool(input, kernel_size, stride, padding, *args, **kwargs)
        return found

    def max_pool2d(
        input: torch.Tensor, kernel_size: Any, stride: Any = None, padding: Any = 0, *args: Any, **kwargs: Any
    ) -> Any:
        if is_fake(input) and _pools_all(input, kernel_size, padding):
            return input.amax((-2, -1), keepdim=True)
        return original_max_pool(input, kernel_size, stride, padding, *args, **kwargs)

    model_type = getattr(config, "model_type", None)
    if model_type in _CUT_OFF:
        torch.isfinite, torch.isinf = isfinite, isinf  # type: ignore[assignment]
    torch.Tensor.squeeze = squeeze  # type: ignore[method-assign, assignment]
    torch.div, torch.gather, functional.one_hot = div, gather, one_hot
    functional.avg_pool2d, functional.max_pool2d = avg_pool2d, max_pool2d
    torch.Tensor.__getitem__ = getitem  # type: ignore[method-assign, assignment]
    torch.Tensor.item = item  # type: ignore[method-assign, assignment]
    torch.Tensor.__len__ = length  # type: ignore[method-assign]
    try:
        yield
    finally:
        torch.Tensor.squeeze = original_squeeze  # type: ignore[method-assign]
        torch.div, torch.gather, functional.one_hot = original_div, original_gather, original_one_hot
        functional.avg_pool2d, functional.max_pool2d = original_mean_pool, original_max_pool
        torch.isfinite, torch.isinf = original_isfinite, original_isinf
        torch.Tensor.__getitem__ = original_getitem  # type: ignore[method-assign]
        torch.Tensor.item = original_item  # type: ignore[method-assign]
        torch.Tensor.__len__ = original_len  # type: ignore[method-assign]


@contextmanager
def whole_patches(model: torch.nn.Module) -> Iterator[None]:
    """FocalNet with images that are padded to whole patches in every call, where a trace would keep what its sample needed."""
    layers: list[Any] = [layer for layer in model.modules() if type(layer).__name__ == "FocalNetPatchEmbeddings"]
    for layer in layers:
        layer.maybe_pad = functools.partial(_pad_to_patches, layer.patch_size)
    try:
        yield
    finally:
        for layer in layers:
            del layer.maybe_pad


def _pad_to_patches(patch_size: Sequence[int], pixel_values: torch.Tensor, height: Any, width: Any) -> torch.Tensor:
    """An image `(batch, channels, height, width)` with zeros on the right and below, up to whole patches."""
    tall, wide = (size * ((n + size - 1) // size) - n for n, size in zip((height, width), patch_size, strict=True))
    return torch.nn.functional.pad(pixel_values, (0, wide, 0, tall))


def _pools_all(image: torch.Tensor, kernel_size: Any, padding: Any) -> bool:
    """Whether a window of 2-D pooling holds all of any image `(..., height, width)`."""
    sides = kernel_size if isinstance(kernel_size, tuple) else (kernel_size, kernel_size)
    return padding in (0, (0, 0)) and all(map(_covers, sides, image.shape[-2:]))


def _covers(side: Any, size: Any) -> bool:
    if isinstance(side, torch.SymInt):
        # transformers' exporter for OpenVINO has cut the window: to the smaller of its side and the image's.
        limits = [int(one) for one in side.node.expr.args if one.is_Integer]
        return side.node.expr.func.__name__ == "Min" and min(limits, default=0) >= _WIDEST
    return bool(side >= _WIDEST or (isinstance(size, int) and side >= size))


class _Overflowing:
    """Whether numbers are finite, for code that asks for all of them alone, and whether they are infinite, for code that asks for any: not
    all are finite.
    """

    def all(self) -> bool:
        """What a branch is decided by that asks for finite numbers."""
        return False

    def any(self) -> bool:
        """What a branch is decided by that asks for infinite ones."""
        return True


def _counts_from_the_end(stop: Any) -> bool:
    """Whether the end of a slice is minus something that varies."""
    return isinstance(stop, torch.SymInt) and bool(stop.node.expr.as_coeff_Mul()[0] < 0)


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


def round_to_bfloat16(model: onnx_ir.Model) -> None:
    """Compute sums and products of bfloat16 in float32 and round them, which is what PyTorch does: the same numbers.

    Falcon's and BLOOM's positions are bfloat16 in models of any type.
    """
    import onnx_ir

    for graph in model.graphs():
        for node in [node for node in graph if node.op_type in _ARITHMETIC and node.domain == ""]:
            result = node.outputs[0]
            if result.dtype != onnx_ir.DataType.BFLOAT16:
                continue
            wide = [
                onnx_ir.node("Cast", [value], {"to": onnx_ir.DataType.FLOAT}, name=f"{result.name}_wide_{i}")
                for i, value in enumerate(node.inputs)
            ]
            for cast, value in zip(wide, node.inputs, strict=True):
                cast.outputs[0].dtype = onnx_ir.DataType.FLOAT
                cast.outputs[0].shape = value.shape if value is not None else None
                cast.outputs[0].name = cast.name
            graph.insert_before(node, wide)
            for i, cast in enumerate(wide):
                node.replace_input_with(i, cast.outputs[0])
            back = onnx_ir.node("Cast", [result], {"to": onnx_ir.DataType.BFLOAT16}, name=f"{result.name}_rounded")
            rounded = back.outputs[0]
            rounded.name, rounded.dtype, rounded.shape = back.name, onnx_ir.DataType.BFLOAT16, result.shape
            result.replace_all_uses_with(rounded)
            back.replace_input_with(0, result)
            graph.insert_after(node, back)
            result.dtype = onnx_ir.DataType.FLOAT


def divide_sizes(model: onnx_ir.Model) -> None:
    """Divide sizes of axes by integer division alone, rounded down as in Python.

    The exporter writes `size // n` as a quotient that is corrected where a negative number has a remainder. ONNX Runtime's CUDA provider
    (1.31) reads 0 there, now and then. What a number is computed from says how small and how large it may be: one that is never
    negative is divided, one that never is above 0 is divided as its opposite, and one that may be a little below 0 is moved above
    it and its quotient back. Others stay as they are.
    """
    import onnx_ir
    from onnx_ir.passes.common import RemoveUnusedNodesPass

    replaced = False
    for node in [node for node in model.graph if node.op_type == "Sub" and node.domain == ""]:
        quotient, correction = _made_by(node.inputs[0], "Div"), _made_by(node.inputs[1], "Cast")
        if quotient is None or correction is None or _made_by(correction.inputs[0], "And") is None:
            continue
        (size, divisor), result = quotient.inputs, node.outputs[0]
        number, bounds = _number(divisor), _bounds(size)
        if number is None or number <= 0 or bounds is None or result.is_graph_output():
            continue
        least, most = bounds
        steps: list[tuple[str, int]]
        if least >= 0:
            steps = [("Div", number)]
        elif most <= 0:
            steps = [("Mul", -1), ("Add", number - 1), ("Div", number), ("Mul", -1)]
        elif least >= -_FARTHEST:
            moved = math.ceil(-least / number)
            steps = [("Add", moved * number), ("Div", number), ("Sub", moved)]
        else:
            continue
        found = size
        for operator, operand in steps:
            constant = onnx_ir.node("Constant", [], {"value": onnx_ir.tensor(operand, dtype=onnx_ir.DataType.INT64)})
            # The next division, of what comes of this one, asks for it.
            constant.outputs[0].const_value = constant.attributes["value"].as_tensor()
            step = onnx_ir.node(operator, [found, constant.outputs[0]])
            found = step.outputs[0]
            found.dtype, found.shape = onnx_ir.DataType.INT64, result.shape
            model.graph.insert_before(node, [constant, step])
        result.replace_all_uses_with(found)
        replaced = True
    if replaced:
        RemoveUnusedNodesPass()(model)


def _made_by(value: onnx_ir.Value | None, operator: str) -> onnx_ir.Node | None:
    """The node that makes a value, if it is such an operator."""
    node = None if value is None else value.producer()
    return node if node is not None and node.op_type == operator else None


def _number(value: onnx_ir.Value | None) -> int | None:
    """The whole number that a value always is."""
    known = None if value is None else value.const_value
    if known is None or known.size != 1 or not known.dtype.is_integer():
        return None
    return int(known.numpy().item())


def _bounds(value: onnx_ir.Value | None) -> tuple[float, float] | None:
    """The least and the largest that a value computed from sizes of axes and whole numbers alone may be, else `None`."""
    number = _number(value)
    if number is not None:
        return number, number
    node = None if value is None else value.producer()
    if node is None or node.domain != "":
        return None
    if node.op_type == "Shape":
        return 0, math.inf
    if node.op_type in ("Cast", "Gather", "Squeeze"):
        return _bounds(node.inputs[0])
    if node.op_type not in _ARITHMETIC:
        return None
    one, other = _bounds(node.inputs[0]), _bounds(node.inputs[1])
    if one is None or other is None:
        return None
    if node.op_type == "Add":
        return one[0] + other[0], one[1] + other[1]
    if node.op_type == "Sub":
        return one[0] - other[1], one[1] - other[0]
    if node.op_type == "Mul":
        # A size of 0 times any number is 0.
        every = [a * b if a and b else 0 for a in one for b in other]
        return min(every), max(every)
    if other[0] != other[1] or other[0] <= 0:
        return None
    # Integers are rounded towards 0.
    least, most = (bound if math.isinf(bound) else math.trunc(bound / other[0]) for bound in one)
    return least, most
