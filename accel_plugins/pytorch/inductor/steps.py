"""Decoder session that compiles decoding steps: one new token per row, with the KV cache in memory of a fixed size (a
slot).

Prompts, and calls with several tokens after a past, run without compiled code on a growing cache. The first decoding
step moves the cache into a slot of a size that code is compiled for. On a GPU, the slot has a CUDA graph. Other
operations on the cache move it out of the slot again.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from transformers import AttentionInterface
from transformers.cache_utils import Cache, DynamicCache

from accel.artifact import Component
from accel.capture import CACHE_NAME, Source, first_lines
from accel.capture.graph_forms import relative_tolerance
from accel.interfaces.specs import DeviceSpec

from ..cuda_graphs import StreamOrder, captured
from ..decoder_session import ModuleDecoderSession
from ..state import CacheState
from .comparison import difference
from .compilation import compiled, compiling
from .packing import sharing_copy

logger = logging.getLogger(__name__)

ATTENTION = "accel_step"
"""Name of the attention function for one token per row, registered with transformers."""

_FEWEST = 256
# Cache size in tokens up to which the Triton kernel in kernels.py is faster than two matrix products of a library. The
# kernel reads shared keys once per query head.
_SHORT = 1024
# Number of unused slots to keep, with their CUDA graphs, for the next caches of the same sizes.
_SPARE = 2
# Options for matrix products of one row: the compiler tunes them as fused sums and puts independent kernels into one
# launch. Results of more than a few operations (an activation, a norm) are computed once instead of again in each sum
# that reads them.
_OPTIONS = {
    "coordinate_descent_tuning": True,
    "combo_kernels": True,
    "benchmark_combo_kernel": True,
    "realize_opcount_threshold": 5,
}
# Arguments of an attention function that do not change its result here.
_HARMLESS = frozenset(
    ("is_causal", "position_ids", "use_cache", "output_attentions", "cache_position", "cu_seq_lens_q")
)


def _attend(
    module: torch.nn.Module,  # noqa: ARG001
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor,
    scaling: float | None = None,
    dropout: float = 0.0,
    **others: Any,
) -> tuple[torch.Tensor, None]:
    """Attention function in the interface of transformers, for `query: (rows, heads, 1, size)`. Heads that share keys
    are computed as rows of one product.

    Raises:
        NotImplementedError: The attention uses sliding windows, score caps, sinks or dropout.
    """
    odd = [name for name, told in others.items() if told is not None and name not in _HARMLESS]
    if odd or dropout:
        raise NotImplementedError(f"compiled steps do not support attention with {', '.join(odd) or 'dropout'}")
    rows, heads, _, size = query.shape
    shared, capacity = key.shape[1:3]
    scale = size**-0.5 if scaling is None else scaling
    if query.is_cuda and capacity <= _SHORT:
        # Triton is installed only with PyTorch's builds for GPUs.
        from .kernels import step_attention

        bias = attention_mask.expand(rows, heads, 1, capacity)
        return step_attention(query, key, value, bias, scale), None
    grouped = query.reshape(rows, shared, heads // shared, size)
    scores = torch.matmul(grouped, key.transpose(2, 3)).float() * scale
    weights = torch.softmax(scores + attention_mask, dim=-1).to(value.dtype)
    return torch.matmul(weights, value).reshape(rows, 1, heads, value.shape[-1]), None


class _SeparateBias(torch.nn.Module):
    """Linear layer that adds its bias as a separate operation, so that the compiler fuses the product instead of
    calling a library.
    """

    def __init__(self, linear: torch.nn.Linear) -> None:
        super().__init__()
        self.weight, self.bias = linear.weight, linear.bias

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.linear(hidden, self.weight) + self.bias


class _FixedCache(Cache):  # type: ignore[misc]  # transformers is untyped here
    """Cache object for the model code that keeps keys and values in memory of a fixed size.

    Args:
        keys: Keys `(rows, heads, capacity, size)` of each layer.
        values: Values of the same shape of each layer.
        place: Index of the new token, `(1,)`.
    """

    def __init__(self, keys: Sequence[torch.Tensor], values: Sequence[torch.Tensor], place: torch.Tensor) -> None:
        self.keys, self.values, self.place = keys, values, place
        self.layers: list[Any] = []

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Write the new keys and values of a layer at index `place`, and return all keys and values of the layer."""
        keys, values = self.keys[layer_idx], self.values[layer_idx]
        keys.index_copy_(2, self.place, key_states)
        values.index_copy_(2, self.place, value_states)
        return keys, values

    def get_seq_length(self, layer_idx: int = 0) -> Any:
        """Return the number of tokens in the cache."""
        return self.place


class Slot:
    """Memory for a KV cache of a fixed size, with the code and the CUDA graph that compute a decoding step.

    Args:
        layers: Cache layers whose shapes, data type and device are used.
        batch: Number of rows of the batch.
        capacity: Number of tokens per row that fit.
        positions: Whether the model has a `position_ids` input.
        step: The compiled code of a step.
    """

    def __init__(self, layers: Sequence[Any], batch: int, capacity: int, *, positions: bool, step: Any) -> None:
        device = layers[0].keys.device
        self.batch, self.capacity = batch, capacity
        self._step = step
        self._keys, self._values = (
            [_room(getattr(layer, name), capacity) for layer in layers] for name in ("keys", "values")
        )
        ids = torch.zeros((batch, 1), dtype=torch.int64, device=device)
        self._inputs: dict[str, torch.Tensor] = {"input_ids": ids}
        if positions:
            self._inputs["position_ids"] = torch.zeros_like(ids)
        self._mask = torch.zeros((batch, capacity), dtype=torch.int64, device=device)
        self._place = torch.zeros(1, dtype=torch.int64, device=device)
        self._graph: torch.cuda.CUDAGraph | None = None
        self._logits = torch.empty(0)
        self._on_device = StreamOrder(device)

    def fill(self, layers: Sequence[Any], length: int) -> None:
        """Copy the keys and values of `length` tokens into the slot, and clear the rest."""
        self._on_device.take()
        for layer, keys, values in zip(layers, self._keys, self._values, strict=True):
            keys[:, :, :length].copy_(layer.keys)
            values[:, :, :length].copy_(layer.values)
        # Masked values are multiplied by zero, so values from an earlier cache must not be infinite or NaN.
        for tensor in (*self._keys, *self._values):
            tensor[:, :, length:].zero_()
        self._mask.zero_()

    def read(self, cache: DynamicCache, length: int) -> DynamicCache:
        """Copy the keys and values of `length` tokens into `cache`, and return it."""
        for i, (keys, values) in enumerate(zip(self._keys, self._values, strict=True)):
            cache.update(keys[:, :, :length].clone(), values[:, :, :length].clone(), i)
        return cache

    def reorder(self, index: torch.Tensor) -> None:
        """Reorder the rows of the batch: row `i` becomes the previous row `index[i]`."""
        for tensor in (*self._keys, *self._values):
            tensor.copy_(tensor.index_select(0, index))

    def run(self, tensors: Mapping[str, torch.Tensor], length: int, *, capture: bool = True) -> torch.Tensor:
        """Compute the logits `(rows, 1, vocabulary)` of one more token after `length` tokens.

        With `capture`, the first call on a GPU captures a CUDA graph, and later calls replay it.
        """
        mask = tensors["attention_mask"]
        self._on_device.take()
        self._mask[:, : mask.shape[1]].copy_(mask)
        if mask.shape[1] < self.capacity:
            # Clear mask entries of an earlier step: the cache may have been cropped since then.
            self._mask[:, mask.shape[1] :].zero_()
        for name, buffer in self._inputs.items():
            buffer.copy_(tensors[name])
        self._place.fill_(length)
        if self._graph is not None:
            self._graph.replay()
            return self._logits.clone()
        found = self._call()
        if capture and self._place.device.type == "cuda":
            # Capturing repeats the step, which writes the same values again.
            self._graph, self._logits = captured(self._call, self._place.device, warm_up=2)
        return found

    def _call(self) -> torch.Tensor:
        found: torch.Tensor = self._step(self._inputs, self._mask, self._place, self._keys, self._values)
        return found


def _room(tensor: torch.Tensor, capacity: int) -> torch.Tensor:
    return tensor.new_zeros((*tensor.shape[:2], capacity, tensor.shape[3]))


class StepState(CacheState):
    """Decoder state whose KV cache is either a growing cache or in a slot."""

    session: CompiledStepsSession
    slot: Slot | None = None

    @property
    def cache(self) -> DynamicCache:
        """The KV cache of transformers. Reading the attribute moves the cache out of its slot."""
        if self.slot is not None:
            self.cache = self.slot.read(self._new_cache(), self._length)
        return self._cache

    @cache.setter
    def cache(self, cache: DynamicCache) -> None:
        self.leave()
        self._cache = cache

    def enter(self, slot: Slot) -> None:
        """Move the KV cache into a slot (memory of a fixed size)."""
        slot.fill(self._cache.layers, self._length)
        self.slot, self._cache = slot, self._new_cache()

    def leave(self) -> None:
        """Release the slot of the KV cache without reading its contents."""
        slot, self.slot = self.slot, None
        if slot is not None:
            self.session.give_back(slot)

    def select_rows(self, rows: Sequence[int]) -> None:
        """Reorder the rows of the batch: row `i` becomes the previous row `rows[i]`. The cache stays in its slot if the
        number of rows does not change.
        """
        if self.slot is None or len(rows) != self._batch:
            super().select_rows(rows)
        else:
            self.slot.reorder(torch.tensor(rows, device=self.session.where))

    def keep_columns(self, start: int, stop: int) -> None:
        """Keep only the tokens from `start` to `stop`. A slot needs no change if `start` is 0: the mask excludes the
        last tokens.
        """
        if self.slot is None or start:
            super().keep_columns(start, stop)

    def __del__(self) -> None:
        self.leave()


class CompiledStepsSession(ModuleDecoderSession):
    """Session that computes decoding steps of one token with compiled code. Only one thread at a time computes a step.

    Args:
        model: The whole model.
        part: The decoder part that exporters trace; it gives the input names.
        component: The component, which describes the inputs and outputs.
        device: The device of the model.
        dtype: Data type used for computation.
        forms: Maximum number of sizes to compile for.
    """

    def __init__(
        self, model: Any, part: Source, component: Component, device: DeviceSpec, dtype: str, *, forms: int
    ) -> None:
        super().__init__(model, part, component, device, dtype)
        self.where = self._where
        self._most = forms
        self._tolerance = relative_tolerance(dtype)
        self._steps: dict[tuple[int, int], Any] = {}
        self._spare: list[Slot] = []
        self._turn = threading.RLock()
        self._why_eager, self._told = "", False
        self._positions = any(spec.name == "position_ids" for spec in component.inputs)
        self._step_code: Any = _stepping(model)

    def new_state(self, batch: int) -> CacheState:
        """Return a decoder state with an empty KV cache for `batch` rows."""
        return StepState(self, self._component, batch, self._new_cache, joinable=True)

    def close(self) -> None:
        """Release the model, the compiled code and the unused slots."""
        super().close()
        self._step_code = None
        with self._turn:
            self._steps.clear()
            self._spare.clear()

    def give_back(self, slot: Slot) -> None:
        """Keep an unused slot for the next KV cache of the same size."""
        with self._turn:
            self._spare = [*self._spare, slot][-_SPARE:] if self._step_code is not None else []

    def _extend(self, model: Any, tensors: Mapping[str, torch.Tensor], state: CacheState, new: int) -> torch.Tensor:
        assert isinstance(state, StepState)
        if new != 1 or not state.length or self._why_eager:
            return super()._extend(model, tensors, state, new)
        # Compiled code and CUDA graphs write to tensors. PyTorch allows this only in the mode (inference mode or not)
        # in which the tensors were created.
        with self._turn, torch.inference_mode(False), torch.no_grad():
            if state.slot is not None and state.length < state.slot.capacity:
                return state.slot.run(tensors, state.length)
            capacity = max(_FEWEST, 1 << state.length.bit_length())
            key = (state.batch, capacity)
            if key not in self._steps:
                if len(self._steps) < self._most:
                    return self._first(key, model, tensors, state)
                if not self._told:
                    self._told = True
                    logger.warning(
                        "Decoding steps are compiled for %d sizes, which is the limit. Steps for %d rows of up to %d tokens run "
                        "without compiled code. Pass provider_options={'graphs': ...} to compile more sizes.", self._most, *key,
                    )  # fmt: skip
                return super()._extend(model, tensors, state, new)
            state.enter(self._slot(key, state.cache.layers))
            assert state.slot is not None
            return state.slot.run(tensors, state.length)

    def _slot(self, key: tuple[int, int], layers: Sequence[Any]) -> Slot:
        for slot in self._spare:
            if (slot.batch, slot.capacity) == key:
                self._spare.remove(slot)
                return slot
        batch, capacity = key
        return Slot(layers, batch, capacity, positions=self._positions, step=self._steps[key])

    def _rehearse(self, key: tuple[int, int], tensors: Mapping[str, torch.Tensor], state: StepState) -> None:
        """Run a step without compilation, so that unsupported attention raises an error before minutes of compilation."""
        model: Any = self.runtime
        config = model.config.get_text_config(decoder=True)
        if odd := {*(getattr(config, "layer_types", None) or ())} - {"full_attention"}:
            # Some models apply these layer types only in their attention mask, and the mask is replaced here.
            raise NotImplementedError(f"compiled steps do not support layers with {', '.join(sorted(odd))}")
        batch, capacity = key
        slot = Slot(state.cache.layers, batch, capacity, positions=self._positions, step=self._step_code)
        slot.fill(state.cache.layers, state.length)
        slot.run(tensors, state.length, capture=False)

    def _first(
        self, key: tuple[int, int], model: Any, tensors: Mapping[str, torch.Tensor], state: StepState
    ) -> torch.Tensor:
        """Compile for these sizes, compare one step with the original model, and return the original model's logits."""
        logger.info(
            "compiling decoding steps of %s for %d rows of up to %d tokens: this may take minutes",
            type(model).__name__,
            *key,
        )
        trial = state.clone()
        assert isinstance(trial, StepState)
        untried = not self._steps
        self._steps[key] = compiled(self._step_code, options=_OPTIONS)
        expected = super()._extend(model, tensors, state, 1)
        try:
            if untried:
                self._rehearse(key, tensors, trial)
            with compiling(freezing=False):
                trial.enter(self._slot(key, trial.cache.layers))
                assert trial.slot is not None
                found = trial.slot.run(tensors, trial.length)
                # The second call replays the CUDA graph.
                found = trial.slot.run(tensors, trial.length) if self.where.type == "cuda" else found
            gap = difference(found, expected)
            why = f"the logits differ by {gap:.2g} of the largest value" if not gap <= self._tolerance else ""
        # The compiler may raise any exception.
        except Exception as error:  # noqa: BLE001
            why = f"{type(error).__name__}: {first_lines(error)}"
        if why:
            logger.warning("Decoding steps of %s run without compiled code. Reason: %s", type(model).__name__, why)
            self._why_eager = why
            trial.slot = None
            self._steps.clear()
        trial.leave()
        return expected


def _stepping(model: Any) -> Callable[..., torch.Tensor]:
    """Return a function that computes one step: the model's code with the same weights and the attention function for
    one token per row.
    """
    made = sharing_copy(model)
    AttentionInterface.register(ATTENTION, _attend)
    for module in list(made.modules()):
        if hasattr(module, "config"):
            module.config._attn_implementation = ATTENTION
        for name, child in list(module.named_children()):
            if type(child) is torch.nn.Linear and child.bias is not None:
                setattr(module, name, _SeparateBias(child))

    def step(
        inputs: Mapping[str, torch.Tensor],
        mask: torch.Tensor,
        place: torch.Tensor,
        keys: Sequence[torch.Tensor],
        values: Sequence[torch.Tensor],
    ) -> torch.Tensor:
        hidden = torch.finfo(torch.float32).min
        bias = torch.where(mask[:, None, None] != 0, 0.0, hidden)
        found: torch.Tensor = made(
            **inputs, attention_mask=bias, use_cache=True, **{CACHE_NAME: _FixedCache(keys, values, place)}
        ).logits
        return found

    return step
