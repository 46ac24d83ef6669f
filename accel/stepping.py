"""What every backend's state checks before a step: the rows, the mask, and the order of rows."""

from __future__ import annotations

from typing import TYPE_CHECKING

from .errors import InputError

if TYPE_CHECKING:
    import torch

    from .artifact import Component
    from .interfaces import Feeds


def check_step(component: Component, feeds: Feeds, batch: int, length: int) -> int:
    """How many tokens a call brings.

    Args:
        component: The decoder's graph.
        feeds: Its inputs for this call, without the cache.
        batch: Rows that the state holds.
        length: Tokens that it holds.

    Raises:
        InputError: Another number of rows, or a mask that does not cover the cached and the new tokens.
    """
    tokens = next(spec.name for spec in component.inputs if spec.shape[1:2] == ("sequence",))
    mask = next(spec.name for spec in component.inputs if spec.pair is None and spec.shape[-1] == "total")
    rows, new = feeds[tokens].shape[:2]
    if rows != batch:
        raise InputError(f"{rows} rows were given to a cache of {batch}.", fix="pass the cache of the same batch.")
    total = feeds[mask].shape[1]
    if total != length + new:
        raise InputError(
            f"{mask!r} covers {total} tokens; the cache holds {length} and {new} are new.",
            fix=f"pass a mask of {length + new} tokens: the cached ones and the new ones.",
        )
    return int(new)


def check_rows(batch: int, index: torch.Tensor | None = None) -> list[int]:
    """The rows that `index` chooses from a state of `batch` rows; all of them when `None`.

    Raises:
        InputError: No rows, or a row that is not there.
    """
    if batch < 1:
        raise InputError(f"A state for {batch} rows cannot be made.", fix="use at least 1.")
    if index is None:
        return list(range(batch))
    chosen = [int(row) for row in index.reshape(-1).tolist()]
    if index.ndim != 1 or not chosen or min(chosen) < 0 or max(chosen) >= batch:
        raise InputError(f"Rows {chosen} cannot be taken from a state of {batch} rows.")
    return chosen
