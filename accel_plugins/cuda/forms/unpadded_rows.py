"""Rows of a batch as a KV cache stores them: tokens without the padding of the caller's mask.

A mask `(batch, columns)` may have padding anywhere. A cache without a mask stores, for each row, only the tokens that
the mask keeps, starting at index 0.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from accel.errors import InputError


@dataclass(frozen=True, slots=True)
class NewTokenColumns:
    """New tokens, arranged for a KV cache; all tensors are in CPU memory.

    Attributes:
        counts: `(batch,)`, the number of new tokens in each row.
        order: `(batch, longest)`, the columns of each row's new tokens, counted from the first new column, followed by
            columns of padding.
        places: `(batch, new)`, the index of each new column's token among the row's new tokens; for padding, the index
            of the preceding token.
        whole: Whether none of the new columns is padding.
    """

    counts: torch.Tensor
    order: torch.Tensor
    places: torch.Tensor
    whole: bool


class MaskColumns:
    """Record of the attention mask columns that the tokens in a KV cache come from, for each row.

    Args:
        batch: The number of rows.
    """

    def __init__(self, batch: int) -> None:
        # The mask that was read so far, in CPU memory, and the number of later columns in which every row has a token.
        self._mask = torch.ones((batch, 0), dtype=torch.bool)
        self._following = 0

    @property
    def columns(self) -> int:
        """Number of mask columns so far."""
        return self._mask.shape[1] + self._following

    @property
    def lengths(self) -> torch.Tensor:
        """Number of tokens in each row: `(batch,) int64`, in CPU memory."""
        return self._mask.sum(1) + self._following

    @property
    def unbroken(self) -> bool:
        """True if no row has padding between its tokens."""
        tokens = self._complete_mask().int()
        return bool(
            (tokens.diff(dim=1, prepend=torch.zeros((len(tokens), 1), dtype=torch.int32)) == 1).sum(1).le(1).all()
        )

    def _complete_mask(self) -> torch.Tensor:
        return torch.cat([self._mask, torch.ones((self._mask.shape[0], self._following), dtype=torch.bool)], dim=1)

    def step(self) -> None:
        """Add one column in which every row has a token."""
        self._following += 1

    def agree(self, mask: torch.Tensor) -> bool:
        """Return whether a boolean attention mask keeps exactly the tokens that are stored in the KV cache.

        The mask has at least as many columns as all earlier calls together. Its later columns are ignored.
        """
        return torch.equal(mask[:, : self.columns], self._complete_mask())

    def extend(self, mask: torch.Tensor) -> NewTokenColumns:
        """Add the new columns of an attention mask, and return the new tokens.

        Args:
            mask: `(batch, columns so far + new) bool`, in CPU memory.

        Returns:
            The new tokens.

        Raises:
            InputError: The mask keeps other earlier tokens than before.
        """
        if not self.agree(mask):
            raise InputError(
                "The attention mask does not match the KV cache: it masks other tokens of earlier calls than the earlier masks.",
                fix="pass the earlier mask, extended by the entries of the new tokens, or start with an empty cache.",
            )
        new = mask[:, self.columns :]
        self._mask, self._following = mask.clone(), 0
        counts = new.sum(1)
        order = torch.argsort(new.logical_not().int(), dim=1, stable=True)[:, : int(counts.max())]
        return NewTokenColumns(counts, order, (new.cumsum(1) - 1).clamp(min=0), bool(new.all()))

    def crop(self, columns: int) -> None:
        """Remove all columns from the index `columns` on."""
        self._following = max(0, columns - self._mask.shape[1])
        self._mask = self._mask[:, :columns]

    def select(self, index: torch.Tensor) -> None:
        """Set row `i` to the previous row `index[i]` (`index: (rows,) int64`)."""
        self._mask = self._mask.index_select(0, index)

    def clone(self) -> MaskColumns:
        """Return an independent copy."""
        copy = MaskColumns(self._mask.shape[0])
        copy._mask, copy._following = self._mask.clone(), self._following
        return copy
