"""Buffers for the KV cache of a decoder on the GPU ("slots"), each with a CUDA graph for steps with one token."""

from __future__ import annotations

import weakref
from collections.abc import Mapping

import torch

from accel.artifact import Component

from ..ortkit.optimization.maskless_decoder import LENGTHS, TOTAL
from .cuda_graphs import CaptureError, ClampedInputs, DeferredIdCheck, captured, overlapped
from .runtime import Runtime, copy_in

_LEAST = 256
_ROOM = 64
# Number of unused caches that keep their buffers and CUDA graph for the next `generate` call.
_SPARE = 2


def capacity_for(tokens: int, limit: int) -> int:
    """Return the capacity of cache buffers in tokens: a power of two, so that copies and captures are rare.

    Args:
        tokens: The number of tokens to store now.
        limit: The number of positions that the model supports; 0 for no limit.
    """
    size = _LEAST
    while size < tokens + _ROOM:
        size *= 2
    return size if not limit else max(tokens, min(size, limit))


class Slot:
    """Buffers at fixed addresses for one KV cache, and for the inputs and outputs of a decoding step.

    Args:
        runtime: The runtime of the decoder on its GPU.
        component: The component of the artifact that describes the decoder.
        batch: The number of rows.
        capacity: The maximum number of tokens in each row.
        late: Checks the values of steps; `None` for no check.
    """

    def __init__(
        self, runtime: Runtime, component: Component, batch: int, capacity: int, late: DeferredIdCheck | None = None
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
        """Blocks of all buffers with the same shape: `(buffers, batch, heads, capacity, head_size)`."""
        self.buffers: dict[str, torch.Tensor] = {}
        for (heads, size, dtype), names in kinds.items():
            shape = (len(names), batch, heads, capacity, size)
            block = torch.zeros(shape, dtype=getattr(torch, dtype), device=device)
            self.blocks.append(block)
            self.buffers.update(zip(names, block, strict=True))
        self._presents = {spec.name: spec.pair or "" for spec in pasts}
        self.lengths = torch.zeros(batch, dtype=torch.int32, device=device)
        """Number of tokens in each row before the next step."""
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
        self._bounded = ClampedInputs(late, tokens)
        self.inputs = {**tokens, **self._bounded.given}
        fixed = {
            spec.name: torch.zeros(1, dtype=torch.int64, device=device)
            for spec in component.inputs
            if spec.shape == ("kept",)
        }
        # Keep a reference, because ONNX Runtime reads this tensor in CPU memory at each run.
        self._total = torch.full((1,), capacity, dtype=torch.int32)
        logits = next(spec for spec in component.outputs if spec.name == "logits")
        self.logits = torch.empty((batch, 1, int(logits.shape[-1])), dtype=getattr(torch, logits.dtype), device=device)
        # Keep references, because a binding holds only addresses.
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
        """True if a step replays a CUDA graph."""
        return self._graph is not None

    def presents(self, row: int | None = None) -> dict[str, torch.Tensor]:
        """Return the graph's cache outputs: the buffers `(rows, heads, capacity, head_size)` of all rows or of one row."""
        return {self._presents[name]: buffer for name, buffer in self.pasts(row).items()}

    def pasts(self, row: int | None = None) -> dict[str, torch.Tensor]:
        """Return the graph's cache inputs: the same buffers as the outputs, `(rows, heads, capacity, head_size)`."""
        if row is None:
            return self.buffers
        return {name: buffer[row : row + 1] for name, buffer in self.buffers.items()}

    def take(self, other: Slot, tokens: int, rows: torch.Tensor | None = None) -> None:
        """Copy the first tokens of another slot's KV cache into this slot, on the current stream.

        Args:
            other: The other slot; may be this slot.
            tokens: The number of tokens to copy from each row.
            rows: `(batch,)`, the other slot's row for each row of this slot; `None` for the same rows.
        """
        for mine, block in zip(self.blocks, other.blocks, strict=True):
            first_tokens = block[:, :, :, :tokens]
            mine[:, :, :, :tokens].copy_(first_tokens if rows is None else first_tokens.index_select(1, rows))

    def set_lengths(self, lengths: torch.Tensor) -> None:
        """Set the number of tokens in each row from `lengths: (batch,)` in CPU memory, and clear the mask."""
        self.lengths.copy_(lengths)
        self.mask.zero_()

    def reset_check(self) -> None:
        """Reset the check for attention masks that do not match the KV cache. Waits for the GPU."""
        torch.cuda.synchronize(self._odd.device)
        self._odd.zero_()
        self._odd_host.zero_()

    @property
    def mask_was_odd(self) -> bool:
        """True if a finished step had a mask with a different number of tokens than the cache contains.

        Reading this does not wait for the GPU, so the last step may not be included yet.
        """
        return bool(self._odd_host)

    def step(self, feeds: Mapping[str, torch.Tensor], mask: torch.Tensor, current: torch.cuda.Stream) -> torch.Tensor:
        """Run one more token of each row, and return the logits `(batch, 1, vocabulary)`.

        The next step overwrites the returned logits.

        Args:
            feeds: The id or embedding, and the position, of each token: `(batch, 1, ...)`.
            mask: `(batch, columns)`; its number of tokens is checked against the cache.
            current: The stream on which the feeds and the mask are written; it waits for the previous run.
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
        """Enqueue a run on the runtime's stream, with checks in parallel."""
        with torch.cuda.stream(self._runtime.stream):
            self._bounded.clamp()
            with overlapped(self._runtime, self._check):
                self._runtime.enqueue("general", self._binding)

    def _check(self) -> None:
        self._odd.logical_or_((self.mask.sum(1) != self.lengths + 1).any())
        self._odd_host.copy_(self._odd, non_blocking=True)
        self._bounded.check()

    def _capture(self, current: torch.cuda.Stream) -> None:
        """Capture a decoding step as a CUDA graph.

        This runs the step a few times; each time, the same token is written to the same position of the KV cache.
        """
        try:
            self._graph = captured(self._runtime, self._enqueue, {"logits": self.logits}, current)
        except CaptureError as error:
            self._runtime.refuse_graphs(error)


class Slots:
    """The KV cache buffers (slots) of one decoder. Each slot is used by one decoder state at a time.

    Args:
        late: Checks the values of steps.
    """

    def __init__(self, late: DeferredIdCheck | None = None) -> None:
        self._late = late
        self._slots: list[Slot] = []

    def acquire(self, user: object, runtime: Runtime, component: Component, batch: int, capacity: int) -> Slot:
        """Return KV cache buffers for a state. The state uses them until it is deleted or releases them. Waits for the
        GPU.
        """
        free = [slot for slot in self._slots if slot.user is None or slot.user() is None]
        chosen = next((s for s in free if (s.batch, s.capacity) == (batch, capacity)), None)
        if chosen is None:
            for slot in free[: max(0, len(free) - _SPARE + 1)]:
                self._slots.remove(slot)
            # Create the buffers outside of inference mode, because tensors created in inference mode cannot be changed
            # outside of it.
            with torch.inference_mode(False):
                chosen = Slot(runtime, component, batch, capacity, self._late)
        else:
            # Move the slot to the end of the list, because slots at the start are discarded first.
            self._slots.remove(chosen)
        self._slots.append(chosen)
        chosen.user = weakref.ref(user)
        chosen.reset_check()
        return chosen

    @staticmethod
    def release(slot: Slot) -> None:
        """Allow other states to use the buffers of a slot."""
        slot.user = None

    def clear(self) -> None:
        """Release the buffers of all KV caches."""
        self._slots.clear()
