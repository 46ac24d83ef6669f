"""State of a decoder between calls, such as a KV cache: named tensors for a batch of rows.

Most tensors grow by one column for each token. `State` counts tokens, checks inputs and implements operations such as `crop`. A
subclass for a runtime stores the tensors. If the subclass may create new tensors in each operation, it overrides only `tensors` and
`store`. A subclass that changes tensors in place, or that selects rows at the next call, also overrides `select_rows`,
`keep_columns` and `append_rows`.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Protocol, Self

from ..artifact.manifest import Component
from ..artifact.tensor_specs import TensorSpec
from ..errors import InputError
from .session_contract import StepCheck

if TYPE_CHECKING:
    import torch

    Feeds = Mapping[str, torch.Tensor]
    Results = dict[str, torch.Tensor]

_KEYS_OR_VALUES = re.compile(r"(\d+)[._](key|value)\Z")


def kept_name(name: str) -> str:
    """Return the public name of a tensor of a state.

    The names of keys and values are `0.key` and `0.value`, with the number of the layer. Other tensors keep their names.
    """
    match = _KEYS_OR_VALUES.search(name)
    return f"{match[1]}.{match[2]}" if match else name


def growing_axes(component: Component) -> dict[str, int]:
    """Return the token axis of each cache input, by input name. Cache inputs of a fixed size have no token axis and are left out."""
    presents = {spec.name: spec for spec in component.outputs}
    return {
        spec.name: _growing_axis(spec, presents[spec.pair])
        for spec in component.inputs
        if spec.pair is not None and any(isinstance(axis, str) and axis != "batch" for axis in spec.shape)
    }


def _growing_axis(past: TensorSpec, present: TensorSpec) -> int:
    """Return the token axis of a cache tensor, which is the axis in which its input spec and its output spec differ.

    If the specs do not differ, the tensor is a buffer with room for more tokens, and the token axis is the third axis.
    """
    pairs = enumerate(zip(past.shape, present.shape, strict=True))
    return next((axis for axis, (before, after) in pairs if before != after), 2)


def moved_right(tensor: torch.Tensor, axis: int, length: int) -> torch.Tensor:
    """Pad a tensor with zeros at the start of an axis, up to the size `length`.

    If the axis already has this size, the tensor is returned without a copy.
    """
    import torch

    sizes = list(tensor.shape)
    sizes[axis] = length - sizes[axis]
    return torch.cat([tensor.new_zeros(sizes), tensor], dim=axis) if sizes[axis] else tensor


class StateOwner(Protocol):
    """The session that creates and owns a state."""

    def new_state(self, batch: int) -> State:
        """Return an empty state for `batch` rows."""


class State:
    """State of a session between calls: a KV cache, recurrent states, or the tokens of the text. Only one thread may use it at a time.

    The last column contains the last token of each row. A row with fewer tokens than other rows begins with empty columns. The masks
    of later calls must be 0 in the empty columns.

    Args:
        session: The session that created the state. Only states of the same session can be joined.
        component: The component of the decoder graph.
        batch: Number of rows.
        waits: Whether to check the indices of requested logits also if they are on a GPU. The check then waits for the GPU.

    Attributes:
        joinable: Whether `join` can add rows and `drop` can remove columns at the start. Continuous batching needs both methods.
        readable: Whether `read` can copy the tensors and `load` can replace them.
    """

    joinable: bool = True
    readable: bool = True

    def __init__(self, session: StateOwner, component: Component, batch: int, *, waits: bool = False) -> None:
        if batch < 1:
            raise InputError(
                f"A state (KV cache) cannot have {batch} rows.", fix="pass a batch size of at least 1 to new_state()."
            )
        self.session, self.component = session, component
        # StepCheck also checks the indices of the requested logits, because GPU kernels do not check indices.
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
        """Increase the length by the number of tokens that the runtime has added to the tensors."""
        self._length += new

    # A subclass for a runtime may override the following methods, which store the tensors.

    def growing_axis(self, name: str) -> int | None:
        """Return the token axis of a tensor, or `None` for a tensor of fixed size."""
        return self._axes.get(name)

    def tensors(self) -> dict[str, torch.Tensor]:
        """Return the tensors by name, with `length` tokens along their token axes. The tensors may share memory with the runtime."""
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
        """Append the rows of another state. All rows of both states are padded on the left to `length` columns."""
        import torch

        other_tensors = other.tensors()
        joined = {}
        for name, tensor in self.tensors().items():
            axis, parts = self.growing_axis(name), [tensor, other_tensors[name]]
            joined[name] = torch.cat(parts if axis is None else [moved_right(part, axis, length) for part in parts])
        self.store(joined)

    # The following methods are the public operations on a state.

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
        """Keep the first `length` tokens of each row and remove all later tokens.

        Raises:
            InputError: `length` is negative or larger than the state's length, or the state has recurrent states, from which tokens
                cannot be removed.
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
        """Append the rows of another state of the same session. The other state must not be used afterwards.

        Rows of the state with fewer tokens get empty columns at the start.

        Raises:
            InputError: The other state is this state or a state of another session, one of the two states is empty, or the runtime
                cannot join states.
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
        """Remove the first columns of every row. The columns must be empty, or masked as padding, in all rows.

        Raises:
            InputError: The number is negative, no column would remain, or the runtime cannot remove columns.
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
        """Return copies of the tensors, by the names from `kept_name`. Keys and values are `(batch, heads, tokens, size)`.

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
        """Replace all tensors by copies of `values`, which have `length` tokens and the names and shapes that `read` returns.

        Raises:
            InputError: Names or shapes do not match the graph, the graph has other cached tensors than keys and values, or the runtime
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
        """Return the names of the cache inputs for which `load` needs tensors.

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
        """Run several new tokens one by one, for graphs that accept only one new token if the cache contains tokens.

        Args:
            feeds: Checked inputs of the graph with all new tokens.
            new: Number of new tokens.
            run: Function that runs one call and adds the token of this call to the state.
        """
        import torch

        start, check = self._length, self.check_step
        steps = [run(check.single(feeds, start, place)) for place in range(new)]
        joined = {name: torch.cat([step[name] for step in steps], dim=1) for name in steps[0]}
        if check.kept is None:
            return joined
        return {name: tensor.index_select(1, feeds[check.kept]) for name, tensor in joined.items()}
