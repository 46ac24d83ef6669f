"""Wrappers of sessions for decoder graphs that cannot process several new tokens after cached tokens.

`open_plan` wraps the sessions of a backend if the manifest requires this (`Component.continues`). With the wrapper, a caller can pass
any number of new tokens with any state.
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
    """Return the sessions of an artifact by component name. Sessions of decoders that need a wrapper are wrapped."""
    wrapped = {
        component.name: kind(sessions[component.name], component)
        for component in components
        if (kind := _KINDS.get(component.continues)) is not None
    }
    return {**sessions, **wrapped} if wrapped else sessions


class _SessionWrapper:
    """Wrapper of a session. Attributes that the wrapper does not define are read from the session."""

    def __init__(self, session: Any, component: Component) -> None:
        self._session, self._component = session, component

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return getattr(self._session, name)


class TokenByTokenDecoder(_SessionWrapper):
    """Session of a decoder whose graph accepts only one token per call after the prompt. Several tokens are run one by one."""

    def run(
        self, feeds: Feeds, *, outputs: Names | None = None, out: Feeds | None = None, state: State | None = None
    ) -> dict[str, torch.Tensor]:
        """Compute the outputs, as `accel.interfaces.protocols.Session.run`."""

        def run(part: Feeds) -> dict[str, torch.Tensor]:
            results: dict[str, torch.Tensor] = self._session.run(part, outputs=outputs, out=out, state=state)
            return results

        declared = {spec.name for spec in self._component.inputs if spec.pair is None}
        if state is None or not state.length or feeds.keys() != declared:
            return run(feeds)
        new = state.check_step(feeds, state.batch, state.length)
        return state.one_by_one(feeds, new, run) if new > 1 else run(feeds)


class DecoderWithoutCache(_SessionWrapper):
    """Session of a decoder whose graph has no KV cache. The state contains all tokens, and each call runs all tokens again."""

    def __init__(self, session: Any, component: Component) -> None:
        # The graph's mask has one column for each token of a call. A call of this wrapper runs all tokens, so the mask covers them all.
        inputs = [replace(spec, shape=("batch", "total")) if spec.role == "mask" else spec for spec in component.inputs]
        super().__init__(session, replace(component, inputs=tuple(inputs)))

    def run(
        self, feeds: Feeds, *, outputs: Names | None = None, out: Feeds | None = None, state: State | None = None
    ) -> dict[str, torch.Tensor]:
        """Compute the outputs, as `accel.interfaces.protocols.Session.run`."""
        if state is None:
            # Comparisons with the PyTorch model pass the complete text in one call without a state.
            results: dict[str, torch.Tensor] = self._session.run(feeds, outputs=outputs, out=out)
            return results
        check_state(state, self, stateful=True, out=out)
        assert isinstance(state, UncachedDecoderState)
        all_feeds, new = state.extended(feeds)
        results = self._session.run(all_feeds, outputs=outputs)
        state.store({name: tensor for name, tensor in all_feeds.items() if state.growing_axis(name)})
        state.advance(new)
        return {name: tensor[:, -new:] for name, tensor in results.items()}

    def steps(self, feeds: Feeds, state: State, *, calls: int) -> TokenStep | None:
        """Return `None`, because `run` is the fastest way for this graph."""
        return None

    def new_state(self, batch: int) -> State:
        """Return a state without tokens."""
        return UncachedDecoderState(self, self._component, batch)


class UncachedDecoderState(State):
    """State of a decoder without a KV cache. It contains the inputs that have one column for each token, such as `input_ids`."""

    readable = False

    def growing_axis(self, name: str) -> int | None:
        """Return the token axis of an input, or `None` if the input has no token axis."""
        return next(
            (1 for spec in self.component.inputs if spec.name == name and spec.shape[1:2] == ("sequence",)), None
        )

    def extended(self, feeds: Feeds) -> tuple[dict[str, torch.Tensor], int]:
        """Return the inputs with the earlier tokens before the new tokens, and the number of new tokens.

        Raises:
            InputError: The names differ from the names of the graph's inputs, the number of rows differs from the state's number of
                rows, or the mask does not have a column for each token.
        """
        import torch

        declared = [spec.name for spec in self.component.inputs]
        if feeds.keys() != set(declared):
            raise wrong_names(feeds, declared)
        new = self.check_step(feeds, self._batch, self._length)
        joined = {name: torch.cat([tensor, feeds[name].to(tensor)], dim=1) for name, tensor in self.tensors().items()}
        return {**feeds, **joined}, new


_KINDS: Mapping[str, Any] = {"one": TokenByTokenDecoder, "none": DecoderWithoutCache}
