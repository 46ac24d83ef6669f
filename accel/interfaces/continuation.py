"""Wrappers of decoder sessions whose graphs cannot take several new tokens after a past.

`open_plan` wraps a backend's sessions if the manifest requires it (`Component.continues`). Callers can then pass any number of
tokens to any state.
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
    """Return the sessions of an artifact. Sessions of decoders that need it are wrapped."""
    wrapped = {
        component.name: kind(sessions[component.name], component)
        for component in components
        if (kind := _KINDS.get(component.continues)) is not None
    }
    return {**sessions, **wrapped} if wrapped else sessions


class _SessionWrapper:
    """A wrapper of a session. It forwards attributes that it does not define to the session."""

    def __init__(self, session: Any, component: Component) -> None:
        self._session, self._component = session, component

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return getattr(self._session, name)


class TokenByTokenDecoder(_SessionWrapper):
    """A decoder whose graph takes one token per call after the prompt. Several tokens are run one after another."""

    def run(
        self, feeds: Feeds, *, outputs: Names | None = None, out: Feeds | None = None, state: State | None = None
    ) -> dict[str, torch.Tensor]:
        """Compute the outputs, as `accel.interfaces.protocols.Session.run`."""

        def run(part: Feeds) -> dict[str, torch.Tensor]:
            found: dict[str, torch.Tensor] = self._session.run(part, outputs=outputs, out=out, state=state)
            return found

        declared = {spec.name for spec in self._component.inputs if spec.pair is None}
        if state is None or not state.length or feeds.keys() != declared:
            return run(feeds)
        new = state.check_step(feeds, state.batch, state.length)
        return state.one_by_one(feeds, new, run) if new > 1 else run(feeds)


class DecoderWithoutCache(_SessionWrapper):
    """A decoder whose graph has no cache. The state contains the tokens, and each call computes all of them again."""

    def __init__(self, session: Any, component: Component) -> None:
        # The graph's mask covers the tokens of one call. Here, one call has all tokens of the text.
        inputs = [replace(spec, shape=("batch", "total")) if spec.role == "mask" else spec for spec in component.inputs]
        super().__init__(session, replace(component, inputs=tuple(inputs)))

    def run(
        self, feeds: Feeds, *, outputs: Names | None = None, out: Feeds | None = None, state: State | None = None
    ) -> dict[str, torch.Tensor]:
        """Compute the outputs, as `accel.interfaces.protocols.Session.run`."""
        if state is None:
            # Without a state, one call has the whole text. Comparisons with the PyTorch model do this.
            results: dict[str, torch.Tensor] = self._session.run(feeds, outputs=outputs, out=out)
            return results
        check_state(state, self, stateful=True, out=out)
        assert isinstance(state, TokenState)
        whole, new = state.extended(feeds)
        found = self._session.run(whole, outputs=outputs)
        state.store({name: tensor for name, tensor in whole.items() if state.growing_axis(name)})
        state.advance(new)
        return {name: tensor[:, -new:] for name, tensor in found.items()}

    def steps(self, feeds: Feeds, state: State, *, calls: int) -> TokenStep | None:
        """Return `None`, because there is no faster way than `run`."""
        return None

    def new_state(self, batch: int) -> State:
        """Return a state without tokens."""
        return TokenState(self, self._component, batch)


class TokenState(State):
    """A state that contains the tokens of a batch: each input that has a column for each token."""

    readable = False

    def growing_axis(self, name: str) -> int | None:
        """Return the axis of the new tokens in an input, or `None` if it has none."""
        return next(
            (1 for spec in self.component.inputs if spec.name == name and spec.shape[1:2] == ("sequence",)), None
        )

    def extended(self, feeds: Feeds) -> tuple[dict[str, torch.Tensor], int]:
        """Return the inputs with the earlier tokens before the new ones, and the number of new tokens.

        Raises:
            InputError: The names differ from the graph's inputs, the number of rows differs, or the mask does not cover all tokens.
        """
        import torch

        declared = [spec.name for spec in self.component.inputs]
        if feeds.keys() != set(declared):
            raise wrong_names(feeds, declared)
        new = self.check_step(feeds, self._batch, self._length)
        held = {name: torch.cat([tensor, feeds[name].to(tensor)], dim=1) for name, tensor in self.tensors().items()}
        return {**feeds, **held}, new


_KINDS: Mapping[str, Any] = {"one": TokenByTokenDecoder, "none": DecoderWithoutCache}
