"""What every backend's `run` and states check, with the same errors everywhere. Long because it is a session's whole contract.

A session calls them on the way of its slow path, and keeps a fast path for calls that are plainly right: declared names,
declared types, shapes that passed before (`ShapeCheck`).
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from ..errors import InputError, IntegrityError, SessionClosedError, SessionError, did_you_mean

if TYPE_CHECKING:
    import numpy as np
    import torch

    from ..artifact.manifest import Component
    from ..artifact.tensors import TensorSpec
    from .interfaces import Feeds, State

_REMEMBERED = 4096  # shapes that passed; lengths that come once only must not fill the memory
_FEW = 32  # values that are checked faster as a list
Sizes = tuple[int, ...]


def tensor_dtypes(specs: Iterable[TensorSpec]) -> dict[str, torch.dtype]:
    """The declared types by name, in the graph's order."""
    import torch

    return {spec.name: getattr(torch, spec.dtype) for spec in specs}


def read_feeds(feeds: Feeds, dtypes: Mapping[str, torch.dtype]) -> dict[str, torch.Tensor]:
    """The inputs in the graph's order, each of its declared type; integers of any width are converted.

    Args:
        feeds: What the caller gave; shapes are not looked at.
        dtypes: What the graph takes.

    Raises:
        InputError: Missing or extra names, something else than tensors of values, floating-point values where integers are
            declared, or integers that the declared type does not have.
    """
    tensors = {}
    for name, dtype in dtypes.items():
        tensor = feeds.get(name)
        if tensor is None:
            raise wrong_names(feeds, dtypes)
        check_readable(name, tensor)
        if tensor.dtype is not dtype:
            # A cast would drop what does not fit without a word: fractions, imaginary parts.
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
    """Check that an input is a tensor that holds one value behind the other.

    Raises:
        InputError: It is none, holds no values (device `meta`), or holds them in another form (sparse, nested, quantized).
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
    """Check that integers in host memory are numbers of the integer type that they are converted to, which would wrap others.

    Raises:
        InputError: One is not.
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
    """The error for inputs that are not exactly the declared ones; it lists both."""
    missing = [name for name in declared if feeds.get(name) is None]
    extra = [name for name in feeds if name not in declared]
    return InputError(
        f"The graph takes {list(declared)} and was given {list(feeds)}"
        f"{f'; missing: {missing}' if missing else ''}{f'; not taken: {extra}' if extra else ''}.",
        fix="pass exactly the inputs that the graph takes.",
    )


class ShapeCheck:
    """Checks the shapes of a call's inputs; shapes that passed are remembered, which costs about a microsecond a call.

    Args:
        inputs: What the graph takes, in the order in which shapes are given.
        fixed: Sizes that the session was opened with for named axes.
        limits: The largest sizes of named axes that the model has positions for.
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
            InputError: A wrong rank, a fixed axis with another size, an empty axis, one axis with several sizes, or more of it than the
                model has positions for.
        """
        if shapes in self._passed:
            return
        sizes: dict[str, int] = dict(self.fixed)
        for spec, shape in zip(self._inputs, shapes, strict=True):
            wanted = tuple(self.fixed.get(axis, axis) if isinstance(axis, str) else axis for axis in spec.shape)
            fits = len(shape) == len(wanted) and all(
                isinstance(w, str) or w == n for n, w in zip(shape, wanted, strict=True)
            )
            # A cache among the inputs is empty at first.
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


class ValueCheck:
    """Checks that values are within the bounds that inputs declare: ids of tokens and positions that a model does not have, and masks of
    other numbers than 0 and 1, are an error of the caller's, which runtimes answer by wrapping, clamping or crashing, each in its own
    way. So is a row whose mask leaves it no token (docs/adr/0037-rows-without-a-token.md). About 2 microseconds for each such input with
    warm caches, 10 after a model's matrix products; values on a GPU are not read back for it, unless asked for (`waiting`).

    Args:
        inputs: What the graph takes.
    """

    __slots__ = ("_bounded", "_long", "_long_unsigned", "_masks")

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


def wanted_outputs(outputs: Sequence[str], declared: Sequence[str]) -> list[str]:
    """The outputs asked for.

    Raises:
        InputError: One that the graph does not return.
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
    """Check buffers that receive outputs.

    Args:
        out: The buffers by name; for their shapes see `check_buffer_shape`.
        wanted: Outputs of the call.
        dtypes: Declared types of the graph's outputs.
        device: Where the session writes.

    Raises:
        InputError: A buffer for no output, not contiguous, of another type or elsewhere.
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
    """Check the shape of a buffer against that of its output, where that is known.

    Raises:
        InputError: They differ.
    """
    if tuple(buffer.shape) != tuple(shape):
        raise InputError(
            f"The buffer for {name!r} has shape {tuple(buffer.shape)}; the output has {tuple(shape)}.",
            fix="make it of the output's shape.",
        )


def check_state(state: object, kind: type, *, stateful: bool, out: Mapping[str, Any] | None) -> None:
    """Check the state of a call.

    Args:
        state: What the caller gave, or `None`.
        kind: What this session makes.
        stateful: Whether the graph keeps a state.
        out: Buffers of the call.

    Raises:
        InputError: A state for a graph without one, none for a graph with one, one made by another session, or buffers
            beside a state.
    """
    if not stateful:
        if state is not None:
            raise InputError("This graph keeps no state between calls.", fix="leave state=... out.")
        return
    if state is None:
        raise InputError("This graph reads a KV cache.", fix="pass state=session.new_state(batch).")
    if not isinstance(state, kind):
        raise InputError("The state was not made by this session.", fix="make it with new_state().")
    if out:
        raise InputError("A session with a state allocates its outputs.", fix="leave out=... out.")


def no_state() -> SessionError:
    """The error of `new_state` where a graph keeps none."""
    return SessionError("This graph keeps no state between calls.", fix="leave state=... out.")


def session_closed() -> SessionClosedError:
    """The error of everything after `close`."""
    return SessionClosedError("This session is closed.", fix="open the model again.")


class StepCheck:
    """Checks the tokens that a call brings to a state.

    Args:
        component: The decoder's graph.
        waits: Also read which logits are asked for where that is on a device, which waits for it.

    Raises:
        IntegrityError: It takes no tokens.
    """

    __slots__ = ("_beside", "_kept", "_others", "_ranks", "_tokens", "_waits", "mask")

    def __init__(self, component: Component, *, waits: bool = False) -> None:
        self._waits = waits
        own = [spec for spec in component.inputs if spec.pair is None]
        self._tokens = next((spec.name for spec in own if spec.shape[1:2] == ("sequence",)), "")
        if not self._tokens:
            raise IntegrityError(f"The decoder {component.name!r} takes no tokens.", fix="make the artifact again.")
        # Decoders of other tools behind an encoder take no mask of their own.
        self.mask = next((spec.name for spec in own if spec.shape[-1] == "total"), None)
        self._kept = next((spec.name for spec in own if spec.shape == ("kept",)), None)
        self._ranks = {spec.name: spec.shape for spec in own if spec.name in (self._tokens, self.mask, self._kept)}
        by_token = [spec for spec in own if spec.shape[:2] in (("batch", "sequence"), ("batch", "total"))]
        self._others = [spec for spec in by_token if spec.name != self._tokens]
        # What an encoder gave, images, positions of several kinds.
        self._beside = [spec for spec in own if spec not in by_token and spec.name not in self._ranks]

    def __call__(self, feeds: Feeds, batch: int, length: int) -> int:
        """How many tokens there are.

        Args:
            feeds: The graph's inputs for this call, without the cache.
            batch: Rows that the state holds.
            length: Tokens that it holds.

        Raises:
            InputError: Another number of rows, a mask that does not cover the cached and the new tokens, inputs that do not agree, or
                logits asked for of tokens that are not there.
        """
        for name, declared in self._ranks.items():
            if feeds[name].ndim != len(declared):
                raise InputError(
                    f"Input {name!r} has shape {tuple(feeds[name].shape)}; the graph takes {declared}.",
                    fix="check the shapes of the inputs.",
                )
        rows, new = feeds[self._tokens].shape[:2]
        if new == 0:
            raise InputError("No new tokens were given.", fix="pass at least one.")
        if rows != batch:
            raise InputError(f"{rows} rows were given to a cache of {batch}.", fix="pass the cache of the same batch.")
        total = feeds[self.mask].shape[1] if self.mask is not None else length + new
        if total != length + new:
            raise InputError(
                f"{self.mask!r} covers {total} tokens; the cache holds {length} and {new} are new.",
                fix=f"pass a mask of {length + new} tokens: the cached ones and the new ones.",
            )
        for spec in self._others:
            shape, sizes = feeds[spec.name].shape, (rows, total if spec.shape[1] == "total" else new)
            if shape[:2] != sizes or len(shape) != len(spec.shape):
                raise InputError(
                    f"Input {spec.name!r} has shape {tuple(shape)}; {spec.shape} is {sizes} here.",
                    fix="give each input as many rows and tokens as the ids have.",
                )
        known = {"batch": rows, "sequence": new, "total": total}
        for spec in self._beside:
            found = feeds[spec.name].shape
            if len(found) != len(spec.shape) or any(
                size != (axis if isinstance(axis, int) else known.setdefault(axis, size))
                for axis, size in zip(spec.shape, found, strict=True)
            ):
                wanted = tuple(known.get(axis, axis) if isinstance(axis, str) else axis for axis in spec.shape)
                raise InputError(
                    f"Input {spec.name!r} has shape {tuple(found)}; {spec.shape} is {wanted} here.",
                    fix="check the shapes of the inputs; axes of one name have one size.",
                )
        if self._kept is not None and (self._waits or feeds[self._kept].is_cpu):
            kept = feeds[self._kept].tolist()
            if not kept or min(kept) < 0 or max(kept) >= new:
                raise InputError(
                    f"{self._kept!r} holds {f'{min(kept)} to {max(kept)}' if kept else 'nothing'}; the new tokens are 0 to {new - 1}.",
                    fix="name at least one of the new tokens, by their places.",
                )
        return int(new)


def check_crop(length: int, held: int, *, croppable: bool = True) -> None:
    """Check the length that a state of `held` tokens is cropped to.

    Raises:
        InputError: It is negative, or more than what is held; or the graph keeps a state that tokens cannot be taken out of.
    """
    if not 0 <= length <= held:
        raise InputError(f"A state of {held} tokens cannot be cropped to {length}.")
    if 0 < length < held and not croppable:
        raise InputError(
            f"A state of {held} tokens cannot be cropped to {length}: the model sums the text up in states of one size, which "
            "no token can be taken out of.",
            fix="clone() it before the tokens that may have to go, or begin a new one.",
        )


def check_join(state: State, other: object, *, same: bool) -> None:
    """Check two states before the rows of one join the other's.

    Args:
        state: Where they come to.
        other: Where they come from.
        same: Whether both are of one session.

    Raises:
        InputError: They are one, of two sessions, or one holds nothing.
    """
    if other is state or not isinstance(other, type(state)) or not same:
        raise InputError("Rows join from another state of the same session.", fix="make it with its new_state().")
    if not state.length or not other.length:
        raise InputError(
            f"States of {state.length} and {other.length} tokens cannot be joined.",
            fix="run a prompt in each of them first.",
        )


def check_drop(columns: int, held: int) -> None:
    """Check how many columns a state of `held` is to forget at its beginning.

    Raises:
        InputError: It is negative, or all of them.
    """
    if not 0 <= columns < max(held, 1):
        raise InputError(f"A state of {held} tokens cannot lose its first {columns}.", fix="keep at least one.")


def grows(spec: TensorSpec) -> bool:
    """Whether a cache tensor has an axis of tokens; others have one size, whatever the length of the text."""
    return any(isinstance(axis, str) and axis != "batch" for axis in spec.shape)


def check_held(
    values: Mapping[str, torch.Tensor],
    sizes: Mapping[str, tuple[int | str | None, int | str | None]],
    batch: int,
    length: int,
) -> None:
    """Check keys and values that a state is to hold: `(batch, heads, length, size)` each.

    Args:
        values: By the names that the state has for them.
        sizes: Heads, and size of each; no number where the graph does not say.
        batch: Rows of the state.
        length: Tokens.

    Raises:
        InputError: Other names or sizes.
    """
    if values.keys() != sizes.keys():
        raise InputError(
            f"The cache has {sorted(values)}; this model keeps {sorted(sizes)}.", fix="pass a cache of the same model."
        )
    for name, tensor in values.items():
        heads, size = sizes[name]
        wanted = (batch, heads, length, size)
        if tensor.ndim != 4 or any(isinstance(w, int) and w != n for w, n in zip(wanted, tensor.shape, strict=True)):
            raise InputError(
                f"{name} of the cache has shape {tuple(tensor.shape)}; this model keeps {wanted}.",
                fix="pass a cache of the same model, and as many rows and tokens in each layer.",
            )


def check_rows(batch: int, index: torch.Tensor | None = None) -> list[int]:
    """The rows that `index: (rows,)` of integers chooses from a state of `batch` rows; all of them when `None`.

    Raises:
        InputError: No rows, or a row that is not there.
    """
    if batch < 1:
        raise InputError(f"A state for {batch} rows cannot be made.", fix="use at least 1.")
    if index is None:
        return list(range(batch))
    chosen = [int(row) for row in index.reshape(-1).tolist()]
    if index.ndim != 1 or not chosen or min(chosen) < 0 or max(chosen) >= batch:
        raise InputError(f"Rows {chosen} cannot be taken from a state of {batch} rows.", fix=f"use 0 to {batch - 1}.")
    return chosen
