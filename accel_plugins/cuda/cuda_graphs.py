"""Capture and replay of CUDA graphs.

A CUDA graph contains all kernels of a model run for one input shape. One launch replays all of them.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence

import torch

from accel.errors import InputError, SessionError

from .forms.packing import PackingInputs
from .forms.padding_variants import MaskContent, MaskPlan, content_from_flags, counting_weights, flags_of
from .runtime import Runtime


@contextlib.contextmanager
def overlapped(runtime: Runtime, check: Callable[[], None]) -> Iterator[None]:
    """Run the kernels of `check` in parallel with the kernels that the `with` block enqueues on the runtime's stream.

    The kernels of `check` and of the block start after the earlier work of the stream. Later work of the stream waits
    for both groups of kernels.
    """
    runtime.aside.wait_stream(runtime.stream)
    with torch.cuda.stream(runtime.aside):
        check()
    yield
    runtime.stream.wait_stream(runtime.aside)


class CaptureError(SessionError):
    """Raised when a run cannot be captured as a CUDA graph, or when its replay gives different results."""


def captured(
    runtime: Runtime,
    enqueue: Callable[[], None],
    outputs: Mapping[str, torch.Tensor],
    current: torch.cuda.Stream,
    varied: Sequence[torch.Tensor] = (),
) -> torch.cuda.CUDAGraph:
    """Capture a model run as a CUDA graph, and check that its replay gives the same outputs as the run. Takes the time
    of a few runs.

    Args:
        runtime: The runtime of the ONNX graph.
        enqueue: A function that enqueues the run on the runtime's stream, in the same way each time.
        outputs: The fixed output buffers that the run writes, of any shape.
        current: The stream on which the inputs are written.
        varied: Buffers of inputs that change between calls. The replay is also compared after their values are changed.

    Raises:
        CaptureError: The run cannot be captured, or the replay gives different results.
    """
    stream = runtime.stream
    stream.wait_stream(current)
    # Run before the capture, because the first run allocates memory that later runs reuse.
    for _ in range(2):
        with torch.cuda.stream(stream):
            enqueue()
    torch.cuda.synchronize(runtime.device)
    expected = {name: tensor.clone() for name, tensor in outputs.items()}
    for tensor in outputs.values():
        tensor.zero_()
    graph = torch.cuda.CUDAGraph()
    torch.cuda.synchronize(runtime.device)
    try:
        with torch.cuda.stream(stream):
            # `thread_local` lets other threads allocate memory during the capture.
            graph.capture_begin(capture_error_mode="thread_local")
            try:
                enqueue()
            finally:
                graph.capture_end()
            graph.replay()
    # Catch all errors of ONNX Runtime and CUDA, because the run worked before the capture: the session continues
    # without a CUDA graph.
    except Exception as error:
        raise CaptureError(
            f"A run of the model cannot be captured as a CUDA graph: {type(error).__name__}: {str(error)[:300]}."
        ) from error
    torch.cuda.synchronize(runtime.device)
    _compare(outputs, expected, "The replay of the captured CUDA graph")
    if varied:
        _compare_on_others(runtime, enqueue, graph, outputs, varied)
    return graph


def _compare_on_others(
    runtime: Runtime,
    enqueue: Callable[[], None],
    graph: torch.cuda.CUDAGraph,
    outputs: Mapping[str, torch.Tensor],
    varied: Sequence[torch.Tensor],
) -> None:
    """Compare the replay of a CUDA graph with a run on changed inputs.

    This finds values of the captured run that the CUDA graph wrongly uses as constants.

    Raises:
        CaptureError: The replay and the run give different results.
    """
    before = [buffer.clone() for buffer in varied]
    torch.cuda.synchronize(runtime.device)
    try:
        with torch.cuda.stream(runtime.stream):
            for buffer, value in zip(varied, before, strict=True):
                buffer.copy_(value.roll(1, dims=-1))
            enqueue()
            expected = {name: tensor.clone() for name, tensor in outputs.items()}
            graph.replay()
        torch.cuda.synchronize(runtime.device)
        _compare(outputs, expected, "The replay of the captured CUDA graph with other inputs")
    finally:
        with torch.cuda.stream(runtime.stream):
            for buffer, value in zip(varied, before, strict=True):
                buffer.copy_(value)
        torch.cuda.synchronize(runtime.device)


def _compare(replayed: Mapping[str, torch.Tensor], expected: Mapping[str, torch.Tensor], subject: str) -> None:
    for name, tensor in replayed.items():
        if not _agree(tensor, expected[name]):
            raise CaptureError(f"{subject} gives a different output {name!r} than the run without a CUDA graph.")


class DeferredIdCheck:
    """Check of token ids in GPU memory that does not wait for the GPU.

    An invalid id is reported when the GPU has finished the call, which may be during a later call.

    Args:
        bounds: The smallest and largest valid value for each input.
        device: The GPU.
    """

    def __init__(self, bounds: Mapping[str, tuple[int, int]], device: torch.device) -> None:
        self.bounds = dict(bounds)
        # Create the buffers outside of inference mode, because tensors created in inference mode cannot be changed
        # outside of it.
        with torch.inference_mode(False):
            self._wrong = torch.zeros((), dtype=torch.bool, device=device)
            self._host = torch.zeros((), dtype=torch.bool).pin_memory()
        self._view = self._host.numpy()

    def note(self, wrong: torch.Tensor) -> None:
        """Enqueue kernels on the current stream that record if any element of the boolean tensor `wrong` is true."""
        self._wrong.logical_or_(wrong.any())
        self._host.copy_(self._wrong, non_blocking=True)

    def report(self) -> None:
        """Raise if a finished call had token ids that the model does not have.

        Raises:
            InputError: A call had ids that the model does not have. Each error is reported once.
        """
        if not self._view:
            return
        torch.cuda.synchronize(self._wrong.device)
        self._wrong.zero_()
        self._host.zero_()
        listing = ", ".join(f"{name} has {least} to {most}" for name, (least, most) in self.bounds.items())
        raise InputError(
            "This call, or an earlier call on this GPU, had token ids that the model does not have, so its results are wrong. "
            f"The valid ids are: {listing}.",
            fix="use the tokenizer that belongs to the model. Ids in CPU memory are checked before the model runs.",
        )


class ClampedInputs:
    """Inputs of a graph whose values are clamped to the valid range before the graph reads them.

    Without clamping, a fused kernel for embeddings and normalization would read beyond its tables.

    Args:
        late: Records whether a value is out of bounds; `None` for no check.
        inputs: All inputs by name; only their shapes, data types and device are used.
    """

    def __init__(self, late: DeferredIdCheck | None, inputs: Mapping[str, torch.Tensor]) -> None:
        self.given: dict[str, torch.Tensor] = {}
        self.within: dict[str, torch.Tensor] = {}
        self._late = late
        self._blocks: list[tuple[torch.Tensor, ...]] = []
        bounds = late.bounds if late is not None else {}
        # Inputs with the same data type share one block of memory, so that one kernel clamps all of them.
        for dtype in {inputs[name].dtype for name in bounds}:
            names = [name for name in bounds if inputs[name].dtype is dtype]
            sizes = [inputs[name].numel() for name in names]
            memory = torch.zeros(sum(sizes), dtype=dtype, device=inputs[names[0]].device)
            limits = [
                torch.cat([memory.new_full((n,), bounds[name][i]) for name, n in zip(names, sizes, strict=True)])
                for i in (0, 1)
            ]
            block = (memory, torch.zeros_like(memory), *limits)
            self._blocks.append(block)
            for views, memory_block in ((self.given, block[0]), (self.within, block[1])):
                parts = zip(names, torch.split(memory_block, sizes), strict=True)
                views.update({name: part.view(inputs[name].shape) for name, part in parts})

    def clamp(self) -> None:
        """Enqueue kernels on the current stream that write the clamped inputs to the buffers `within`."""
        for values, within, least, most in self._blocks:
            torch.clamp(values, least, most, out=within)

    def check(self) -> None:
        """Enqueue kernels on the current stream that record if an input value is outside of the valid range."""
        for values, _, least, most in self._blocks:
            if self._late is not None:
                self._late.note(values.clamp(least, most) != values)


class GpuMaskCheck:
    """Check on the GPU that finds out where an attention mask has padding, and if token ids are valid.

    The GPU runs this check in parallel with the model, which is started with the kernels for the expected padding.

    Args:
        mask: The fixed buffer `(batch, sequence)` for each call's mask.
        bounded: The inputs with bounds.
    """

    def __init__(self, mask: torch.Tensor, bounded: ClampedInputs) -> None:
        self._stream = torch.cuda.Stream(mask.device)  # type: ignore[no-untyped-call]
        self._done = torch.cuda.Event()  # type: ignore[no-untyped-call]
        self._ready = torch.cuda.Event()  # type: ignore[no-untyped-call]
        self._flags = torch.zeros((mask.shape[0], 2), dtype=torch.int64).pin_memory()
        self._view = self._flags.numpy()
        self._sequence = mask.shape[1]
        # Keep a reference, because the captured graph reads this tensor.
        self._weights = counting_weights(self._sequence, mask.device)
        self._graph = torch.cuda.CUDAGraph()
        torch.cuda.synchronize(mask.device)
        with torch.cuda.stream(self._stream):
            bounded.check()
            self._flags.copy_(flags_of(mask, self._weights), non_blocking=True)
            self._stream.synchronize()
            self._graph.capture_begin(capture_error_mode="thread_local")
            bounded.check()
            self._flags.copy_(flags_of(mask, self._weights), non_blocking=True)
            self._graph.capture_end()

    def mark(self, current: torch.cuda.Stream) -> None:
        """Record an event on the stream `current` after the attention mask was written to its buffer."""
        self._ready.record(current)

    def content(self) -> MaskContent:
        """Return where the attention mask of the last `mark` call has padding.

        The method waits only for this mask, not for work that was enqueued later.
        """
        with torch.cuda.stream(self._stream):
            self._stream.wait_event(self._ready)
            self._graph.replay()
            self._done.record(self._stream)
        self._done.synchronize()
        return content_from_flags(self._view, self._sequence)


class ShapeGraphs:
    """The CUDA graphs for one input shape, with shared buffers at fixed addresses. There is one CUDA graph for each way
    to compute a call (`MaskPlan`).

    Args:
        runtime: The runtime of the ONNX graph.
        inputs: Tensors of the input shape; their values are used for the first run.
        outputs: The shape and data type of each output.
        late: Checks the values of calls; `None` for no check.
    """

    def __init__(
        self,
        runtime: Runtime,
        inputs: Mapping[str, torch.Tensor],
        outputs: Mapping[str, tuple[tuple[int, ...], torch.dtype]],
        late: DeferredIdCheck | None = None,
    ) -> None:
        self._runtime = runtime
        buffers = {name: torch.empty_like(t, device=runtime.device) for name, t in inputs.items()}
        self._bounded = ClampedInputs(late, buffers)
        self.inputs = {**buffers, **self._bounded.given}
        self.input_list = list(self.inputs.values())
        self.outputs = {
            name: torch.empty(shape, dtype=dtype, device=runtime.device) for name, (shape, dtype) in outputs.items()
        }
        self.load(list(inputs.values()))
        self.graphs: dict[MaskPlan, torch.cuda.CUDAGraph] = {}
        self.expected = MaskPlan("general")
        self.waits = False
        self._packings: list[PackingInputs] = []
        self._mask = self.inputs.get(runtime.mask) if runtime.mask is not None else None
        checked = runtime.options.padding == "check"
        self.check = GpuMaskCheck(self._mask, self._bounded) if self._mask is not None and checked else None

    def load(self, values: Sequence[torch.Tensor]) -> None:
        """Copy inputs into the fixed buffers on the current stream.

        The inputs are in the order of the buffers and have the same shapes. `on_device` describes the handling of
        pinned memory.
        """
        for buffer, value in zip(self.input_list, values, strict=True):
            buffer.copy_(value, non_blocking=not value.is_pinned())

    def capture(self, plan: MaskPlan) -> torch.cuda.CUDAGraph:
        """Return the CUDA graph for a `MaskPlan`. The first call for a plan captures the graph, which takes the time of
        a few runs.

        Raises:
            CaptureError: The run cannot be captured, or its replay gives different results.
        """
        existing = self.graphs.get(plan)
        if existing is not None:
            return existing
        runtime = self._runtime
        enqueue = self._prepared(plan)
        # The capture must start after the input buffers are written, which happens on the current stream.
        varied = [buffer for buffer in self.input_list if buffer is not self._mask]
        graph = captured(runtime, enqueue, self.outputs, torch.cuda.current_stream(runtime.device), varied)
        self.graphs[plan] = graph
        # Later calls of this shape wait for their mask: this takes 40 microseconds, but a wrong plan costs much more.
        self.waits = self.waits or plan.form == "packed"
        return graph

    def _prepared(self, plan: MaskPlan) -> Callable[[], None]:
        """Return a function that enqueues one run of the model with the fixed buffers."""
        runtime, mask, bounded = self._runtime, self._mask, self._bounded
        inputs = {**self.inputs, **bounded.within}
        packing = None
        if plan.form == "packed" and mask is not None:
            packing = PackingInputs(mask.shape, plan.rows, runtime.device)
            # Keep a reference, because the captured graph reads and writes its buffers.
            self._packings.append(packing)
            inputs |= packing.inputs
        binding = runtime.bind(plan.form, inputs, self.outputs)

        def enqueue() -> None:
            bounded.clamp()
            if packing is not None and mask is not None:
                packing.fill(mask)
            # A `GpuMaskCheck` also checks the bounds of ids, so the ids need no second check.
            if self.check is not None or not bounded.within:
                runtime.enqueue(plan.form, binding)
                return
            with overlapped(runtime, bounded.check):
                runtime.enqueue(plan.form, binding)

        return enqueue


def _agree(replayed: torch.Tensor, expected: torch.Tensor) -> bool:
    """Return whether two results are equal, except for the small differences that floating-point additions in another
    order cause.
    """
    if not replayed.is_floating_point():
        return torch.equal(replayed, expected)
    scale = float(expected.nan_to_num(0, 0, 0).abs().max()) if expected.numel() else 0.0
    return torch.allclose(replayed.float(), expected.float(), rtol=1e-2, atol=1e-2 * scale, equal_nan=True)
