"""Checks of input values: bounds of token ids and masks, at least one token in each row, and finite numbers."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from ...errors import InputError

if TYPE_CHECKING:
    import numpy as np

    from ...artifact.tensor_specs import TensorSpec
    from ..protocols import Feeds

_FEW = 32  # For at most this number of values, Python's min and max of a list are faster than NumPy.


class InputValueCheck:
    """Check that input values are within the bounds of their specs, and that each row of a mask has at least one 1.

    Without this check, some runtimes would wrap or clamp invalid token ids, positions and mask values, and other runtimes would
    crash. docs/adr/0037-fully-masked-rows.md explains why a fully masked row is an error. The check takes about 2 microseconds for
    each input with warm CPU caches, and 10 microseconds after the matrix products of a model. Only the method `waiting` checks values
    on a GPU.

    Args:
        inputs: Specs of the graph's inputs.
    """

    __slots__ = ("_bounded", "_long", "_long_unsigned", "_mask_place", "_masks", "_required")

    def __init__(self, inputs: Sequence[TensorSpec]) -> None:
        import numpy as np

        self._long, self._long_unsigned = np.dtype(np.int64), np.dtype(np.uint64)
        bounded = [
            (place, spec, (place, spec.name, *spec.bounds))
            for place, spec in enumerate(inputs)
            if spec.bounds is not None
        ]
        self._bounded: list[tuple[int, str, int, int]] = [row for _, spec, row in bounded if spec.role != "mask"]
        # If a prompt is run in parts, the mask of the first part may contain only the padding of a left-padded row. So rows without
        # tokens are allowed in masks whose last axis is `total`.
        self._masks: list[tuple[int, str, int, int, bool]] = [
            (*row, spec.shape[-1:] != ("total",)) for _, spec, row in bounded if spec.role == "mask"
        ]
        self._required = [
            (place, spec.name, spec.required, spec.equal_counts)
            for place, spec in enumerate(inputs)
            if spec.required is not None
        ]
        self._mask_place = next((place for place, spec in enumerate(inputs) if spec.name == "attention_mask"), None)

    @property
    def bounds(self) -> dict[str, tuple[int, int]]:
        """Smallest and largest value of each input with bounds. Masks are left out, because kernels do not use them as indices."""
        return {name: (least, most) for _, name, least, most in self._bounded}

    def __call__(self, feeds: Feeds) -> None:
        """Check the values of a call's inputs, in any integer dtype.

        Raises:
            InputError: A value is out of bounds, a row is fully masked, or a row lacks a required token.
        """
        for _, name, least, most in self._bounded:
            tensor = feeds.get(name)
            if tensor is not None and tensor.is_cpu and not tensor.is_floating_point():
                self._check(tensor.numpy(), name, least, most)
        for _, name, least, most, filled in self._masks:
            tensor = feeds.get(name)
            if tensor is not None and tensor.is_cpu and not tensor.is_floating_point():
                self._check_mask(tensor.numpy(), name, least, most, filled)
        # This check also reads tensors on a GPU, and waits for the GPU. Only a few models require a token in each row, and their graphs
        # cannot detect that the token is missing.
        for _, name, token, equal_counts in self._required:
            tensor, mask = feeds.get(name), feeds.get("attention_mask")
            if tensor is not None:
                mask = None if mask is None else mask.to(tensor.device)
                check_required(tensor, mask, name, token, equal_counts=equal_counts)

    def waiting(self, feeds: Feeds) -> None:
        """Check the values of inputs that are on a GPU, and wait for the GPU. Masks are not checked.

        Raises:
            InputError: A value is out of bounds.
        """
        import torch

        for _, name, least, most in self._bounded:
            tensor = feeds.get(name)
            if tensor is not None and not tensor.is_cpu and tensor.numel() and not tensor.is_floating_point():
                self._check(torch.stack(torch.aminmax(tensor)).cpu().numpy(), name, least, most)

    def arrays(self, arrays: Sequence[np.ndarray[Any, Any]]) -> None:
        """Check the values of all inputs, passed as NumPy arrays in the graph's order.

        The caller has checked that no array is empty, and that inputs with bounds are integers.

        Raises:
            InputError: A value is out of bounds, a row is fully masked, or a row lacks a required token.
        """
        for place, name, least, most in self._bounded:
            values = arrays[place]
            # After a matrix product, Python's and NumPy's code is not in the CPU caches. A check that runs less code is then faster, and
            # NumPy's reductions run more code than `min` and `max` of a short list.
            if values.size <= _FEW:
                few = values.ravel().tolist()
                if least <= min(few) and max(few) <= most:
                    continue
            elif least == 0 and values.dtype is self._long:
                # Read as unsigned integers, negative values are very large. So one search for the largest value finds values below 0 and
                # values above the limit.
                unsigned = values.view(self._long_unsigned)
                if unsigned.item(unsigned.argmax()) <= most:
                    continue
            self._check(values, name, least, most)
        for place, name, least, most, filled in self._masks:
            self._check_mask(arrays[place], name, least, most, filled)
        for place, name, token, equal_counts in self._required:
            mask = None if self._mask_place is None else arrays[self._mask_place]
            check_required(arrays[place], mask, name, token, equal_counts=equal_counts)

    def _check_mask(self, mask: np.ndarray[Any, Any], name: str, least: int, most: int, filled: bool) -> None:
        """Check a mask against its bounds. If `filled` is True, also check that each row has a token."""
        # `ShapeCheck` raises the error for a mask with one axis.
        filled = filled and mask.ndim > 1
        if mask.size <= _FEW:
            few = mask.ravel().tolist()
            if not few:
                return
            if min(few) < least or max(few) > most:
                self._check(mask, name, least, most)
            # In most batches, each row begins with a token. Then the first column has no 0, and the slower check is not needed.
            if filled and not all(few[:: mask.shape[-1]]):
                check_filled(mask, name)
            return
        if least == 0 and mask.dtype is self._long:
            unsigned = mask.view(self._long_unsigned)
            if unsigned.item(unsigned.argmax()) > most:
                self._check(mask, name, least, most)
        else:
            self._check(mask, name, least, most)
        if filled and not all(mask[..., 0].ravel().tolist()):
            check_filled(mask, name)

    @staticmethod
    def _check(values: np.ndarray[Any, Any], name: str, least: int, most: int) -> None:
        if not values.size:
            return
        few = values.ravel().tolist() if values.size <= _FEW else None
        lowest, highest = (min(few), max(few)) if few is not None else (int(values.min()), int(values.max()))
        if lowest < least or highest > most:
            raise InputError(
                f"The input {name!r} contains the value {int(lowest if lowest < least else highest)}, but the model allows only "
                f"{least} to {most}.",
                fix=f"leave out {name}, or number the tokens from 0."
                if "position" in name
                else "use 1 for tokens and 0 for padding."
                if "mask" in name
                else "use the tokenizer of this model. The value -100 is allowed only in labels.",
            )


def check_filled(mask: np.ndarray[Any, Any], name: str) -> None:
    """Check that each row of a non-empty mask `(..., sequence)` has at least one token.

    Raises:
        InputError: A row is fully masked.
    """
    rows = mask.reshape(-1, mask.shape[-1]).any(1)
    if not rows.all():
        raise InputError(
            f"Row {int(rows.argmin())} of the input {name!r} contains only zeros, so all tokens of this row are masked. The result for a "
            "row without tokens is undefined and differs between runtimes.",
            fix="remove this row from the batch. If the row only fills up the batch, set its first mask value to 1 and ignore its result.",
        )


def check_required(ids: Any, mask: Any, name: str, token: int, *, equal_counts: bool) -> None:
    """Check that each row of `ids: (batch, sequence)` contains a token where `mask` is not 0.

    Args:
        ids: NumPy array or tensor.
        mask: NumPy array or tensor of the same shape. `None` means that no token is masked.
        name: Input name for the error message.
        token: Id of the required token.
        equal_counts: Whether all rows must contain the token the same number of times.

    Raises:
        InputError: A row lacks the token, or the rows contain the token a different number of times.
    """
    if ids.ndim != 2:
        return
    matches = ids == token
    if mask is not None and mask.shape == ids.shape:
        matches = matches & (mask != 0)
    counts = matches.sum(1).tolist()
    if not all(counts):
        raise InputError(
            f"Row {counts.index(0)} of the input {name!r} does not contain the token {token}, which the model needs in each row.",
            fix="use the tokenizer of this model with add_special_tokens=True, and let the tokenizer truncate long texts.",
        )
    if equal_counts and len(set(counts)) > 1:
        raise InputError(
            f"The rows of the input {name!r} contain the token {token} between {min(counts)} and {max(counts)} times. This graph computes "
            "wrong results if the numbers differ within a batch.",
            fix="pass the rows one by one, or export the model again with this version of accel (`accel export MODEL OUT`).",
        )


class _HostValueCheck:
    """Base class of checks of input values in host memory.

    Args:
        inputs: Index of each checked input in the graph's order, and its name.
    """

    __slots__ = ("_inputs",)

    def __init__(self, inputs: list[tuple[int, str]]) -> None:
        self._inputs = inputs

    def __call__(self, feeds: Feeds) -> None:
        """Check the values of a call's inputs.

        Raises:
            InputError: A value is invalid.
        """
        for _, name in self._inputs:
            tensor = feeds.get(name)
            if tensor is not None and tensor.is_cpu:
                self._check(tensor.numpy(), name)

    def arrays(self, arrays: Sequence[np.ndarray[Any, Any]]) -> None:
        """Check the values of all inputs, passed as non-empty NumPy arrays in the graph's order.

        Raises:
            InputError: A value is invalid.
        """
        for place, name in self._inputs:
            self._check(arrays[place], name)

    @staticmethod
    def _check(values: np.ndarray[Any, Any], name: str) -> None:
        raise NotImplementedError


class MaskCheck(_HostValueCheck):
    """Check that masks have at least one token in each row, for masks whose spec has no bounds.

    Runtimes use this check if they compute a fully masked row differently from PyTorch. `InputValueCheck` checks masks with bounds on
    every backend. The masks of artifacts from older versions of accel have no bounds.

    Args:
        inputs: Specs of the graph's inputs.
    """

    __slots__ = ()

    def __init__(self, inputs: Sequence[TensorSpec]) -> None:
        super().__init__(
            [(place, spec.name) for place, spec in enumerate(inputs) if spec.role == "mask" and spec.bounds is None]
        )

    @staticmethod
    def _check(mask: np.ndarray[Any, Any], name: str) -> None:
        # In most batches, each row begins with a token. Then the first column has no 0, and the slower check is not needed.
        if mask.ndim == 2 and mask.size and not all(mask[:, 0].tolist()):
            check_filled(mask, name)


class FiniteCheck(_HostValueCheck):
    """Check that floating-point inputs are finite, for runtimes whose results for infinity and NaN differ from PyTorch's results.

    Some runtimes would return finite numbers. Masks are not checked, because additive masks contain minus infinity.

    Args:
        inputs: Specs of the graph's inputs.
    """

    __slots__ = ()

    def __init__(self, inputs: Sequence[TensorSpec]) -> None:
        super().__init__(
            [
                (place, spec.name)
                for place, spec in enumerate(inputs)
                if spec.role == "data" and spec.dtype.startswith("float") and "mask" not in spec.name
            ]
        )

    @staticmethod
    def _check(values: np.ndarray[Any, Any], name: str) -> None:
        import numpy as np

        # The sum is finite if all values are finite and the sum does not overflow. This test needs no memory. If the sum is not finite,
        # the code below checks each value.
        with np.errstate(over="ignore", invalid="ignore"):
            if math.isfinite(values.sum()):
                return
        finite = np.isfinite(values)
        if not finite.all():
            place = tuple(int(i) for i in np.unravel_index(int(finite.argmin()), values.shape))
            raise InputError(
                f"The input {name!r} contains the value {values[place]} at the index {place}. For NaN and infinity, the outputs of this "
                "runtime differ from those of PyTorch.",
                fix="pass only finite numbers.",
            )
