"""Checks of names, dtypes and shapes of inputs, and of buffers for outputs."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from ...errors import InputError, SessionClosedError, did_you_mean

if TYPE_CHECKING:
    import torch

    from ...artifact.tensors import TensorSpec
    from ..protocols import Feeds

_REMEMBERED = 4096  # Limit of remembered shapes, so that ever new lengths do not fill the memory.
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
            # A cast would silently drop fractions and imaginary parts.
            if (tensor.is_floating_point() and not dtype.is_floating_point) or tensor.is_complex():
                raise InputError(
                    f"Input {name!r} is {tensor.dtype}; the graph takes {dtype}.", fix=f"convert it to {dtype}."
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
        InputError: The input is no tensor, has no values (device `meta`), or is sparse, nested or quantized.
    """
    import torch

    if not isinstance(tensor, torch.Tensor):
        raise InputError(f"Input {name!r} is a {type(tensor).__name__}, not a tensor.", fix="pass a torch tensor.")
    if tensor.is_meta:
        raise InputError(
            f"Input {name!r} is on the device 'meta', where tensors have no values.", fix="pass a tensor with values."
        )
    if tensor.layout is not torch.strided or tensor.is_nested or tensor.is_quantized:
        form = "nested" if tensor.is_nested else "quantized" if tensor.is_quantized else str(tensor.layout)
        raise InputError(
            f"Input {name!r} is a tensor of another form ({form}) than one value behind the other.",
            fix="call its to_dense(), dequantize() or to_padded_tensor() first.",
        )


def check_fits(name: str, tensor: torch.Tensor, dtype: torch.dtype) -> None:
    """Check that integers in host memory fit into the dtype that they are converted to. Other values would wrap around.

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
    found = next((int(value) for value in (values.min(), values.max()) if not least <= int(value) <= most), None)
    if found is not None:
        raise InputError(
            f"Input {name!r} holds {found}; the graph takes {dtype}, which ends at {least} and {most}.",
            fix="use the tokenizer that belongs to the model.",
        )


def wrong_names(feeds: Mapping[str, Any], declared: Collection[str]) -> InputError:
    """Return the error for inputs that are not exactly the declared ones. Its message lists both."""
    missing = [name for name in declared if feeds.get(name) is None]
    extra = [name for name in feeds if name not in declared]
    return InputError(
        f"The graph takes {list(declared)} and was given {list(feeds)}"
        f"{f'; missing: {missing}' if missing else ''}{f'; not taken: {extra}' if extra else ''}.",
        fix="pass exactly the inputs that the graph takes.",
    )


class ShapeCheck:
    """Check of the shapes of a call's inputs. Shapes that passed are remembered, so the check takes about a microsecond per call.

    Args:
        inputs: Specs of the graph's inputs, in the order in which shapes are passed.
        fixed: Fixed sizes of named axes with which the session was opened.
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
            InputError: A wrong rank, a wrong size of a fixed axis, an empty axis, different sizes of one axis, or an axis longer
                than the model's position embeddings.
        """
        if shapes in self._passed:
            return
        sizes: dict[str, int] = dict(self.fixed)
        for spec, shape in zip(self._inputs, shapes, strict=True):
            wanted = tuple(self.fixed.get(axis, axis) if isinstance(axis, str) else axis for axis in spec.shape)
            fits = len(shape) == len(wanted) and all(
                isinstance(w, str) or w == n for n, w in zip(shape, wanted, strict=True)
            )
            # Cache inputs may be empty, because they are empty at the first call.
            empty = 0 in shape and spec.pair is None
            if not fits or empty:
                raise InputError(
                    f"Input {spec.name!r} has shape {tuple(shape)}; the graph takes {wanted}"
                    f"{', no axis empty' if fits else ''}.",
                    fix="check the shapes of the inputs.",
                )
            for size, axis in zip(shape, wanted, strict=True):
                if isinstance(axis, str) and sizes.setdefault(axis, size) != size:
                    given = {s.name: tuple(found) for s, found in zip(self._inputs, shapes, strict=True)}
                    raise InputError(
                        f"The axis {axis!r} has sizes {sizes[axis]} and {size} among the inputs {given}.",
                        fix="give each axis one size.",
                    )
        for axis, limit in self._limits.items():
            if sizes.get(axis, 0) > limit:
                raise InputError(
                    f"The inputs have {sizes[axis]} along the axis {axis!r}; the model has positions for {limit}.",
                    fix=f"cut them into parts of at most {limit}, or truncate them.",
                )
        if len(self._passed) < _REMEMBERED:
            self._passed.add(shapes)


def wanted_outputs(outputs: Sequence[str], declared: Sequence[str]) -> list[str]:
    """Return the names of the requested outputs.

    Raises:
        InputError: The graph does not return one of them.
    """
    unknown = [name for name in outputs if name not in declared]
    if unknown:
        raise InputError(
            f"The graph returns {list(declared)}, not {unknown}.{did_you_mean(unknown[0], declared)}",
            fix="ask for these.",
        )
    return list(outputs)


def check_buffers(
    out: Mapping[str, torch.Tensor], wanted: Collection[str], dtypes: Mapping[str, torch.dtype], device: torch.device
) -> None:
    """Check the buffers that receive outputs.

    Args:
        out: Buffers by output name. `check_buffer_shape` checks their shapes.
        wanted: Names of the requested outputs.
        dtypes: Declared dtypes of the graph's outputs.
        device: Device on which the session writes outputs.

    Raises:
        InputError: A buffer has no matching output, is not contiguous, or has another dtype or device.
    """
    unknown = [name for name in out if name not in wanted]
    if unknown:
        raise InputError(f"out holds {unknown}; the outputs are {list(wanted)}.", fix="give buffers for these.")
    for name, buffer in out.items():
        if not buffer.is_contiguous() or buffer.device != device or buffer.dtype is not dtypes[name]:
            raise InputError(
                f"The buffer for {name!r} is {buffer.dtype} on {buffer.device}"
                f"{'' if buffer.is_contiguous() else ', not contiguous'}; it must be contiguous {dtypes[name]} on {device}.",
                fix="make it with torch.empty(..., dtype=..., device=...).",
            )


def check_buffer_shape(name: str, buffer: torch.Tensor, shape: Sizes) -> None:
    """Check that a buffer has the shape of its output.

    Raises:
        InputError: The shapes differ.
    """
    if tuple(buffer.shape) != tuple(shape):
        raise InputError(
            f"The buffer for {name!r} has shape {tuple(buffer.shape)}; the output has {tuple(shape)}.",
            fix="make it of the output's shape.",
        )


def session_closed() -> SessionClosedError:
    """Return the error for calls after `close`."""
    return SessionClosedError("This session is closed.", fix="open the model again.")
