"""Buffers of KV caches on the GPU, each with the CUDA graph of one more token."""

from __future__ import annotations

import weakref
from collections.abc import Mapping

import torch

from accel.artifact import Component

from ..ortkit.optimization.causal_attention import LENGTHS, TOTAL
from .cuda_graphs import Bounded, CaptureError, LateCheck, beside, captured
from .runtime import Runtime, copy_in

_LEAST = 256
_ROOM = 64
# Of caches that nobody uses any more these many keep their buffers and graph: the next `generate` is alike.
_SPARE = 2


def capacity_for(tokens: int, limit: int) -> int:
    """How many tokens buffers get room for: a power of two, so that a growing cache is seldom copied and captured anew.

    Args:
        tokens: Tokens to hold now.
        limit: Tokens that the model has positions for; 0 when it knows none.
    """
    size = _LEAST
    while size < tokens + _ROOM:
        size *= 2
    return size if not limit else max(tokens, min(size, limit))


class Slot:
    """The buffers of one cache, and what a step reads and writes, at fixed addresses.

    Args:
        runtime: The decoder on its GPU.
        component: What the artifact says about it.
        batch: Rows.
        capacity: Tokens that each row has room for.
        late: What checks the values of steps; `None` for no check.
    """

    def __init__(
        self, runtime: Runtime, component: Component, batch: int, capacity: int, late: LateCheck | None = None
    ) -> None:
        self.batch, self.capacity = batch, capacity
        self.user: weakref.ref[object] | None = None
        self._runtime = runtime
        device = runtime.device
        pasts = [spec for spec in component.inputs if spec.pair is not None]
        kinds: dict[tuple[int, int, str], list[str]] = {}
        for spec in pasts:
            kinds.setdefault((int(spec.shape[1]), int(spec.shape[3]), spec.dtype), []).append(spec.name)
        self.blocks: list[torch.Tensor] = []
        """All buffers of one shape together: `(buffers, batch, heads, capacity, head_size)`."""
        self.buffers: dict[str, torch.Tensor] = {}
        for (heads, size, dtype), names in kinds.items():
            shape = (len(names), batch, heads, capacity, size)
            block = torch.zeros(shape, dtype=getattr(torch, dtype), device=device)
            self.blocks.append(block)
            self.buffers.update(zip(names, block, strict=True))
        self._presents = {spec.name: spec.pair or "" for spec in pasts}
        self.lengths = torch.zeros(batch, dtype=torch.int32, device=device)
        """Tokens of each row before the next step."""
        self.mask = torch.zeros((batch, capacity), dtype=torch.int64, device=device)
        self._odd = torch.zeros((), dtype=torch.bool, device=device)
        self._odd_host = torch.zeros((), dtype=torch.bool).pin_memory()
        tokens = {
            spec.name: torch.zeros(
                (batch, 1, *map(int, spec.shape[2:])), dtype=getattr(torch, spec.dtype), device=device
            )
            for spec in component.inputs
            if spec.shape[:2] == ("batch", "sequence")
        }
        self._bounded = Bounded(late, tokens)
        self.inputs = {**tokens, **self._bounded.given}
        fixed = {
            spec.name: torch.zeros(1, dtype=torch.int64, device=device)
            for spec in component.inputs
            if spec.shape == ("kept",)
        }
        # Kept: ONNX Runtime reads it on the host in each run.
        self._total = torch.full((1,), capacity, dtype=torch.int32)
        logits = next(spec for spec in component.outputs if spec.name == "logits")
        self.logits = torch.empty((batch, 1, int(logits.shape[-1])), dtype=getattr(torch, logits.dtype), device=device)
        # Kept: a binding holds addresses alone.
        self._bound = {
            **self.inputs,
            **self._bounded.within,
            **fixed,
            **self.buffers,
            LENGTHS: self.lengths,
            TOTAL: self._total,
        }
        self._binding = runtime.bind("general", self._bound, {**self.presents(), "logits": self.logits})
        self._steps = 0
        self._graph: torch.cuda.CUDAGraph | None = None

    @property
    def captured(self) -> bool:
        """Whether a step is one CUDA graph."""
        return self._graph is not None

    def presents(self, row: int | None = None) -> dict[str, torch.Tensor]:
        """The graph's cache outputs: the buffers `(rows, heads, capacity, head_size)`, of all rows or of one."""
        return {self._presents[name]: buffer for name, buffer in self.pasts(row).items()}

    def pasts(self, row: int | None = None) -> dict[str, torch.Tensor]:
        """The graph's cache inputs: the same buffers, `(rows, heads, capacity, head_size)`."""
        if row is None:
            return self.buffers
        return {name: buffer[row : row + 1] for name, buffer in self.buffers.items()}

    def take(self, other: Slot, tokens: int, rows: torch.Tensor | None = None) -> None:
        """Copy the first tokens of another slot's rows, on the current stream.

        Args:
            other: May be this one.
            tokens: How many of each row.
            rows: `(batch,)` the other's row for each of these; the same rows when `None`.
        """
        for mine, block in zip(self.blocks, other.blocks, strict=True):
            held = block[:, :, :, :tokens]
            mine[:, :, :, :tokens].copy_(held if rows is None else held.index_select(1, rows))

    def set_lengths(self, lengths: torch.Tensor) -> None:
        """Tokens of each row, `lengths: (batch,)` on the host; forgets the mask."""
        self.lengths.copy_(lengths)
        self.mask.zero_()

    def reset_check(self) -> None:
        """Forget what earlier masks were. Waits for the GPU."""
        torch.cuda.synchronize(self._odd.device)
        self._odd.zero_()
        self._odd_host.zero_()

    @property
    def mask_was_odd(self) -> bool:
        """Whether a finished step had a mask that kept another number of tokens than the cache holds.

        Nothing waits for the GPU, so the last step may not count yet.
        """
        return bool(self._odd_host)

    def step(self, feeds: Mapping[str, torch.Tensor], mask: torch.Tensor, current: torch.cuda.Stream) -> torch.Tensor:
        """Logits `(batch, 1, vocabulary)` behind one more token of each row, overwritten by the next step.

        Args:
            feeds: What each token brings, ids or embeddings, and positions: `(batch, 1, ...)`.
            mask: `(batch, columns)`, checked against the tokens held.
            current: The stream that they are written on; ordered behind the last run's.
        """
        for name, buffer in self.inputs.items():
            copy_in(buffer, feeds[name])
        copy_in(self.mask[:, : mask.shape[1]], mask)
        self._steps += 1
        if self._graph is None and self._steps > 1 and self._runtime.graph_obstacle is None:
            self._capture(current)
        if self._graph is not None:
            self._graph.replay()
        else:
            self._runtime.stream.wait_stream(current)
            self._enqueue()
            current.wait_stream(self._runtime.stream)
        self.lengths.add_(1)
        return self.logits

    def _enqueue(self) -> None:
        """The run, and the checks beside it, on the runtime's stream."""
        with torch.cuda.stream(self._runtime.stream):
            self._bounded.clamp()
            with beside(self._runtime, self._check):
                self._runtime.enqueue("general", self._binding)

    def _check(self) -> None:
        self._odd.logical_or_((self.mask.sum(1) != self.lengths + 1).any())
        self._odd_host.copy_(self._odd, non_blocking=True)
        self._bounded.check()

    def _capture(self, current: torch.cuda.Stream) -> None:
        """A step as one graph. Takes a few steps' time; each writes the same token to the same place."""
        try:
            self._graph = captured(self._runtime, self._enqueue, {"logits": self.logits}, current)
        except CaptureError as error:
            self._runtime.refuse_graphs(error)


class Slots:
    """The slots of one decoder, for one state at a time each.

    Args:
        late: What checks the values of steps.
    """

    def __init__(self, late: LateCheck | None = None) -> None:
        self._late = late
        self._slots: list[Slot] = []

    def acquire(self, user: object, runtime: Runtime, component: Component, batch: int, capacity: int) -> Slot:
        """A slot for a state, as long as that lives or until it is released. Waits for the GPU."""
        free = [slot for slot in self._slots if slot.user is None or slot.user() is None]
        found = next((s for s in free if (s.batch, s.capacity) == (batch, capacity)), None)
        if found is None:
            for slot in free[: max(0, len(free) - _SPARE + 1)]:
                self._slots.remove(slot)
            # Buffers made in inference mode could not be written outside of it.
            with torch.inference_mode(False):
                found = Slot(runtime, component, batch, capacity, self._late)
        else:
            # The one used last is the last to go.
            self._slots.remove(found)
        self._slots.append(found)
        found.user = weakref.ref(user)
        found.reset_check()
        return found

    @staticmethod
    def release(slot: Slot) -> None:
        """Let other states have a slot."""
        slot.user = None

    def clear(self) -> None:
        """Let go of all buffers."""
        self._slots.clear()
