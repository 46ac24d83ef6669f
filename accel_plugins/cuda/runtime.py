"""ONNX Runtime's sessions of one graph on one GPU: one for each form of the graph that calls have needed so far."""

from __future__ import annotations

import logging
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

import onnxruntime as ort
import torch

from accel.artifact import Component
from accel.backends.specs import DeviceSpec
from accel.config import SessionOptions
from accel.errors import SessionError

from ..ortkit.runtime.assignment import Assignment, assignment_of
from ..ortkit.runtime.nvidia import CUDA
from ..ortkit.runtime.session import OPTIONS_OBJECT, open_runtime
from .forms.masks import Form, Held, Plan, in_form, mask_input, packs, plan_for
from .options import CudaOptions
from .weights import SharedWeights

logger = logging.getLogger(__name__)

# Element types by their numbers in ONNX's TensorProto, which ONNX Runtime's binding takes.
ELEMENT_TYPES: Mapping[torch.dtype, int] = {
    torch.float32: 1,
    torch.uint8: 2,
    torch.int8: 3,
    torch.int16: 5,
    torch.int32: 6,
    torch.int64: 7,
    torch.bool: 9,
    torch.float16: 10,
    torch.float64: 11,
    torch.bfloat16: 16,
}


_KERNELS = "sdpa_kernel"
_MEMORY_EFFICIENT = "2"
_HOPPER = 90


def _capability(device: DeviceSpec) -> int:
    """Compute capability as in `sm_90`; 0 when unknown."""
    number = (device.arch or "").removeprefix("sm_")
    return int(number) if number.isdigit() else 0


def device_tensor(shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Memory on the GPU, not initialised."""
    return torch.empty(tuple(shape), dtype=dtype, device=device)


def on_device(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """The tensor on the GPU; the caller may change the original as soon as this returns."""
    # From pageable memory CUDA takes its copy before it returns; from pinned memory it reads later.
    return tensor.to(device, non_blocking=not tensor.is_pinned())


def copy_in(buffer: torch.Tensor, value: torch.Tensor) -> None:
    """Copy a tensor into a buffer on the GPU, on the current stream; the caller may change it as soon as this returns."""
    buffer.copy_(value, non_blocking=value.is_cuda or not value.is_pinned())


class Runtime:
    """A graph on one GPU, shared by the sessions that run it.

    ONNX Runtime enqueues all work on `stream`, which callers order against torch's current stream. `lock` is held while a
    call is enqueued. Runs use the same memory one after another, so a call on another stream than the last one's waits, on
    the GPU, for that one (`follow`).

    Args:
        path: The graph file.
        component: What the artifact says about it.
        device: The GPU.
        options: The backend's options.
        session: How to run.
    """

    disabled_optimizers: ClassVar[tuple[str, ...]] = ()
    """ONNX Runtime's graph optimizers that are wrong for such graphs."""

    def __init__(
        self, path: Path, component: Component, device: DeviceSpec, options: CudaOptions, session: SessionOptions
    ) -> None:
        self.component = component
        self.options = options
        self.device = torch.device("cuda", device.index)
        self.lock = threading.RLock()
        # Never the default stream: work on it cannot be captured, and ONNX Runtime takes its number for "none given".
        self.stream = torch.cuda.Stream(self.device)  # type: ignore[no-untyped-call]
        self._last: torch.cuda.Stream | None = None
        self._last_number = 0
        self.mask = mask_input(path)
        checked = self.mask is not None and options.padding == "check"
        self.packs = checked and options.packing and packs(path)
        # Measured where cuDNN's attention is ONNX Runtime's choice.
        self._short = checked and _capability(device) >= _HOPPER and _KERNELS not in options.provider
        self._path = path
        self._session_options = session
        self._sessions: dict[Form, ort.InferenceSession] = {}
        # Weights outside of ONNX Runtime's arena would escape its limit, and the user's own options object is not ours to
        # put them in.
        shared = checked and "gpu_mem_limit" not in options.provider and OPTIONS_OBJECT not in session.native
        self._weights = SharedWeights(path, self.device) if shared else None
        self.graph_obstacle: str | None = None if options.cuda_graphs else "cuda_graphs=0"
        # Whether all of the graph runs on the GPU, as far as is known.
        self._whole = True
        self._run_options = ort.RunOptions()
        # Graphs are captured by us, for each shape; ONNX Runtime's own capture stays out of it.
        self._run_options.add_run_config_entry("gpu_graph_id", "-1")
        # The order on the stream is all that is needed; nothing waits for the GPU.
        self._run_options.add_run_config_entry("disable_synchronize_execution_providers", "1")
        self.session("full" if checked else self.safe_form)

    def follow(self) -> torch.cuda.Stream:
        """torch's current stream, ordered behind the stream of the call before."""
        # Its number costs a tenth of the object: 3.5 microseconds before the first launch (host of an H200).
        number = torch._C._cuda_getCurrentRawStream(self.device.index)  # noqa: SLF001
        if self._last is None or number != self._last_number:
            current = torch.cuda.current_stream(self.device)
            if self._last is not None:
                current.wait_stream(self._last)
            self._last, self._last_number = current, number
        return self._last

    @property
    def safe_form(self) -> Form:
        """The form that is right for every mask that the options allow."""
        return "lengths" if self.mask is not None and self.options.padding == "right" else "general"

    @property
    def assignment(self) -> Assignment | None:
        """Which provider runs which nodes of the form that was opened first; `None` where ONNX Runtime does not say."""
        opened = next(iter(self._sessions.values()), None)
        return assignment_of(opened, CUDA) if opened is not None else None

    def plan(self, held: Held, mask: torch.Tensor) -> Plan:
        """The fastest way to compute a call whose mask holds that."""
        return plan_for(held, mask.shape, packs=self.packs, short=self._short)

    def without_packing(self, held: Held, error: Exception) -> Plan:
        """How to compute a call after its packed form failed. It is not tried again."""
        self.packs = False
        logger.warning("no packed execution for %s: %s", self._path.name, str(error)[:300])
        return Plan(held.form)

    def session(self, form: Form) -> ort.InferenceSession:
        """ONNX Runtime's session of a form of the graph; opened when it is first needed."""
        found = self._sessions.get(form)
        if found is None:
            found = self._sessions[form] = self._open(self._model(form), form)
        return found

    def _model(self, form: Form) -> bytes | None:
        """The graph in a form; `None` for the file as it is."""
        return in_form(self._path, form) if form != "general" else None

    def _open(self, model: bytes | None, form: Form) -> ort.InferenceSession:
        """Open a graph, such that it can be captured if ONNX Runtime finds that all of it runs on the GPU."""
        extra = {_KERNELS: _MEMORY_EFFICIENT} if form == "short" else {}
        if self._whole:
            weights = self._weights.values() if self._weights is not None else {}
            try:
                return self._open_with(model, weights, enable_cuda_graph="1", **extra)
            except SessionError as error:
                if form == "packed":
                    raise
                session = self._open_with(model, {}, **extra)
                self._whole = False
                self.graph_obstacle = f"ONNX Runtime cannot run all of it on the GPU ({error.message[-300:]})"
                logger.info("no CUDA graphs for %s: %s", self._path.name, self.graph_obstacle)
                return session
        # What runs on the host cannot read weights on the GPU.
        return self._open_with(model, {}, **extra)

    def _open_with(self, model: bytes | None, weights: Mapping[str, Any], **extra: str) -> ort.InferenceSession:
        provider_options = {**self.options.provider, **extra, "user_compute_stream": str(self.stream.cuda_stream)}
        return open_runtime(
            self._path,
            self.component,
            provider=CUDA,
            provider_options=provider_options,
            options=self._session_options,
            model=model,
            weights=weights,
            disabled_optimizers=self.disabled_optimizers,
        )

    def bind(self, form: Form, inputs: Mapping[str, torch.Tensor], outputs: Mapping[str, torch.Tensor | None]) -> Any:
        """ONNX Runtime's binding of tensors by their addresses; `None` lets it allocate an output on the GPU.

        Of `inputs` those are bound that this form of the graph has.
        """
        session = self.session(form)
        binding = session.io_binding()
        index = self.device.index
        taken = {argument.name for argument in session.get_inputs()}
        for name, tensor in inputs.items():
            if name not in taken:
                continue
            kind = ELEMENT_TYPES[tensor.dtype]
            where = ("cuda", index) if tensor.is_cuda else ("cpu", 0)
            binding.bind_input(name, *where, kind, tuple(tensor.shape), tensor.data_ptr())
        for name, given in outputs.items():
            if given is None:
                binding.bind_output(name, "cuda", index)
            else:
                kind = ELEMENT_TYPES[given.dtype]
                binding.bind_output(name, "cuda", index, kind, tuple(given.shape), given.data_ptr())
        return binding

    def enqueue(self, form: Form, binding: Any) -> None:
        """Put a run on `stream`; returns before the GPU is done."""
        self.session(form).run_with_iobinding(binding, self._run_options)

    def refuse_graphs(self, error: SessionError) -> None:
        """Run kernel by kernel from now on."""
        self.graph_obstacle = error.message
        logger.warning("no CUDA graphs: %s. Calls run kernel by kernel, which is slower.", error.message)

    def close(self) -> None:
        """Wait for the GPU and give ONNX Runtime's memory back."""
        with self.lock:
            if self._sessions:
                self.stream.synchronize()
            self._sessions.clear()
