"""Checks of the inputs of a call that continues a state."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from ...errors import InputError, IntegrityError, SessionError

if TYPE_CHECKING:
    import torch

    from ...artifact.manifest import Component
    from ..protocols import Feeds
    from ..state import State


def check_state(state: State | None, session: object, *, stateful: bool, out: Mapping[str, Any] | None) -> None:
    """Check that the state of a call matches the session.

    Args:
        state: The state that the caller passed, or `None`.
        session: The session that is called.
        stateful: Whether the graph has a state.
        out: Output buffers of the call.

    Raises:
        InputError: The caller passed a state for a graph without a state, no state for a graph with a state, a state of another
            session, or output buffers together with a state.
    """
    if not stateful:
        if state is not None:
            raise InputError(
                "The argument state was passed, but this graph has no KV cache and no other state between calls.",
                fix="leave out state=....",
            )
        return
    if state is None:
        raise InputError(
            "The argument state is missing: this graph reads a KV cache.", fix="pass state=session.new_state(batch)."
        )
    if state.session is not session:
        raise InputError(
            "The state was created by another session.",
            fix="create the state with new_state() of the session that you call.",
        )
    if out:
        raise InputError(
            "The argument out cannot be combined with state: a graph with a KV cache allocates its outputs itself.",
            fix="do not pass out=....",
        )


def no_state() -> SessionError:
    """Return the error of `new_state` for a graph without a state."""
    return SessionError(
        "This graph has no KV cache and no other state between calls, so new_state() cannot create a state.",
        fix="call run(...) without state=....",
    )


class StepCheck:
    """Check of the tokens that a call adds to a state.

    Args:
        component: The decoder's graph.
        waits: Whether to check the values of the input `kept` also if the tensor is on a GPU. The check then waits for the GPU.

    Attributes:
        tokens: Name of the input with token ids or embeddings.
        mask: Name of the mask input `(batch, total)`, or `None` if the graph has none.
        kept: Name of the input that selects the new tokens whose logits are returned, or `None` if the graph has none.

    Raises:
        IntegrityError: The graph has no input with tokens.
    """

    __slots__ = ("_others", "_ranks", "_shapes", "_waits", "kept", "mask", "tokens")

    def __init__(self, component: Component, *, waits: bool = False) -> None:
        self._waits = waits
        specs = [spec for spec in component.inputs if spec.pair is None]
        self._shapes = {spec.name: spec.shape for spec in specs}
        self.tokens = next((spec.name for spec in specs if spec.shape[1:2] == ("sequence",)), "")
        if not self.tokens:
            raise IntegrityError(
                f"The decoder graph {component.name!r} has no input for token ids or embeddings.",
                fix="export the model again with `accel export MODEL OUT`.",
            )
        # In encoder-decoder models of other tools, the decoder graph may have no mask of the decoder's tokens.
        self.mask = next((spec.name for spec in specs if spec.shape[-1] == "total"), None)
        self.kept = next((spec.name for spec in specs if spec.shape == ("kept",)), None)
        self._ranks = {spec.name: spec.shape for spec in specs if spec.name in (self.tokens, self.mask, self.kept)}
        self._others = [(spec.name, spec.shape) for spec in specs if spec.name not in (self.tokens, self.kept)]

    def __call__(self, feeds: Feeds, batch: int, length: int) -> int:
        """Check the inputs of a call, and return the number of new tokens.

        Args:
            feeds: Inputs of the graph for this call, without the cache.
            batch: Number of rows of the state.
            length: Number of tokens of the state.

        Raises:
            InputError: The inputs have another number of rows than the state, the mask does not have a column for each cached and new
                token, the shapes of the inputs do not match, or an index of requested logits is not a new token.
        """
        for name, declared in self._ranks.items():
            if feeds[name].ndim != len(declared):
                raise InputError(
                    f"The input {name!r} has the shape {tuple(feeds[name].shape)}, but the model needs the shape {declared}.",
                    fix=f"pass {name} in the shape that the model needs.",
                )
        rows, new = feeds[self.tokens].shape[:2]
        if new == 0:
            raise InputError("The call contains no new tokens.", fix="pass at least one token in each row.")
        if rows != batch:
            raise InputError(
                f"The inputs have {rows} rows, but the KV cache has {batch} rows.",
                fix="pass the KV cache of an earlier call with the same batch.",
            )
        total = feeds[self.mask].shape[1] if self.mask is not None else length + new
        if total != length + new:
            raise InputError(
                f"The input {self.mask!r} has {total} columns, but the KV cache contains {length} tokens and the call adds {new} tokens.",
                fix=f"pass a mask with {length + new} columns, for the cached tokens and the new tokens.",
            )
        sizes = {"batch": rows, "sequence": new, "total": total}
        for name, declared in self._others:
            shape = feeds[name].shape
            fits = len(shape) == len(declared)
            for axis, size in zip(declared, shape, strict=False):
                if size != (sizes.setdefault(axis, size) if isinstance(axis, str) else axis):
                    fits = False
            if not fits:
                expected = tuple(sizes.get(axis, axis) if isinstance(axis, str) else axis for axis in declared)
                raise InputError(
                    f"The input {name!r} has the shape {tuple(shape)}, but this call needs the shape {expected} for its axes {declared}.",
                    fix=f"pass inputs with the same number of rows and tokens as {self.tokens}.",
                )
        if self.kept is not None and (self._waits or feeds[self.kept].is_cpu):
            indices = feeds[self.kept].tolist()
            if not indices or min(indices) < 0 or max(indices) >= new:
                raise InputError(
                    f"The input {self.kept!r} contains {f'indices from {min(indices)} to {max(indices)}' if indices else 'no indices'}, "
                    f"but the new tokens have the indices 0 to {new - 1}.",
                    fix=f"pass at least one index from 0 to {new - 1}.",
                )
        return int(new)

    def single(self, feeds: Feeds, length: int, place: int) -> dict[str, torch.Tensor]:
        """Return contiguous inputs for a call with only one token, selected from several new tokens.

        Args:
            feeds: Inputs with all new tokens.
            length: Number of tokens in the state before the first new token.
            place: Index of the token among the new tokens.
        """
        parts = {}
        for name, tensor in feeds.items():
            part = tensor.new_zeros(1) if name == self.kept else tensor
            for axis, size in enumerate(self._shapes[name]):
                if size == "sequence":
                    part = part.narrow(axis, place, 1)
                elif size == "total":
                    part = part.narrow(axis, 0, length + place + 1)
            parts[name] = part.contiguous()
        return parts
