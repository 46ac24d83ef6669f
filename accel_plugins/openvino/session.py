"""Session that runs a compiled OpenVINO model (`accel.interfaces.protocols.Session`)."""

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
from accel.interfaces.session import BaseSession
from accel.interfaces.session_contract import FiniteCheck, MaskCheck, check_buffer_shape, no_state, session_closed
from accel.interfaces.specs import DeviceSpec
from accel.interfaces.state import State

from .runtime import one_line, port_order
from .state import OpenVinoDecodingSteps, OpenVinoState
from .upstream import native_infer, native_start

# Up to this size in bytes, copying an input into a bound buffer is faster than creating a tensor that shares its
# memory. Measured with 3 inputs of 1x16 int64, cold caches, 2 Zen 4 cores: 54 against 104 microseconds per call for all
# code around the inference.
_COPIED_BYTES = 1 << 16

Array = np.ndarray[Any, np.dtype[Any]]

_WORDS = {"f32": "float32", "bf16": "bfloat16", "f16": "float16", "i8": "int8"}
_PRODUCTS = ("FullyConnected", "MatMul", "Convolution")
_NOTHING: dict[int, Any] = {}


class _Request:
    """One infer request of OpenVINO, with the small buffers that are bound to it. Only one thread uses the request at a
    time.
    """

    __slots__ = ("_start", "buffers", "infer", "of", "outputs", "request", "shapes", "views")

    def __init__(self, compiled: ov.CompiledModel) -> None:
        self.of = compiled
        self.request = request = compiled.create_infer_request()
        self.infer = native_infer(request)
        self._start = native_start(request)
        # Input shapes of the last call if a call with the same shapes can reuse the buffers of this request; `None` if
        # not.
        self.shapes: list[tuple[int, ...]] | None = None
        self.buffers: list[ov.Tensor] = []
        self.views: list[Array] = []
        self.outputs: list[Array] = []

    def compute(self, *, alone: bool) -> None:
        """Run the request. If other requests may run at the same time (`alone` is False), it runs on OpenVINO's
        threads.

        A request that runs on its caller's thread creates its own thread pool, and the pools of many callers compete
        for the cores. Measured with MiniLM 1x16 on two cores: 313 calls/s with one caller. With ten callers, 266
        calls/s on the callers' threads, and 311 calls/s on OpenVINO's threads.
        """
        if alone:
            self.infer(_NOTHING, share_outputs=True, decode_strings=True)
        else:
            self._start(_NOTHING, None)
            self.request.wait()


class OpenVinoSession(BaseSession[ov.CompiledModel]):
    """Session that runs a compiled model on CPU tensors. Several threads may call it: each call takes its own infer
    request from a pool.

    Args:
        compiled: The compiled model.
        component: The component of the artifact.
        device: The device that the model runs on.
        shapes: Fixed sizes of named axes.
        compile_again: Function that compiles the model again after a failed call.
        masked_rows: Whether fully masked rows give the same results as in PyTorch; if not, they are rejected.
        profile: Folder for a profile of the operators.
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
        # The KV cache is inside the compiled model, so cache inputs and outputs are left out.
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
        self._types = [
            ov.Type.bf16 if spec.dtype == "bfloat16" else ov.Type(np.dtype(spec.dtype)) for spec in component.inputs
        ]
        self._input_ports = port_order(compiled.inputs, list(self._dtypes), "input")
        self._output_ports = port_order(compiled.outputs, self._output_names, "output")
        # The pool has one request more than OpenVINO runs in parallel. Further callers wait for a request, which needs no
        # memory and no CPU time.
        self._pool: SimpleQueue[_Request] | _ClosedPool
        self._requests: list[_Request]
        # Requests whose outputs are bound to buffers of callers, by the names of the outputs. Other calls do not use
        # these requests.
        self._bound: dict[frozenset[str], list[_Request]]
        self._fill(compiled)
        self._others = len(self._requests) - 1

    def run(
        self, feeds: Feeds, *, outputs: Names | None = None, out: Feeds | None = None, state: State | None = None
    ) -> dict[str, torch.Tensor]:
        """Run the model; see `accel.interfaces.protocols.Session.run`.

        Large CPU inputs of the declared type are read in place, and large outputs are returned without a copy. Small
        inputs and outputs are copied through buffers that stay bound, which is faster. A call with the same shapes as
        the request's last call does as little work as possible, because CPU caches are often cold.
        """
        if (
            outputs is not None
            or out is not None
            or state is not None
            or not self._numpy_only
            or self._component.stateful
        ):
            return super().run(feeds, outputs=outputs, out=out, state=state)
        arrays = self._arrays(feeds)
        self._check_masks.arrays(arrays)
        self._check_finite.arrays(arrays)
        pool, request = self._free_request()
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
        """Run a call with shapes that differ from the request's last call, or with large tensors."""
        request.shapes = None
        inputs = [self._bindable(array, type_) for array, type_ in zip(arrays, self._types, strict=True)]
        for port, tensor in zip(self._input_ports, inputs, strict=True):
            request.request.set_input_tensor(port, tensor)
        request.compute(alone=alone)
        outputs = [request.request.get_output_tensor(port) for port in self._output_ports]
        views = [tensor.data for tensor in outputs]
        results = [
            torch.from_numpy(self._detached(request, *item))
            for item in zip(self._output_ports, outputs, views, strict=True)
        ]
        if all(a.nbytes <= _COPIED_BYTES for a in (*arrays, *views)):
            # Bind output buffers of this session: OpenVINO may allocate its own outputs at another address in the next
            # call.
            output_tensors = [ov.Tensor(tensor.element_type, tensor.shape) for tensor in outputs]
            for port, tensor in zip(self._output_ports, output_tensors, strict=True):
                request.request.set_output_tensor(port, tensor)
            request.buffers, request.views = [*inputs, *output_tensors], [tensor.data for tensor in inputs]
            request.outputs = [tensor.data for tensor in output_tensors]
            request.shapes = [array.shape for array in arrays]
        return results

    @staticmethod
    def _bindable(array: Array, type_: ov.Type) -> ov.Tensor:
        """Return a tensor with a copy of a small array, or a tensor that shares the memory of a large array."""
        if array.nbytes > _COPIED_BYTES:
            return ov.Tensor(np.ascontiguousarray(array), shared_memory=True)
        tensor = ov.Tensor(type_, ov.Shape(array.shape))
        tensor.data[...] = array
        return tensor

    @staticmethod
    def _detached(request: _Request, port: int, tensor: ov.Tensor, view: Array) -> Array:
        """Return a copy of a small output. A large output is returned itself, and the request gets a new tensor for its
        next call.
        """
        if view.nbytes <= _COPIED_BYTES:
            return view.copy()
        request.request.set_output_tensor(port, ov.Tensor(tensor.element_type, tensor.shape))
        return view

    def _fill(self, compiled: ov.CompiledModel) -> None:
        """Replace all infer requests by requests of a compiled model."""
        requests = [_Request(compiled) for _ in range(_concurrency(compiled) + 1)]
        pool: SimpleQueue[_Request] = SimpleQueue()
        for request in requests:
            pool.put(request)
        self._runtime, self._requests, self._bound, self._pool = compiled, requests, {}, pool

    def _free_request(self) -> tuple[SimpleQueue[_Request] | _ClosedPool, _Request]:
        """Return a free request and the pool to return it to."""
        while True:
            pool = self._pool
            request = pool.get()
            if request.of is self._runtime or self._runtime is None:
                return pool, request
            # The model of this request was replaced while this call waited.
            pool.put(request)

    def renew(self, failed: ov.CompiledModel) -> None:
        """Replace a compiled model after a failed call, unless another thread already replaced it. Takes as long as
        opening the model.

        Operators store data for the input sizes of a call. After a call that fails in the middle, some operators still
        have data for the sizes of the previous call. Later calls then fail as well, even in a new request (OpenVINO
        2026.4: a convolution of an image that is smaller than its kernel).
        """
        with self._anew:
            if self._runtime is failed:
                compiled = self._compile_again()
                # `close` may run at the same time in another thread.
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
            free = pool.pop()
        except IndexError:
            free = _Request(self.runtime)
        request = free.request
        try:
            for port, tensor in zip(self._input_ports, tensors.values(), strict=True):
                request.set_input_tensor(port, _wrapped(tensor))
            for name, buffer in out.items():
                request.set_output_tensor(self._port(name), _wrapped(buffer))
            request.infer(_NOTHING)
            outputs = {name: request.get_output_tensor(self._port(name)) for name in names}
        except RuntimeError:
            self.renew(free.of)
            raise
        for name, buffer in out.items():
            check_buffer_shape(name, buffer, tuple(outputs[name].shape))
        results = {name: out[name] if name in out else _unwrapped(outputs[name]).clone() for name in names}
        pool.append(free)
        return results

    def _reason(self, error: Exception) -> str:
        return one_line(error)

    def _port(self, name: str) -> int:
        return self._output_ports[self._output_names.index(name)]

    def new_state(self, batch: int) -> State:
        """Return a state with an empty KV cache; see `accel.interfaces.protocols.Session.new_state`."""
        if not self._component.stateful:
            raise no_state()
        return OpenVinoState(self, self._component, batch)

    def steps(self, feeds: Feeds, state: State, *, calls: int) -> TokenStep | None:
        """Return the decoding steps of a state; see `accel.interfaces.protocols.Session.steps`."""
        if not isinstance(state, OpenVinoState):
            return None
        tensors = self._read(feeds, state)
        return (
            OpenVinoDecodingSteps(self, state, tensors, calls)
            if OpenVinoDecodingSteps.fits(state, tensors, calls)
            else None
        )

    def close(self) -> None:
        """Release OpenVINO's memory when the running calls have ended."""
        if self._runtime is not None and self._profile is not None:
            self._write_profile(Path(self._profile))
        with self._anew:
            self._runtime = None
            self._pool = _ClosedPool()
            self._requests = []
            self._bound = {}

    def _write_profile(self, folder: Path) -> None:
        """Write a JSON file with the time of each node in the last call of one request, in microseconds, slowest first."""
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
    """Pool of a closed session; it has no requests."""

    def qsize(self) -> int:
        """Return 0: a closed session has no free infer requests."""
        return 0

    def get(self) -> NoReturn:
        """Raise, because the session is closed.

        Raises:
            SessionClosedError: Always.
        """
        raise session_closed()

    def put(self, request: _Request) -> None:
        """Discard an infer request that a running call returns after the session was closed."""


def _concurrency(compiled: ov.CompiledModel) -> int:
    return max(1, int(compiled.get_property("OPTIMAL_NUMBER_OF_INFER_REQUESTS")))


def compute_dtype(compiled: ov.CompiledModel) -> str:
    """Return the data type of most matrix products of a compiled model, or int8 if any product has the type int8.

    The data type is the end of the kernel's name in OpenVINO's execution graph (`brgemm_avx512_bf16`).
    `runtimePrecision` is not used, because it is the data type of the stored weights.
    """
    counts: dict[str, int] = {}
    for node in compiled.get_runtime_model().get_ops():
        info = node.get_rt_info()
        if "layerType" in info and info["layerType"].value in _PRODUCTS and "primitiveType" in info:
            word = str(info["primitiveType"].value).rpartition("_")[2].lower()
            counts[word] = counts.get(word, 0) + 1
    counts_by_dtype = {ours: counts[word] for word, ours in _WORDS.items() if word in counts}
    if "int8" in counts_by_dtype:
        return "int8"
    if counts_by_dtype:
        return max(counts_by_dtype, key=lambda word: counts_by_dtype[word])
    # For the device `AUTO`, OpenVINO reports this hint only in the properties of the single devices.
    listed = "INFERENCE_PRECISION_HINT" in compiled.get_property("SUPPORTED_PROPERTIES")
    devices = [] if listed else list(compiled.get_property("DEVICE_PROPERTIES").values())
    hint_type = devices[0]["INFERENCE_PRECISION_HINT"] if devices else compiled.get_property("INFERENCE_PRECISION_HINT")
    hint = str(hint_type.get_type_name())
    return _WORDS.get(hint, hint)


def _wrapped(tensor: torch.Tensor) -> ov.Tensor:
    """Return an OpenVINO tensor that shares the memory of a PyTorch tensor. The PyTorch tensor must live as long as the
    result.
    """
    if tensor.dtype is torch.bfloat16:
        return ov.Tensor(tensor.view(torch.int16).numpy(), ov.Shape(tuple(tensor.shape)), ov.Type.bf16)
    return ov.Tensor(tensor.numpy(), shared_memory=True)


def _unwrapped(tensor: ov.Tensor) -> torch.Tensor:
    """Return a PyTorch tensor that shares the memory of an OpenVINO tensor. It is valid as long as the OpenVINO tensor
    lives.
    """
    if tensor.element_type == ov.Type.bf16:
        return torch.from_numpy(tensor.data.view(np.int16)).view(torch.bfloat16)
    return torch.from_numpy(tensor.data)
