"""Decoders whose graphs cannot take several new tokens behind a past, behind the same interface as those that can.

`open_artifact` puts these around a backend's sessions, by what the manifest says (`Component.continues`): callers give any
number of tokens to any state.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from ..artifact.manifest import Component
from ..errors import InputError
from .description import StateDescription
from .protocols import Feeds, Names, Session, State
from .session_contract import StepCheck, check_crop, check_drop, check_join, check_rows, check_state

if TYPE_CHECKING:
    import torch


def continued(sessions: Mapping[str, Session], components: tuple[Component, ...]) -> Mapping[str, Session]:
    """The sessions of an artifact, those of decoders that need it wrapped."""
    wrapped = {
        component.name: kind(sessions[component.name], component)
        for component in components
        if (kind := _KINDS.get(component.continues)) is not None
    }
    return {**sessions, **wrapped} if wrapped else sessions


def moved_right(tensor: torch.Tensor, axis: int, length: int) -> torch.Tensor:
    """Tokens along an axis, with zeros in front so that they are `length`; the tensor itself where they are."""
    import torch

    sizes = list(tensor.shape)
    sizes[axis] = length - sizes[axis]
    return torch.cat([tensor.new_zeros(sizes), tensor], dim=axis) if sizes[axis] else tensor


class _Wrapped:
    """What is not particular to a wrapper is the session's own."""

    def __init__(self, session: Any, component: Component) -> None:
        self._session = session
        self._check_step = StepCheck(component)
        # Inputs that have a row a token, and the one that covers all tokens so far.
        self._each = [
            spec.name for spec in component.inputs if spec.shape[1:2] == ("sequence",) and spec.role != "mask"
        ]
        self._masks = [spec.name for spec in component.inputs if spec.role == "mask" and spec.pair is None]

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return getattr(self._session, name)


class OneByOne(_Wrapped):
    """A decoder whose graph takes a prompt, and behind it one token a call; several are given one after another."""

    def run(
        self, feeds: Feeds, *, outputs: Names | None = None, out: Feeds | None = None, state: State | None = None
    ) -> dict[str, torch.Tensor]:
        """See `accel.interfaces.protocols.Session.run`."""
        import torch

        run = self._session.run
        tokens = feeds.get(self._each[0])
        if state is None or not state.length or tokens is None or tokens.ndim < 2 or tokens.shape[1] < 2:
            found: dict[str, torch.Tensor] = run(feeds, outputs=outputs, out=out, state=state)
            return found
        self._check_step(feeds, state.batch, state.length)
        start, steps = state.length, []
        for i in range(tokens.shape[1]):
            step = dict(feeds)
            step.update({name: feeds[name][:, i : i + 1] for name in self._each})
            step.update({name: feeds[name][:, : start + i + 1] for name in self._masks})
            steps.append(run(step, outputs=outputs, out=out, state=state))
        return {name: torch.cat([step[name] for step in steps], dim=1) for name in steps[0]}


class Recomputed(_Wrapped):
    """A decoder whose graph keeps nothing: the state holds the tokens, and each call computes all of them again."""

    def run(
        self, feeds: Feeds, *, outputs: Names | None = None, out: Feeds | None = None, state: State | None = None
    ) -> dict[str, torch.Tensor]:
        """See `accel.interfaces.protocols.Session.run`."""
        check_state(state, TokenState, stateful=True, out=out)
        assert isinstance(state, TokenState)
        whole, new = state.extended(feeds)
        found = self._session.run(whole, outputs=outputs)
        state.keep(whole)
        return {name: tensor[:, -new:] for name, tensor in found.items()}

    def new_state(self, batch: int) -> State:
        """No tokens yet."""
        return TokenState(self._each, self._masks, batch)


class TokenState(StateDescription):
    """The tokens of one batch of sequences.

    Args:
        names: Inputs that have a row a token.
        masks: Inputs that cover the tokens held and the new ones.
        batch: Rows.
    """

    def __init__(self, names: Sequence[str], masks: Sequence[str], batch: int) -> None:
        check_rows(batch)
        super().__init__(batch)
        self._names, self._masks = names, masks
        self._held: dict[str, torch.Tensor] = {}

    @property
    def nbytes(self) -> int:
        """Memory of the tokens."""
        return sum(tensor.nbytes for tensor in self._held.values())

    def extended(self, feeds: Feeds) -> tuple[dict[str, torch.Tensor], int]:
        """The inputs with the tokens held before the new ones, and how many are new.

        Raises:
            InputError: Another number of rows, or a mask that does not cover all of them.
        """
        import torch

        shapes = {name: tuple(feeds[name].shape) for name in (*self._names, *self._masks) if name in feeds}
        rows = {shape[:1] for shape in shapes.values()}
        new = {shapes[name][1:2] for name in self._names if name in shapes}
        (count,) = next(iter(new), ()) or (0,)
        total = {shapes[name][1:2] for name in self._masks if name in shapes} or {(self._length + count,)}
        if rows != {(self._batch,)} or new != {(count,)} or not count or total != {(self._length + count,)}:
            raise InputError(
                f"The inputs have shapes {shapes}; the state holds {self._length} tokens of {self._batch} rows.",
                fix="pass new tokens for each of its rows, and a mask of the cached tokens and the new ones.",
            )
        whole = dict(feeds)
        for name, held in self._held.items():
            whole[name] = torch.cat([held, feeds[name].to(held)], dim=1)
        return whole, count

    def keep(self, whole: Feeds) -> None:
        """Hold these tokens."""
        self._held = {name: whole[name] for name in self._names if name in whole}
        self._length = int(self._held[self._names[0]].shape[1])

    def reorder(self, index: torch.Tensor) -> None:
        """Row `i` becomes what row `index[i]` was (`index: (rows,)` of integers)."""
        chosen = check_rows(self._batch, index)
        self._held = {name: tensor[chosen] for name, tensor in self._held.items()}
        self._batch = len(chosen)

    def crop(self, length: int) -> None:
        """Forget all tokens from `length` on."""
        check_crop(length, self._length)
        self._held = {name: tensor[:, :length] for name, tensor in self._held.items()}
        self._length = length

    def join(self, other: State) -> None:
        """The rows of another state behind these, the shorter ones moved to the right."""
        import torch

        check_join(self, other, same=getattr(other, "_names", None) == self._names)
        assert isinstance(other, TokenState)
        length = max(self._length, other._length)

        self._held = {
            name: torch.cat([moved_right(tensor, 1, length), moved_right(other._held[name], 1, length)])
            for name, tensor in self._held.items()
        }
        self._batch, self._length = self._batch + other._batch, length

    def drop(self, columns: int) -> None:
        """Forget the first columns of every row, which all masks hid."""
        check_drop(columns, self._length)
        self._held = {name: tensor[:, columns:] for name, tensor in self._held.items()}
        self._length -= columns

    def clone(self) -> TokenState:
        """An independent copy."""
        copy = TokenState(self._names, self._masks, self._batch)
        copy._held, copy._length = dict(self._held), self._length
        return copy


_KINDS: Mapping[str, Any] = {"one": OneByOne, "none": Recomputed}
