"""A decoder's state between calls: named tensors for a batch of rows. Most tensors grow by one column for each token.

`State` counts tokens, checks inputs and computes; a runtime's subclass stores the tensors. If new tensors are fast enough, the
subclass only overrides `tensors` and `store`. A runtime with in-place buffers, or with row selection at the next call, also
overrides `select_rows`, `keep_columns` and `append_rows`.
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
    """Return the public name of a state's tensor: `0.key` or `0.value` for keys or values of a layer, else its own name."""
    match = _KEYS_OR_VALUES.search(name)
    return f"{match[1]}.{match[2]}" if match else name


def growing_axes(component: Component) -> dict[str, int]:
    """Return the token axis of each cache input that has one. Other cache inputs have a fixed size for any text length."""
    presents = {spec.name: spec for spec in component.outputs}
    return {
        spec.name: _growing_axis(spec, presents[spec.pair])
        for spec in component.inputs
        if spec.pair is not None and any(isinstance(axis, str) and axis != "batch" for axis in spec.shape)
    }


def _growing_axis(past: TensorSpec, present: TensorSpec) -> int:
    """Return the axis in which past and present differ. Buffers with room for more tokens do not differ; return their third axis."""
    pairs = enumerate(zip(past.shape, present.shape, strict=True))
    return next((axis for axis, (before, after) in pairs if before != after), 2)


def moved_right(tensor: torch.Tensor, axis: int, length: int) -> torch.Tensor:
    """Pad a tensor with zeros at the start of an axis up to `length`. Return the tensor itself if it has that length."""
    import torch

    sizes = list(tensor.shape)
    sizes[axis] = length - sizes[axis]
    return torch.cat([tensor.new_zeros(sizes), tensor], dim=axis) if sizes[axis] else tensor


class StateOwner(Protocol):
    """The session that creates and owns a state."""

    def new_state(self, batch: int) -> State:
        """Return an empty state for `batch` rows."""


class State:
    """A session's state between calls: a KV cache, recurrent states, or the tokens themselves. Used by one thread at a time.

    The last column contains the last token of each row. A row that joined with fewer tokens begins with empty columns, which the
    masks of later calls have to hide.

    Args:
        session: The session that created the state. Only rows of states of the same session can join.
        component: The decoder's graph.
        batch: Number of rows.
        waits: Whether to check the requested logits even if their indices are on another device. This waits for the device.

    Attributes:
        joinable: Whether rows can be added and leading columns removed (continuous batching), by `join` and `drop`.
        readable: Whether the tensors can be read and loaded, by `read` and `load`.
    """

    joinable: bool = True
    readable: bool = True

    def __init__(self, session: StateOwner, component: Component, batch: int, *, waits: bool = False) -> None:
        if batch < 1:
            raise InputError(
                f"A state (KV cache) cannot have {batch} rows.", fix="pass a batch size of at least 1 to new_state()."
            )
        self.session, self.component = session, component
        # GPU kernels do not check the indices of the requested logits.
        self.check_step = StepCheck(component, waits=waits)
        self._batch, self._length = batch, 0
        self._axes = growing_axes(component)
        self._tensors: dict[str, torch.Tensor] = {}

    @property
    def batch(self) -> int:
        """Number of rows."""
        return self._batch

    @property
    def length(self) -> int:
        """Number of tokens of each row."""
        return self._length

    def advance(self, new: int) -> None:
        """Add the number of tokens that the runtime has stored to the length."""
        self._length += new

    # Storage, which a runtime may implement differently

    def growing_axis(self, name: str) -> int | None:
        """Return the token axis of a tensor, or `None` for a tensor of fixed size."""
        return self._axes.get(name)

    def tensors(self) -> dict[str, torch.Tensor]:
        """Return the tensors, with `length` tokens along their token axes. They may share memory with the runtime."""
        return dict(self._tensors)

    def store(self, tensors: Mapping[str, torch.Tensor]) -> None:
        """Replace all tensors by the given ones."""
        self._tensors = dict(tensors)

    def copy_from(self, other: Self) -> None:
        """Replace all tensors by copies of another state's tensors."""
        self.store({name: tensor.clone() for name, tensor in other.tensors().items()})

    def clear(self) -> None:
        """Remove all tensors."""
        self._tensors = {}

    def select_rows(self, rows: Sequence[int]) -> None:
        """Replace row `i` by the previous row `rows[i]`."""
        self.store({name: tensor[list(rows)] for name, tensor in self.tensors().items()})

    def keep_columns(self, start: int, stop: int) -> None:
        """Remove all tokens outside the columns from `start` to `stop`."""
        tensors = self.tensors()
        for name in tensors:
            if (axis := self.growing_axis(name)) is not None:
                tensors[name] = tensors[name].narrow(axis, start, stop - start)
        self.store(tensors)

    def append_rows(self, other: Self, length: int) -> None:
        """Append the rows of another state. Rows of both are padded on the left to `length` columns."""
        import torch

        theirs = other.tensors()
        joined = {}
        for name, tensor in self.tensors().items():
            axis, parts = self.growing_axis(name), [tensor, theirs[name]]
            joined[name] = torch.cat(parts if axis is None else [moved_right(part, axis, length) for part in parts])
        self.store(joined)

    # Operations for callers

    def reorder(self, index: torch.Tensor) -> None:
        """Replace row `i` by the previous row `index[i]` (`index: (rows,)`, integers). The number of rows may change.

        Raises:
            InputError: `index` is empty, or contains a row that does not exist.
        """
        rows = [int(row) for row in index.reshape(-1).tolist()]
        if index.ndim != 1 or not rows or min(rows) < 0 or max(rows) >= self._batch:
            raise InputError(
                f"The KV cache cannot be reordered with the row indices {rows}, because it has {self._batch} rows.",
                fix=f"pass row indices from 0 to {self._batch - 1}.",
            )
        if rows != list(range(self._batch)):
            self.select_rows(rows)
            self._batch = len(rows)

    def crop(self, length: int) -> None:
        """Remove all tokens from position `length` on.

        Raises:
            InputError: `length` is negative or larger than the state's length, or no tokens can be removed from the state.
        """
        if not 0 <= length <= self._length:
            raise InputError(
                f"A KV cache of {self._length} tokens cannot be cropped to {length} tokens.",
                fix=f"pass a length from 0 to {self._length}.",
            )
        if 0 < length < self._length and not self.component.croppable:
            raise InputError(
                f"The state of {self._length} tokens cannot be cropped to {length} tokens. The model has recurrent states of a fixed size, "
                "and single tokens cannot be removed from a recurrent state.",
                fix="call clone() before you add tokens that you may have to remove, or start again with a new state.",
            )
        if not length:
            self.clear()
        elif length < self._length:
            self.keep_columns(0, length)
        self._length = length

    def join(self, other: State) -> None:
        """Append the rows of another state of the same session, which must not be used afterwards. Both states contain tokens.

        Rows of the shorter state get empty columns at the start.

        Raises:
            InputError: It is this state or a state of another session, one of them is empty, or the runtime's states cannot join.
        """
        if not self.joinable:
            raise self._not_joinable()
        if other is self or not isinstance(other, type(self)) or other.session is not self.session:
            raise InputError(
                "The other state cannot be joined: it is this state itself, or it was created by another session.",
                fix="create the other state with new_state() of the same session.",
            )
        if not self._length or not other.length:
            raise InputError(
                f"A state of {self._length} tokens and a state of {other.length} tokens cannot be joined, because one of them is empty.",
                fix="run a prompt with each of the two states first.",
            )
        length = max(self._length, other.length)
        self.append_rows(other, length)
        self._batch, self._length = self._batch + other.batch, length

    def drop(self, columns: int) -> None:
        """Remove the first columns of every row. All masks must have hidden them.

        Raises:
            InputError: A negative number, no column would remain, or the runtime's states cannot drop columns.
        """
        if not self.joinable:
            raise self._not_joinable()
        if not 0 <= columns < max(self._length, 1):
            raise InputError(
                f"The first {columns} columns cannot be removed from a state of {self._length} tokens.",
                fix="pass a number that is at least 0 and smaller than the number of tokens.",
            )
        if columns:
            self.keep_columns(columns, self._length)
            self._length -= columns

    @staticmethod
    def _not_joinable() -> InputError:
        return InputError(
            "The runtime of this session cannot add rows to a state, or remove columns from a state.",
            fix="create a new state with all rows, and run all tokens again.",
        )

    def clone(self) -> State:
        """Return an independent copy."""
        copy = self.session.new_state(self._batch)
        copy.advance(self._length)
        if self._length:
            copy.copy_from(self)
        return copy

    def read(self) -> dict[str, torch.Tensor]:
        """Return copies of the tensors by `kept_name`. Keys and values are `(batch, heads, tokens, size)`.

        Raises:
            InputError: The runtime stores the tensors in its own format.
        """
        if not self.readable:
            raise InputError(
                "The keys and values of the KV cache cannot be read, because this backend stores them in its own format.",
                fix="load the model with another backend=..., such as backend='cpu'.",
            )
        return {kept_name(name): tensor.clone() for name, tensor in self.tensors().items()} if self._length else {}

    def load(self, values: Mapping[str, torch.Tensor], length: int) -> None:
        """Replace all tensors by the given ones, in the form that `read` returns, with `length` tokens.

        Raises:
            InputError: Names or shapes differ from the graph's, the graph has states other than keys and values, or the runtime
                stores the tensors in its own format.
        """
        if not self.readable:
            raise InputError(
                "This backend cannot load keys and values that another backend or PyTorch computed.",
                fix="pass the complete text without past_key_values, or load the model with another backend=..., such as backend='cpu'.",
            )
        names = {kept_name(name): name for name in self.loaded_names()}
        specs = {spec.name: spec for spec in self.component.inputs}
        if values.keys() != names.keys():
            raise InputError(
                f"The KV cache has the tensors {sorted(values)}, but the model needs {sorted(names)}.",
                fix="pass a KV cache of the same model.",
            )
        for name, tensor in values.items():
            spec = specs.get(names[name])
            expected = (self._batch, spec.shape[1] if spec else "heads", length, spec.shape[3] if spec else "size")
            if tensor.ndim != 4 or any(
                isinstance(axis, int) and axis != n for axis, n in zip(expected, tensor.shape, strict=True)
            ):
                raise InputError(
                    f"The tensor {name!r} of the KV cache has the shape {tuple(tensor.shape)}, but the model needs the shape {expected}.",
                    fix="pass a KV cache of the same model, with the same number of rows and tokens in all layers.",
                )
        self.clear()
        self._length = length
        self.store({names[name]: tensor.detach().clone() for name, tensor in values.items()})

    def loaded_names(self) -> Sequence[str]:
        """Return the names of the tensors that `load` needs.

        Raises:
            InputError: The state contains tensors other than keys and values.
        """
        caches = [spec.name for spec in self.component.inputs if spec.pair is not None]
        if len(caches) != len(self._axes):
            raise InputError(
                "The model has states of a fixed size in addition to keys and values, and accel cannot load them from another cache.",
                fix="pass the complete text without past_key_values.",
            )
        return caches

    def one_by_one(self, feeds: Feeds, new: int, run: Callable[[Feeds], Results]) -> Results:
        """Run several new tokens in calls of one token each, for graphs that take one token at a time after a past.

        Args:
            feeds: Checked inputs of the graph with all new tokens.
            new: Number of new tokens.
            run: Function that runs one call and stores its token.
        """
        import torch

        start, check = self._length, self.check_step
        steps = [run(check.single(feeds, start, place)) for place in range(new)]
        whole = {name: torch.cat([step[name] for step in steps], dim=1) for name in steps[0]}
        if check.kept is None:
            return whole
        return {name: tensor.index_select(1, feeds[check.kept]) for name, tensor in whole.items()}
