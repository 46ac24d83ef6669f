"""A decoder's state between calls: named tensors of a batch of rows, most of which grow by a column for each token.

`State` counts, checks and computes; a runtime's subclass stores. Where new tensors are good enough, `tensors` and `store` are all that it
says; where the runtime can do better (buffers written in place, rows chosen at the next call), it says how by `select_rows`,
`keep_columns` and `append_rows`.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Protocol, Self

from ..artifact.manifest import Component
from ..artifact.tensors import TensorSpec
from ..errors import InputError
from .session_contract import StepCheck

if TYPE_CHECKING:
    import torch

    Feeds = Mapping[str, torch.Tensor]
    Results = dict[str, torch.Tensor]

_KEYS_OR_VALUES = re.compile(r"(\d+)[._](key|value)\Z")


def kept_name(name: str) -> str:
    """The public name of a state's tensor: `0.key` or `0.value` for a layer's keys or values, or the tensor's own name."""
    match = _KEYS_OR_VALUES.search(name)
    return f"{match[1]}.{match[2]}" if match else name


def growing_axes(component: Component) -> dict[str, int]:
    """The axis of tokens of each cache input that has one. The other cache inputs have one size, whatever the length of the text."""
    presents = {spec.name: spec for spec in component.outputs}
    return {
        spec.name: _growing_axis(spec, presents[spec.pair])
        for spec in component.inputs
        if spec.pair is not None and any(isinstance(axis, str) and axis != "batch" for axis in spec.shape)
    }


def _growing_axis(past: TensorSpec, present: TensorSpec) -> int:
    """Where past and present differ; the third axis of buffers with room for more tokens, where they do not."""
    pairs = enumerate(zip(past.shape, present.shape, strict=True))
    return next((axis for axis, (before, after) in pairs if before != after), 2)


def moved_right(tensor: torch.Tensor, axis: int, length: int) -> torch.Tensor:
    """Tokens along an axis, with zeros in front so that they are `length`; the tensor itself where they are."""
    import torch

    sizes = list(tensor.shape)
    sizes[axis] = length - sizes[axis]
    return torch.cat([tensor.new_zeros(sizes), tensor], dim=axis) if sizes[axis] else tensor


class StateOwner(Protocol):
    """The session that a state belongs to."""

    def new_state(self, batch: int) -> State:
        """An empty state for `batch` rows."""


class State:
    """What a session keeps between calls: a KV cache, recurrent states, or the tokens themselves. Used by one thread at a time.

    The last token of each row is in the last column. A row that joined with fewer tokens begins with columns that hold none: the masks of
    later calls have to hide them.

    Args:
        session: Made it; rows join from states of the same session.
        component: The decoder's graph.
        batch: Rows.
        waits: Also check which logits are asked for where that tensor is on a device, which waits for it.

    Attributes:
        joinable: Whether rows can come and go while others stay (continuous batching): `join` and `drop` work.
        readable: Whether the tensors can be read and loaded: `read` and `load` work.
    """

    joinable: bool = True
    readable: bool = True

    def __init__(self, session: StateOwner, component: Component, batch: int, *, waits: bool = False) -> None:
        if batch < 1:
            raise InputError(f"A state for {batch} rows cannot be made.", fix="use at least 1.")
        self.session, self.component = session, component
        # A GPU's kernels do not check the places whose logits are asked for.
        self.check_step = StepCheck(component, waits=waits)
        self._batch, self._length = batch, 0
        self._axes = growing_axes(component)
        self._tensors: dict[str, torch.Tensor] = {}

    @property
    def batch(self) -> int:
        """Rows held."""
        return self._batch

    @property
    def length(self) -> int:
        """Tokens held."""
        return self._length

    def advance(self, new: int) -> None:
        """Count tokens that the runtime has stored."""
        self._length += new

    # Storage, which a runtime may have in another form

    def growing_axis(self, name: str) -> int | None:
        """The axis of tokens of a tensor; `None` for a tensor of one size."""
        return self._axes.get(name)

    def tensors(self) -> dict[str, torch.Tensor]:
        """The tensors held, with `length` tokens along their growing axes; may share memory with the runtime."""
        return dict(self._tensors)

    def store(self, tensors: Mapping[str, torch.Tensor]) -> None:
        """Hold these tensors, in the place of all."""
        self._tensors = dict(tensors)

    def copy_from(self, other: Self) -> None:
        """Hold copies of the tensors of another state."""
        self.store({name: tensor.clone() for name, tensor in other.tensors().items()})

    def clear(self) -> None:
        """Hold nothing."""
        self._tensors = {}

    def select_rows(self, rows: Sequence[int]) -> None:
        """Let row `i` become what row `rows[i]` was."""
        self.store({name: tensor[list(rows)] for name, tensor in self.tensors().items()})

    def keep_columns(self, start: int, stop: int) -> None:
        """Forget all tokens but those of the columns from `start` to `stop`."""
        tensors = self.tensors()
        for name in tensors:
            if (axis := self.growing_axis(name)) is not None:
                tensors[name] = tensors[name].narrow(axis, start, stop - start)
        self.store(tensors)

    def append_rows(self, other: Self, length: int) -> None:
        """Put the rows of another state after these, both moved right to `length` columns."""
        import torch

        theirs = other.tensors()
        joined = {}
        for name, tensor in self.tensors().items():
            axis, parts = self.growing_axis(name), [tensor, theirs[name]]
            joined[name] = torch.cat(parts if axis is None else [moved_right(part, axis, length) for part in parts])
        self.store(joined)

    # What callers ask for

    def reorder(self, index: torch.Tensor) -> None:
        """Let row `i` become what row `index[i]` was (`index: (rows,)` of integers); fewer or more rows than before are fine.

        Raises:
            InputError: No rows, or a row that is not there.
        """
        rows = [int(row) for row in index.reshape(-1).tolist()]
        if index.ndim != 1 or not rows or min(rows) < 0 or max(rows) >= self._batch:
            raise InputError(
                f"Rows {rows} cannot be taken from a state of {self._batch} rows.", fix=f"use 0 to {self._batch - 1}."
            )
        if rows != list(range(self._batch)):
            self.select_rows(rows)
            self._batch = len(rows)

    def crop(self, length: int) -> None:
        """Forget all tokens from `length` on.

        Raises:
            InputError: A negative length, more than is held, or a graph whose state no token can be taken out of.
        """
        if not 0 <= length <= self._length:
            raise InputError(f"A state of {self._length} tokens cannot be cropped to {length}.")
        if 0 < length < self._length and not self.component.croppable:
            raise InputError(
                f"A state of {self._length} tokens cannot be cropped to {length}: the model sums the text up in states of one size, "
                "which no token can be taken out of.",
                fix="clone() it before the tokens that may have to go, or begin a new one.",
            )
        if not length:
            self.clear()
        elif length < self._length:
            self.keep_columns(0, length)
        self._length = length

    def join(self, other: State) -> None:
        """Put the rows of another state of the same session after these; that one is not used any more. Both hold tokens. The rows of
        the state with fewer columns get some in front.

        Raises:
            InputError: It is this state, a state of another session, one of the two holds nothing, or the runtime's states cannot join.
        """
        if not self.joinable:
            raise self._not_joinable()
        if other is self or not isinstance(other, type(self)) or other.session is not self.session:
            raise InputError("Rows join from another state of the same session.", fix="make it with its new_state().")
        if not self._length or not other.length:
            raise InputError(
                f"States of {self._length} and {other.length} tokens cannot be joined.",
                fix="run a prompt in each of them first.",
            )
        length = max(self._length, other.length)
        self.append_rows(other, length)
        self._batch, self._length = self._batch + other.batch, length

    def drop(self, columns: int) -> None:
        """Forget the first columns of every row, which all masks hid.

        Raises:
            InputError: A negative number, no column would be left, or the runtime's states cannot.
        """
        if not self.joinable:
            raise self._not_joinable()
        if not 0 <= columns < max(self._length, 1):
            raise InputError(
                f"A state of {self._length} tokens cannot lose its first {columns}.", fix="keep at least one."
            )
        if columns:
            self.keep_columns(columns, self._length)
            self._length -= columns

    @staticmethod
    def _not_joinable() -> InputError:
        return InputError(
            "Rows cannot join or leave the states of this session.", fix="begin a new state with all rows."
        )

    def clone(self) -> State:
        """An independent copy."""
        copy = self.session.new_state(self._batch)
        copy.advance(self._length)
        if self._length:
            copy.copy_from(self)
        return copy

    def read(self) -> dict[str, torch.Tensor]:
        """Copies of the tensors by `kept_name`: keys and values are `(batch, heads, tokens, size)`.

        Raises:
            InputError: This runtime keeps them in a form of its own.
        """
        if not self.readable:
            raise InputError(
                "The keys and values of this backend are in a form of its own.",
                fix="read them with another backend=..., such as 'cpu'.",
            )
        return {kept_name(name): tensor.clone() for name, tensor in self.tensors().items()} if self._length else {}

    def load(self, values: Mapping[str, torch.Tensor], length: int) -> None:
        """Hold these tensors, as `read` returns them, for `length` tokens.

        Raises:
            InputError: Other names or sizes than the graph has, a graph that keeps more than keys and values, or a runtime that keeps
                them in a form of its own.
        """
        if not self.readable:
            raise InputError(
                "This backend takes no keys and values that were computed elsewhere.",
                fix="start with the whole text, or load the model with another backend=..., such as 'cpu'.",
            )
        names = {kept_name(name): name for name in self.loaded_names()}
        specs = {spec.name: spec for spec in self.component.inputs}
        if values.keys() != names.keys():
            raise InputError(
                f"The cache has {sorted(values)}; this model keeps {sorted(names)}.",
                fix="pass a cache of the same model.",
            )
        for name, tensor in values.items():
            spec = specs.get(names[name])
            wanted = (self._batch, spec.shape[1] if spec else "heads", length, spec.shape[3] if spec else "size")
            if tensor.ndim != 4 or any(
                isinstance(w, int) and w != n for w, n in zip(wanted, tensor.shape, strict=True)
            ):
                raise InputError(
                    f"{name} of the cache has shape {tuple(tensor.shape)}; this model keeps {wanted}.",
                    fix="pass a cache of the same model, and as many rows and tokens in each layer.",
                )
        self.clear()
        self._length = length
        self.store({names[name]: tensor.detach().clone() for name, tensor in values.items()})

    def loaded_names(self) -> Sequence[str]:
        """The tensors that `load` fills.

        Raises:
            InputError: Some are not keys or values.
        """
        caches = [spec.name for spec in self.component.inputs if spec.pair is not None]
        if len(caches) != len(self._axes):
            raise InputError(
                "The model keeps states of one size, which cannot be filled from elsewhere.",
                fix="give it the whole text.",
            )
        return caches

    def one_by_one(self, feeds: Feeds, new: int, run: Callable[[Feeds], Results]) -> Results:
        """Run several new tokens as calls of one token each, for graphs that take one at a time after a past.

        Args:
            feeds: The graph's inputs, checked.
            new: How many tokens are new.
            run: One call, which stores its token.
        """
        import torch

        start, check = self._length, self.check_step
        steps = [run(check.single(feeds, start, place)) for place in range(new)]
        whole = {name: torch.cat([step[name] for step in steps], dim=1) for name in steps[0]}
        if check.kept is None:
            return whole
        return {name: tensor.index_select(1, feeds[check.kept]) for name, tensor in whole.items()}
