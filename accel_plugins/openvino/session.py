"""A compiled OpenVINO model behind `accel.interfaces.protocols.Session`."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from queue import SimpleQueue
from typing import Any, NoReturn

import numpy as np
import openvino as ov
import torch

from accel.artifact import Component
from accel.interfaces.protocols import Feeds, Names, TokenStep
from accel.interfaces.session import HostSession
from accel.interfaces.session_contract import FiniteCheck, MaskCheck, check_buffer_shape, no_state, session_closed
from accel.interfaces.specs import DeviceSpec
from accel.interfaces.state import State

from .runtime import one_line, port_order
from .state import OpenVinoState, OpenVinoSteps
from .upstream import native_infer, native_start

# Up to this size, copying an input into a buffer that the request holds costs less than making a tensor around it
# (3 inputs of 1x16 int64 with cold caches, 2 Zen 4 cores: 54 against 104 microseconds for the whole wrapper).
_COPIED_BYTES = 1 << 16

Array = np.ndarray[Any, np.dtype[Any]]

_TYPES = {
    torch.float32: ov.Type.f32,
    torch.float64: ov.Type.f64,
    torch.float16: ov.Type.f16,
    torch.bfloat16: ov.Type.bf16,
    torch.int64: ov.Type.i64,
    torch.int32: ov.Type.i32,
    torch.int16: ov.Type.i16,
    torch.int8: ov.Type.i8,
    torch.uint8: ov.Type.u8,
    torch.bool: ov.Type.boolean,
}
_WORDS = {"f32": "float32", "bf16": "bfloat16", "f16": "float16", "i8": "int8"}
_PRODUCTS = ("FullyConnected", "MatMul", "Convolution")
_NOTHING: dict[int, Any] = {}
_HOST = torch.device("cpu")


class _Request:
    """One infer request and the small buffers bound to it. Used by one thread at a time."""

    __slots__ = ("_start", "buffers", "infer", "of", "outputs", "request", "shapes", "views")

    def __init__(self, compiled: ov.CompiledModel) -> None:
        self.of = compiled
        self.request = request = compiled.create_infer_request()
        self.infer = native_infer(request)
        self._start = native_start(request)
        # Of the last call, where it can be repeated with the buffers below; else `None`.
        self.shapes: list[tuple[int, ...]] | None = None
        self.buffers: list[ov.Tensor] = []
        self.views: list[Array] = []
        self.outputs: list[Array] = []

    def compute(self, *, alone: bool) -> None:
        """Run it, beside other requests on OpenVINO's own threads.

        A request that a thread runs itself brings its own thread pool; with ten callers these take the processors from each
        other (MiniLM 1x16 on two cores: 266 calls a second against 313 of one caller; 311 on OpenVINO's threads).
        """
        if alone:
            self.infer(_NOTHING, share_outputs=True, decode_strings=True)
        else:
            self._start(_NOTHING, None)
            self.request.wait()


class OpenVinoSession(HostSession[ov.CompiledModel]):
    """Runs a compiled model on host memory. Thread-safe: every call takes an infer request of its own from a pool.

    Args:
        compiled: The model.
        component: What the artifact says about it.
        device: Where it runs.
        shapes: Sizes that it was opened with for named axes.
        compile_again: Makes the model anew behind a call that failed.
        masked_rows: Whether it answers rows as PyTorch does that a mask hides as a whole; else they are refused.
        profile: Folder for a profile of its operators.
    """

    runtime_name = "OpenVINO"

    def __init__(
        self,
        compiled: ov.CompiledModel,
        component: Component,
        device: DeviceSpec,
        *,
        shapes: Mapping[str, int],
        compile_again: Callable[[], ov.CompiledModel],
        masked_rows: bool = True,
        profile: str | None = None,
    ) -> None:
        # What a cache outside of the graph was is inside of the compiled model.
        component = replace(
            component,
            inputs=tuple(spec for spec in component.inputs if spec.pair is None),
            outputs=tuple(spec for spec in component.outputs if spec.pair is None),
        )
        super().__init__(compiled, component, device, compute_dtype(compiled), shapes=shapes)
        self._check_masks = MaskCheck(() if masked_rows else component.inputs)
        self._check_finite = FiniteCheck(component.inputs)
        self._profile = profile
        self._compile_again = compile_again
        self._anew = threading.Lock()
        self._types = [_TYPES[dtype] for dtype in self._dtypes.values()]
        self._input_ports = port_order(compiled.inputs, list(self._dtypes), "input")
        self._output_ports = port_order(compiled.outputs, self._output_names, "output")
        # As many as OpenVINO runs at once and one that is ready behind them: further callers wait here, where they cost no
        # memory and do not compete.
        self._pool: SimpleQueue[_Request] | _ClosedPool
        self._requests: list[_Request]
        # Requests whose outputs of these names are bound to callers' buffers; never used for other calls.
        self._bound: dict[frozenset[str], list[_Request]]
        self._fill(compiled)
        self._others = len(self._requests) - 1

    def run(
        self, feeds: Feeds, *, outputs: Names | None = None, out: Feeds | None = None, state: State | None = None
    ) -> dict[str, torch.Tensor]:
        """See `accel.interfaces.protocols.Session.run`.

        Large inputs of the declared type on the host are read in place and large outputs handed out as they were
        written; small ones are copied through buffers that stay bound, which is faster. Written for cold caches, like
        the ONNX Runtime session: a call with the shapes of the request's last one does as little as it can.
        """
        if outputs is not None or out is not None or state is not None or not self._plain or self._component.stateful:
            return super().run(feeds, outputs=outputs, out=out, state=state)
        arrays = self._arrays(feeds)
        self._check_masks.arrays(arrays)
        self._check_finite.arrays(arrays)
        pool, request = self._taken()
        alone = pool.qsize() == self._others
        try:
            if request.shapes == [array.shape for array in arrays]:
                for view, array in zip(request.views, arrays, strict=True):
                    view[...] = array
                request.compute(alone=alone)
                results = [torch.from_numpy(view.copy()) for view in request.outputs]
            else:
                results = self._run_new_shapes(request, arrays, alone=alone)
        except RuntimeError as error:
            request.shapes = None
            self.renew(request.of)
            raise self.failed(error, feeds) from error
        finally:
            pool.put(request)
        return dict(zip(self._output_names, results, strict=True))

    def _run_new_shapes(self, request: _Request, arrays: list[Array], *, alone: bool) -> list[torch.Tensor]:
        """Other shapes than the request's last ones, or large tensors."""
        request.shapes = None
        inputs = [self._bindable(array, type_) for array, type_ in zip(arrays, self._types, strict=True)]
        for port, tensor in zip(self._input_ports, inputs, strict=True):
            request.request.set_input_tensor(port, tensor)
        request.compute(alone=alone)
        found = [request.request.get_output_tensor(port) for port in self._output_ports]
        views = [tensor.data for tensor in found]
        results = [
            torch.from_numpy(self._detached(request, *item))
            for item in zip(self._output_ports, found, views, strict=True)
        ]
        if all(a.nbytes <= _COPIED_BYTES for a in (*arrays, *views)):
            # Outputs that OpenVINO allocates may lie elsewhere after the next call.
            kept = [ov.Tensor(tensor.element_type, tensor.shape) for tensor in found]
            for port, tensor in zip(self._output_ports, kept, strict=True):
                request.request.set_output_tensor(port, tensor)
            request.buffers, request.views = [*inputs, *kept], [tensor.data for tensor in inputs]
            request.outputs = [tensor.data for tensor in kept]
            request.shapes = [array.shape for array in arrays]
        return results

    @staticmethod
    def _bindable(array: Array, type_: ov.Type) -> ov.Tensor:
        """A small array copied into a tensor that a request may keep, or a large one's own memory."""
        if array.nbytes > _COPIED_BYTES:
            return ov.Tensor(np.ascontiguousarray(array), shared_memory=True)
        tensor = ov.Tensor(type_, ov.Shape(array.shape))
        tensor.data[...] = array
        return tensor

    @staticmethod
    def _detached(request: _Request, port: int, tensor: ov.Tensor, view: Array) -> Array:
        """A copy of a small output; a large one itself, and a new tensor for the request's next call."""
        if view.nbytes <= _COPIED_BYTES:
            return view.copy()
        request.request.set_output_tensor(port, ov.Tensor(tensor.element_type, tensor.shape))
        return view

    def _fill(self, compiled: ov.CompiledModel) -> None:
        """Requests of a compiled model in the place of all that there were."""
        requests = [_Request(compiled) for _ in range(_concurrency(compiled) + 1)]
        pool: SimpleQueue[_Request] = SimpleQueue()
        for request in requests:
            pool.put(request)
        self._runtime, self._requests, self._bound, self._pool = compiled, requests, {}, pool

    def _taken(self) -> tuple[SimpleQueue[_Request] | _ClosedPool, _Request]:
        """A request that is free, and where it goes back to."""
        while True:
            pool = self._pool
            request = pool.get()
            if request.of is self._runtime or self._runtime is None:
                return pool, request
            # Of a model that a call failed in while this one waited.
            pool.put(request)

    def renew(self, failed: ov.CompiledModel) -> None:
        """Another compiled model in the place of one whose call failed, unless it has been replaced already.

        Its operators keep what they prepared for the sizes of a call, and one that fails in the middle leaves some of them with the sizes
        of the call before: that call again then fails as well (2026.4: a convolution behind an image that is smaller than its kernel), also
        in a new request. Another request of the same model is no help, and compiling again takes as long as opening did.
        """
        with self._anew:
            if self._runtime is failed:
                compiled = self._compile_again()
                # Beside `close`.
                if self._runtime is not None:
                    self._fill(compiled)

    def _read(self, feeds: Feeds, state: State | None = None) -> dict[str, torch.Tensor]:
        tensors = super()._read(feeds, state)
        self._check_masks(tensors)
        self._check_finite(tensors)
        return tensors

    def _compute(
        self, tensors: dict[str, torch.Tensor], names: Names, out: Feeds, state: State | None
    ) -> dict[str, torch.Tensor]:
        if isinstance(state, OpenVinoState):
            return state.run(tensors, names)
        pool = self._bound.setdefault(frozenset(out), [])
        try:
            taken = pool.pop()
        except IndexError:
            taken = _Request(self.runtime)
        request = taken.request
        try:
            for port, tensor in zip(self._input_ports, tensors.values(), strict=True):
                request.set_input_tensor(port, _wrapped(tensor))
            for name, buffer in out.items():
                request.set_output_tensor(self._port(name), _wrapped(buffer))
            request.infer(_NOTHING)
            found = {name: request.get_output_tensor(self._port(name)) for name in names}
        except RuntimeError:
            self.renew(taken.of)
            raise
        for name, buffer in out.items():
            check_buffer_shape(name, buffer, tuple(found[name].shape))
        results = {name: out[name] if name in out else _unwrapped(found[name]).clone() for name in names}
        pool.append(taken)
        return results

    def _reason(self, error: Exception) -> str:
        return one_line(error)

    def _port(self, name: str) -> int:
        return self._output_ports[self._output_names.index(name)]

    def new_state(self, batch: int) -> State:
        """An empty KV cache; see `accel.interfaces.protocols.Session.new_state`."""
        if not self._component.stateful:
            raise no_state()
        return OpenVinoState(self, self._component, batch)

    def steps(self, feeds: Feeds, state: State, *, calls: int) -> TokenStep | None:
        """See `accel.interfaces.protocols.Session.steps`."""
        if not isinstance(state, OpenVinoState):
            return None
        tensors = self._read(feeds, state)
        return OpenVinoSteps(self, state, tensors, calls) if OpenVinoSteps.fits(state, tensors, calls) else None

    def close(self) -> None:
        """Give OpenVINO's memory back, once the calls under way are through."""
        if self._runtime is not None and self._profile is not None:
            self._write_profile(Path(self._profile))
        with self._anew:
            self._runtime = None
            self._pool = _ClosedPool()
            self._requests = []
            self._bound = {}

    def _write_profile(self, folder: Path) -> None:
        """Time of each node in the last call of one request, in microseconds, slowest first."""
        requests = [r.request for r in self._requests if r.shapes is not None]
        if not requests:
            return
        nodes = [
            {"node": n.node_name, "type": n.node_type, "kernel": n.exec_type, "us": n.real_time.total_seconds() * 1e6}
            for n in requests[-1].profiling_info
        ]
        folder.mkdir(parents=True, exist_ok=True)
        nodes.sort(key=lambda node: -float(node["us"]))
        file = folder / f"openvino-{self._component.name}.json"
        file.write_text(json.dumps(nodes, indent=1), encoding="utf-8")


class _ClosedPool:
    """The pool of a closed session."""

    def qsize(self) -> int:
        """No requests."""
        return 0

    def get(self) -> NoReturn:
        """Refuse.

        Raises:
            SessionClosedError: Always.
        """
        raise session_closed()

    def put(self, request: _Request) -> None:
        """Let the request go."""


def _concurrency(compiled: ov.CompiledModel) -> int:
    return max(1, int(compiled.get_property("OPTIMAL_NUMBER_OF_INFER_REQUESTS")))


def compute_dtype(compiled: ov.CompiledModel) -> str:
    """What most matrix products of a compiled model run in, read from its execution graph; int8 where any does.

    The kernel's name ends in it (`brgemm_avx512_bf16`); `runtimePrecision` is that of the stored weights instead.
    """
    counts: dict[str, int] = {}
    for node in compiled.get_runtime_model().get_ops():
        info = node.get_rt_info()
        if "layerType" in info and info["layerType"].value in _PRODUCTS and "primitiveType" in info:
            word = str(info["primitiveType"].value).rpartition("_")[2].lower()
            counts[word] = counts.get(word, 0) + 1
    known = {ours: counts[word] for word, ours in _WORDS.items() if word in counts}
    if "int8" in known:
        return "int8"
    if known:
        return max(known, key=lambda word: known[word])
    # The device that chooses a device has its settings, and none of its own.
    listed = "INFERENCE_PRECISION_HINT" in compiled.get_property("SUPPORTED_PROPERTIES")
    devices = [] if listed else list(compiled.get_property("DEVICE_PROPERTIES").values())
    found = devices[0]["INFERENCE_PRECISION_HINT"] if devices else compiled.get_property("INFERENCE_PRECISION_HINT")
    hint = str(found.get_type_name())
    return _WORDS.get(hint, hint)


def _wrapped(tensor: torch.Tensor) -> ov.Tensor:
    """A torch tensor's memory as OpenVINO's; it must outlive the value."""
    if tensor.dtype is torch.bfloat16:
        return ov.Tensor(tensor.view(torch.int16).numpy(), ov.Shape(tuple(tensor.shape)), ov.Type.bf16)
    return ov.Tensor(tensor.numpy(), shared_memory=True)


def _unwrapped(tensor: ov.Tensor) -> torch.Tensor:
    """OpenVINO's memory as a torch tensor, valid while the tensor is."""
    if tensor.element_type == ov.Type.bf16:
        return torch.from_numpy(tensor.data.view(np.int16)).view(torch.bfloat16)
    return torch.from_numpy(tensor.data)
