"""ONNX Runtime's sessions of one graph on one GPU. Each form of the graph (see `forms.masks`) gets its own session when
a call needs the form for the first time.
"""

from __future__ import annotations

import contextlib
import logging
import sys
import threading
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import onnx_ir as ir
import onnxruntime as ort
import torch

from accel.artifact import Component, TensorSpec
from accel.capture.fast_path_verification import FastPath, FastPathComparison, FastPathVerifier
from accel.config import SessionOptions
from accel.errors import SessionError
from accel.interfaces.protocols import Feeds
from accel.interfaces.specs import DeviceSpec
from accel.interfaces.state import growing_axes

from ..ortkit import upstream
from ..ortkit.graph.editing import read_graph
from ..ortkit.optimization.maskless_decoder import MaskRemovalError, causal_form
from ..ortkit.runtime.nvidia import CUDA, on_gpu
from ..ortkit.runtime.provider_assignment import ProviderAssignment, assignment_of
from ..ortkit.runtime.session import OPTIONS_OBJECT, open_runtime
from ..ortkit.upstream import ort_value_as_tensor
from .forms.packing import PackingInputs, packed_rows
from .forms.padding_variants import (
    PACKED_FROM,
    SHORT_UP_TO,
    FormName,
    MaskContent,
    MaskPlan,
    in_form,
    mask_input,
    packs,
    plan_for,
)
from .options import CudaOptions
from .upstream import current_stream_number
from .weights import SharedWeights

logger = logging.getLogger(__name__)

# ONNX Runtime's IO binding takes element types by their numbers in ONNX's TensorProto.
_FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
_INTEGERS = (torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64)
ELEMENT_TYPES = {dtype: int(ir.tensor_adapters.from_torch_dtype(dtype)) for dtype in (*_FLOATS, *_INTEGERS)}

# A run with IO binding raises `RuntimeError` for every kind of failure, and torch does so as well.
RUN_ERRORS = (*upstream.RUN_ERRORS, RuntimeError)

# The form to use instead if the results of a form are not correct.
_INSTEAD: Mapping[FormName, FormName] = {"packed": "lengths", "short": "full", "full": "general", "lengths": "general"}
# The sequence length at which each form is compared: a length that calls of this form typically have.
_CHECKED_LENGTH: Mapping[FormName, int] = {
    "packed": 128,
    "short": SHORT_UP_TO // 2,
    "full": 80,
    "lengths": 80,
    "general": 80,
}
_CHECKED_ROWS = 4
# Data types of the KV cache that ONNX Runtime's attention with a cache supports on GPUs.
_CACHE_TYPES = ("float16", "bfloat16")

_SIZED_BY_VALUES = {"Compress", "NonMaxSuppression", "NonZero", "Unique"}

_KERNELS = "sdpa_kernel"
_MEMORY_EFFICIENT = "2"
# A bit mask that enables cuDNN's attention, memory-efficient attention and unfused attention.
_ALL_BUT_FLASH = str(8 | 2 | 16)
_HOPPER = 90


def _capability(device: DeviceSpec) -> int:
    """Return the compute capability as a number (90 for `sm_90`); 0 if unknown."""
    number = (device.arch or "").removeprefix("sm_")
    return int(number) if number.isdigit() else 0


def _graph_obstacle(path: Path) -> str | None:
    """Return the reason why runs of a graph cannot be captured as CUDA graphs, or `None`.

    Some kernels read a number from the GPU to decide how much memory to allocate. Such kernels cannot be replayed, and
    a failed capture may crash the process.
    """
    model = read_graph(path)
    operators = sorted({node.op_type for graph in model.graphs() for node in graph if node.op_type in _SIZED_BY_VALUES})
    return f"the output sizes of the operators {', '.join(operators)} depend on values" if operators else None


def on_device(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Return a tensor of any shape on the GPU; the caller may change the original as soon as this returns."""
    # CUDA copies pageable memory before the call returns. Pinned memory is read later, so that copy must not be
    # asynchronous.
    return tensor.to(device, non_blocking=not tensor.is_pinned())


def copy_in(buffer: torch.Tensor, value: torch.Tensor) -> None:
    """Copy a tensor to a buffer of the same shape on the GPU, on the current stream.

    The caller may change the tensor as soon as this returns.
    """
    buffer.copy_(value, non_blocking=value.is_cuda or not value.is_pinned())


@dataclass(frozen=True, slots=True)
class GraphOpenRequest:
    """A request to open a graph on a GPU.

    Attributes:
        path: The graph file.
        component: The component of the artifact that describes the graph.
        device: The GPU.
        options: The backend's options.
        session: The session options.
        checks: The stored verdicts on forms of the graph.
    """

    path: Path
    component: Component
    device: DeviceSpec
    options: CudaOptions
    session: SessionOptions
    checks: FastPathVerifier


class Runtime:
    """An ONNX graph on one GPU, shared by all sessions that run it.

    ONNX Runtime enqueues all work on `stream`, which is synchronized with torch's current stream. Checks run in
    parallel on the stream `aside`. Callers hold `lock` while they enqueue a call. All runs use the same memory. If a
    call uses another stream than the previous call, it therefore waits for the previous call on the GPU (`follow`).

    Args:
        request: The graph and its options.
    """

    # This optimizer changes the memory layout of convolutions on the CPU. It crashes the process on float16 graphs
    # without convolutions (ONNX Runtime 1.31).
    disabled_optimizers: ClassVar[tuple[str, ...]] = ("NchwcTransformer",)
    """ONNX Runtime's graph optimizers that must be disabled."""

    def __init__(self, request: GraphOpenRequest) -> None:
        path, options, session = request.path, request.options, request.session
        self.component = request.component
        self.checks = request.checks
        self.options = options
        self.device = torch.device("cuda", request.device.index)
        self.lock = threading.RLock()
        # Do not use the default stream: its work cannot be captured, and ONNX Runtime treats its number 0 as "no
        # stream".
        self.stream = torch.cuda.Stream(self.device)  # type: ignore[no-untyped-call]
        self.aside = torch.cuda.Stream(self.device)  # type: ignore[no-untyped-call]
        self._last: torch.cuda.Stream | None = None
        self._last_number = 0
        self.mask = mask_input(path)
        checked = self.mask is not None and options.padding == "check"
        self.packs = checked and options.packing and packs(path)
        # Use the form `short` only on GPUs where ONNX Runtime would select cuDNN's attention: it was measured on these GPUs.
        self._short = checked and _capability(request.device) >= _HOPPER and _KERNELS not in options.provider
        self._path = path
        self._session_options = session
        self._sessions: dict[FormName, ort.InferenceSession] = {}
        # Share weights only if the options allow it. Shared weights are outside of ONNX Runtime's arena, so
        # `gpu_mem_limit` would not apply to them. They also cannot be added to the user's own options object.
        shared = checked and "gpu_mem_limit" not in options.provider and OPTIONS_OBJECT not in session.native
        self._weights = SharedWeights(path, self.device) if shared else None
        self.graph_obstacle = _graph_obstacle(path) if options.cuda_graphs else "cuda_graphs=0"
        # Forms whose results agreed with the results of the general form.
        self._right: set[FormName] = {"general"}
        # True if the whole graph runs on the GPU; set to False if ONNX Runtime cannot open the graph in this way.
        self._whole = True
        self._run_options = ort.RunOptions()
        # accel captures CUDA graphs for each shape, so disable ONNX Runtime's own capture.
        self._run_options.add_run_config_entry("gpu_graph_id", "-1")
        # Runs need not synchronize, because the order on the stream is sufficient. Graphs that partly run on the CPU must
        # synchronize. Without synchronization, ONNX Runtime would keep the CPU memory of their kernels until the session
        # is closed, and freeing this memory then crashes the process (ONNX Runtime 1.31).
        self._waiting_options = ort.RunOptions()
        self._waiting_options.add_run_config_entry("gpu_graph_id", "-1")
        self._run_options.add_run_config_entry("disable_synchronize_execution_providers", "1")
        self.session("full" if checked else self.safe_form)

    def follow(self) -> torch.cuda.Stream:
        """Return torch's current stream, after making it wait for the stream of the previous call."""
        number = current_stream_number(self.device.index)
        if self._last is None or number != self._last_number:
            current = torch.cuda.current_stream(self.device)
            if self._last is not None:
                current.wait_stream(self._last)
            self._last, self._last_number = current, number
        return self._last

    @property
    def safe_form(self) -> FormName:
        """The form of the graph that is correct for every mask that the options allow."""
        return "lengths" if self.mask is not None and self.options.padding == "right" else "general"

    @property
    def assignment(self) -> ProviderAssignment | None:
        """Which execution provider runs each node of the graph; `None` if ONNX Runtime does not record this.

        Nodes may differ between forms of the graph; this is the form that was opened first.
        """
        opened = next(iter(self._sessions.values()), None)
        return assignment_of(opened, CUDA) if opened is not None else None

    def plan(self, content: MaskContent, mask: torch.Tensor) -> MaskPlan:
        """Return the fastest way to compute a call with this attention mask `(batch, sequence)`. Forms of the graph
        that gave wrong results are not used.
        """
        plan = plan_for(content, mask.shape, packs=self.packs, short=self._short)
        while plan.form not in self._right:
            if self._verdict(plan.form).passed:
                self._right.add(plan.form)
            else:
                plan = MaskPlan(_INSTEAD[plan.form])
        return plan

    def check_forms(self) -> list[FastPathComparison]:
        """Compare the results of all forms of the graph with the results of the general form, and return the verdicts."""
        if self.mask is None:
            return []
        forms: list[FormName] = ["lengths"]
        if self.options.padding == "check":
            forms.append("full")
            if self._short:
                forms.append("short")
            if self.packs:
                forms.append("packed")
        return [self._verdict(form) for form in forms]

    def _verdict(self, form: FormName) -> FastPathComparison:
        """Return whether a form of the graph gives correct results.

        The form is compared with the general form, unless the result of an earlier comparison is stored.
        """
        limit = self.component.max_sizes.get("sequence", _CHECKED_LENGTH[form])
        sequence = min(_CHECKED_LENGTH[form], limit)
        batch = max(_CHECKED_ROWS, 2 * PACKED_FROM // sequence) if form == "packed" else _CHECKED_ROWS
        described = FastPath(
            name=form,
            sizes={"batch": batch, "sequence": sequence},
            padding="right" if form in ("lengths", "packed") else "none",
            context={"provider": dict(self.options.provider), "kernels": _MEMORY_EFFICIENT if form == "short" else ""},
        )

        def compute(feeds: Feeds, form: FormName = form) -> dict[str, torch.Tensor]:
            assert self.mask is not None
            rows = packed_rows(int(feeds[self.mask].sum()), batch * sequence) if form == "packed" else 0
            return self._computed(MaskPlan(form, rows), feeds)

        return self.checks.check(described, compute, lambda feeds: compute(feeds, "general"))

    def _computed(self, plan: MaskPlan, feeds: Feeds) -> dict[str, torch.Tensor]:
        """Run the graph once without a CUDA graph, and return copies of all outputs in CPU memory; waits for the GPU.

        Raises:
            SessionError: The run failed.
        """
        names = [spec.name for spec in self.component.outputs]
        inputs = {name: tensor.to(self.device) for name, tensor in feeds.items()}
        try:
            binding = self.launch(plan, inputs, dict.fromkeys(names), self.follow())
        except SessionError:
            raise
        except RUN_ERRORS as error:
            raise SessionError(" ".join(str(error).split())[:600]) from error
        values = zip(names, binding.get_outputs(), strict=True)
        return {name: ort_value_as_tensor(value).to("cpu", copy=True) for name, value in values}

    def launch(
        self,
        plan: MaskPlan,
        inputs: Mapping[str, torch.Tensor],
        results: Mapping[str, torch.Tensor | None],
        current: torch.cuda.Stream,
    ) -> Any:
        """Start a run without a CUDA graph, and return its IO binding; later work on `current` waits for the run.

        Args:
            plan: How to compute the call.
            inputs: The inputs, on the GPU.
            results: Buffers for the outputs; `None` for outputs that ONNX Runtime allocates.
            current: torch's current stream.
        """
        if plan.form == "packed" and self.mask is not None:
            mask = inputs[self.mask]
            packing = PackingInputs(mask.shape, plan.rows, self.device)
            packing.fill(mask)
            inputs = {**inputs, **packing.inputs}
        binding = self.bind(plan.form, inputs, results)
        self.stream.wait_stream(current)
        self.enqueue(plan.form, binding)
        current.wait_stream(self.stream)
        return binding

    def without_packing(self, content: MaskContent, error: Exception) -> MaskPlan:
        """Return the way to compute a call after the packed form of the graph failed. The packed form is not tried
        again.
        """
        self.packs = False
        self.checks.refuse("packed", error)
        return MaskPlan(content.form)

    def session(self, form: FormName) -> ort.InferenceSession:
        """Return ONNX Runtime's session for a form of the graph. It is opened at the first request."""
        session = self._sessions.get(form)
        if session is None:
            session = self._sessions[form] = self._open(self._model(form), form)
        return session

    def _model(self, form: FormName) -> bytes | None:
        """Return the graph rewritten to a form, serialized; `None` for the unchanged file."""
        return in_form(self._path, form) if form != "general" else None

    def _kernels(self, form: FormName) -> dict[str, str]:
        """Return the provider option that selects attention kernels, if this form of the graph needs particular
        kernels.
        """
        return {_KERNELS: _MEMORY_EFFICIENT} if form == "short" else {}

    def _open(self, model: bytes | None, form: FormName) -> ort.InferenceSession:
        """Open a form of the graph. CUDA graphs are supported if the whole graph runs on the GPU."""
        extra = self._kernels(form)
        if self._whole:
            weights = self._weights.values() if self._weights is not None else {}
            try:
                return self._open_with(model, weights, enable_cuda_graph="1", **extra)
            except SessionError as error:
                if form == "packed":
                    raise
                session = self._open_with(model, {}, **extra)
                self._whole = False
                self.graph_obstacle = f"a part of the graph cannot run on the GPU ({error.message[-300:]})"
                logger.info("CUDA graphs are disabled for %s: %s", self._path.name, self.graph_obstacle)
                return session
        # Open the session without shared weights, because nodes on the CPU cannot read weights in GPU memory.
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

    def bind(
        self, form: FormName, inputs: Mapping[str, torch.Tensor], outputs: Mapping[str, torch.Tensor | None]
    ) -> Any:
        """Return an IO binding of tensors by address; `None` lets ONNX Runtime allocate an output on the GPU.

        The tensors have the shapes of the call. Entries of `inputs` that are not inputs of this form of the graph are
        ignored.
        """
        session = self.session(form)
        binding = session.io_binding()
        index = self.device.index
        input_names = {argument.name for argument in session.get_inputs()}
        for name, tensor in inputs.items():
            if name not in input_names:
                continue
            kind = ELEMENT_TYPES[tensor.dtype]
            where = ("cuda", index) if tensor.is_cuda else ("cpu", 0)
            binding.bind_input(name, *where, kind, tuple(tensor.shape), tensor.data_ptr())
        for name, buffer in outputs.items():
            if buffer is None:
                binding.bind_output(name, "cuda", index)
            else:
                kind = ELEMENT_TYPES[buffer.dtype]
                binding.bind_output(name, "cuda", index, kind, tuple(buffer.shape), buffer.data_ptr())
        return binding

    def enqueue(self, form: FormName, binding: Any) -> None:
        """Enqueue a run on `stream`. If the whole graph runs on the GPU, this returns before the run is finished."""
        session = self.session(form)
        session.run_with_iobinding(binding, self._run_options if self._whole else self._waiting_options)

    def refuse_graphs(self, error: SessionError) -> None:
        """Disable CUDA graphs for all later calls, and log the reason."""
        self.graph_obstacle = error.message
        logger.warning(
            "CUDA graphs are disabled, so each kernel is launched separately, which is slower: %s", error.message
        )

    def close(self) -> None:
        """Wait for the GPU and release ONNX Runtime's memory."""
        with self.lock, torch.cuda.device(self.device):
            if self._sessions:
                self.stream.synchronize()
            self._sessions.clear()

    def __del__(self) -> None:
        # Suppress errors in a forked process, because the GPU is not available in a forked process.
        with contextlib.suppress(AttributeError, RuntimeError):
            if not sys.is_finalizing():
                with on_gpu(self.device.index):
                    self._sessions.clear()


def _is_of_tokens(spec: TensorSpec) -> bool:
    """Return whether a decoder input is a token input, the attention mask, a cache tensor, or `logits_to_keep`."""
    tokens = spec.shape[:2] in (("batch", "sequence"), ("batch", "total"))
    return tokens or spec.pair is not None or spec.shape == ("kept",)


def _decoder_obstacle(component: Component) -> tuple[str, str] | None:
    """Return (reason, fix) if a decoder graph cannot be rewritten to read the lengths of rows instead of an attention
    mask, or `None`.
    """
    pasts = [spec for spec in component.inputs if spec.pair is not None]
    presents = {spec.name: spec.shape for spec in component.outputs}
    on_cpu = "open it on the CPU: backend='cpu'."
    if len(growing_axes(component)) < len(pasts):
        return (
            "has states of fixed size in addition to keys and values, which the GPU form of decoders does not support.",
            on_cpu,
        )
    if not all(map(_is_of_tokens, component.inputs)):
        return "has attention to the outputs of an encoder, which the GPU form of decoders does not support.", on_cpu
    if any(spec.shape != presents[spec.pair or ""] for spec in pasts):
        obstacle = (
            "returns a longer KV cache at each call, but the GPU form of decoders must write the KV cache in place."
        )
        return obstacle, "export the original: accel export MODEL OUT --dtype float16."
    if pasts[0].dtype not in _CACHE_TYPES:
        supported = " and ".join(_CACHE_TYPES)
        obstacle = (
            f"has a KV cache of {pasts[0].dtype}, but ONNX Runtime's attention with a cache supports only {supported}"
        )
        return (
            f"{obstacle} on NVIDIA GPUs.",
            "create a float16 artifact: accel optimize --level O4 --backend cuda, or accel export --dtype float16.",
        )
    return None


class DecoderRuntime(Runtime):
    """A decoder graph on one GPU, rewritten to read the lengths of rows instead of an attention mask.

    Raises:
        MaskRemovalError: The graph cannot be rewritten to this form, or has no kernels for the data type of its cache.
    """

    # Disable this fusion, because it moves rotary position embeddings into attention. Attention would then use a row's
    # length as the token's position, and read accel's table of the current call's angles as a table of all positions
    # (ONNX Runtime 1.31).
    disabled_optimizers = (*Runtime.disabled_optimizers, "GroupQueryAttentionFusion")

    def __init__(self, request: GraphOpenRequest) -> None:
        obstacle = _decoder_obstacle(request.component)
        if obstacle is not None:
            problem, fix = obstacle
            raise MaskRemovalError(f"The decoder graph {request.path.name} {problem}", fix=fix)
        # Keep rotary embeddings outside of attention if the user selects kernels, because the user may select flash attention.
        self._form = causal_form(request.path, rotary_inside=_KERNELS not in request.options.provider)
        super().__init__(request)

    @property
    def windowed(self) -> bool:
        """True if a layer attends only to a window of the last tokens."""
        return self._form.windowed

    def _model(self, form: FormName) -> bytes | None:
        return self._form.model

    def _kernels(self, form: FormName) -> dict[str, str]:
        return {_KERNELS: _ALL_BUT_FLASH} if self._form.rotary_inside else {}

    def compute(self, inputs: Mapping[str, torch.Tensor], outputs: Mapping[str, torch.Tensor | None]) -> None:
        """Run the graph once, after earlier work on torch's current stream; later work on that stream waits for the run.

        Inputs and outputs are tensors by name, on the GPU, with the shapes that the graph declares.
        """
        self.launch(MaskPlan("general"), inputs, outputs, self.follow())
