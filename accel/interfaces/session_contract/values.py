"""Values that a session is given: ids and masks within their bounds, rows that have a token, finite numbers."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from ...errors import InputError

if TYPE_CHECKING:
    import numpy as np

    from ...artifact.tensors import TensorSpec
    from ..protocols import Feeds

_FEW = 32  # values that are checked faster as a list


class ValueCheck:
    """Checks that values are within the bounds that inputs declare: ids of tokens and positions that a model does not have, and masks of
    other numbers than 0 and 1, are an error of the caller's, which runtimes answer by wrapping, clamping or crashing, each in its own
    way. So is a row whose mask leaves it no token (docs/adr/0037-rows-without-a-token.md). About 2 microseconds for each such input with
    warm caches, 10 after a model's matrix products; values on a GPU are not read back for it, unless asked for (`waiting`).

    Args:
        inputs: What the graph takes.
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
        # Of the tokens so far a decoder may be given the first alone, where rows that are padded in front have none.
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
        """Least and greatest value by input, of those that declare them; of masks, which no kernel reads out of bounds for, none."""
        return {name: (least, most) for _, name, least, most in self._bounded}

    def __call__(self, feeds: Feeds) -> None:
        """Check the values of a call's inputs, of any integer type.

        Raises:
            InputError: One lies outside, or a row is masked as a whole.
        """
        for _, name, least, most in self._bounded:
            tensor = feeds.get(name)
            if tensor is not None and tensor.is_cpu and not tensor.is_floating_point():
                self._check(tensor.numpy(), name, least, most)
        for _, name, least, most, filled in self._masks:
            tensor = feeds.get(name)
            if tensor is not None and tensor.is_cpu and not tensor.is_floating_point():
                self._check_mask(tensor.numpy(), name, least, most, filled)
        # On a GPU they are waited for: few models have such tokens, and nothing in a graph says that one is missing.
        for _, name, token, equal_counts in self._required:
            tensor, mask = feeds.get(name), feeds.get("attention_mask")
            if tensor is not None:
                mask = None if mask is None else mask.to(tensor.device)
                check_required(tensor, mask, name, token, equal_counts=equal_counts)

    def waiting(self, feeds: Feeds) -> None:
        """The same for tensors on a device, which it waits for; masks are not looked at.

        Raises:
            InputError: One lies outside.
        """
        import torch

        for _, name, least, most in self._bounded:
            tensor = feeds.get(name)
            if tensor is not None and not tensor.is_cpu and tensor.numel() and not tensor.is_floating_point():
                self._check(torch.stack(torch.aminmax(tensor)).cpu().numpy(), name, least, most)

    def arrays(self, arrays: Sequence[np.ndarray[Any, Any]]) -> None:
        """The same for all inputs in the graph's order, none empty, and integers where bounds are declared.

        Raises:
            InputError: One lies outside, or a row is masked as a whole.
        """
        for place, name, least, most in self._bounded:
            values = arrays[place]
            # With caches that a matrix product has emptied, what counts is how much code runs: NumPy's reductions have the most.
            if values.size <= _FEW:
                few = values.ravel().tolist()
                if least <= min(few) and max(few) <= most:
                    continue
            elif least == 0 and values.dtype is self._long:
                # Seen as unsigned, what is negative is large: one pass instead of two.
                seen = values.view(self._long_unsigned)
                if seen.item(seen.argmax()) <= most:
                    continue
            self._check(values, name, least, most)
        for place, name, least, most, filled in self._masks:
            self._check_mask(arrays[place], name, least, most, filled)
        for place, name, token, equal_counts in self._required:
            mask = None if self._mask_place is None else arrays[self._mask_place]
            check_required(arrays[place], mask, name, token, equal_counts=equal_counts)

    def _check_mask(self, mask: np.ndarray[Any, Any], name: str, least: int, most: int, filled: bool) -> None:
        """Hold a mask against its bounds and, where its rows are to be `filled`, find those without a token."""
        # Of another rank, what checks the shapes tells.
        filled = filled and mask.ndim > 1
        if mask.size <= _FEW:
            few = mask.ravel().tolist()
            if not few:
                return
            if min(few) < least or max(few) > most:
                self._check(mask, name, least, most)
            # Most rows begin with a token.
            if filled and not all(few[:: mask.shape[-1]]):
                check_filled(mask, name)
            return
        if least == 0 and mask.dtype is self._long:
            seen = mask.view(self._long_unsigned)
            if seen.item(seen.argmax()) > most:
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
        found = (min(few), max(few)) if few is not None else (int(values.min()), int(values.max()))
        if found[0] < least or found[1] > most:
            raise InputError(
                f"Input {name!r} holds {int(found[0] if found[0] < least else found[1])}; the model has {least} to {most}.",
                fix="leave them out, or count the tokens from 0."
                if "position" in name
                else "give 1 for tokens and 0 for padding."
                if "mask" in name
                else "use the tokenizer that belongs to the model; -100 is for labels alone.",
            )


def check_filled(mask: np.ndarray[Any, Any], name: str) -> None:
    """Check that a mask, `(..., sequence)` and not empty, leaves every row a token.

    Raises:
        InputError: A row is masked as a whole.
    """
    rows = mask.reshape(-1, mask.shape[-1]).any(1)
    if not rows.all():
        raise InputError(
            f"Row {int(rows.argmin())} of {name!r} has no token that is not masked: what a model makes of such a row is defined nowhere, "
            "and differs between runtimes.",
            fix="leave such rows out, or give rows that only fill a batch one token (1 in the first place) and drop their answers.",
        )


def check_required(ids: Any, mask: Any, name: str, token: int, *, equal_counts: bool) -> None:
    """Check that each row of `ids: (batch, sequence)` holds a token where `mask` is not 0.

    Args:
        ids: NumPy array or tensor.
        mask: NumPy array or tensor of the same shape; `None` keeps all tokens.
        name: Input name.
        token: The token's id.
        equal_counts: Whether all rows must hold it equally often.

    Raises:
        InputError: A row lacks the token, or rows hold it unequally often.
    """
    if ids.ndim != 2:
        return
    kept = ids == token
    if mask is not None and mask.shape == ids.shape:
        kept = kept & (mask != 0)
    counts = kept.sum(1).tolist()
    if not all(counts):
        raise InputError(
            f"Row {counts.index(0)} of {name!r} has no token {token}, which the model looks for in each row.",
            fix="use the tokenizer that belongs to the model, with add_special_tokens=True, and truncate with the tokenizer.",
        )
    if equal_counts and len(set(counts)) > 1:
        raise InputError(
            f"Rows of {name!r} hold the token {token} {min(counts)} to {max(counts)} times: this graph answers a row "
            "from another row's tokens where the numbers differ.",
            fix="pass such rows one by one, or export the model again with this version of accel: accel export MODEL OUT.",
        )


class MaskCheck:
    """Checks that masks without bounds leave every row a token, for runtimes that answer a row without any otherwise than PyTorch does;
    `ValueCheck` does it for those with bounds, on every backend. Artifacts from before masks had bounds have the former.

    Args:
        inputs: What the graph takes.
    """

    __slots__ = ("_masks",)

    def __init__(self, inputs: Sequence[TensorSpec]) -> None:
        self._masks = [
            (place, spec.name) for place, spec in enumerate(inputs) if spec.role == "mask" and spec.bounds is None
        ]

    def __call__(self, feeds: Feeds) -> None:
        """Check the masks of a call's inputs.

        Raises:
            InputError: A row is masked as a whole.
        """
        for _, name in self._masks:
            tensor = feeds.get(name)
            if tensor is not None and tensor.is_cpu:
                self._check(tensor.numpy(), name)

    def arrays(self, arrays: Sequence[np.ndarray[Any, Any]]) -> None:
        """The same for all inputs in the graph's order, none empty.

        Raises:
            InputError: A row is masked as a whole.
        """
        for place, name in self._masks:
            self._check(arrays[place], name)

    @staticmethod
    def _check(mask: np.ndarray[Any, Any], name: str) -> None:
        # Most begin with a token. Of no columns, what checks the shapes tells.
        if mask.ndim == 2 and mask.size and not all(mask[:, 0].tolist()):
            check_filled(mask, name)


class FiniteCheck:
    """Checks that values are finite numbers, for runtimes that answer what is none otherwise than PyTorch does, by numbers as well.

    Masks are left out, which may add minus infinity to what they hide.

    Args:
        inputs: What the graph takes.
    """

    __slots__ = ("_values",)

    def __init__(self, inputs: Sequence[TensorSpec]) -> None:
        self._values = [
            (place, spec.name)
            for place, spec in enumerate(inputs)
            if spec.role == "data" and spec.dtype.startswith("float") and "mask" not in spec.name
        ]

    def __call__(self, feeds: Feeds) -> None:
        """Check the values of a call's inputs.

        Raises:
            InputError: One is infinite, or not a number.
        """
        for _, name in self._values:
            tensor = feeds.get(name)
            if tensor is not None and tensor.is_cpu:
                self._check(tensor.numpy(), name)

    def arrays(self, arrays: Sequence[np.ndarray[Any, Any]]) -> None:
        """The same for all inputs in the graph's order.

        Raises:
            InputError: One is infinite, or not a number.
        """
        for place, name in self._values:
            self._check(arrays[place], name)

    @staticmethod
    def _check(values: np.ndarray[Any, Any], name: str) -> None:
        import numpy as np

        # A sum is one pass that allocates nothing; one of numbers that are very large may be infinite as well.
        with np.errstate(over="ignore", invalid="ignore"):
            if math.isfinite(values.sum()):
                return
        finite = np.isfinite(values)
        if not finite.all():
            place = tuple(int(i) for i in np.unravel_index(int(finite.argmin()), values.shape))
            raise InputError(
                f"Input {name!r} holds {values[place]} at {place}, which this runtime does not answer as PyTorch does.",
                fix="pass finite numbers.",
            )
