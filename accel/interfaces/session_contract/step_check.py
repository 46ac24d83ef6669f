"""Inputs of a call that continues a state."""

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
    """Check the state of a call.

    Args:
        state: What the caller gave, or `None`.
        session: The session that is called.
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
    if state.session is not session:
        raise InputError("The state was not made by this session.", fix="make it with new_state().")
    if out:
        raise InputError("A session with a state allocates its outputs.", fix="leave out=... out.")


def no_state() -> SessionError:
    """The error of `new_state` where a graph keeps none."""
    return SessionError("This graph keeps no state between calls.", fix="leave state=... out.")


class StepCheck:
    """Checks the tokens that a call brings to a state.

    Args:
        component: The decoder's graph.
        waits: Also read which logits are asked for where that is on a device, which waits for it.

    Attributes:
        tokens: Name of the input of token ids, or of embeddings.
        mask: Name of the mask `(batch, total)`; `None` where the graph takes none.
        kept: Name of the input that says which of the new tokens' logits are wanted; `None` where the graph takes none.

    Raises:
        IntegrityError: It takes no tokens.
    """

    __slots__ = ("_beside", "_others", "_ranks", "_shapes", "_waits", "kept", "mask", "tokens")

    def __init__(self, component: Component, *, waits: bool = False) -> None:
        self._waits = waits
        own = [spec for spec in component.inputs if spec.pair is None]
        self._shapes = {spec.name: spec.shape for spec in own}
        self.tokens = next((spec.name for spec in own if spec.shape[1:2] == ("sequence",)), "")
        if not self.tokens:
            raise IntegrityError(f"The decoder {component.name!r} takes no tokens.", fix="make the artifact again.")
        # Decoders of other tools behind an encoder take no mask of their own.
        self.mask = next((spec.name for spec in own if spec.shape[-1] == "total"), None)
        self.kept = next((spec.name for spec in own if spec.shape == ("kept",)), None)
        self._ranks = {spec.name: spec.shape for spec in own if spec.name in (self.tokens, self.mask, self.kept)}
        by_token = [spec for spec in own if spec.shape[:2] in (("batch", "sequence"), ("batch", "total"))]
        self._others = [spec for spec in by_token if spec.name != self.tokens]
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
        rows, new = feeds[self.tokens].shape[:2]
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
        if self.kept is not None and (self._waits or feeds[self.kept].is_cpu):
            kept = feeds[self.kept].tolist()
            if not kept or min(kept) < 0 or max(kept) >= new:
                raise InputError(
                    f"{self.kept!r} holds {f'{min(kept)} to {max(kept)}' if kept else 'nothing'}; the new tokens are 0 to {new - 1}.",
                    fix="name at least one of the new tokens, by their places.",
                )
        return int(new)

    def single(self, feeds: Feeds, length: int, place: int) -> dict[str, torch.Tensor]:
        """The inputs of a call that brings one of several new tokens alone, contiguous.

        Args:
            feeds: The inputs of all new tokens.
            length: Tokens that the state held before the first of them.
            place: Which of the new tokens.
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
