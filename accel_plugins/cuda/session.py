"""Sessions on an NVIDIA GPU, with torch tensors bound by address and CUDA graphs for input shapes that are used again."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from typing import TypeVar

import torch

from accel.capture.fast_path_verification import FastPathComparison
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
from .cuda_graphs import CaptureError, DeferredIdCheck, GpuMaskCheck, ShapeGraphs
from .forms.padding_variants import FormName, MaskContent, MaskPlan, mask_content
from .runtime import ELEMENT_TYPES, RUN_ERRORS, Runtime, on_device
from .upstream import current_device

logger = logging.getLogger(__name__)

_RIGHT_FOR: Mapping[FormName, tuple[FormName, ...]] = {
    "full": ("full",),
    "short": ("full",),
    "lengths": ("full", "lengths"),
    "general": ("full", "lengths", "general"),
}
"""The kinds of masks for which each form gives correct results. The packed form is missing, because its results also
depend on the number of rows.
"""
Key = tuple[torch.Size, ...]
R = TypeVar("R", bound=Runtime)


class CudaSession(BaseSession[R]):
    """Session that runs a graph on one GPU.

    Calls are ordered on torch's current stream and return before the GPU is done.

    Calls may come from any thread and any stream. Only one thread enqueues at a time. If a call uses another stream than
    the previous call, it waits for the previous call on the GPU.

    Args:
        runtime: The runtime of the graph on its GPU.
        device: The GPU.
        compute_dtype: The data type of the computation.
    """

    runtime_name = "ONNX Runtime on the GPU"
    run_errors = RUN_ERRORS
    advice = "if the GPU has too little memory, use smaller batches, or raise gpu_mem_limit."

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
            raise SessionError(
                f"The graph has tensors of the data type {unsupported[0]}, which cannot be bound on the GPU.",
                fix="run the graph on the CPU: backend='cpu'.",
            )
        axes = {axis for spec in component.inputs for axis in spec.shape if isinstance(axis, str)}
        self._known_shapes = all(isinstance(d, int) or d in axes for s in component.outputs for d in s.shape)
        bounds = self._check_values.bounds
        self._late = DeferredIdCheck(bounds, self._where) if bounds else None
        self._graphs: dict[Key, ShapeGraphs] = {}
        self._seen: set[Key] = set()
        self._told: set[str] = set()

    @property
    def left_to_cpu(self) -> int:
        """Number of nodes that run on the CPU.

        Nodes that compute shapes are expected on the CPU; for other nodes, a warning was logged.
        """
        assignment = self._runtime.assignment if self._runtime is not None else None
        return assignment.left_to_cpu if assignment is not None else 0

    @property
    def graph_count(self) -> int:
        """Number of input shapes with a CUDA graph."""
        return len(self._graphs)

    @property
    def last_graph(self) -> torch.cuda.CUDAGraph:
        """The CUDA graph of the input shape that was captured last. It is used for measurements.

        Raises:
            SessionError: No CUDA graph was captured yet.
        """
        if not self._graphs:
            raise SessionError(
                "The session has not captured a CUDA graph yet.",
                fix="call the session twice with inputs of the same shape.",
            )
        last = list(self._graphs.values())[-1]
        return last.graphs[last.expected]

    def run(
        self, feeds: Feeds, *, outputs: Names | None = None, out: Feeds | None = None, state: State | None = None
    ) -> dict[str, torch.Tensor]:
        """Run the graph; see `accel.interfaces.protocols.Session.run`.

        The first call with an input shape runs without a CUDA graph and without copies. The second call captures a CUDA
        graph, which later calls replay; each input and output is then copied once on the device.
        """
        runtime = self.runtime
        if state is not None:
            check_state(state, self, stateful=False, out=out)
        names = self._output_names if outputs is None else wanted_outputs(outputs, self._output_names)
        if out:
            check_buffers(out, names, self._output_dtypes, self._where)
        # Check common inputs with little Python code, because the GPU is idle before the first launch.
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
            # Raise accel's own errors unchanged. The next `except` clause would catch them, because `SessionError` is a
            # `RuntimeError`.
            raise
        except RUN_ERRORS as error:
            raise self.failed(error, dict(zip(self._names, values, strict=True))) from error

    def check_forms(self) -> list[FastPathComparison]:
        """Compare the results of all forms of this graph with the results of the general form on this GPU, and return
        the verdicts.
        """
        runtime = self.runtime
        with runtime.lock, torch.cuda.device(self._where):
            return runtime.check_forms()

    # The methods below run calls with CUDA graphs.

    def _new_graphs(self, runtime: Runtime, key: Key, tensors: Feeds) -> ShapeGraphs | None:
        """Return the CUDA graphs and buffers for an input shape that is used for the second time. Return `None` if the
        call runs without a CUDA graph.
        """
        self._check_shapes(tuple([tuple(tensor.shape) for tensor in tensors.values()]))
        if runtime.graph_obstacle is not None:
            return None
        if not self._known_shapes:
            self._tell("CUDA graphs are disabled, because the sizes of the graph's outputs are not known before a run.")
            return None
        if key not in self._seen:
            # Limit the number of remembered shapes, because shapes that are used only once would fill the memory.
            if len(self._seen) < 4096:
                self._seen.add(key)
            return None
        if len(self._graphs) >= runtime.options.cuda_graphs:
            self._tell(
                f"{len(self._graphs)} input shapes have a CUDA graph, which is the maximum. Other shapes run without a CUDA "
                "graph. Raise the option cuda_graphs, or use buckets to have fewer shapes."
            )
            return None
        shapes = self._output_shapes(tensors)
        # Create the buffers outside of inference mode, because tensors created in inference mode cannot be changed
        # outside of it.
        with torch.inference_mode(False):
            outputs = {name: (shapes[name], dtype) for name, dtype in self._output_dtypes.items()}
            graphs = ShapeGraphs(runtime, tensors, outputs, self._late)
        content = self._mask_content(runtime, tensors)
        try:
            self._captured(runtime, graphs, content)
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
        """Copy the inputs to their buffers, replay a CUDA graph, and copy the outputs.

        If the mask is on the GPU, the plan of the previous call is replayed before the mask is known. If that plan is
        wrong for this mask, the correct plan is replayed afterwards. Packed plans are an exception, because their number
        of rows changes often: if calls of a shape were packed, the call waits for its mask first.
        """
        if resident or all(tensor.is_cuda for tensor in values):
            torch._foreach_copy_(graphs.input_list, values)
        else:
            graphs.load(values)
        check, plan, content = graphs.check, graphs.expected, None
        if check is not None:
            mask = values[self._mask_position]
            if not mask.is_cuda:
                self._check_values.waiting(dict(zip(self._names, values, strict=True)))
                content = mask_content(mask)
            else:
                check.mark(current)
                if graphs.waits or plan.form == "packed":
                    content = self._checked_content(check)
            if content is not None:
                plan, check = runtime.plan(content, mask), None
        graph = graphs.graphs.get(plan)
        if graph is None:
            graph = graphs.capture(plan) if content is None else self._captured(runtime, graphs, content)
        else:
            graphs.expected = plan
        graph.replay()
        results = {name: self._copied(name, graphs.outputs[name], out.get(name)) for name in names}
        if check is not None:
            content = self._checked_content(check)
            if content.form not in _RIGHT_FOR[plan.form]:
                self._captured(runtime, graphs, content).replay()
                for name, result in results.items():
                    result.copy_(graphs.outputs[name])
            else:
                graphs.expected = runtime.plan(content, mask)
        return results

    def _checked_content(self, check: GpuMaskCheck) -> MaskContent:
        """Return where the attention mask of this call has padding.

        Raises:
            InputError: The call has ids that the model does not have.
        """
        content = check.content()
        if self._late is not None:
            self._late.report()
        return content

    def _captured(self, runtime: Runtime, graphs: ShapeGraphs, content: MaskContent) -> torch.cuda.CUDAGraph:
        """Return the fastest CUDA graph for an attention mask. The next call with this input shape starts with the same
        CUDA graph.
        """
        mask = graphs.input_list[self._mask_position]
        plan = runtime.plan(content, mask) if runtime.mask is not None else MaskPlan(content.form)
        try:
            graph = graphs.capture(plan)
        except (SessionError, *RUN_ERRORS) as error:
            if plan.form != "packed":
                raise
            plan = runtime.without_packing(content, error)
            graph = graphs.capture(plan)
        graphs.expected = plan
        return graph

    @staticmethod
    def _copied(name: str, value: torch.Tensor, buffer: torch.Tensor | None) -> torch.Tensor:
        if buffer is None:
            return value.clone()
        check_buffer_shape(name, buffer, value.shape)
        return buffer.copy_(value)

    def _mask_content(self, runtime: Runtime, tensors: Feeds) -> MaskContent:
        """Return where the attention mask has padding, or the padding that the option `padding` assumes. This waits for
        a mask in GPU memory.
        """
        if runtime.mask is None or runtime.options.padding != "check":
            return MaskContent(runtime.safe_form, 0)
        return mask_content(tensors[runtime.mask])

    # The methods below run calls without CUDA graphs.

    def _run_kernels(
        self,
        runtime: Runtime,
        tensors: Feeds,
        names: Sequence[str],
        out: Mapping[str, torch.Tensor],
        current: torch.cuda.Stream,
    ) -> dict[str, torch.Tensor]:
        # Check ids in GPU memory immediately, because the call waits for the mask anyway.
        self._check_values.waiting(tensors)
        content = self._mask_content(runtime, tensors)
        inputs = {name: on_device(tensor, self._where) for name, tensor in tensors.items()}
        plan = MaskPlan(content.form) if runtime.mask is None else runtime.plan(content, inputs[runtime.mask])
        results: dict[str, torch.Tensor | None] = dict.fromkeys(names)
        if self._known_shapes:
            shapes = self._output_shapes(inputs)
            for name in names:
                buffer = out.get(name)
                dtype = self._output_dtypes[name]
                if buffer is not None:
                    check_buffer_shape(name, buffer, shapes[name])
                results[name] = (
                    buffer if buffer is not None else torch.empty(shapes[name], dtype=dtype, device=self._where)
                )
        try:
            binding = runtime.launch(plan, inputs, results, current)
        except (SessionError, *RUN_ERRORS) as error:
            if plan.form != "packed":
                raise
            binding = runtime.launch(runtime.without_packing(content, error), inputs, results, current)
        if self._known_shapes:
            return {name: value for name, value in results.items() if value is not None}
        values = dict(zip(names, binding.get_outputs(), strict=True))
        outputs = {name: ort_value_as_tensor(value) for name, value in values.items()}
        # Return copies, because ONNX Runtime may reuse the memory of an output as soon as its Python object is deleted.
        return {name: self._copied(name, tensor, out.get(name)) for name, tensor in outputs.items()}

    def _output_shapes(self, tensors: Feeds) -> dict[str, tuple[int, ...]]:
        sizes: dict[int | str, int] = {}
        for spec in self.inputs:
            sizes.update(zip(spec.shape, tensors[spec.name].shape, strict=True))
        return {s.name: tuple(d if isinstance(d, int) else sizes[d] for d in s.shape) for s in self.outputs}

    # The methods below check the inputs of a call.

    def _read(self, feeds: Feeds, state: State | None = None) -> dict[str, torch.Tensor]:
        """Return the inputs in the graph's order, with the declared data types, on this GPU or in CPU memory.

        Shapes are not checked by this method, but by `_new_graphs` when they are new.
        """
        read = read_feeds(feeds, self._dtypes if state is None else self._stateless_dtypes)
        self._check_values(read)
        return {name: self._placed(tensor) for name, tensor in read.items()}

    def _placed(self, tensor: torch.Tensor) -> torch.Tensor:
        return (tensor.to(self._where) if tensor.is_cuda and tensor.device != self._where else tensor).detach()

    def _tell(self, reason: str) -> None:
        """Log a reason, but only once."""
        if reason not in self._told:
            self._told.add(reason)
            logger.info("%s", reason)

    def close(self) -> None:
        """Release the buffers of CUDA graphs, and ONNX Runtime's memory if no other session shares it."""
        runtime, self._runtime = self._runtime, None
        if runtime is None:
            return
        # Restore the current GPU: freeing ONNX Runtime's session changes it, and a binding may hold the last reference.
        with runtime.lock, on_gpu(self._where.index):
            if self._graphs:
                torch.cuda.synchronize(self._where)
            self._graphs.clear()
        try:
            if self._late is not None:
                self._late.report()
        except InputError as error:
            logger.warning("%s", error)
