"""Bases for sessions: what a session says about itself, the order of the checks in a call, and its errors. No session need have them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, ClassVar, Generic, TypeVar

from ..artifact.manifest import Component
from ..artifact.tensors import TensorSpec
from ..errors import AccelError, SessionError
from .session_contract import (
    ShapeCheck,
    ValueCheck,
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
"""Types of tensors that NumPy has."""


class BaseSession(Generic[Runtime]):
    """A `accel.interfaces.protocols.Session`: a subclass says how to compute (`_compute`).

    Args:
        runtime: The runtime's own object, which `close` lets go.
        component: What the artifact says about the graph.
        device: Where it runs, as the opened runtime says.
        compute_dtype: What the kernels really compute in.
        shapes: Sizes that it was opened with for named axes.

    Attributes:
        runtime_name: The runtime in error messages.
        run_errors: What the runtime raises when a run fails.
        advice: What to do when a run fails.
        state_is_optional: Whether a graph that keeps a state also runs without one.
    """

    runtime_name: ClassVar[str] = "The runtime"
    run_errors: ClassVar[tuple[type[Exception], ...]] = (RuntimeError,)
    advice: ClassVar[str] = (
        "check the sizes of the inputs, and the artifact: `accel validate FOLDER`; with too little memory, use smaller batches."
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
        self._check_values = ValueCheck(component.inputs)

    @property
    def inputs(self) -> tuple[TensorSpec, ...]:
        """As declared by the artifact."""
        return self._component.inputs

    @property
    def outputs(self) -> tuple[TensorSpec, ...]:
        """As declared by the artifact."""
        return self._component.outputs

    @property
    def device(self) -> DeviceSpec:
        """Where it runs, read from the opened runtime."""
        return self._device

    @property
    def compute_dtype(self) -> str:
        """What the kernels really compute in."""
        return self._compute_dtype

    @property
    def stateful(self) -> bool:
        """Whether it keeps something between calls."""
        return self._component.stateful

    @property
    def runtime(self) -> Runtime:
        """The runtime's own object.

        Raises:
            SessionClosedError: After `close`.
        """
        if self._runtime is None:
            raise session_closed()
        return self._runtime

    def run(
        self, feeds: Feeds, *, outputs: Names | None = None, out: Feeds | None = None, state: State | None = None
    ) -> dict[str, torch.Tensor]:
        """See `accel.interfaces.protocols.Session.run`."""
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
            # Some are `RuntimeError`s as well.
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
        """The outputs `names` of checked inputs.

        Args:
            tensors: The inputs in the graph's order, as `_read` returns them.
            names: Names of the outputs wanted.
            out: Buffers that may be written to and returned as results; other results are copied into them.
            state: A state of this session.
        """
        raise NotImplementedError

    def _read(self, feeds: Feeds, state: State | None = None) -> dict[str, torch.Tensor]:
        """A call's inputs in the graph's order, of the declared types, where the session reads them.

        Raises:
            InputError: Names, types, shapes or values that the graph does not take.
        """
        tensors = read_feeds(feeds, self._dtypes if state is None else self._stateless_dtypes)
        if state is None:
            self._check_shapes(tuple([tuple(tensor.shape) for tensor in tensors.values()]))
        self._check_values(tensors)
        return {name: self._placed(tensor) for name, tensor in tensors.items()}

    def _placed(self, tensor: torch.Tensor) -> torch.Tensor:
        """A tensor as the runtime reads it: contiguous, where the session runs."""
        if tensor.device == self._where and tensor.is_contiguous() and not tensor.requires_grad:
            return tensor
        return tensor.detach().to(self._where).contiguous()

    def failed(self, error: Exception, tensors: Feeds) -> SessionError:
        """The error of a run that failed on these inputs."""
        shapes = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
        return SessionError(f"{self.runtime_name} failed on inputs {shapes}: {self._reason(error)}", fix=self.advice)

    def _reason(self, error: Exception) -> str:
        """The runtime's error on one line."""
        return " ".join(str(error).split())[:600]

    def new_state(self, batch: int) -> State:
        """An empty state for `batch` rows.

        Raises:
            SessionError: The graph keeps no state.
        """
        raise no_state()

    def steps(self, feeds: Feeds, state: State, *, calls: int) -> TokenStep | None:
        """No shorter way than `run`; see `accel.interfaces.protocols.Session.steps`."""
        return None

    def close(self) -> None:
        """Let the runtime's object go."""
        self._runtime = None


class HostSession(BaseSession[Runtime]):
    """A session that reads NumPy arrays over the host's memory, where it can."""

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

        super().__init__(runtime, component, device, compute_dtype, shapes=shapes)
        self._numpy_dtypes = [np.dtype(s.dtype if s.dtype in _NUMPY_DTYPES else np.void) for s in component.inputs]
        # NumPy has no bfloat16 and no float8.
        self._plain = all(spec.dtype in _NUMPY_DTYPES for spec in (*component.inputs, *component.outputs))

    def _arrays(self, feeds: Feeds) -> list[Array]:
        """The inputs as arrays in the graph's order, over the callers' memory where they are of the declared types on the host.

        Written for cold caches: after a few milliseconds of matrix products every attribute looked up comes from main memory.

        Raises:
            InputError: Names, types, shapes or values that the graph does not take.
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
