"""States between calls: what a call brings to one, and what is asked of it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from ...errors import InputError, IntegrityError, SessionError

if TYPE_CHECKING:
    import torch

    from ...artifact.manifest import Component
    from ...artifact.tensors import TensorSpec
    from ..protocols import Feeds, State


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


class StepCheck:
    """Checks the tokens that a call brings to a state.

    Args:
        component: The decoder's graph.
        waits: Also read which logits are asked for where that is on a device, which waits for it.

    Raises:
        IntegrityError: It takes no tokens.
    """

    __slots__ = ("_beside", "_kept", "_others", "_ranks", "_waits", "mask", "tokens")

    def __init__(self, component: Component, *, waits: bool = False) -> None:
        self._waits = waits
        own = [spec for spec in component.inputs if spec.pair is None]
        self.tokens = next((spec.name for spec in own if spec.shape[1:2] == ("sequence",)), "")
        if not self.tokens:
            raise IntegrityError(f"The decoder {component.name!r} takes no tokens.", fix="make the artifact again.")
        # Decoders of other tools behind an encoder take no mask of their own.
        self.mask = next((spec.name for spec in own if spec.shape[-1] == "total"), None)
        self._kept = next((spec.name for spec in own if spec.shape == ("kept",)), None)
        self._ranks = {spec.name: spec.shape for spec in own if spec.name in (self.tokens, self.mask, self._kept)}
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
