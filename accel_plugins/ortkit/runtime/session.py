"""ONNX Runtime sessions with the interface `accel.interfaces.protocols.Session`."""

from __future__ import annotations

import logging
import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NoReturn

import onnxruntime as ort
import torch

from accel.artifact import Artifact, Component, TensorSpec
from accel.config import SessionOptions, available_processors
from accel.errors import BackendUnavailableError, ConfigError, IntegrityError, SessionError, did_you_mean
from accel.interfaces.fork_safety import kept_in_children
from accel.interfaces.protocols import Feeds, Names, TokenStep
from accel.interfaces.session import BaseSession
from accel.interfaces.session_contract import no_state, session_closed
from accel.interfaces.specs import DeviceSpec
from accel.interfaces.state import State

from ..upstream import (
    INVALID_GRAPH_ERRORS,
    INVALID_OPTION_ERRORS,
    PROVIDER_ERRORS,
    RUN_ERRORS,
    VERSION,
    native_run,
    ort_value_as_tensor,
)
from .decoding_steps import OrtDecodingSteps
from .provider_assignment import CPU, ProviderAssignment, assignment_of, check_assignment, record
from .state import LENGTHS, OrtState
from .values import as_ort_value

logger = logging.getLogger(__name__)

OPTIONS_OBJECT = "onnxruntime.SessionOptions"
"""Key of `SessionOptions.native` for the user's own `onnxruntime.SessionOptions` object, which is used unchanged."""
DISABLED_OPTIMIZERS = "disabled_optimizers"
"""Key of `SessionOptions.native` for the names of ONNX Runtime's graph optimizers to disable."""

_EXTERNAL_FOLDER = "session.model_external_initializers_file_folder_path"
_SPINS_SHORTLY = VERSION >= (1, 26)
"""Whether the duration of spinning can be set; earlier versions of ONNX Runtime spin for milliseconds."""
_SPIN_US = "50"
"""Time in microseconds for which an idle thread spins: longer than the pauses within a call, but shorter than the pauses
between calls. For MiniLM with 1 x 14 tokens and two threads, a call takes 0.61 ms instead of 0.85 ms, and 1.30 ms of
processor time instead of 1.48 ms.
"""
_LEVELS = {
    "none": ort.GraphOptimizationLevel.ORT_DISABLE_ALL,
    "basic": ort.GraphOptimizationLevel.ORT_ENABLE_BASIC,
    "extended": ort.GraphOptimizationLevel.ORT_ENABLE_EXTENDED,
    "all": ort.GraphOptimizationLevel.ORT_ENABLE_ALL,
}
# The source location at the start of an error message, for example:
# "/onnxruntime_src/.../file.cc:71 virtual ... Function(const A&, const B&) "
_SOURCE_LOCATION = re.compile(r"^\S+\.(?:cc|h):\d+ .*?\) ")
_ELEMENT_TYPES = {
    f"tensor({word})": dtype
    for word, dtype in {
        **{name: name for name in ("bool", "int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64", "float16")},
        "bfloat16": "bfloat16", "float": "float32", "double": "float64",
    }.items()
}  # fmt: skip
"""torch's data type names by ONNX Runtime's tensor type names."""


def native_options(options: SessionOptions, provider: str) -> tuple[ort.SessionOptions, tuple[str, ...]]:
    """Return ONNX Runtime's session options for accel's session options, and the names of graph optimizers to disable.

    `native` can set every attribute of `onnxruntime.SessionOptions`, and every configuration entry (`session.…`,
    `mlas.…`) by its key.

    Raises:
        ConfigError: ONNX Runtime does not have a setting.
    """
    disabled = tuple(options.native.get(DISABLED_OPTIMIZERS, ()))
    if OPTIONS_OBJECT in options.native:
        return options.native[OPTIONS_OBJECT], disabled
    native = ort.SessionOptions()
    native.intra_op_num_threads = options.threads or available_processors()
    native.inter_op_num_threads = options.inter_op_threads
    # Other providers start their kernels from one thread. CUDA's current device belongs to a thread, so in other threads,
    # a kernel of a session on the second GPU would fail.
    if options.inter_op_threads > 1 and provider == CPU:
        native.execution_mode = ort.ExecutionMode.ORT_PARALLEL
    native.graph_optimization_level = _LEVELS[options.graph_optimization]
    native.log_severity_level = 4  # Log nothing, because ONNX Runtime raises errors as exceptions.
    # Idle threads always spin for a short time within a call. For a small model, the wake-up of sleeping
    # threads takes a third of the call time.
    native.add_session_config_entry(
        "session.intra_op.allow_spinning", "1" if options.spinning or _SPINS_SHORTLY else "0"
    )
    if not options.spinning:
        native.add_session_config_entry("session.intra_op.spin_duration_us", _SPIN_US)
    if options.profile is not None:
        # Create the folder, because ONNX Runtime writes no profile, and raises no error, if the folder is missing.
        Path(options.profile).mkdir(parents=True, exist_ok=True)
        native.enable_profiling = True
        native.profile_file_prefix = str(Path(options.profile) / "onnxruntime")
    names = [name for name in dir(native) if not name.startswith("_") and not callable(getattr(native, name))]
    for name, value in options.native.items():
        if name == DISABLED_OPTIMIZERS:
            continue
        if "." in name:
            native.add_session_config_entry(name, str(value))
        elif name in names:
            setattr(native, name, value)
        else:
            raise ConfigError(
                f"onnxruntime.SessionOptions has no setting {name!r}.{did_you_mean(name, names)}",
                fix=f"use one of {', '.join(names)}, or a configuration key with a dot in it.",
            )
    return native, disabled


def for_float8(session: SessionOptions, artifact: Artifact) -> SessionOptions:
    """Return session options with which ONNX Runtime can open a graph with FP8 Q/DQ pairs.

    The options disable the ONNX Runtime optimizer that rewrites Q/DQ pairs. The optimizer (1.31) treats FP8 pairs as
    INT8 pairs and produces an invalid graph.
    """
    if not is_float8(artifact):
        return session
    return replace(session, native={"session.disable_quant_qdq": "1", **session.native})


def is_float8(artifact: Artifact) -> bool:
    """Return whether an artifact has FP8 Q/DQ pairs; ONNX Runtime computes layers with FP8 pairs in floating point."""
    quantization = artifact.manifest.quantization
    return quantization is not None and quantization.scheme.endswith("fp8")


def open_runtime(
    path: Path,
    component: Component,
    *,
    provider: str,
    provider_options: Mapping[str, object],
    options: SessionOptions,
    disabled_optimizers: Sequence[str] = (),
    shapes: Mapping[str, int] | None = None,
    model: bytes | None = None,
    weights: Mapping[str, ort.OrtValue] | None = None,
    others: Sequence[tuple[str, Mapping[str, str]]] = (),
    devices: Sequence[ort.OrtEpDevice] = (),
) -> ort.InferenceSession:
    """Open a graph on one execution provider. Raise if ONNX Runtime would silently fall back to the CPU.

    The function also raises an error if the provider runs none of the graph's arithmetic. If the CPU runs a part of the
    arithmetic, the function logs a warning. For providers other than the CPU provider, ONNX Runtime records which
    provider runs each node; this setting is also made in an options object that the user passed.

    Args:
        path: The graph file.
        component: The component of the artifact that describes the graph.
        provider: ONNX Runtime's name of the execution provider.
        provider_options: The provider's options.
        options: The session options.
        disabled_optimizers: Names of ONNX Runtime's graph optimizers to disable.
        shapes: Fixed sizes of named axes.
        model: A serialized graph to open instead of the file's graph; the weights of this graph are in the file's
            folder.
        weights: Initializers in memory that replace initializers of the graph; they must exist as long as the session.
        others: More providers with their options, for nodes for which the first provider has no kernels.
        devices: ONNX Runtime's devices of the provider, if the provider comes in a separate library.

    Raises:
        ConfigError: ONNX Runtime does not have an option.
        SessionError: ONNX Runtime cannot open the graph.
        BackendUnavailableError: The provider does not start, or has no kernels for the graph.
    """
    if devices and OPTIONS_OBJECT in options.native:
        raise ConfigError(
            f"{provider} is in a separate library and needs new session options for each session, so accel cannot use your "
            f"{OPTIONS_OBJECT} object.",
            fix="pass the settings of your object as session_options=SessionOptions(native={...}).",
        )
    if not devices and provider not in ort.get_available_providers():
        raise BackendUnavailableError(
            f"This build of ONNX Runtime has no {provider}, only {', '.join(ort.get_available_providers())}.",
            fix="run `accel doctor`, which shows the command to install a build with this provider.",
        )
    native, disabled = native_options(options, provider)
    if model is not None:
        native.add_session_config_entry(_EXTERNAL_FOLDER, str(path.resolve().parent))
    for name, value in (weights or {}).items():
        native.add_initializer(name, value)
    for name, size in _fixed_sizes(path, component, shapes).items() if shapes else ():
        native.add_free_dimension_override_by_name(name, size)
    strings = {key: str(value) for key, value in provider_options.items()}
    record(native, provider)
    try:
        if devices:
            native.add_provider_for_devices(list(devices), strings)
        session = kept_in_children(
            ort.InferenceSession(
                str(path) if model is None else model,
                native,
                providers=None if devices else [(provider, strings), *others],
                disabled_optimizers=[*disabled_optimizers, *disabled] or None,
                # Without this setting, ONNX Runtime would print an error, open the graph on the CPU and not raise the
                # error.
                enable_fallback=0,
            )
        )
    except INVALID_GRAPH_ERRORS as error:
        raise SessionError(
            f"ONNX Runtime reports that the graph {path} is invalid: {_one_line(error)}",
            fix="export the model again: `accel export MODEL OUT`; see docs/troubleshooting.md.",
        ) from error
    except INVALID_OPTION_ERRORS as error:
        raise SessionError(
            f"ONNX Runtime cannot open {path}: {_one_line(error)}",
            fix="check the session and provider options; `accel doctor` shows the versions installed.",
        ) from error
    except PROVIDER_ERRORS as error:
        raise SessionError(
            f"{provider} cannot compile {path}: {_one_line(error)}",
            fix="try a graph of another data type, fixed shapes (SessionOptions(buckets=...)), or another backend.",
        ) from error
    except RuntimeError as error:
        raise BackendUnavailableError(
            f"ONNX Runtime cannot start {provider} for {path.name}: {_SOURCE_LOCATION.sub('', _one_line(error))}",
            fix="check the options and libraries of the provider; `accel doctor` shows the installed libraries.",
        ) from error
    check_assignment(session, provider, path.name)
    if model is None:
        _check_declared(session, component, path)
    return session


def _check_declared(session: ort.InferenceSession, component: Component, path: Path) -> None:
    """Check that a graph has the inputs and outputs that its component declares.

    Raises:
        IntegrityError: The graph lacks a declared input or output, an input or output has another rank or data type
            than declared, or a name is not valid text.
    """
    try:
        wrong = _undeclared(session.get_inputs(), component.inputs) or _undeclared(
            session.get_outputs(), component.outputs
        )
    except UnicodeDecodeError as error:
        wrong = f"has a name that is not valid UTF-8 text ({error.reason})"
    if wrong:
        raise IntegrityError(
            f"The graph {path} {wrong}. It does not match the manifest accel.json of its artifact.",
            fix="create the artifact again: `accel export MODEL OUT`.",
        )


def _undeclared(tensors: Sequence[Any], declared: Sequence[TensorSpec]) -> str:
    """Return a text about the first difference between a graph's tensors and the declared specs; empty if they match."""
    arguments = {argument.name: argument for argument in tensors}
    for spec in declared:
        argument = arguments.get(spec.name)
        if argument is None:
            return f"has no input or output {spec.name[:80]!r}"
        if argument.shape and len(argument.shape) != len(spec.shape):
            return f"has {len(argument.shape)} axes for {spec.name!r} instead of {len(spec.shape)}"
        if argument.type in _ELEMENT_TYPES and _ELEMENT_TYPES[argument.type] != spec.dtype:
            return f"has the data type {_ELEMENT_TYPES[argument.type]} for {spec.name!r} instead of {spec.dtype}"
    return ""


def _fixed_sizes(path: Path, component: Component, shapes: Mapping[str, int]) -> dict[str, int]:
    """Return the fixed axis sizes by the axis names in the graph file.

    Graphs of other tools have different axis names than the artifact.
    """
    from ..graph.editing import read_graph

    declared = {spec.name: spec.shape for spec in component.inputs}
    return {
        dim.value: shapes[axis]
        for value in read_graph(path).graph.inputs
        # The lengths differ if the artifact does not match its graph; the call that opens the session reports this error.
        for dim, axis in zip(value.shape or (), declared.get(str(value.name), ()), strict=False)
        if isinstance(axis, str) and axis in shapes and not isinstance(dim, int) and dim.value is not None
    }


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split())[:600]


class OrtSession(BaseSession[ort.InferenceSession]):
    """Session that runs a graph in CPU memory. Thread-safe, because ONNX Runtime's `run` is thread-safe."""

    runtime_name = "ONNX Runtime"
    # For runs with IO binding, ONNX Runtime raises `RuntimeError` in addition to its own exception types.
    run_errors = (*RUN_ERRORS, RuntimeError)
    # A caller may pass the KV cache as inputs and read it from the outputs instead of passing a state.
    state_is_optional = True

    def __init__(
        self,
        session: ort.InferenceSession,
        component: Component,
        device: DeviceSpec,
        compute_dtype: str,
        shapes: Mapping[str, int] | None = None,
    ) -> None:
        super().__init__(session, component, device, compute_dtype, shapes=shapes)
        self._own_lengths = component.stateful and any(argument.name == LENGTHS for argument in session.get_inputs())
        self._presents = frozenset(spec.name for spec in component.outputs if spec.pair is not None)
        self._run = native_run(session)

    @property
    def assignment(self) -> ProviderAssignment | None:
        """The assignment of nodes to providers; `None` for the CPU provider, which runs all nodes.

        Raises:
            SessionClosedError: The session is closed.
        """
        return assignment_of(self.runtime, self.runtime.get_providers()[0])

    @property
    def left_to_cpu(self) -> int:
        """Number of nodes that run on the CPU although another provider was requested."""
        assignment = self.assignment
        return assignment.left_to_cpu if assignment is not None else 0

    def run(
        self, feeds: Feeds, *, outputs: Names | None = None, out: Feeds | None = None, state: State | None = None
    ) -> dict[str, torch.Tensor]:
        """Run the graph; see `accel.interfaces.protocols.Session.run`.

        ONNX Runtime reads inputs in CPU memory without a copy if they have the declared data type. The call uses IO
        binding if the caller requests a subset of the outputs or passes output buffers or a state, or if NumPy lacks a
        data type of the graph.
        """
        if outputs is not None or out is not None or state is not None or not self._numpy_only:
            return super().run(feeds, outputs=outputs, out=out, state=state)
        arrays = dict(zip(self._dtypes, self._arrays(feeds), strict=True))
        try:
            results = self._run(self._output_names, arrays, None)
        except RUN_ERRORS as error:
            raise self.failed(error, feeds) from error
        return dict(zip(self._output_names, map(torch.from_numpy, results), strict=True))

    def _compute(
        self, tensors: dict[str, torch.Tensor], names: Names, out: Feeds, state: State | None
    ) -> dict[str, torch.Tensor]:
        if isinstance(state, OrtState):
            return state.run(tensors, [name for name in names if name not in self._presents])
        session = self.runtime
        binding = session.io_binding()
        for name, tensor in tensors.items():
            binding.bind_ortvalue_input(name, as_ort_value(tensor))
        for name in names:
            if name in out:
                binding.bind_ortvalue_output(name, as_ort_value(out[name]))
            else:
                binding.bind_output(name, self._where.type, self._where.index or 0)
        if self._where.type == "cuda":
            # ONNX Runtime computes on its own CUDA stream, so first wait until torch has computed the inputs.
            torch.cuda.current_stream(self._where).synchronize()
        session.run_with_iobinding(binding)
        values = dict(zip(names, binding.get_outputs(), strict=True))
        return {name: out[name] if name in out else self._result(values[name]) for name in names}

    def _result(self, value: ort.OrtValue) -> torch.Tensor:
        """Return an output as a tensor; the tensor may share memory with the value of ONNX Runtime."""
        return ort_value_as_tensor(value)

    def new_state(self, batch: int) -> State:
        """Return an empty state for a batch of this many rows.

        Raises:
            SessionError: The graph has no KV cache.
        """
        if not self._component.stateful:
            raise no_state()
        return OrtState(self, self._component, batch, self._where, lengths=self._own_lengths)

    def steps(self, feeds: Feeds, state: State, *, calls: int) -> TokenStep | None:
        """Return an object that runs single-token steps with little overhead; see `accel.interfaces.protocols.Session.steps`.

        Return `None` for states in GPU memory, and for graphs that do not write keys and values in place.
        """
        if not isinstance(state, OrtState):
            return None
        tensors = self._read(feeds, state)
        return OrtDecodingSteps(self, state, tensors, calls) if OrtDecodingSteps.fits(state, tensors, calls) else None

    def close(self) -> None:
        """Release ONNX Runtime's memory."""
        super().close()
        self._run = self._closed

    def _closed(self, *_: object) -> NoReturn:
        raise session_closed()
