"""A session on an NVIDIA GPU: torch tensors in and out by their addresses, CUDA graphs for shapes that come again."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from typing import TypeVar

import torch

from accel.capture.graph_forms import FormVerdict
from accel.errors import InputError, SessionError
from accel.interfaces.protocols import Feeds, Names
from accel.interfaces.session import BaseSession
from accel.interfaces.session_contract import (
    check_buffer_shape,
    check_buffers,
    check_state,
    read_feeds,
    wanted_outputs,
)
from accel.interfaces.specs import DeviceSpec
from accel.interfaces.state import State

from ..ortkit.runtime.nvidia import on_gpu
from ..ortkit.upstream import ort_value_as_tensor
from .cuda_graphs import CaptureError, LateCheck, MaskCheck, ShapeGraphs
from .forms.masks import Form, Held, Plan, held_by
from .runtime import ELEMENT_TYPES, RUN_ERRORS, Runtime, device_tensor, on_device
from .upstream import current_device

logger = logging.getLogger(__name__)

_RIGHT_FOR: Mapping[Form, tuple[Form, ...]] = {
    "full": ("full",),
    "short": ("full",),
    "lengths": ("full", "lengths"),
    "general": ("full", "lengths", "general"),
}
"""Masks by what they hold that a form of the graph computes rightly, whatever its number of rows."""
Key = tuple[torch.Size, ...]
R = TypeVar("R", bound=Runtime)


class CudaSession(BaseSession[R]):
    """Runs a graph on one GPU. Calls are ordered on torch's current stream and return before the GPU is done.

    A call may come from any thread and any stream: enqueueing is serialized, and a call on another stream than the one
    before waits, on the GPU, for that one.

    Args:
        runtime: The graph on its GPU.
        device: That GPU.
        compute_dtype: What its kernels compute in.
    """

    runtime_name = "ONNX Runtime on the GPU"
    run_errors = RUN_ERRORS
    advice = "with too little memory: use smaller batches, or raise gpu_mem_limit."

    def __init__(self, runtime: R, device: DeviceSpec, compute_dtype: str) -> None:
        component = runtime.component
        super().__init__(runtime, component, device, compute_dtype)
        self._where = runtime.device
        self._names = list(self._dtypes)
        self._dtype_list = list(self._dtypes.values())
        self._index = device.index
        self._mask_position = self._names.index(runtime.mask) if runtime.mask is not None else -1
        unsupported = [d for d in (*self._dtypes.values(), *self._output_dtypes.values()) if d not in ELEMENT_TYPES]
        if unsupported:
            raise SessionError(f"Tensors of {unsupported[0]} cannot be bound on the GPU.")
        axes = {axis for spec in component.inputs for axis in spec.shape if isinstance(axis, str)}
        self._known_shapes = all(isinstance(d, int) or d in axes for s in component.outputs for d in s.shape)
        bounds = self._check_values.bounds
        self._late = LateCheck(bounds, self._where) if bounds else None
        self._graphs: dict[Key, ShapeGraphs] = {}
        self._seen: set[Key] = set()
        self._told: set[str] = set()

    @property
    def left_to_cpu(self) -> int:
        """Nodes that run on the CPU: those about shapes do so rightly, others were warned of."""
        found = self._runtime.assignment if self._runtime is not None else None
        return found.left_to_cpu if found is not None else 0

    @property
    def graph_count(self) -> int:
        """Input shapes that have a CUDA graph."""
        return len(self._graphs)

    @property
    def last_graph(self) -> torch.cuda.CUDAGraph:
        """The CUDA graph that the next call of the shape captured last starts with; for measuring it alone.

        Raises:
            SessionError: Nothing was captured yet.
        """
        if not self._graphs:
            raise SessionError("No CUDA graph was captured yet.", fix="call it twice with one input shape.")
        last = list(self._graphs.values())[-1]
        return last.graphs[last.expected]

    def run(
        self, feeds: Feeds, *, outputs: Names | None = None, out: Feeds | None = None, state: State | None = None
    ) -> dict[str, torch.Tensor]:
        """See `accel.interfaces.protocols.Session.run`.

        A shape that comes for the second time is captured as a CUDA graph, and from then on replayed; each input and
        output is then copied once on the device. A shape seen once runs kernel by kernel, without any copy.
        """
        runtime = self.runtime
        if state is not None:
            check_state(state, self, stateful=False, out=out)
        names = self._output_names if outputs is None else wanted_outputs(outputs, self._output_names)
        if out:
            check_buffers(out, names, self._output_dtypes, self._where)
        # What comes before the first launch is what a small model waits for, so the common case does little here.
        try:
            values = [feeds[name] for name in self._names]
            usual = len(feeds) == len(values)
            for tensor, dtype in zip(values, self._dtype_list, strict=True):
                if tensor.dtype is not dtype or tensor.get_device() != self._index or tensor.requires_grad:
                    usual = False
                    break
        except KeyError:
            usual = False
        if not usual:
            values = list(self._read(feeds).values())
        key: Key = tuple([tensor.shape for tensor in values])
        with runtime.lock:
            if current_device() != self._index:
                with torch.cuda.device(self._where):
                    return self._enqueue(runtime, key, values, names, out or {}, usual)
            return self._enqueue(runtime, key, values, names, out or {}, usual)

    def _enqueue(
        self,
        runtime: Runtime,
        key: Key,
        values: list[torch.Tensor],
        names: Sequence[str],
        out: Mapping[str, torch.Tensor],
        resident: bool,
    ) -> dict[str, torch.Tensor]:
        current = runtime.follow()
        if self._late is not None:
            self._late.report()
        graphs = self._graphs.get(key)
        try:
            if graphs is None:
                tensors = {name: value.contiguous() for name, value in zip(self._names, values, strict=True)}
                graphs = self._new_graphs(runtime, key, tensors)
                if graphs is None:
                    return self._run_kernels(runtime, tensors, names, out, current)
            return self._replay(runtime, graphs, values, names, out, current, resident)
        except SessionError:
            # A `RuntimeError` as well, with words of its own.
            raise
        except RUN_ERRORS as error:
            raise self.failed(error, dict(zip(self._names, values, strict=True))) from error

    def check_forms(self) -> list[FormVerdict]:
        """Compare every form in which this graph is computed with the general one, on this GPU."""
        runtime = self.runtime
        with runtime.lock, torch.cuda.device(self._where):
            return runtime.check_forms()

    # Replaying

    def _new_graphs(self, runtime: Runtime, key: Key, tensors: Feeds) -> ShapeGraphs | None:
        """Buffers for a shape that comes for the second time, or `None`."""
        self._check_shapes(tuple([tuple(tensor.shape) for tensor in tensors.values()]))
        if runtime.graph_obstacle is not None:
            return None
        if not self._known_shapes:
            self._tell("no CUDA graphs: the sizes of its outputs are not known before it runs")
            return None
        if key not in self._seen:
            # Lengths that come once only must not fill the memory of what keeps track of them.
            if len(self._seen) < 4096:
                self._seen.add(key)
            return None
        if len(self._graphs) >= runtime.options.cuda_graphs:
            self._tell(
                f"{len(self._graphs)} input shapes have a CUDA graph; others run without "
                "(raise cuda_graphs, or use buckets to have fewer shapes)"
            )
            return None
        shapes = self._output_shapes(tensors)
        # Buffers made in inference mode could not be written outside of it.
        with torch.inference_mode(False):
            outputs = {name: (shapes[name], dtype) for name, dtype in self._output_dtypes.items()}
            graphs = ShapeGraphs(runtime, tensors, outputs, self._late)
        held = self._held(runtime, tensors)
        try:
            self._captured(runtime, graphs, held)
        except CaptureError as error:
            runtime.refuse_graphs(error)
            return None
        self._graphs[key] = graphs
        return graphs

    def _replay(
        self,
        runtime: Runtime,
        graphs: ShapeGraphs,
        values: list[torch.Tensor],
        names: Sequence[str],
        out: Mapping[str, torch.Tensor],
        current: torch.cuda.Stream,
        resident: bool,
    ) -> dict[str, torch.Tensor]:
        """Copy in, replay, copy out. With a mask on the GPU the form that was right last time is replayed before it is
        known to be right this time, and another one after it where it was not. The number of rows of a packed call is
        too likely to change for that: where calls of a shape were packed, the mask is waited for.
        """
        if resident or all(tensor.is_cuda for tensor in values):
            torch._foreach_copy_(graphs.input_list, values)
        else:
            graphs.load(values)
        check, plan, held = graphs.check, graphs.expected, None
        if check is not None:
            mask = values[self._mask_position]
            if not mask.is_cuda:
                self._check_values.waiting(dict(zip(self._names, values, strict=True)))
                held = held_by(mask)
            else:
                check.mark(current)
                if graphs.waits or plan.form == "packed":
                    held = self._found(check)
            if held is not None:
                plan, check = runtime.plan(held, mask), None
        graph = graphs.graphs.get(plan)
        if graph is None:
            graph = graphs.capture(plan) if held is None else self._captured(runtime, graphs, held)
        else:
            graphs.expected = plan
        graph.replay()
        results = {name: self._copied(name, graphs.outputs[name], out.get(name)) for name in names}
        if check is not None:
            held = self._found(check)
            if held.form not in _RIGHT_FOR[plan.form]:
                self._captured(runtime, graphs, held).replay()
                for name, result in results.items():
                    result.copy_(graphs.outputs[name])
            else:
                graphs.expected = runtime.plan(held, mask)
        return results

    def _found(self, check: MaskCheck) -> Held:
        """What the mask of this call holds.

        Raises:
            InputError: Its ids are none that the model has.
        """
        held = check.held()
        if self._late is not None:
            self._late.report()
        return held

    def _captured(self, runtime: Runtime, graphs: ShapeGraphs, held: Held) -> torch.cuda.CUDAGraph:
        """The fastest graph for a mask that holds that; expected for the next call, too."""
        mask = graphs.input_list[self._mask_position]
        plan = runtime.plan(held, mask) if runtime.mask is not None else Plan(held.form)
        try:
            graph = graphs.capture(plan)
        except (SessionError, *RUN_ERRORS) as error:
            if plan.form != "packed":
                raise
            plan = runtime.without_packing(held, error)
            graph = graphs.capture(plan)
        graphs.expected = plan
        return graph

    @staticmethod
    def _copied(name: str, value: torch.Tensor, buffer: torch.Tensor | None) -> torch.Tensor:
        if buffer is None:
            return value.clone()
        check_buffer_shape(name, buffer, value.shape)
        return buffer.copy_(value)

    def _held(self, runtime: Runtime, tensors: Feeds) -> Held:
        """What the mask of these inputs holds, or what the options promise; waits for the GPU where the mask is there."""
        if runtime.mask is None or runtime.options.padding != "check":
            return Held(runtime.safe_form, 0)
        return held_by(tensors[runtime.mask])

    # Running kernel by kernel

    def _run_kernels(
        self,
        runtime: Runtime,
        tensors: Feeds,
        names: Sequence[str],
        out: Mapping[str, torch.Tensor],
        current: torch.cuda.Stream,
    ) -> dict[str, torch.Tensor]:
        # The mask is waited for here as well.
        self._check_values.waiting(tensors)
        held = self._held(runtime, tensors)
        inputs = {name: on_device(tensor, self._where) for name, tensor in tensors.items()}
        plan = Plan(held.form) if runtime.mask is None else runtime.plan(held, inputs[runtime.mask])
        results: dict[str, torch.Tensor | None] = dict.fromkeys(names)
        if self._known_shapes:
            shapes = self._output_shapes(inputs)
            for name in names:
                given = out.get(name)
                dtype = self._output_dtypes[name]
                if given is not None:
                    check_buffer_shape(name, given, shapes[name])
                results[name] = device_tensor(shapes[name], dtype, self._where) if given is None else given
        try:
            binding = runtime.launch(plan, inputs, results, current)
        except (SessionError, *RUN_ERRORS) as error:
            if plan.form != "packed":
                raise
            binding = runtime.launch(runtime.without_packing(held, error), inputs, results, current)
        if self._known_shapes:
            return {name: value for name, value in results.items() if value is not None}
        found = dict(zip(names, binding.get_outputs(), strict=True))
        made = {name: ort_value_as_tensor(value) for name, value in found.items()}
        # ONNX Runtime may use its memory again as soon as the tensor is gone: the caller gets a copy.
        return {name: self._copied(name, tensor, out.get(name)) for name, tensor in made.items()}

    def _output_shapes(self, tensors: Feeds) -> dict[str, tuple[int, ...]]:
        sizes: dict[int | str, int] = {}
        for spec in self.inputs:
            sizes.update(zip(spec.shape, tensors[spec.name].shape, strict=True))
        return {s.name: tuple(d if isinstance(d, int) else sizes[d] for d in s.shape) for s in self.outputs}

    # Checking

    def _read(self, feeds: Feeds, state: State | None = None) -> dict[str, torch.Tensor]:
        """The inputs in the graph's order, of the declared type, on this GPU or on the host; shapes are checked when they are new."""
        read = read_feeds(feeds, self._dtypes if state is None else self._stateless_dtypes)
        self._check_values(read)
        return {name: self._placed(tensor) for name, tensor in read.items()}

    def _placed(self, tensor: torch.Tensor) -> torch.Tensor:
        return (tensor.to(self._where) if tensor.is_cuda and tensor.device != self._where else tensor).detach()

    def _tell(self, reason: str) -> None:
        """Log a reason once."""
        if reason not in self._told:
            self._told.add(reason)
            logger.info("%s", reason)

    def close(self) -> None:
        """Give the graphs' buffers back, and ONNX Runtime's memory once no other session shares it."""
        runtime, self._runtime = self._runtime, None
        if runtime is None:
            return
        # A binding may hold the last reference to ONNX Runtime's session, which makes its GPU current when it is freed.
        with runtime.lock, on_gpu(self._where.index):
            if self._graphs:
                torch.cuda.synchronize(self._where)
            self._graphs.clear()
        try:
            if self._late is not None:
                self._late.report()
        except InputError as error:
            logger.warning("%s", error)
