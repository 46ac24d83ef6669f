"""Decoders on an NVIDIA GPU: the cache stays there, a step is one CUDA graph."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path

import torch

from accel.artifact import Component
from accel.backends.checks import check_state, wanted_outputs
from accel.backends.forms import FormChecks
from accel.backends.interfaces import Feeds, State
from accel.backends.specs import DeviceSpec
from accel.config import SessionOptions
from accel.errors import SessionError

from .forms.causal import causal_form
from .forms.masks import Form
from .options import CudaOptions
from .runtime import RUN_ERRORS, Runtime
from .session import CudaSession
from .slots import Slots
from .state import CudaState

_CACHE_TYPES = ("float16", "bfloat16")


class DecoderRuntime(Runtime):
    """A decoder graph on one GPU, in the form that takes lengths instead of a mask.

    Raises:
        SessionError: The graph has no such form, or its cache is of a type that has no kernels.
    """

    # It moves rotary positions into the attention, which then takes a row's length for the position of its token and our
    # table of this call's angles for one of all positions (1.31).
    disabled_optimizers = ("GroupQueryAttentionFusion",)

    def __init__(
        self,
        path: Path,
        component: Component,
        device: DeviceSpec,
        options: CudaOptions,
        session: SessionOptions,
        checks: FormChecks,
    ) -> None:
        dtype = next(spec.dtype for spec in component.inputs if spec.pair is not None)
        if dtype not in _CACHE_TYPES:
            raise SessionError(
                f"{path.name} keeps its cache in {dtype}; ONNX Runtime's attention with a cache computes "
                f"{' and '.join(_CACHE_TYPES)} on NVIDIA GPUs.",
                fix="make a float16 artifact: accel optimize --level O4 --backend cuda, or accel export --dtype float16.",
            )
        self._form = causal_form(path)
        super().__init__(path, component, device, options, session, checks)

    @property
    def windowed(self) -> bool:
        """Whether a layer sees the last tokens only."""
        return self._form.windowed

    def _model(self, form: Form) -> bytes | None:
        return self._form.model

    def compute(self, inputs: Mapping[str, torch.Tensor], outputs: Mapping[str, torch.Tensor | None]) -> None:
        """One run behind what is on torch's current stream, which is behind it afterwards. Tensors by name, on the GPU."""
        current = self.follow()
        binding = self.bind("general", inputs, outputs)
        self.stream.wait_stream(current)
        self.enqueue("general", binding)
        current.wait_stream(self.stream)


class DecoderSession(CudaSession):
    """Runs a decoder over caches that stay on the GPU.

    The first call of a state, and any that brings several tokens, reads the attention mask on the host. A call that brings
    one token for each row waits for nothing; from the second on it replays a CUDA graph.

    Args:
        runtime: The decoder on its GPU.
        device: That GPU.
        compute_dtype: What its kernels compute in.
    """

    _runtime: DecoderRuntime | None

    def __init__(self, runtime: DecoderRuntime, device: DeviceSpec, compute_dtype: str) -> None:
        super().__init__(runtime, device, compute_dtype)
        self.component = runtime.component
        self.slots = Slots()
        self._dtypes = {spec.name: self._dtypes[spec.name] for spec in self._inputs if spec.pair is None}
        self._names = list(self._dtypes)

    @property
    def runtime(self) -> DecoderRuntime:
        """The decoder on its GPU.

        Raises:
            SessionClosedError: After `close`.
        """
        if self._runtime is None:
            self._closed()
        return self._runtime

    def run(
        self,
        feeds: Feeds,
        *,
        outputs: Sequence[str] | None = None,
        out: Mapping[str, torch.Tensor] | None = None,
        state: State | None = None,
    ) -> dict[str, torch.Tensor]:
        """See `accel.backends.interfaces.Session.run`. The cache's tensors are the state's; the caller gives and gets the rest.

        Raises:
            InputError: No state, another session's, or a mask that does not continue the state's.
        """
        runtime = self.runtime
        own = CudaState if getattr(state, "session", self) is self else type(None)
        check_state(state, own, stateful=True, out=out)
        assert isinstance(state, CudaState)
        wanted = self._output_names if outputs is None else wanted_outputs(outputs, self._output_names)
        tensors = dict(zip(self._names, self._converted(feeds), strict=True))
        with runtime.lock, self.on_device():
            try:
                logits = state.run(tensors)
            except RUN_ERRORS as error:
                raise self._failed(error, {name: tuple(tensor.shape) for name, tensor in tensors.items()}) from error
        return {"logits": logits} if "logits" in wanted else {}

    def on_device(self) -> AbstractContextManager[object]:
        """The GPU as torch's current one."""
        if torch.cuda.current_device() == self._index:
            return nullcontext()
        return torch.cuda.device(self._where)

    def new_state(self, batch: int) -> State:
        """An empty cache. Memory is taken at the first call."""
        return CudaState(self, batch)

    def close(self) -> None:
        """Give ONNX Runtime's memory and that of all caches back."""
        super().close()
        self.slots.clear()
