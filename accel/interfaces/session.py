"""Base class of sessions, with the checks of inputs and the errors of a call. A plugin's session need not inherit from this class."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, ClassVar, Generic, TypeVar

from ..artifact.manifest import Component
from ..artifact.tensor_specs import TensorSpec
from ..errors import AccelError, SessionError
from .session_contract import (
    InputValueCheck,
    ShapeCheck,
    check_buffer_shape,
    check_buffers,
    check_state,
    no_state,
    read_feeds,
    session_closed,
    tensor_dtypes,
    wanted_outputs,
)
from .specs import DeviceSpec

if TYPE_CHECKING:
    import numpy as np
    import torch

    from .protocols import Feeds, Names, TokenStep
    from .state import State

    Array = np.ndarray[Any, np.dtype[Any]]

Runtime = TypeVar("Runtime")
_NUMPY_DTYPES = frozenset(("float32", "float64", "float16", "int64", "int32", "int16", "int8", "uint8", "bool"))
"""Tensor dtypes that NumPy also has."""


class BaseSession(Generic[Runtime]):
    """Base class of `accel.interfaces.protocols.Session` implementations. A subclass runs the graph in `_compute`.

    Args:
        runtime: The session object of the runtime, such as an `onnxruntime.InferenceSession`. `close` releases it.
        component: The graph's component in the artifact's manifest.
        device: The device on which the runtime runs the graph.
        compute_dtype: Data type in which the kernels actually compute.
        shapes: Fixed sizes of named axes with which the session was opened.

    Attributes:
        runtime_name: Name of the runtime in error messages.
        run_errors: Exceptions that the runtime raises when a run fails.
        advice: Text after `Fix:` in the error message when a run fails.
        state_is_optional: Whether a stateful graph can also run without a state.
    """

    runtime_name: ClassVar[str] = "The runtime"
    run_errors: ClassVar[tuple[type[Exception], ...]] = (RuntimeError,)
    advice: ClassVar[str] = (
        "check the sizes of the inputs, and check the exported model with `accel validate FOLDER`. If the memory is too small, use "
        "smaller batches."
    )
    state_is_optional: ClassVar[bool] = False

    def __init__(
        self,
        runtime: Runtime,
        component: Component,
        device: DeviceSpec,
        compute_dtype: str,
        *,
        shapes: Mapping[str, int] | None = None,
    ) -> None:
        import numpy as np
        import torch

        self._runtime: Runtime | None = runtime
        self._component = component
        self._device, self._compute_dtype = device, compute_dtype
        self._where = torch.device("cpu")
        self._dtypes = tensor_dtypes(component.inputs)
        self._stateless_dtypes = tensor_dtypes(spec for spec in component.inputs if spec.pair is None)
        self._output_dtypes = tensor_dtypes(component.outputs)
        self._output_names = list(self._output_dtypes)
        self._check_shapes = ShapeCheck(component.inputs, shapes, component.max_sizes)
        self._check_values = InputValueCheck(component.inputs)
        # NumPy has no bfloat16 or float8.
        self._numpy_only = all(spec.dtype in _NUMPY_DTYPES for spec in (*component.inputs, *component.outputs))
        self._numpy_dtypes = [np.dtype(s.dtype if s.dtype in _NUMPY_DTYPES else np.void) for s in component.inputs]

    @property
    def inputs(self) -> tuple[TensorSpec, ...]:
        """Specs of the inputs, as in the artifact."""
        return self._component.inputs

    @property
    def outputs(self) -> tuple[TensorSpec, ...]:
        """Specs of the outputs, as in the artifact."""
        return self._component.outputs

    @property
    def device(self) -> DeviceSpec:
        """Device of the opened runtime."""
        return self._device

    @property
    def compute_dtype(self) -> str:
        """Data type in which the kernels actually compute."""
        return self._compute_dtype

    @property
    def stateful(self) -> bool:
        """Whether the session keeps a state between calls."""
        return self._component.stateful

    @property
    def runtime(self) -> Runtime:
        """The session object of the runtime.

        Raises:
            SessionClosedError: The session was closed.
        """
        if self._runtime is None:
            raise session_closed()
        return self._runtime

    def run(
        self, feeds: Feeds, *, outputs: Names | None = None, out: Feeds | None = None, state: State | None = None
    ) -> dict[str, torch.Tensor]:
        """Check the inputs and compute the outputs, as `accel.interfaces.protocols.Session.run`."""
        _ = self.runtime
        if state is not None or not self.state_is_optional:
            check_state(state, self, stateful=self.stateful, out=out)
        tensors = self._read(feeds, state)
        names = self._output_names if outputs is None else wanted_outputs(outputs, self._output_names)
        buffers = out or {}
        if buffers:
            check_buffers(buffers, names, self._output_dtypes, self._where)
        try:
            results = self._compute(tensors, names, buffers, state)
        except AccelError:
            # Some subclasses of AccelError are also RuntimeErrors. They must not be converted to a SessionError below.
            raise
        except self.run_errors as error:
            raise self.failed(error, tensors) from error
        for name, buffer in buffers.items():
            if results[name] is not buffer:
                check_buffer_shape(name, buffer, results[name].shape)
                results[name] = buffer.copy_(results[name])
        return results

    def _compute(
        self, tensors: dict[str, torch.Tensor], names: Names, out: Feeds, state: State | None
    ) -> dict[str, torch.Tensor]:
        """Compute the outputs `names` from checked inputs.

        Args:
            tensors: Inputs in the graph's order, as `_read` returns them.
            names: Names of the requested outputs.
            out: Buffers by output name. The method may write a result into its buffer and return the buffer. `run` copies all other
                results into their buffers.
            state: A state of this session, or `None`.
        """
        raise NotImplementedError

    def _read(self, feeds: Feeds, state: State | None = None) -> dict[str, torch.Tensor]:
        """Return the inputs of a call in the graph's order, in the declared dtypes, on the session's device.

        Raises:
            InputError: Names, dtypes, shapes or values do not match the graph.
        """
        tensors = read_feeds(feeds, self._dtypes if state is None else self._stateless_dtypes)
        if state is None:
            self._check_shapes(tuple([tuple(tensor.shape) for tensor in tensors.values()]))
        self._check_values(tensors)
        return {name: self._placed(tensor) for name, tensor in tensors.items()}

    def _placed(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return a tensor in contiguous memory on the session's device."""
        if tensor.device == self._where and tensor.is_contiguous() and not tensor.requires_grad:
            return tensor
        return tensor.detach().to(self._where).contiguous()

    def failed(self, error: Exception, tensors: Feeds) -> SessionError:
        """Return the SessionError for a run that failed with the exception `error` on these inputs."""
        shapes = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
        return SessionError(
            f"{self.runtime_name} failed on inputs of the shapes {shapes}: {self._reason(error)}", fix=self.advice
        )

    def _reason(self, error: Exception) -> str:
        """Return the runtime's error message on one line."""
        return " ".join(str(error).split())[:600]

    def new_state(self, batch: int) -> State:
        """Return an empty state for `batch` rows.

        Raises:
            SessionError: The graph has no state.
        """
        raise no_state()

    def steps(self, feeds: Feeds, state: State, *, calls: int) -> TokenStep | None:
        """Return `None`, because this session has no faster function than `run` for decoding steps (see `Session.steps`)."""
        return None

    def close(self) -> None:
        """Release the runtime's object."""
        self._runtime = None

    def _arrays(self, feeds: Feeds) -> list[Array]:
        """Return checked inputs as NumPy arrays in the graph's order, for sessions on the CPU.

        Inputs with the declared dtypes are not copied. The code avoids attribute lookups, because the CPU caches contain no Python
        objects after the matrix products of the previous call.

        Raises:
            InputError: Names, dtypes, shapes or values do not match the graph.
        """
        try:
            arrays = [feeds[name].numpy() for name in self._dtypes]
        except (KeyError, AttributeError, TypeError, RuntimeError):
            arrays = []
        if len(feeds) != len(arrays) or [array.dtype for array in arrays] != self._numpy_dtypes:
            arrays = [self._placed(tensor).numpy() for tensor in read_feeds(feeds, self._dtypes).values()]
        self._check_shapes(tuple([array.shape for array in arrays]))
        self._check_values.arrays(arrays)
        return arrays
