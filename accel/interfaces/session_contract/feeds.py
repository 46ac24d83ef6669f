"""Checks of the names, dtypes and shapes of inputs, and of the buffers for outputs."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from ...errors import InputError, SessionClosedError, did_you_mean

if TYPE_CHECKING:
    import torch

    from ...artifact.tensor_specs import TensorSpec
    from ..protocols import Feeds

_REMEMBERED = 4096  # Largest number of remembered shapes, so that calls with always new lengths do not fill the memory.
Sizes = tuple[int, ...]


def tensor_dtypes(specs: Iterable[TensorSpec]) -> dict[str, torch.dtype]:
    """Return the declared dtypes by name, in the graph's order."""
    import torch

    return {spec.name: getattr(torch, spec.dtype) for spec in specs}


def read_feeds(feeds: Feeds, dtypes: Mapping[str, torch.dtype]) -> dict[str, torch.Tensor]:
    """Return the inputs in the graph's order, in their declared dtypes. Integers of any width are converted.

    Args:
        feeds: Inputs of the caller. Shapes are not checked.
        dtypes: Declared dtypes of the graph's inputs.

    Raises:
        InputError: Missing or extra names, inputs that are not dense tensors with values, floating-point values for integer
            inputs, or integers outside the range of the declared dtype.
    """
    tensors = {}
    for name, dtype in dtypes.items():
        tensor = feeds.get(name)
        if tensor is None:
            raise wrong_names(feeds, dtypes)
        check_readable(name, tensor)
        if tensor.dtype is not dtype:
            # A cast from floating-point to integer, or from complex to real, would silently change values.
            if (tensor.is_floating_point() and not dtype.is_floating_point) or tensor.is_complex():
                raise InputError(
                    f"The input {name!r} has the dtype {tensor.dtype}, but the model needs {dtype}.",
                    fix=f"convert the tensor with tensor.to({dtype}).",
                )
            check_fits(name, tensor, dtype)
            tensor = tensor.to(dtype)
        tensors[name] = tensor
    if len(feeds) != len(tensors):
        raise wrong_names(feeds, dtypes)
    return tensors


def check_readable(name: str, tensor: object) -> None:
    """Check that an input is a dense tensor with values.

    Raises:
        InputError: The input is not a tensor, has no values (device `meta`), or is sparse, nested or quantized.
    """
    import torch

    if not isinstance(tensor, torch.Tensor):
        raise InputError(
            f"The input {name!r} is a {type(tensor).__name__}, not a torch tensor.", fix="pass a torch tensor."
        )
    if tensor.is_meta:
        raise InputError(
            f"The input {name!r} is on the device 'meta', where tensors have no values.",
            fix="pass a tensor on the CPU or on a GPU.",
        )
    if tensor.layout is not torch.strided or tensor.is_nested or tensor.is_quantized:
        form = "nested" if tensor.is_nested else "quantized" if tensor.is_quantized else str(tensor.layout)
        raise InputError(
            f"The input {name!r} is a tensor of the kind {form}, and the model accepts only dense tensors.",
            fix="convert the tensor first: call to_dense() on a sparse tensor, dequantize() on a quantized tensor, or "
            "to_padded_tensor(0) on a nested tensor.",
        )


def check_fits(name: str, tensor: torch.Tensor, dtype: torch.dtype) -> None:
    """Check that the integers of a tensor in host memory fit into the dtype to which the tensor will be converted.

    A conversion would silently change values outside the dtype's range.

    Raises:
        InputError: A value is outside the dtype's range.
    """
    import torch

    if any(kind.is_floating_point or kind is torch.bool for kind in (tensor.dtype, dtype)):
        return
    least, most = torch.iinfo(dtype).min, torch.iinfo(dtype).max
    wide = torch.iinfo(tensor.dtype)
    if not tensor.is_cpu or not tensor.numel() or (least <= wide.min and wide.max <= most):
        return
    values = tensor.numpy()
    invalid = next((int(value) for value in (values.min(), values.max()) if not least <= int(value) <= most), None)
    if invalid is not None:
        raise InputError(
            f"The input {name!r} contains the value {invalid}, but the model's dtype {dtype} allows only {least} to {most}.",
            fix="use the tokenizer of this model.",
        )


def wrong_names(feeds: Mapping[str, Any], declared: Collection[str]) -> InputError:
    """Return the error for input names that differ from the graph's input names. The message lists both."""
    missing = [name for name in declared if feeds.get(name) is None]
    extra = [name for name in feeds if name not in declared]
    return InputError(
        f"The inputs {list(feeds)} do not match the model's inputs {list(declared)}."
        f"{f' Missing inputs: {missing}.' if missing else ''}{f' Unknown inputs: {extra}.' if extra else ''}",
        fix="pass exactly the model's inputs.",
    )


class ShapeCheck:
    """Check of the shapes of a call's inputs.

    The object remembers shapes that passed, so a check of the same shapes takes about one microsecond.

    Args:
        inputs: Specs of the graph's inputs. Each call passes shapes in the same order.
        fixed: Sizes of named axes that were fixed when the session was opened.
        limits: Largest sizes of named axes, from the model's position embeddings.
    """

    __slots__ = ("_inputs", "_limits", "_passed", "fixed")

    def __init__(
        self,
        inputs: Sequence[TensorSpec],
        fixed: Mapping[str, int] | None = None,
        limits: Mapping[str, int] | None = None,
    ) -> None:
        self.fixed = dict(fixed or {})
        self._limits = dict(limits or {})
        self._inputs = tuple(inputs)
        self._passed: set[tuple[Sizes, ...]] = set()

    def __call__(self, shapes: tuple[Sizes, ...]) -> None:
        """Check the shapes of all inputs.

        Raises:
            InputError: An input has a wrong rank, a wrong size of a fixed axis, an empty axis, or an axis longer than the model's
                position embeddings, or the inputs have different sizes for the same named axis.
        """
        if shapes in self._passed:
            return
        sizes: dict[str, int] = dict(self.fixed)
        for spec, shape in zip(self._inputs, shapes, strict=True):
            expected = tuple(self.fixed.get(axis, axis) if isinstance(axis, str) else axis for axis in spec.shape)
            fits = len(shape) == len(expected) and all(
                isinstance(axis, str) or axis == n for n, axis in zip(shape, expected, strict=True)
            )
            # The inputs of a KV cache have no tokens in the first call, so an empty axis is valid for them.
            empty = 0 in shape and spec.pair is None
            if not fits or empty:
                raise InputError(
                    f"The input {spec.name!r} has the shape {tuple(shape)}, but the model needs the shape {expected}"
                    f"{', where no axis may have the size 0' if fits else ''}.",
                    fix=f"pass {spec.name} in the shape that the model needs.",
                )
            for size, axis in zip(shape, expected, strict=True):
                if isinstance(axis, str) and sizes.setdefault(axis, size) != size:
                    all_shapes = {s.name: tuple(dims) for s, dims in zip(self._inputs, shapes, strict=True)}
                    raise InputError(
                        f"The axis {axis!r} has two different sizes, {sizes[axis]} and {size}, in the shapes of the inputs {all_shapes}.",
                        fix=f"pass inputs in which the axis {axis!r} has the same size everywhere.",
                    )
        for axis, limit in self._limits.items():
            if sizes.get(axis, 0) > limit:
                raise InputError(
                    f"The inputs are too long: the axis {axis!r} has the size {sizes[axis]}, and the model has positions for only {limit}.",
                    fix=f"truncate the inputs to {limit}, for example with tokenizer(..., truncation=True, max_length={limit}), or split "
                    "them into shorter parts.",
                )
        if len(self._passed) < _REMEMBERED:
            self._passed.add(shapes)


def wanted_outputs(outputs: Sequence[str], declared: Sequence[str]) -> list[str]:
    """Return the names of the requested outputs.

    Raises:
        InputError: The graph has no output with one of the requested names.
    """
    unknown = [name for name in outputs if name not in declared]
    if unknown:
        raise InputError(
            f"The model has no outputs {unknown}; its outputs are {list(declared)}.{did_you_mean(unknown[0], declared)}",
            fix="request only outputs that the model has.",
        )
    return list(outputs)


def check_buffers(
    out: Mapping[str, torch.Tensor], wanted: Collection[str], dtypes: Mapping[str, torch.dtype], device: torch.device
) -> None:
    """Check the buffers that outputs are written to. (`check_buffer_shape` checks the shapes.)

    Args:
        out: Buffers by output name.
        wanted: Names of the requested outputs.
        dtypes: Declared dtypes of the graph's outputs.
        device: Device on which the session writes outputs.

    Raises:
        InputError: A buffer belongs to no requested output, is not contiguous, or has another dtype or device than the output.
    """
    unknown = [name for name in out if name not in wanted]
    if unknown:
        raise InputError(
            f"The argument out contains buffers for {unknown}, but the requested outputs are {list(wanted)}.",
            fix="pass buffers only for requested outputs.",
        )
    for name, buffer in out.items():
        if not buffer.is_contiguous() or buffer.device != device or buffer.dtype is not dtypes[name]:
            raise InputError(
                f"The buffer for the output {name!r} is a {'' if buffer.is_contiguous() else 'non-contiguous '}{buffer.dtype} tensor on "
                f"{buffer.device}; it must be a contiguous {dtypes[name]} tensor on {device}.",
                fix=f"create the buffer with torch.empty(shape, dtype={dtypes[name]}, device='{device}').",
            )


def check_buffer_shape(name: str, buffer: torch.Tensor, shape: Sizes) -> None:
    """Check that a buffer has the shape of its output.

    Raises:
        InputError: The shapes differ.
    """
    if tuple(buffer.shape) != tuple(shape):
        raise InputError(
            f"The buffer for the output {name!r} has the shape {tuple(buffer.shape)}, but the output has the shape {tuple(shape)}.",
            fix=f"create the buffer with the shape {tuple(shape)}.",
        )


def session_closed() -> SessionClosedError:
    """Return the error for calls after `close`."""
    return SessionClosedError(
        "The session of the model was closed, so the model cannot run.",
        fix="load the model again with from_pretrained.",
    )
