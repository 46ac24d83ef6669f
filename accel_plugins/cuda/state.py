"""State of a decoder: a KV cache in GPU memory that ONNX Runtime reads and writes in place."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Self

import torch

from accel.artifact import Component
from accel.errors import InputError
from accel.interfaces.protocols import Feeds
from accel.interfaces.state import State

from ..ortkit.optimization.maskless_decoder import LENGTHS, TOTAL
from .forms.unpadded_rows import MaskColumns, NewTokenColumns
from .runtime import on_device
from .slots import Slot, capacity_for

if TYPE_CHECKING:
    from .decoder_session import CudaDecoderSession


class CudaState(State):
    """The KV cache of one batch of sequences on the GPU.

    The tokens of each row are stored from the start of its buffers, without the padding of the caller's mask
    (`MaskColumns`). If a call has several new tokens after earlier tokens, the rows are computed one after another,
    because the attention operator requires it.

    Args:
        session: The decoder's session.
        component: The component that describes the decoder's graph.
        batch: The number of rows.
    """

    session: CudaDecoderSession
    joinable = False
    readable = False

    def __init__(self, session: CudaDecoderSession, component: Component, batch: int) -> None:
        super().__init__(session, component, batch)
        assert self.check_step.mask is not None
        self._mask, self._tokens, self._kept = self.check_step.mask, self.check_step.tokens, self.check_step.kept
        self._rows_held = MaskColumns(batch)
        self._slot: Slot | None = None
        self._limit = component.max_sizes.get("total", 0)
        self._each = [spec.name for spec in component.inputs if spec.shape[:2] == ("batch", "sequence")]

    @property
    def captured(self) -> bool:
        """True if a step replays a CUDA graph."""
        return self._slot is not None and self._slot.captured

    def select_rows(self, rows: Sequence[int]) -> None:
        """Set row `i` to the previous row `rows[i]`. Waits for the copy of the row indices to the GPU."""
        with self.session.runtime.lock, self.session.on_device():
            self._batch = len(rows)
            slot, index = self._slot, torch.tensor(rows)
            longest = int(self._rows_held.lengths.max())
            self._rows_held.select(index)
            if slot is None:
                return
            self.session.runtime.follow()
            index = index.to(slot.lengths.device)
            if self._batch == slot.batch:
                slot.take(slot, longest, index)
            else:
                self._move(slot.capacity, longest, index)
            self._set_lengths()

    def keep_columns(self, start: int, stop: int) -> None:
        """Remove all tokens from column `stop` on; `start` must be 0."""
        self._rows_held.crop(stop)
        if self._slot is not None:
            with self.session.runtime.lock, self.session.on_device():
                self.session.runtime.follow()
                self._set_lengths()

    def clear(self) -> None:
        """Remove all tokens from the KV cache."""
        self.keep_columns(0, 0)

    def copy_from(self, other: Self) -> None:
        """Copy the content of another state into this state."""
        self._rows_held, slot = other._rows_held.clone(), other._slot
        if slot is not None:
            with self.session.runtime.lock, self.session.on_device():
                self.session.runtime.follow()
                self._slot = self._new_slot(slot.capacity)
                self._slot.take(slot, int(self._rows_held.lengths.max()))
                self._set_lengths()

    def run(self, feeds: Feeds) -> torch.Tensor:
        """Run the next tokens, append their keys and values, and return the logits `(batch, kept, vocabulary)`.

        Args:
            feeds: The graph's inputs without the cache, with the declared data types, on any device.

        Raises:
            InputError: The mask does not continue the earlier masks.
        """
        new = self.check_step(feeds, self._batch, self._length)
        mask = feeds[self._mask]
        slot = self._slot
        if slot is not None and slot.mask_was_odd:
            raise InputError(
                "The attention mask of an earlier step does not match the tokens in the KV cache.",
                fix="start with an empty cache, and pass the mask of the prompt, extended by a 1 for each later token.",
            )
        if slot is None or new > 1 or not self._continues(mask):
            # Check ids in GPU memory immediately, because the call waits for the mask anyway.
            self.session.check_values.waiting(feeds)
            return self._extend(feeds, new, mask.to("cpu") != 0)
        if self._length >= slot.capacity:
            slot = self._grown(self._length + 1)
        logits = slot.step(feeds, mask, self.session.runtime.follow()).clone()
        self._length += 1
        self._rows_held.step()
        logits_to_keep = feeds[self._kept] if self._kept is not None else None
        return (
            logits
            if logits_to_keep is None or logits_to_keep.numel() == 1
            else logits.expand(-1, logits_to_keep.numel(), -1).clone()
        )

    def _continues(self, mask: torch.Tensor) -> bool:
        """Return whether an attention mask keeps all tokens in the KV cache and one new token of each row.

        A mask on the GPU is assumed to keep these tokens, and is checked on the GPU during the step.
        """
        if mask.is_cuda:
            return True
        tokens = mask != 0
        return bool(tokens[:, -1].all()) and self._rows_held.agree(tokens)

    # The methods below run calls with several tokens.

    def _extend(self, feeds: Feeds, new: int, mask: torch.Tensor) -> torch.Tensor:
        before = self._rows_held.lengths
        rows = self._rows_held.clone()
        added = rows.extend(mask)
        if self.session.runtime.windowed and not rows.unbroken:
            raise InputError(
                "The attention mask masks tokens between other tokens of a row. This model has a sliding window, which would "
                "then cover the wrong tokens.",
                fix="put padding only on the left or only on the right of each row.",
            )
        slot = self._slot
        if slot is None or self._length + new > slot.capacity:
            slot = self._grown(self._length + new)
        columns = self._columns(feeds, new)
        if int(before.max()) == 0 and int(added.counts.min()) > 0:
            logits = self._prompt(slot, feeds, added, columns)
        else:
            logits = self._row_by_row(slot, feeds, added, before, columns)
        self._rows_held = rows
        self._length += new
        self._set_lengths()
        return logits

    def _columns(self, feeds: Feeds, new: int) -> torch.Tensor:
        """Return the indices of the new mask columns whose logits are requested, in CPU memory."""
        return torch.arange(new) if self._kept is None else feeds[self._kept].to("cpu")

    def _prompt(self, slot: Slot, feeds: Feeds, added: NewTokenColumns, columns: torch.Tensor) -> torch.Tensor:
        """Run the prompt of all rows together; no row has tokens in the cache yet."""
        tokens = {name: self._placed(feeds[name]) for name in self._each}
        if not added.whole:
            order = added.order.to(slot.lengths.device)
            row = torch.arange(self._batch, device=order.device).unsqueeze(1)
            tokens = {name: tensor[row, order] for name, tensor in tokens.items()}
        requested_places = added.places[:, columns]
        places, inverse = _distinct(requested_places)
        logits = self._compute(slot, tokens, added.counts, int(added.counts.max()), places, None)
        if self._kept is None:
            inverse = requested_places
        if torch.equal(inverse, torch.arange(logits.shape[1]).expand(self._batch, -1)):
            return logits
        chosen = inverse.to(logits.device)
        return logits[torch.arange(self._batch, device=logits.device).unsqueeze(1), chosen]

    def _row_by_row(
        self, slot: Slot, feeds: Feeds, added: NewTokenColumns, before: torch.Tensor, columns: torch.Tensor
    ) -> torch.Tensor:
        """Run rows that already have tokens in the cache one after another; rows without new tokens are skipped."""
        tokens = {name: self._placed(feeds[name]) for name in self._each}
        parts: list[torch.Tensor | None] = []
        for row in range(self._batch):
            count = int(added.counts[row])
            if not count:
                parts.append(None)
                continue
            order = added.order[row, :count].to(slot.lengths.device)
            mine = {name: tensor[row : row + 1].index_select(1, order) for name, tensor in tokens.items()}
            places, inverse = _distinct(added.places[row, columns])
            total = int(before[row]) + count
            logits = self._compute(slot, mine, torch.tensor([total]), total, places, row)
            chosen = added.places[row, columns] if self._kept is None else inverse
            parts.append(logits.index_select(1, chosen.to(logits.device)))
        computed = [part for part in parts if part is not None]
        if not computed:
            raise InputError(
                "The attention mask masks all new tokens of this call.",
                fix="set the mask of at least one new token to 1.",
            )
        return torch.cat([torch.zeros_like(computed[0]) if part is None else part for part in parts])

    def _compute(
        self,
        slot: Slot,
        tokens: Mapping[str, torch.Tensor],
        lengths: torch.Tensor,
        total: int,
        places: torch.Tensor,
        row: int | None,
    ) -> torch.Tensor:
        """Run the graph once and return the logits `(rows, places, vocabulary)`.

        Args:
            slot: The buffers.
            tokens: The inputs of each new token, `(rows, new, ...)`, on the GPU.
            lengths: `(rows,)`, the number of tokens in each row after the run, in CPU memory.
            total: The largest of the lengths.
            places: Indices of the new tokens whose logits are computed; ignored by graphs that always compute all
                logits.
            row: The only row to run; `None` for all rows.
        """
        where = slot.lengths.device
        inputs = {**tokens, **slot.pasts(row)}
        count = tokens[self._tokens].shape[1]
        if self._kept is not None:
            inputs[self._kept] = places.to(where)
            count = places.numel()
        inputs[LENGTHS] = (lengths - 1).to(where, torch.int32)
        inputs[TOTAL] = torch.tensor([total], dtype=torch.int32)
        logits = slot.logits.new_empty((lengths.numel(), count, slot.logits.shape[2]))
        self.session.runtime.compute(inputs, {**slot.presents(row), "logits": logits})
        return logits

    def _placed(self, tensor: torch.Tensor) -> torch.Tensor:
        return on_device(tensor, self.session.runtime.device).contiguous()

    # The methods below manage the buffers of the KV cache.

    def _new_slot(self, capacity: int) -> Slot:
        session = self.session
        return session.slots.acquire(self, session.runtime, self.component, self._batch, capacity)

    def _grown(self, tokens: int) -> Slot:
        """Move the KV cache to larger buffers, with room for this number of tokens."""
        return self._move(capacity_for(tokens, self._limit), int(self._rows_held.lengths.max()))

    def _move(self, capacity: int, tokens: int, rows: torch.Tensor | None = None) -> Slot:
        """Move the first tokens of the KV cache to the buffers of another slot, and return the slot."""
        before = self._slot
        slot = self._slot = self._new_slot(capacity)
        if before is not None:
            if tokens:
                slot.take(before, tokens, rows)
            self.session.slots.release(before)
        self._set_lengths()
        return slot

    def _set_lengths(self) -> None:
        if self._slot is not None:
            self._slot.set_lengths(self._rows_held.lengths)


def _distinct(places: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the sorted distinct values of `places`, and for each place the index of its value among them."""
    distinct = torch.tensor(sorted(set(places.flatten().tolist())), dtype=torch.int64)
    return distinct, torch.searchsorted(distinct, places.contiguous())
