"""Rows of a batch whose tokens stand one behind the other, whatever padding the caller's mask has between them.

A mask has columns: `(batch, columns)`, padding on any side. A cache without a mask has places: row by row the tokens that
the mask keeps, from place 0 on.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from accel.errors import InputError


@dataclass(frozen=True, slots=True)
class Added:
    """New tokens as a cache takes them, on the host.

    Attributes:
        counts: `(batch,)` new tokens of each row.
        order: `(batch, longest)` the columns of each row's new tokens, counted from the first new column; then columns of
            padding.
        places: `(batch, new)` the place among the row's new tokens of each new column; of padding, that of the token
            before it.
        whole: Whether nothing is padding.
    """

    counts: torch.Tensor
    order: torch.Tensor
    places: torch.Tensor
    whole: bool


class Rows:
    """Which columns each row's tokens came from.

    Args:
        batch: Rows.
    """

    def __init__(self, batch: int) -> None:
        # Columns that a mask was read for, on the host, and how many follow that every row keeps.
        self._mask = torch.ones((batch, 0), dtype=torch.bool)
        self._behind = 0

    @property
    def columns(self) -> int:
        """Columns so far."""
        return self._mask.shape[1] + self._behind

    @property
    def lengths(self) -> torch.Tensor:
        """Tokens of each row: `(batch,) int64`, on the host."""
        return self._mask.sum(1) + self._behind

    @property
    def unbroken(self) -> bool:
        """Whether no row has padding between its tokens."""
        kept = self._kept().int()
        return bool((kept.diff(dim=1, prepend=torch.zeros((len(kept), 1), dtype=torch.int32)) == 1).sum(1).le(1).all())

    def _kept(self) -> torch.Tensor:
        return torch.cat([self._mask, torch.ones((self._mask.shape[0], self._behind), dtype=torch.bool)], dim=1)

    def step(self) -> None:
        """One more column, which every row keeps."""
        self._behind += 1

    def agree(self, mask: torch.Tensor) -> bool:
        """Whether a `(batch, columns or more) bool` mask keeps the tokens that are held, no more and no less."""
        return torch.equal(mask[:, : self.columns], self._kept())

    def extend(self, mask: torch.Tensor) -> Added:
        """Take the columns that a mask has more than before.

        Args:
            mask: `(batch, columns so far + new) bool`, on the host.

        Raises:
            InputError: It keeps other earlier tokens than before.
        """
        if not self.agree(mask):
            raise InputError(
                "The attention mask keeps other tokens than in earlier calls; the cache holds just those of before.",
                fix="pass the earlier mask with the new tokens' entries behind it, or start with an empty cache.",
            )
        new = mask[:, self.columns :]
        self._mask, self._behind = mask.clone(), 0
        counts = new.sum(1)
        order = torch.argsort(new.logical_not().int(), dim=1, stable=True)[:, : int(counts.max())]
        return Added(counts, order, (new.cumsum(1) - 1).clamp(min=0), bool(new.all()))

    def crop(self, columns: int) -> None:
        """Forget all columns from this one on."""
        self._behind = max(0, columns - self._mask.shape[1])
        self._mask = self._mask[:, :columns]

    def select(self, index: torch.Tensor) -> None:
        """Row `i` becomes what row `index[i]` was (`index: (rows,) int64`)."""
        self._mask = self._mask.index_select(0, index)

    def clone(self) -> Rows:
        """An independent copy."""
        copy = Rows(self._mask.shape[0])
        copy._mask, copy._behind = self._mask.clone(), self._behind
        return copy
