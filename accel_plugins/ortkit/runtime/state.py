"""State of a decoder in CPU or GPU memory that ONNX Runtime reads and writes in place."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol, Self

import onnxruntime as ort
import torch

from accel.artifact import Component, TensorSpec
from accel.errors import InputError
from accel.interfaces.protocols import Feeds
from accel.interfaces.state import State, StateOwner, moved_right

from ..upstream import native_as_tensor
from .values import ReusedBinding

# The token capacity of the KV cache grows in steps. One more token at a time would need a copy of the cache for each
# token; a doubled capacity could leave half of the memory unused.
_MIN_CAPACITY = 256
_GROWTH = 1.5
HOST = torch.device("cpu")
LENGTHS = "accel.lengths"
"""Input `(batch,) int32` of graphs whose rows may have different lengths: the position of each row's last token."""


class _Owner(StateOwner, Protocol):
    @property
    def runtime(self) -> ort.InferenceSession:
        """ONNX Runtime's session for the graph."""


class OrtState(State):
    """The state of one batch of sequences, and the IO binding that passes it to the graph.

    If a past input and its present output have the same shape, with capacity for more tokens, both are bound to one
    buffer, and a step copies nothing (`GroupQueryAttention`). In graphs with such buffers, several new tokens after
    earlier tokens are computed one by one if the batch has several rows, because the operator requires this. All other
    tensors (keys and values that grow with each step, and recurrent states of fixed size) are new tensors after each
    step, and become the past of the next step.

    When rows are appended, the caller's mask has padding in front of the shorter rows. In a graph with the input
    `LENGTHS`, the shorter rows still start in the first column of their buffers, and the padding columns are not
    stored. The result of each row is therefore equal, to the last bit, to the result in a batch of one row. In other
    graphs, the padding columns are stored as zeros.

    After rows were appended, buffers that are written in place are views of the first rows of larger buffers, so that
    more rows can be added or removed without a copy of the existing rows.

    Args:
        session: The session that owns ONNX Runtime's session.
        component: The component of the decoder's graph.
        batch: The number of rows.
        where: The device of the buffers.
        lengths: Whether the graph has the input `LENGTHS`.
    """

    def __init__(
        self,
        session: _Owner,
        component: Component,
        batch: int,
        where: torch.device = HOST,
        *,
        lengths: bool = False,
    ) -> None:
        # On a GPU, let the base class check token ids immediately, because each call waits for the GPU in any case.
        super().__init__(session, component, batch, waits=where.type != "cpu")
        self._where = where
        self._runtime = session.runtime
        outputs = {spec.name: spec for spec in component.outputs}
        self._pasts = [spec for spec in component.inputs if spec.pair is not None]
        self._in_place = frozenset(
            spec.name
            for spec in self._pasts
            if self.growing_axis(spec.name) is not None and spec.shape == outputs[spec.pair or ""].shape
        )
        self._replaced = [spec for spec in self._pasts if spec.name not in self._in_place]
        self._lengths = lengths
        # For each row, the number of padding columns in front of the tokens that the buffers do not contain; `None` if
        # this number is 0 for all rows.
        self._front: torch.Tensor | None = None
        # The value of the input `LENGTHS` while `_front` is `None`, reused from call to call.
        self._last = torch.zeros(batch, dtype=torch.int32)
        self._kept, self._mask = self.check_step.kept, self.check_step.mask
        self._results = [spec for spec in component.outputs if spec.pair is None]
        self._buffers: dict[str, torch.Tensor] = {}
        # Buffers with space for more rows; the entries of `_buffers` that are written in place are their first rows.
        self._bases: dict[str, torch.Tensor] = {}
        # Keep references to ONNX Runtime's output values, because these values own the memory of some buffers.
        self._held: list[Any] = []
        self._binding: ReusedBinding | None = None
        self._capacity = 0

    def tensors(self) -> dict[str, torch.Tensor]:
        """Return the tensors of the state; padding columns in front of a row's tokens are zeros."""
        tensors = dict(self._buffers)
        fronts = self._fronts().tolist()
        for name in self._in_place & tensors.keys():
            buffer = tensors[name]
            tensors[name] = buffer[:, :, : self._length]
            if any(fronts):
                shifted = tensors[name] = tensors[name].clone()
                for row, front in enumerate(fronts):
                    shifted[row, :, :front] = 0
                    shifted[row, :, front:] = buffer[row, :, : self._length - front]
        return tensors

    def store(self, tensors: Mapping[str, torch.Tensor]) -> None:
        """Replace all tensors of the state by `tensors`."""
        placed = {spec.name: tensors[spec.name].to(self._where, getattr(torch, spec.dtype)) for spec in self._pasts}
        self._buffers = {spec.name: placed[spec.name].contiguous() for spec in self._replaced}
        self._bases, self._front, self._binding, self._capacity = {}, None, None, 0
        self._reserve(self._length)
        for name in self._in_place:
            self._buffers[name][:, :, : self._length] = placed[name]

    def copy_from(self, other: Self) -> None:
        """Copy each buffer of another state into this state."""
        self._capacity, self._front = other._capacity, other._front
        self._replace({name: buffer.clone() for name, buffer in other._buffers.items()})

    def clear(self) -> None:
        """Remove all tokens. Recurrent states start again with zeros; buffers that are written in place are kept."""
        self._front = None
        self._replace({name: buffer for name, buffer in self._buffers.items() if name in self._in_place})

    def select_rows(self, rows: Sequence[int]) -> None:
        """Set each row `i` to the previous row `rows[i]`; work in place if no row is overwritten before it is copied."""
        index, moves = torch.tensor(rows, device=self._where), _moves(rows)
        buffers = {}
        for name, buffer in self._buffers.items():
            base = self._bases.get(name)
            if base is None or moves is None or len(rows) > base.shape[0]:
                self._bases.pop(name, None)
                buffers[name] = buffer.index_select(0, index)
                continue
            for target, source in moves:
                base[target, :, : self._length] = base[source, :, : self._length]
            buffers[name] = base[: len(rows)]
        self._set_front(self._front[list(rows)] if self._front is not None else None)
        self._replace(buffers)

    def keep_columns(self, start: int, stop: int) -> None:
        """Remove all tokens except the tokens in the columns from `start` to `stop`.

        Raises:
            InputError: A row would have no tokens left.
        """
        if self._front is not None and stop <= int(self._front.max()):
            raise InputError(
                f"Cropping the KV cache to {stop} columns would leave a row without tokens: a row that joined the batch later has only "
                f"padding in its first {int(self._front.max())} columns.",
                fix="remove these rows from the batch first, with the method reorder of the state.",
            )
        buffers = dict(self._buffers)
        # For each row, the number of stored tokens before column `start`; the other tokens move to the left by this
        # number.
        shifts = (start - self._fronts()).clamp(min=0).tolist()
        for name, buffer in self._buffers.items():
            axis = self.growing_axis(name)
            if name in self._in_place:
                for row, shift in enumerate(shifts):
                    if shift:
                        remaining = buffer[row, :, shift : shift + stop - start].clone()
                        buffer[row, :, : remaining.shape[1]] = remaining
            elif axis is not None:
                buffers[name] = buffer.narrow(axis, start, stop - start).clone(memory_format=torch.contiguous_format)
        self._set_front((self._fronts() - start).clamp(min=0))
        self._replace(buffers)

    def append_rows(self, other: Self, length: int) -> None:
        """Append the rows of another state to this state, without a copy of the existing rows if the buffers have capacity."""
        own_length, other_length, rows = self._length, other._length, self._batch
        # The numbers of columns by which the tokens of this and of the other state move to the right in the buffers.
        # With the input `LENGTHS`, the tokens do not move: only the number of padding columns changes.
        shift, other_shift = (0, 0) if self._lengths else (length - own_length, length - other_length)
        if self._lengths:
            self._set_front(torch.cat([self._fronts() + length - own_length, other._fronts() + length - other_length]))
        count = rows + other._batch
        if length > self._capacity:
            self._capacity = _roomy(length, self._capacity)
        buffers = {}
        for name, buffer in self._buffers.items():
            axis, other_buffer = self.growing_axis(name), other._buffers[name]
            if name in self._in_place:
                base = self._spread(name, buffer, shift, count)
                base[rows:count, :, :other_shift] = 0
                base[rows:count, :, other_shift : other_shift + other_length] = other_buffer[:, :, :other_length]
                buffers[name] = base[:count]
            elif axis is None:
                buffers[name] = torch.cat([buffer, other_buffer])
            else:
                buffers[name] = torch.cat([moved_right(buffer, axis, length), moved_right(other_buffer, axis, length)])
        self._replace(buffers)

    def _fronts(self) -> torch.Tensor:
        """Return, for each row, the number of padding columns in front of the tokens that the buffers do not contain."""
        return self._front if self._front is not None else torch.zeros(self._batch, dtype=torch.int64)

    def _set_front(self, front: torch.Tensor | None) -> None:
        self._front = front if front is not None and bool(front.any()) else None

    def _spread(self, name: str, buffer: torch.Tensor, by: int, count: int) -> torch.Tensor:
        """Return a buffer with space for `count` rows and all columns, with the tokens moved `by` columns to the right."""
        rows, length = buffer.shape[0], self._length
        base = self._bases.get(name, buffer)
        tokens = buffer[:, :, :length]
        fresh = base.shape[0] < count or base.shape[2] < self._capacity
        if fresh:
            room = max(count, base.shape[0] if base.shape[0] >= count else 2 * rows)
            base = torch.zeros(
                (room, buffer.shape[1], self._capacity, buffer.shape[3]), dtype=buffer.dtype, device=buffer.device
            )
        elif by:
            tokens = tokens.clone()
        if fresh or by:
            base[:rows, :, by : by + length] = tokens
            base[:rows, :, :by] = 0
        self._bases[name] = base
        return base

    def run(self, feeds: Feeds, names: Sequence[str]) -> dict[str, torch.Tensor]:
        """Compute the outputs `names` for the next tokens, and append their keys and values to the state.

        Args:
            feeds: The graph's inputs `(batch, new, ...)` except the KV cache. The tensors must be contiguous, have the
                declared data types, and be on the device of the state.
            names: The names of the outputs to return, without cache outputs.
        """
        new = self.check_step(feeds, self._batch, self._length)
        if self._in_place and new > 1 and self._length and self._batch > 1:
            return self.one_by_one(feeds, new, lambda part: self.run(part, names))
        total = self._length + new
        binding = self._reserve(total)
        if self._lengths:
            feeds = self._with_lengths(feeds, total)
        for name, tensor in feeds.items():
            binding.read(name, tensor)
        sizes = {"batch": self._batch, "sequence": new, "total": total}
        if self._kept is not None:
            sizes["kept"] = feeds[self._kept].shape[0]
        outputs = {}
        for spec in self._results:
            result = self._room(spec, sizes)
            binding.write(spec.name, result)
            if result is not None:
                outputs[spec.name] = result
        if self._where != HOST:
            # ONNX Runtime computes on its own CUDA stream, so first wait until torch has computed the inputs. No wait
            # is needed afterwards, because `run` returns after the computation.
            torch.cuda.current_stream(self._where).synchronize()
        binding.run()
        self._length = total
        if self._replaced or len(outputs) < len(self._results):
            values = binding.results()
            for name in names:
                if name not in outputs:
                    result = native_as_tensor(values[name])
                    # On a GPU, copy the result, because ONNX Runtime reuses the memory after `values` is deleted.
                    outputs[name] = result if self._where == HOST else result.clone()
            presents = {spec.name: native_as_tensor(values[spec.pair or ""]) for spec in self._replaced}
            self._replace({**self._buffers, **presents})
            self._held = [values[spec.pair or ""] for spec in self._replaced]
        return {name: outputs[name] for name in names}

    def _room(self, spec: TensorSpec, sizes: Mapping[str, int]) -> torch.Tensor | None:
        """Return a new tensor for an output; `None` if the size of the output is known only after the computation."""
        shape = [axis if isinstance(axis, int) else sizes.get(axis) for axis in spec.shape]
        if None in shape:
            return None
        return torch.empty(shape, dtype=getattr(torch, spec.dtype), device=self._where)  # type: ignore[arg-type]

    def _with_lengths(self, feeds: Feeds, total: int) -> Feeds:
        """Return the inputs with `LENGTHS` (the position of each row's last token) and with a mask for the stored columns only.

        Raises:
            InputError: The mask is not zero in padding columns that are not stored.
        """
        front = self._front
        if front is None:
            if self._last.shape[0] != self._batch:
                self._last = torch.empty(self._batch, dtype=torch.int32)
            return {**feeds, LENGTHS: self._last.fill_(total - 1)}
        assert self._mask is not None
        mask, columns = feeds[self._mask], torch.arange(total)
        if bool(mask[columns < front.unsqueeze(1)].any()):
            raise InputError(
                "The attention mask has ones in padding columns of a row that joined the batch with fewer tokens than the other rows.",
                fix="pass zeros in attention_mask for the padding columns at the start of this row.",
            )
        columns_of_rows = torch.arange(total - int(front.min())) + front.unsqueeze(1)
        stored_mask = mask.gather(1, columns_of_rows.clamp(max=total - 1)) * (columns_of_rows < total)
        return {**feeds, self._mask: stored_mask.contiguous(), LENGTHS: (total - 1 - front).to(torch.int32)}

    def _reserve(self, total: int) -> ReusedBinding:
        """Enlarge the buffers if they have no space for `total` tokens, and return a binding of the buffers."""
        if self._in_place and total > self._capacity:
            self._capacity = _roomy(total, self._capacity)
            self._binding = None
        if self._binding is None:
            self._replace({spec.name: self._grown(spec) for spec in self._pasts})
        assert self._binding is not None
        return self._binding

    def _grown(self, spec: TensorSpec) -> torch.Tensor:
        old_buffer = self._buffers.get(spec.name)
        in_place = spec.name in self._in_place
        if not in_place and old_buffer is not None:
            return old_buffer
        sizes = [self._batch, *(size if isinstance(size, int) else 0 for size in spec.shape[1:])]
        if in_place:
            sizes[2] = self._capacity
            base = self._bases.get(spec.name)
            if base is not None:
                sizes[0] = base.shape[0]
        buffer = torch.zeros(sizes, dtype=getattr(torch, spec.dtype), device=self._where)
        if old_buffer is not None:
            buffer[: self._batch, :, : self._length] = old_buffer[:, :, : self._length]
        if in_place:
            self._bases[spec.name] = buffer
        return buffer[: self._batch]

    def _replace(self, buffers: Mapping[str, torch.Tensor]) -> None:
        """Replace the buffers, and bind the new buffers if there is a buffer for each past input."""
        self._buffers = dict(buffers)
        self._binding = None
        if len(self._buffers) < len(self._pasts):
            return
        self._binding = ReusedBinding(self._runtime, self._where)
        for spec in self._pasts:
            buffer = self._buffers[spec.name]
            self._binding.read(spec.name, buffer)
            self._binding.write(spec.pair or "", buffer if spec.name in self._in_place else None)


def _roomy(tokens: int, before: int) -> int:
    """Return a token capacity for at least `tokens` tokens, with spare space; `before` is the previous capacity."""
    return max(_MIN_CAPACITY, -(-tokens // 64) * 64, int(before * _GROWTH))


def _moves(chosen: Sequence[int]) -> list[tuple[int, int]] | None:
    """Return the copies `(target row, source row)` that set each row `i` to row `chosen[i]`, in the order of execution.

    Return `None` if a copy would read a row that an earlier copy has overwritten.
    """
    moves = [(target, source) for target, source in enumerate(chosen) if target != source]
    return None if any(source in {target for target, _ in moves[:i]} for i, (_, source) in enumerate(moves)) else moves
