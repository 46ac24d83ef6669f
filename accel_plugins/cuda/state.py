"""A KV cache in GPU memory that ONNX Runtime reads and writes where it is."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Protocol, Self

import torch

from accel.artifact import Component
from accel.errors import InputError
from accel.interfaces.protocols import Feeds
from accel.interfaces.session_contract import ValueCheck
from accel.interfaces.state import State, StateOwner

from ..ortkit.optimization.causal_attention import LENGTHS, TOTAL
from .forms.rows import Added, Rows
from .runtime import DecoderRuntime, on_device
from .slots import Slot, Slots, capacity_for


class Decoder(StateOwner, Protocol):
    """The session of a state.

    Attributes:
        slots: Buffers of caches, free ones among them.
        check_values: Checks ids against the model's vocabulary.
    """

    slots: Slots
    check_values: ValueCheck

    @property
    def runtime(self) -> DecoderRuntime:
        """The decoder on its GPU.

        Raises:
            SessionClosedError: After `close`.
        """

    def on_device(self) -> AbstractContextManager[object]:
        """The GPU as torch's current one."""


class CudaState(State):
    """Keys and values of one batch of sequences.

    Each row's tokens stand at the beginning of its buffers, whatever padding the caller's mask has (`Rows`). Several tokens
    after a past go row by row, as the attention operator wants it.

    Args:
        session: The decoder's.
        component: Its graph.
        batch: Rows.
    """

    session: Decoder
    joinable = False
    readable = False

    def __init__(self, session: Decoder, component: Component, batch: int) -> None:
        super().__init__(session, component, batch)
        assert self.check_step.mask is not None
        self._mask, self._tokens, self._kept = self.check_step.mask, self.check_step.tokens, self.check_step.kept
        self._rows_held = Rows(batch)
        self._slot: Slot | None = None
        self._limit = component.max_sizes.get("total", 0)
        self._each = [spec.name for spec in component.inputs if spec.shape[:2] == ("batch", "sequence")]

    @property
    def captured(self) -> bool:
        """Whether a step is one CUDA graph."""
        return self._slot is not None and self._slot.captured

    def select_rows(self, rows: Sequence[int]) -> None:
        """Let row `i` become what row `rows[i]` was. Waits for the indices."""
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
        """Forget all tokens from column `stop` on; `start` is 0."""
        self._rows_held.crop(stop)
        if self._slot is not None:
            with self.session.runtime.lock, self.session.on_device():
                self.session.runtime.follow()
                self._set_lengths()

    def clear(self) -> None:
        """Hold nothing."""
        self.keep_columns(0, 0)

    def copy_from(self, other: Self) -> None:
        """Hold a copy of what another state holds."""
        self._rows_held, slot = other._rows_held.clone(), other._slot
        if slot is not None:
            with self.session.runtime.lock, self.session.on_device():
                self.session.runtime.follow()
                self._slot = self._new_slot(slot.capacity)
                self._slot.take(slot, int(self._rows_held.lengths.max()))
                self._set_lengths()

    def run(self, feeds: Feeds) -> torch.Tensor:
        """Logits `(batch, kept, vocabulary)` behind the next tokens, whose keys and values are kept.

        Args:
            feeds: The graph's inputs without the cache, of the declared types, anywhere.

        Raises:
            InputError: A mask that does not continue the earlier ones.
        """
        new = self.check_step(feeds, self._batch, self._length)
        mask = feeds[self._mask]
        slot = self._slot
        if slot is not None and slot.mask_was_odd:
            raise InputError(
                "An attention mask of an earlier step kept other tokens than the cache holds.",
                fix="pass the prompt's mask with a 1 behind it for each token since; start with an empty cache.",
            )
        if slot is None or new > 1 or not self._continues(mask):
            # The mask is waited for here as well.
            self.session.check_values.waiting(feeds)
            return self._extend(feeds, new, mask.to("cpu") != 0)
        if self._length >= slot.capacity:
            slot = self._grown(self._length + 1)
        logits = slot.step(feeds, mask, self.session.runtime.follow()).clone()
        self._length += 1
        self._rows_held.step()
        kept = feeds[self._kept] if self._kept is not None else None
        return logits if kept is None or kept.numel() == 1 else logits.expand(-1, kept.numel(), -1).clone()

    def _continues(self, mask: torch.Tensor) -> bool:
        """Whether a mask keeps one more token of each row, and all those held; one on the GPU is taken to, and checked
        there.
        """
        if mask.is_cuda:
            return True
        kept = mask != 0
        return bool(kept[:, -1].all()) and self._rows_held.agree(kept)

    # Several tokens

    def _extend(self, feeds: Feeds, new: int, mask: torch.Tensor) -> torch.Tensor:
        before = self._rows_held.lengths
        rows = self._rows_held.clone()
        added = rows.extend(mask)
        if self.session.runtime.windowed and not rows.unbroken:
            raise InputError(
                "The mask leaves out tokens between others; this model's sliding window counts them.",
                fix="put padding on the left or on the right of each row.",
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
        """The new columns whose logits are wanted, on the host."""
        return torch.arange(new) if self._kept is None else feeds[self._kept].to("cpu")

    def _prompt(self, slot: Slot, feeds: Feeds, added: Added, columns: torch.Tensor) -> torch.Tensor:
        """All rows at once, none of which holds a token yet."""
        tokens = {name: self._placed(feeds[name]) for name in self._each}
        if not added.whole:
            order = added.order.to(slot.lengths.device)
            row = torch.arange(self._batch, device=order.device).unsqueeze(1)
            tokens = {name: tensor[row, order] for name, tensor in tokens.items()}
        wanted = added.places[:, columns]
        places, inverse = _distinct(wanted)
        logits = self._compute(slot, tokens, added.counts, int(added.counts.max()), places, None)
        if self._kept is None:
            inverse = wanted
        if torch.equal(inverse, torch.arange(logits.shape[1]).expand(self._batch, -1)):
            return logits
        chosen = inverse.to(logits.device)
        return logits[torch.arange(self._batch, device=logits.device).unsqueeze(1), chosen]

    def _row_by_row(
        self, slot: Slot, feeds: Feeds, added: Added, before: torch.Tensor, columns: torch.Tensor
    ) -> torch.Tensor:
        """Rows that hold tokens already, one after another; rows without a new token are left out."""
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
        found = [part for part in parts if part is not None]
        if not found:
            raise InputError("The attention mask keeps no new token.", fix="pass at least one token that it keeps.")
        return torch.cat([torch.zeros_like(found[0]) if part is None else part for part in parts])

    def _compute(
        self,
        slot: Slot,
        tokens: Mapping[str, torch.Tensor],
        lengths: torch.Tensor,
        total: int,
        places: torch.Tensor,
        row: int | None,
    ) -> torch.Tensor:
        """Logits `(rows, places, vocabulary)` of one run.

        Args:
            slot: The buffers.
            tokens: What each new token brings, `(rows, new, ...)`, on the GPU.
            lengths: `(rows,)` tokens of each row after the run, on the host.
            total: The longest of them.
            places: Places among the new tokens whose logits are computed, where the graph lets one choose.
            row: The only row that runs, or `None` for all.
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

    # Buffers

    def _new_slot(self, capacity: int) -> Slot:
        session = self.session
        return session.slots.acquire(self, session.runtime, self.component, self._batch, capacity)

    def _grown(self, tokens: int) -> Slot:
        """Buffers with room for so many tokens, and what was held in them."""
        return self._move(capacity_for(tokens, self._limit), int(self._rows_held.lengths.max()))

    def _move(self, capacity: int, tokens: int, rows: torch.Tensor | None = None) -> Slot:
        """Other buffers, with the first tokens of these in them."""
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
    """The different ones in order, and for each place which of them it is."""
    found = torch.tensor(sorted(set(places.flatten().tolist())), dtype=torch.int64)
    return found, torch.searchsorted(found, places.contiguous())
