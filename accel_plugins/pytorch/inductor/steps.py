"""Decoder session that compiles decoding steps, which compute one new token per row of the batch.

During decoding steps, the KV cache is in memory of a fixed size, a slot. Prompts, and later calls with several tokens,
run without compiled code on a growing cache. The first decoding step copies the cache into a slot of a size for which
code is compiled. On a GPU, each slot has a CUDA graph. Other operations on the cache, such as cropping its start, copy
the cache out of the slot again.
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
from accel.capture.fast_path_verification import relative_tolerance
from accel.interfaces.specs import DeviceSpec

from ..cuda_graphs import StreamOrder, captured
from ..decoder_session import ModuleDecoderSession
from ..state import CacheState
from .comparison import difference
from .compilation import compiled, compiling
from .matmul_fusion import MatmulFusionPass
from .packing import sharing_copy
from .weight_only import WeightOnlyLinear

logger = logging.getLogger(__name__)

ATTENTION = "accel_step"
"""Name under which the attention function for one token per row is registered with transformers."""

# Smallest size of a slot, in tokens per row.
_FEWEST = 256
# Largest cache size, in tokens, for which the Triton kernel in kernels.py is faster than two matrix products. For
# larger caches, the kernel is slower because it reads the keys once for each query head that shares them.
_SHORT = 1024
# Maximum number of unused slots that a session keeps, with their CUDA graphs, for later caches of the same sizes.
_SPARE = 2
# Compiler options for matrix products with one row per sequence. The compiler generates and tunes its own kernels for
# these products and launches independent kernels together. With the last option, the result of an activation or a norm
# is computed once instead of again in each kernel that reads it.
_OPTIONS = {
    "coordinate_descent_tuning": True,
    "combo_kernels": True,
    "benchmark_combo_kernel": True,
    "realize_opcount_threshold": 5,
}
# Arguments of transformers attention functions that do not change the result for one new token per row.
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
    """Compute attention for one new token per row, in the interface of transformers; `query` has the shape `(rows,
    heads, 1, size)`.

    Query heads that share a key head are computed as the rows of one matrix product.

    Raises:
        NotImplementedError: The attention uses sliding windows, score caps, sinks or dropout.
    """
    unsupported = [name for name, value in others.items() if value is not None and name not in _HARMLESS]
    if unsupported or dropout:
        raise NotImplementedError(f"compiled steps do not support attention with {', '.join(unsupported) or 'dropout'}")
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
    """Linear layer that adds its bias as a separate operation, so that the compiler generates a fused kernel for the
    product instead of calling a matrix library.
    """

    def __init__(self, linear: torch.nn.Linear) -> None:
        super().__init__()
        self.weight, self.bias = linear.weight, linear.bias

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.linear(hidden, self.weight) + self.bias


class _FixedCache(Cache):  # type: ignore[misc]  # transformers is untyped here
    """KV cache for the model code, with keys and values in memory of a fixed size.

    Args:
        keys: Keys `(rows, heads, capacity, size)` of each layer.
        values: Values of the same shape of each layer.
        place: Index of the new token in the cache, `(1,) int64`.
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


class CompiledStepSlot:
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
        """Copy the keys and values of `length` tokens into the slot, and set the memory after these tokens to zero."""
        self._on_device.take()
        for layer, keys, values in zip(layers, self._keys, self._values, strict=True):
            keys[:, :, :length].copy_(layer.keys)
            values[:, :, :length].copy_(layer.values)
        # The attention multiplies masked values by zero. Zero times infinity is NaN, so the memory must not contain
        # infinity or NaN from an earlier cache.
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
        """Compute the logits `(rows, 1, vocabulary)` of one new token per row, after `length` tokens in the cache.

        On a GPU, the first call with `capture=True` captures a CUDA graph, and later calls replay this graph.
        """
        mask = tensors["attention_mask"]
        self._on_device.take()
        self._mask[:, : mask.shape[1]].copy_(mask)
        if mask.shape[1] < self.capacity:
            # The cache may have been cropped since the previous step, so clear the mask entries of removed tokens.
            self._mask[:, mask.shape[1] :].zero_()
        for name, buffer in self._inputs.items():
            buffer.copy_(tensors[name])
        self._place.fill_(length)
        if self._graph is not None:
            self._graph.replay()
            return self._logits.clone()
        logits = self._call()
        if capture and self._place.device.type == "cuda":
            # The capture runs the step again. This is safe because the step writes the same values to the cache.
            self._graph, self._logits = captured(self._call, self._place.device, warm_up=2)
        return logits

    def _call(self) -> torch.Tensor:
        logits: torch.Tensor = self._step(self._inputs, self._mask, self._place, self._keys, self._values)
        return logits


def _room(tensor: torch.Tensor, capacity: int) -> torch.Tensor:
    return tensor.new_zeros((*tensor.shape[:2], capacity, tensor.shape[3]))


class StepState(CacheState):
    """Decoder state whose KV cache is either a growing cache of transformers or in a slot (memory of a fixed size)."""

    session: CompiledStepsSession
    slot: CompiledStepSlot | None = None

    @property
    def cache(self) -> DynamicCache:
        """The KV cache as a cache object of transformers. Reading this attribute copies the cache out of its slot."""
        if self.slot is not None:
            self.cache = self.slot.read(self._new_cache(), self._length)
        return self._cache

    @cache.setter
    def cache(self, cache: DynamicCache) -> None:
        self.leave()
        self._cache = cache

    def enter(self, slot: CompiledStepSlot) -> None:
        """Move the KV cache into a slot (memory of a fixed size)."""
        slot.fill(self._cache.layers, self._length)
        self.slot, self._cache = slot, self._new_cache()

    def leave(self) -> None:
        """Return the slot to the session without copying the KV cache out of the slot."""
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
        """Keep only the tokens from `start` to `stop`. If `start` is 0, a slot needs no change, because the
        attention mask of the next step excludes the removed tokens.
        """
        if self.slot is None or start:
            super().keep_columns(start, stop)

    def __del__(self) -> None:
        self.leave()


class CompiledStepsSession(ModuleDecoderSession):
    """Session that computes decoding steps of one token with compiled code. Only one thread at a time computes a step.

    Args:
        model: The whole model.
        part: The decoder of the model, as exporters trace it; its example inputs define the input names.
        component: The component, which describes the inputs and outputs.
        device: The device of the model.
        dtype: Data type used for computation.
        forms: Maximum number of slot sizes to compile for.
    """

    def __init__(
        self, model: Any, part: Source, component: Component, device: DeviceSpec, dtype: str, *, forms: int
    ) -> None:
        super().__init__(model, part, component, device, dtype)
        self.where = self._where
        self._most = forms
        self._tolerance = relative_tolerance(dtype)
        self._steps: dict[tuple[int, int], Any] = {}
        self._spare: list[CompiledStepSlot] = []
        self._turn = threading.RLock()
        self._why_eager, self._warned = "", False
        self._positions = any(spec.name == "position_ids" for spec in component.inputs)
        self._step_code: Any = _stepping(model)
        self._options: dict[str, Any] = dict(_OPTIONS)
        if any(isinstance(module, WeightOnlyLinear) for module in model.modules()):
            # The pass joins the products of layers that read the same input.
            self._options["pre_grad_custom_pass"] = MatmulFusionPass()

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

    def give_back(self, slot: CompiledStepSlot) -> None:
        """Keep an unused slot for the next KV cache of the same size."""
        with self._turn:
            self._spare = [*self._spare, slot][-_SPARE:] if self._step_code is not None else []

    def _extend(self, model: Any, tensors: Mapping[str, torch.Tensor], state: CacheState, new: int) -> torch.Tensor:
        assert isinstance(state, StepState)
        if new != 1 or not state.length or self._why_eager:
            return super()._extend(model, tensors, state, new)
        # Compiled code and CUDA graphs write to the tensors of a slot. PyTorch forbids these writes if the tensors were
        # created inside inference mode and are changed outside of it, so every step runs outside of inference mode.
        with self._turn, torch.inference_mode(False), torch.no_grad():
            if state.slot is not None and state.length < state.slot.capacity:
                return state.slot.run(tensors, state.length)
            capacity = max(_FEWEST, 1 << state.length.bit_length())
            key = (state.batch, capacity)
            if key not in self._steps:
                if len(self._steps) < self._most:
                    return self._first(key, model, tensors, state)
                if not self._warned:
                    self._warned = True
                    logger.warning(
                        "Decoding steps are compiled for %d sizes, which is the limit. Steps for %d rows of up to %d tokens run "
                        "without compiled code. Pass provider_options={'graphs': ...} to compile more sizes.", self._most, *key,
                    )  # fmt: skip
                return super()._extend(model, tensors, state, new)
            state.enter(self._slot(key, state.cache.layers))
            assert state.slot is not None
            return state.slot.run(tensors, state.length)

    def _slot(self, key: tuple[int, int], layers: Sequence[Any]) -> CompiledStepSlot:
        for slot in self._spare:
            if (slot.batch, slot.capacity) == key:
                self._spare.remove(slot)
                return slot
        batch, capacity = key
        return CompiledStepSlot(layers, batch, capacity, positions=self._positions, step=self._steps[key])

    def _rehearse(self, key: tuple[int, int], tensors: Mapping[str, torch.Tensor], state: StepState) -> None:
        """Run a step without compilation. If the model uses unsupported attention, this raises before a long
        compilation.
        """
        model: Any = self.runtime
        config = model.config.get_text_config(decoder=True)
        if unsupported := {*(getattr(config, "layer_types", None) or ())} - {"full_attention"}:
            # Some models apply these layer types (such as sliding windows) only in the attention mask. A compiled step
            # uses its own mask, so its results would be wrong.
            raise NotImplementedError(f"compiled steps do not support layers with {', '.join(sorted(unsupported))}")
        batch, capacity = key
        slot = CompiledStepSlot(state.cache.layers, batch, capacity, positions=self._positions, step=self._step_code)
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
        self._steps[key] = compiled(self._step_code, options=self._options)
        expected = super()._extend(model, tensors, state, 1)
        try:
            if untried:
                self._rehearse(key, tensors, trial)
            with compiling(freezing=False):
                trial.enter(self._slot(key, trial.cache.layers))
                assert trial.slot is not None
                logits = trial.slot.run(tensors, trial.length)
                # Compare the result of the second call, because only this call replays the CUDA graph.
                logits = trial.slot.run(tensors, trial.length) if self.where.type == "cuda" else logits
            gap = difference(logits, expected)
            why = f"the logits differ by {gap:.2g} of the largest value" if not gap <= self._tolerance else ""
        # PyTorch's compiler may raise any exception.
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
    """Return a function that computes one decoding step.

    The function runs a copy of the model's modules with the same weight tensors. The copy uses the attention function
    for one token per row.
    """
    step_model = sharing_copy(model)
    AttentionInterface.register(ATTENTION, _attend)
    for module in list(step_model.modules()):
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
        logits: torch.Tensor = step_model(
            **inputs, attention_mask=bias, use_cache=True, **{CACHE_NAME: _FixedCache(keys, values, place)}
        ).logits
        return logits

    return step
