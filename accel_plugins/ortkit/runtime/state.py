"""What a decoder keeps between calls, in memory that ONNX Runtime reads and writes where it is: the host's, or a GPU's."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import onnxruntime as ort
import torch

from accel.artifact import Component, TensorSpec
from accel.errors import InputError
from accel.interfaces.continuation import moved_right
from accel.interfaces.description import StateDescription, kept_name
from accel.interfaces.protocols import Feeds, State
from accel.interfaces.session_contract import (
    StepCheck,
    check_crop,
    check_drop,
    check_held,
    check_join,
    check_rows,
    grows,
)

from .values import Binding, native_as_tensor

# Buffers grow in steps: a step a token would copy the cache each time, doubling would waste half of it.
_MIN_CAPACITY = 256
_GROWTH = 1.5
HOST = torch.device("cpu")
LENGTHS = "accel.lengths"
"""Input `(batch,) int32` of a graph whose rows may have lengths of their own: the place of each row's last token."""


class OrtState(StateDescription):
    """What is kept of one batch of sequences, and the binding that hands it to the graph.

    Where a past with room for more tokens has the shape of its present, both are bound to one buffer, and a step copies
    nothing (`GroupQueryAttention`). A batch of rows takes several tokens after a past one by one there: the operator's
    contract. Everything else, keys and values that a graph returns longer each step and states of one size, is a new tensor
    after each step, which becomes the next one's past.

    A graph that takes lengths has rows that joined shorter than others begin in the first column of their buffers all the same:
    what a caller's mask has in front of them has no place there. So each is computed as alone, to the last bit. In other graphs
    there are zeros in front.

    Buffers that are written in place are the first rows of larger ones, once rows have joined: the next come and go without a
    copy of those that stay.
    """

    def __init__(
        self,
        session: ort.InferenceSession,
        component: Component,
        batch: int,
        where: torch.device = HOST,
        *,
        lengths: bool = False,
    ) -> None:
        check_rows(batch)
        self._where = where
        self._session = session
        self._component = component
        super().__init__(batch)
        outputs = {spec.name: spec for spec in component.outputs}
        self._pasts = [spec for spec in component.inputs if spec.pair is not None]
        self._in_place = frozenset(
            spec.name for spec in self._pasts if grows(spec) and spec.shape == outputs[spec.pair or ""].shape
        )
        self._replaced = [spec for spec in self._pasts if spec.name not in self._in_place]
        # The axis along which the cache grows.
        self._growing = {s.name: _growing_axis(s, outputs[s.pair or ""]) for s in self._pasts if grows(s)}
        self._lengths = lengths
        # Columns of the caller's mask that have no place, for each row; `None` where no row has any.
        self._front: torch.Tensor | None = None
        # What `LENGTHS` is given as long as no row has any.
        self._last = torch.zeros(batch, dtype=torch.int32)
        # A GPU's kernels do not look whether what they gather is there, and the call waits for its ids anyway.
        self._check_step = StepCheck(component, waits=where.type != "cpu")
        self._mask = self._check_step.mask
        self._kept = next((spec.name for spec in component.inputs if spec.shape == ("kept",)), None)
        self._results = [spec for spec in component.outputs if spec.pair is None]
        self._buffers: dict[str, torch.Tensor] = {}
        # What those that are written in place are the first rows of.
        self._bases: dict[str, torch.Tensor] = {}
        # ONNX Runtime's values behind them.
        self._held: list[Any] = []
        self._binding: Binding | None = None
        self._capacity = 0

    @property
    def nbytes(self) -> int:
        """Memory of the buffers."""
        return sum(self._bases.get(name, buffer).nbytes for name, buffer in self._buffers.items())

    def reorder(self, index: torch.Tensor) -> None:
        """Row `i` becomes what row `index[i]` was (`index: (rows,)` of integers); fewer or more rows than before are fine."""
        chosen = check_rows(self._batch, index)
        if chosen == list(range(self._batch)):
            return
        rows, moves = torch.tensor(chosen, device=self._where), _moves(chosen)
        buffers = {}
        for name, buffer in self._buffers.items():
            base = self._bases.get(name)
            if base is None or moves is None or len(chosen) > base.shape[0]:
                self._bases.pop(name, None)
                buffers[name] = buffer.index_select(0, rows)
                continue
            for target, source in moves:
                base[target, :, : self._length] = base[source, :, : self._length]
            buffers[name] = base[: len(chosen)]
        self._batch = len(chosen)
        self._set_front(self._front[chosen] if self._front is not None else None)
        self._replace(buffers)

    def crop(self, length: int) -> None:
        """Forget all tokens from `length` on."""
        check_crop(length, self._length, croppable=self._component.croppable)
        if not length:
            self._front = None
        elif self._front is not None and length <= int(self._front.max()):
            raise InputError(
                f"Of {length} tokens, rows that joined with fewer have none.",
                fix="let those rows leave first (reorder).",
            )
        if length < self._length:
            # What a graph finds in its past is its past: nothing may be left behind the end. States begin again with zeros.
            self._replace(
                {
                    name: buffer
                    if name in self._in_place
                    else buffer.narrow(self._growing[name], 0, length).contiguous()
                    for name, buffer in self._buffers.items()
                    if name in self._growing
                }
            )
        self._length = length

    def join(self, other: State) -> None:
        """The rows of another state of the session behind these, the shorter ones moved to the right."""
        check_join(self, other, same=getattr(other, "_session", None) is self._session)
        assert isinstance(other, OrtState)
        mine, theirs, rows = self._length, other._length, self._batch
        length = max(mine, theirs)
        # What moves to the right: the tokens, or where a row's first column is in the caller's mask.
        by, further = (0, 0) if self._lengths else (length - mine, length - theirs)
        if self._lengths:
            self._set_front(torch.cat([self._fronts() + length - mine, other._fronts() + length - theirs]))
        self._batch += other._batch
        if length > self._capacity:
            self._capacity = _roomy(length, self._capacity)
        buffers = {}
        for name, buffer in self._buffers.items():
            axis, more = self._growing.get(name), other._buffers[name]
            if name in self._in_place:
                base = self._spread(name, buffer, by)
                base[rows : self._batch, :, :further] = 0
                base[rows : self._batch, :, further : further + theirs] = more[:, :, :theirs]
                buffers[name] = base[: self._batch]
            elif axis is None:
                buffers[name] = torch.cat([buffer, more])
            else:
                buffers[name] = torch.cat([moved_right(buffer, axis, length), moved_right(more, axis, length)])
        self._length = length
        self._replace(buffers)

    def _fronts(self) -> torch.Tensor:
        """Columns of the mask that have no place, for each row."""
        return self._front if self._front is not None else torch.zeros(self._batch, dtype=torch.int64)

    def _set_front(self, front: torch.Tensor | None) -> None:
        self._front = front if front is not None and bool(front.any()) else None

    def _spread(self, name: str, buffer: torch.Tensor, by: int) -> torch.Tensor:
        """A buffer with room for all rows and columns, in which these tokens stand `by` columns further right."""
        rows, length = buffer.shape[0], self._length
        base = self._bases.get(name, buffer)
        held = buffer[:, :, :length]
        fresh = base.shape[0] < self._batch or base.shape[2] < self._capacity
        if fresh:
            room = max(self._batch, base.shape[0] if base.shape[0] >= self._batch else 2 * rows)
            base = torch.zeros(
                (room, buffer.shape[1], self._capacity, buffer.shape[3]), dtype=buffer.dtype, device=buffer.device
            )
        elif by:
            held = held.clone()
        if fresh or by:
            base[:rows, :, by : by + length] = held
            base[:rows, :, :by] = 0
        self._bases[name] = base
        return base

    def drop(self, columns: int) -> None:
        """Forget the first columns of every row, which all masks hid."""
        check_drop(columns, self._length)
        if not columns:
            return
        left = self._length - columns
        buffers = dict(self._buffers)
        # Rows whose first columns have a place have to move.
        moved = (columns - self._fronts()).clamp(min=0).tolist()
        for name, axis in self._growing.items():
            if name not in self._in_place:
                buffers[name] = (
                    self._buffers[name].narrow(axis, columns, left).clone(memory_format=torch.contiguous_format)
                )
                continue
            for row, by in enumerate(moved):
                if by:
                    held = self._buffers[name][row, :, by : by + left].clone()
                    self._buffers[name][row, :, : held.shape[1]] = held
        self._set_front((self._fronts() - columns).clamp(min=0))
        self._length = left
        self._replace(buffers)

    def clone(self) -> OrtState:
        """An independent copy."""
        copy = OrtState(self._session, self._component, self._batch, self._where, lengths=self._lengths)
        copy._length, copy._capacity, copy._front = self._length, self._capacity, self._front
        copy._replace({name: buffer.clone() for name, buffer in self._buffers.items()})
        return copy

    def read(self) -> dict[str, torch.Tensor]:
        """Copies of what is held, as `kept_name` has it: keys and values `(batch, heads, tokens, size)`."""
        held = {}
        for name, buffer in self._buffers.items():
            filled = buffer.narrow(self._growing[name], 0, self._length) if name in self._in_place else buffer
            copied = held[kept_name(name)] = filled.clone()
            for row, by in enumerate(self._fronts().tolist() if name in self._in_place else ()):
                if by:
                    copied[row, :, :by] = 0
                    copied[row, :, by:] = buffer[row, :, : self._length - by]
        return held

    def load(self, values: Mapping[str, torch.Tensor], length: int) -> None:
        """Hold these instead; as `read` returns them, for `length` tokens.

        Raises:
            InputError: Other names or sizes than the graph has, or a graph that keeps more than keys and values.
        """
        if len(self._growing) != len(self._pasts):
            raise InputError(
                "The model keeps states of one size, which cannot be filled from elsewhere.",
                fix="give it the whole text.",
            )
        pasts = {kept_name(spec.name): spec for spec in self._pasts}
        check_held(values, {name: (spec.shape[1], spec.shape[3]) for name, spec in pasts.items()}, self._batch, length)
        tensors = {spec.name: values[name].to(self._where, getattr(torch, spec.dtype)) for name, spec in pasts.items()}
        replaced = {spec.name: tensors[spec.name] for spec in self._replaced}
        self._front = None
        self._bases.clear()
        self._buffers = {n: t.clone(memory_format=torch.contiguous_format) for n, t in replaced.items()}
        self._binding, self._capacity, self._length = None, 0, length
        self._reserve(length)
        for name in self._in_place:
            self._buffers[name].narrow(self._growing[name], 0, length).copy_(tensors[name])

    def run(self, feeds: Feeds, names: Sequence[str]) -> dict[str, torch.Tensor]:
        """Compute the outputs `names` for the next tokens, and keep their keys and values.

        Args:
            feeds: The graph's inputs `(batch, new, ...)` without the cache, contiguous, where the state is, of the declared types.
            names: Outputs wanted, none of the cache.
        """
        new = self._check_step(feeds, self._batch, self._length)
        if self._in_place and new > 1 and self._length and self._batch > 1:
            return self._one_by_one(feeds, names, new)
        total = self._length + new
        binding = self._reserve(total)
        if self._lengths:
            feeds = self._with_lengths(feeds, total)
        for name, tensor in feeds.items():
            binding.read(name, tensor)
        sizes = {"batch": self._batch, "sequence": new, "total": total}
        if self._kept is not None:
            sizes["kept"] = feeds[self._kept].shape[0]
        found = {}
        for spec in self._results:
            result = self._room(spec, sizes)
            binding.write(spec.name, result)
            if result is not None:
                found[spec.name] = result
        if self._where != HOST:
            # ONNX Runtime computes on a stream of its own, and is done when it returns.
            torch.cuda.current_stream(self._where).synchronize()
        binding.run()
        self._length = total
        if self._replaced or len(found) < len(self._results):
            values = binding.made()
            for name in names:
                if name not in found:
                    result = native_as_tensor(values[name])
                    # On a GPU, ONNX Runtime uses the memory of a value again as soon as that is gone.
                    found[name] = result if self._where == HOST else result.clone()
            made = {spec.name: native_as_tensor(values[spec.pair or ""]) for spec in self._replaced}
            self._replace({**self._buffers, **made})
            self._held = [values[spec.pair or ""] for spec in self._replaced]
        return {name: found[name] for name in names}

    def _room(self, spec: TensorSpec, sizes: Mapping[str, int]) -> torch.Tensor | None:
        """Memory for an output, where its size is known before."""
        shape = [axis if isinstance(axis, int) else sizes.get(axis) for axis in spec.shape]
        if None in shape:
            return None
        return torch.empty(shape, dtype=getattr(torch, spec.dtype), device=self._where)  # type: ignore[arg-type]

    def _with_lengths(self, feeds: Feeds, total: int) -> Feeds:
        """The inputs, with the place of each row's last token, and a mask of places instead of columns.

        Raises:
            InputError: The mask keeps columns in front that hold no token.
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
                "The mask keeps columns in front of rows that joined with fewer tokens.", fix="put zeros there."
            )
        places = torch.arange(total - int(front.min())) + front.unsqueeze(1)
        placed = mask.gather(1, places.clamp(max=total - 1)) * (places < total)
        return {**feeds, self._mask: placed.contiguous(), LENGTHS: (total - 1 - front).to(torch.int32)}

    def _one_by_one(self, feeds: Feeds, names: Sequence[str], new: int) -> dict[str, torch.Tensor]:
        specs = {spec.name: spec for spec in self._component.inputs}
        kept = self._kept
        steps: list[dict[str, torch.Tensor]] = []
        start = self._length
        for i in range(new):
            step = {}
            for name, tensor in feeds.items():
                if name == self._mask:
                    step[name] = tensor[:, : start + i + 1].contiguous()
                elif name == kept:
                    step[name] = torch.zeros(1, dtype=tensor.dtype)
                elif specs[name].shape[1:2] == ("sequence",):
                    step[name] = tensor[:, i : i + 1].contiguous()
                else:
                    step[name] = tensor
            steps.append(self.run(step, names))
        whole = {name: torch.cat([step[name] for step in steps], dim=1) for name in names}
        if kept is None:
            return whole
        return {name: tensor.index_select(1, feeds[kept]) for name, tensor in whole.items()}

    def _reserve(self, total: int) -> Binding:
        """Room for `total` tokens, and a binding that knows the buffers."""
        if self._in_place and total > self._capacity:
            self._capacity = _roomy(total, self._capacity)
            self._binding = None
        if self._binding is None:
            self._replace({spec.name: self._grown(spec) for spec in self._pasts})
        assert self._binding is not None
        return self._binding

    def _grown(self, spec: TensorSpec) -> torch.Tensor:
        before = self._buffers.get(spec.name)
        in_place = spec.name in self._in_place
        if not in_place and before is not None:
            return before
        sizes = [self._batch, *(size if isinstance(size, int) else 0 for size in spec.shape[1:])]
        if in_place:
            sizes[self._growing[spec.name]] = self._capacity
            base = self._bases.get(spec.name)
            if base is not None:
                sizes[0] = base.shape[0]
        buffer = torch.zeros(sizes, dtype=getattr(torch, spec.dtype), device=self._where)
        if before is not None:
            buffer[: self._batch, :, : self._length] = before[:, :, : self._length]
        if in_place:
            self._bases[spec.name] = buffer
        return buffer[: self._batch]

    def _replace(self, buffers: Mapping[str, torch.Tensor]) -> None:
        """Bind these buffers instead."""
        self._buffers = dict(buffers)
        self._binding = None
        if len(self._buffers) < len(self._pasts):
            return
        self._binding = Binding(self._session, self._where)
        for spec in self._pasts:
            buffer = self._buffers[spec.name]
            self._binding.read(spec.name, buffer)
            self._binding.write(spec.pair or "", buffer if spec.name in self._in_place else None)


def _roomy(tokens: int, before: int) -> int:
    """A capacity for so many tokens, and for some more."""
    return max(_MIN_CAPACITY, -(-tokens // 64) * 64, int(before * _GROWTH))


def _moves(chosen: Sequence[int]) -> list[tuple[int, int]] | None:
    """Rows to copy one after another, `(to, from)`, so that row `i` becomes row `chosen[i]`; `None` where one is needed
    after it was written over.
    """
    moves = [(target, source) for target, source in enumerate(chosen) if target != source]
    return None if any(source in {target for target, _ in moves[:i]} for i, (_, source) in enumerate(moves)) else moves


def _growing_axis(past: TensorSpec, present: TensorSpec) -> int:
    """The axis of the tokens: where past and present differ, and the third of buffers with room, which do not."""
    pairs = zip(past.shape, present.shape, strict=True)
    return next((i for i, (before, after) in enumerate(pairs) if before != after), 2)
