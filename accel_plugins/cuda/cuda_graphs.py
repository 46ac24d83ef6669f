"""CUDA graphs: all kernels of a run for one input shape, replayed with one launch."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence

import torch

from accel.errors import InputError, SessionError

from .forms.masks import Held, Plan, counting_weights, flags_of, held_by_flags
from .forms.packing import Packing
from .runtime import Runtime, device_tensor


@contextlib.contextmanager
def beside(runtime: Runtime, check: Callable[[], None]) -> Iterator[None]:
    """What `check` enqueues runs beside what is put on the runtime's stream meanwhile, and behind what was there before; the
    stream is behind both afterwards.
    """
    runtime.aside.wait_stream(runtime.stream)
    with torch.cuda.stream(runtime.aside):
        check()
    yield
    runtime.stream.wait_stream(runtime.aside)


class CaptureError(SessionError):
    """A run that cannot be captured, or whose replay computes something else."""


def captured(
    runtime: Runtime,
    enqueue: Callable[[], None],
    outputs: Mapping[str, torch.Tensor],
    current: torch.cuda.Stream,
    varied: Sequence[torch.Tensor] = (),
) -> torch.cuda.CUDAGraph:
    """A run as a CUDA graph. Takes a few runs.

    Args:
        runtime: What is captured.
        enqueue: Puts the run on the runtime's stream; the same each time.
        outputs: The fixed buffers that it writes, of any shape.
        current: The stream that its inputs are written on.
        varied: Buffers of inputs that other calls fill with other values: the replay is compared on such, too.

    Raises:
        CaptureError: It cannot be captured, or replays something else than it ran.
    """
    stream = runtime.stream
    stream.wait_stream(current)
    # The first run allocates what every later one uses again.
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
            # Other threads may allocate meanwhile.
            graph.capture_begin(capture_error_mode="thread_local")
            try:
                enqueue()
            finally:
                graph.capture_end()
            graph.replay()
    # Whatever ONNX Runtime or CUDA raise: the run itself worked above, so the call goes on without a graph.
    except Exception as error:
        raise CaptureError(f"the capture failed: {type(error).__name__}: {str(error)[:300]}") from error
    torch.cuda.synchronize(runtime.device)
    _compare(outputs, expected, "replaying the captured run")
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
    """Replay a graph on other inputs than it was captured with: what the capture baked in shows there alone.

    Raises:
        CaptureError: The run itself gives something else on them.
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
        _compare(outputs, expected, "replaying it on other inputs")
    finally:
        with torch.cuda.stream(runtime.stream):
            for buffer, value in zip(varied, before, strict=True):
                buffer.copy_(value)
        torch.cuda.synchronize(runtime.device)


def _compare(found: Mapping[str, torch.Tensor], expected: Mapping[str, torch.Tensor], what: str) -> None:
    for name, tensor in found.items():
        if not _agree(tensor, expected[name]):
            raise CaptureError(f"{what} gives another {name}")


class LateCheck:
    """Tells that ids of tokens which came on the GPU were none that the model has. Nothing waits for it: where no mask is
    waited for either, it is told a call later.

    Args:
        bounds: Least and greatest value by input.
        device: The GPU.
    """

    def __init__(self, bounds: Mapping[str, tuple[int, int]], device: torch.device) -> None:
        self.bounds = dict(bounds)
        # Buffers made in inference mode could not be written outside of it.
        with torch.inference_mode(False):
            self._wrong = torch.zeros((), dtype=torch.bool, device=device)
            self._host = torch.zeros((), dtype=torch.bool).pin_memory()
        self._view = self._host.numpy()

    def note(self, found: torch.Tensor) -> None:
        """Put kernels on the current stream that keep whether any of `found`, booleans of any shape, was true."""
        self._wrong.logical_or_(found.any())
        self._host.copy_(self._wrong, non_blocking=True)

    def report(self) -> None:
        """Tell what finished calls brought.

        Raises:
            InputError: One brought what the model does not have. It is told once.
        """
        if not self._view:
            return
        torch.cuda.synchronize(self._wrong.device)
        self._wrong.zero_()
        self._host.zero_()
        listing = ", ".join(f"{name} has {least} to {most}" for name, (least, most) in self.bounds.items())
        raise InputError(
            f"This call, or an earlier one, held ids on the GPU that the model does not have ({listing}); its answer is for others.",
            fix="use the tokenizer that belongs to the model; ids on the host are refused before they are computed.",
        )


class Bounded:
    """Inputs with bounds as the graph reads them: what a call gave, or the nearest value within. A kernel that looks
    embeddings up and normalises them would read beyond its tables otherwise.

    Args:
        late: What is told when they were not within.
        inputs: All inputs by name; their shapes are used.
    """

    def __init__(self, late: LateCheck | None, inputs: Mapping[str, torch.Tensor]) -> None:
        self.given: dict[str, torch.Tensor] = {}
        self.within: dict[str, torch.Tensor] = {}
        self._late = late
        self._blocks: list[tuple[torch.Tensor, ...]] = []
        bounds = late.bounds if late is not None else {}
        # One block for those of a type: one kernel instead of one for each.
        for dtype in {inputs[name].dtype for name in bounds}:
            names = [name for name in bounds if inputs[name].dtype is dtype]
            sizes = [inputs[name].numel() for name in names]
            made = torch.zeros(sum(sizes), dtype=dtype, device=inputs[names[0]].device)
            limits = [
                torch.cat([made.new_full((n,), bounds[name][i]) for name, n in zip(names, sizes, strict=True)])
                for i in (0, 1)
            ]
            block = (made, torch.zeros_like(made), *limits)
            self._blocks.append(block)
            for views, whole in ((self.given, block[0]), (self.within, block[1])):
                parts = zip(names, torch.split(whole, sizes), strict=True)
                views.update({name: part.view(inputs[name].shape) for name, part in parts})

    def clamp(self) -> None:
        """Put kernels on the current stream that fill `within` from `given`."""
        for given, within, least, most in self._blocks:
            torch.clamp(given, least, most, out=within)

    def check(self) -> None:
        """Put kernels on the current stream that note whether what is given is within bounds."""
        for given, _, least, most in self._blocks:
            if self._late is not None:
                self._late.note(given.clamp(least, most) != given)


class MaskCheck:
    """Finds out what a mask on the GPU holds, and whether ids are within bounds, while the GPU is busy with the call that
    assumes it.

    Args:
        mask: The fixed buffer `(batch, sequence)` that holds each call's mask.
        bounded: The inputs with bounds.
    """

    def __init__(self, mask: torch.Tensor, bounded: Bounded) -> None:
        self._stream = torch.cuda.Stream(mask.device)  # type: ignore[no-untyped-call]
        self._done = torch.cuda.Event()  # type: ignore[no-untyped-call]
        self._ready = torch.cuda.Event()  # type: ignore[no-untyped-call]
        self._flags = torch.zeros((mask.shape[0], 2), dtype=torch.int64).pin_memory()
        self._view = self._flags.numpy()
        self._sequence = mask.shape[1]
        # Kept: the graph reads it.
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
        """The mask is in its buffer once `current` gets here."""
        self._ready.record(current)

    def held(self) -> Held:
        """What the marked mask holds; waits for that alone, not for the work enqueued after it."""
        with torch.cuda.stream(self._stream):
            self._stream.wait_event(self._ready)
            self._graph.replay()
            self._done.record(self._stream)
        self._done.synchronize()
        return held_by_flags(self._view, self._sequence)


class ShapeGraphs:
    """The graphs of one input shape, one for each plan, over the same fixed buffers.

    Args:
        runtime: What is captured.
        inputs: Tensors of the shape; their values are used for a first run.
        outputs: Shape and type of each output.
        late: What checks the values of calls; `None` for no check.
    """

    def __init__(
        self,
        runtime: Runtime,
        inputs: Mapping[str, torch.Tensor],
        outputs: Mapping[str, tuple[tuple[int, ...], torch.dtype]],
        late: LateCheck | None = None,
    ) -> None:
        self._runtime = runtime
        buffers = {name: torch.empty_like(t, device=runtime.device) for name, t in inputs.items()}
        self._bounded = Bounded(late, buffers)
        self.inputs = {**buffers, **self._bounded.given}
        self.input_list = list(self.inputs.values())
        self.outputs = {name: device_tensor(shape, dtype, runtime.device) for name, (shape, dtype) in outputs.items()}
        self.load(list(inputs.values()))
        self.graphs: dict[Plan, torch.cuda.CUDAGraph] = {}
        self.expected = Plan("general")
        self.waits = False
        self._packings: list[Packing] = []
        self._mask = self.inputs.get(runtime.mask) if runtime.mask is not None else None
        checked = runtime.options.padding == "check"
        self.check = MaskCheck(self._mask, self._bounded) if self._mask is not None and checked else None

    def load(self, values: Sequence[torch.Tensor]) -> None:
        """Copy inputs, in order and of the buffers' shapes, into the fixed buffers, on the current stream; see `on_device` about
        pinned memory.
        """
        for buffer, value in zip(self.input_list, values, strict=True):
            buffer.copy_(value, non_blocking=not value.is_pinned())

    def capture(self, plan: Plan) -> torch.cuda.CUDAGraph:
        """The graph of a plan, made from what the input buffers hold when it is first asked for.

        Takes a few runs.

        Raises:
            CaptureError: It cannot be captured, or replays something else than it ran.
        """
        found = self.graphs.get(plan)
        if found is not None:
            return found
        runtime = self._runtime
        enqueue = self._prepared(plan)
        # Behind the inputs and what was just prepared, which are written on the current stream.
        varied = [buffer for buffer in self.input_list if buffer is not self._mask]
        graph = captured(runtime, enqueue, self.outputs, torch.cuda.current_stream(runtime.device), varied)
        self.graphs[plan] = graph
        # From now on calls of this shape wait for their mask: 40 microseconds that a wrong guess costs many times over.
        self.waits = self.waits or plan.form == "packed"
        return graph

    def _prepared(self, plan: Plan) -> Callable[[], None]:
        """What enqueues a run over the fixed buffers, on the current stream as far as it is ours."""
        runtime, mask, bounded = self._runtime, self._mask, self._bounded
        inputs = {**self.inputs, **bounded.within}
        packing = None
        if plan.form == "packed" and mask is not None:
            packing = Packing(mask.shape, plan.rows, runtime.device)
            # Kept: the graph reads and writes its buffers.
            self._packings.append(packing)
            inputs |= packing.inputs
        binding = runtime.bind(plan.form, inputs, self.outputs)

        def enqueue() -> None:
            bounded.clamp()
            if packing is not None and mask is not None:
                packing.fill(mask)
            # A `MaskCheck` looks at them as well.
            if self.check is not None or not bounded.within:
                runtime.enqueue(plan.form, binding)
                return
            with beside(runtime, bounded.check):
                runtime.enqueue(plan.form, binding)

        return enqueue


def _agree(found: torch.Tensor, expected: torch.Tensor) -> bool:
    """Equal up to what atomics and algorithm choice may change between two runs."""
    if not found.is_floating_point():
        return torch.equal(found, expected)
    scale = float(expected.nan_to_num(0, 0, 0).abs().max()) if expected.numel() else 0.0
    return torch.allclose(found.float(), expected.float(), rtol=1e-2, atol=1e-2 * scale, equal_nan=True)
