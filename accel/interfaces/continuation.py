"""Decoders whose graphs cannot take several new tokens after a past, behind the same interface as graphs that can.

`open_plan` puts these around a backend's sessions, by what the manifest says (`Component.continues`): callers give any
number of tokens to any state.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from ..artifact.manifest import Component
from .protocols import Feeds, Names, Session, TokenStep
from .session_contract import check_state, wrong_names
from .state import State

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


class _Wrapped:
    """A session around another; what is not particular to it is the other's."""

    def __init__(self, session: Any, component: Component) -> None:
        self._session, self._component = session, component

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return getattr(self._session, name)


class OneByOne(_Wrapped):
    """A decoder whose graph takes a prompt, and after it one token a call; several are given one after another."""

    def run(
        self, feeds: Feeds, *, outputs: Names | None = None, out: Feeds | None = None, state: State | None = None
    ) -> dict[str, torch.Tensor]:
        """See `accel.interfaces.protocols.Session.run`."""

        def run(part: Feeds) -> dict[str, torch.Tensor]:
            found: dict[str, torch.Tensor] = self._session.run(part, outputs=outputs, out=out, state=state)
            return found

        declared = {spec.name for spec in self._component.inputs if spec.pair is None}
        if state is None or not state.length or feeds.keys() != declared:
            return run(feeds)
        new = state.check_step(feeds, state.batch, state.length)
        return state.one_by_one(feeds, new, run) if new > 1 else run(feeds)


class Recomputed(_Wrapped):
    """A decoder whose graph keeps nothing: the state holds the tokens, and each call computes all of them again."""

    def __init__(self, session: Any, component: Component) -> None:
        # The graph's mask covers the tokens of one call, which are all tokens here.
        inputs = [replace(spec, shape=("batch", "total")) if spec.role == "mask" else spec for spec in component.inputs]
        super().__init__(session, replace(component, inputs=tuple(inputs)))

    def run(
        self, feeds: Feeds, *, outputs: Names | None = None, out: Feeds | None = None, state: State | None = None
    ) -> dict[str, torch.Tensor]:
        """See `accel.interfaces.protocols.Session.run`."""
        check_state(state, self, stateful=True, out=out)
        assert isinstance(state, TokenState)
        whole, new = state.extended(feeds)
        found = self._session.run(whole, outputs=outputs)
        state.store({name: tensor for name, tensor in whole.items() if state.growing_axis(name)})
        state.advance(new)
        return {name: tensor[:, -new:] for name, tensor in found.items()}

    def steps(self, feeds: Feeds, state: State, *, calls: int) -> TokenStep | None:
        """No shorter way."""
        return None

    def new_state(self, batch: int) -> State:
        """No tokens yet."""
        return TokenState(self, self._component, batch)


class TokenState(State):
    """The tokens of one batch of sequences: each input that has a row a token."""

    readable = False

    def growing_axis(self, name: str) -> int | None:
        """The axis of the new tokens of an input."""
        return next(
            (1 for spec in self.component.inputs if spec.name == name and spec.shape[1:2] == ("sequence",)), None
        )

    def extended(self, feeds: Feeds) -> tuple[dict[str, torch.Tensor], int]:
        """The inputs with the tokens held before the new ones, and how many are new.

        Raises:
            InputError: Names that the graph does not take, another number of rows, or a mask that does not cover all tokens.
        """
        import torch

        declared = [spec.name for spec in self.component.inputs]
        if feeds.keys() != set(declared):
            raise wrong_names(feeds, declared)
        new = self.check_step(feeds, self._batch, self._length)
        held = {name: torch.cat([tensor, feeds[name].to(tensor)], dim=1) for name, tensor in self.tensors().items()}
        return {**feeds, **held}, new


_KINDS: Mapping[str, Any] = {"one": OneByOne, "none": Recomputed}
