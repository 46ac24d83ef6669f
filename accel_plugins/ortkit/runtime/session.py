"""An ONNX Runtime session behind `accel.interfaces.protocols.Session`."""

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
from accel.interfaces.forks import kept_in_children
from accel.interfaces.protocols import Feeds, Names, TokenStep
from accel.interfaces.session import HostSession
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
from .assignment import Assignment, assignment_of, check_assignment, record
from .state import LENGTHS, OrtState
from .steps import OrtSteps
from .values import as_ort_value

logger = logging.getLogger(__name__)

OPTIONS_OBJECT = "onnxruntime.SessionOptions"
"""Key of `SessionOptions.native` that carries the user's own `onnxruntime.SessionOptions`, used as it is."""
DISABLED_OPTIMIZERS = "disabled_optimizers"
"""Key of `SessionOptions.native` with names of ONNX Runtime's graph optimizers to leave out."""

_EXTERNAL_FOLDER = "session.model_external_initializers_file_folder_path"
_SPINS_SHORTLY = VERSION >= (1, 26)
"""Whether threads can be told how long to spin; earlier versions spin for milliseconds."""
_SPIN_US = "50"
"""Longer than the gaps within a call, shorter than those between calls. MiniLM 1x14, two threads: 0.61 ms a call instead of 0.85,
with less processor time (1.30 instead of 1.48 ms)."""
_LEVELS = {
    "none": ort.GraphOptimizationLevel.ORT_DISABLE_ALL,
    "basic": ort.GraphOptimizationLevel.ORT_ENABLE_BASIC,
    "extended": ort.GraphOptimizationLevel.ORT_ENABLE_EXTENDED,
    "all": ort.GraphOptimizationLevel.ORT_ENABLE_ALL,
}
# "/onnxruntime_src/.../file.cc:71 virtual ... Function(const A&, const B&) " before what happened.
_SOURCE_LOCATION = re.compile(r"^\S+\.(?:cc|h):\d+ .*?\) ")
_ELEMENT_TYPES = {
    f"tensor({word})": dtype
    for word, dtype in {
        **{name: name for name in ("bool", "int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64", "float16")},
        "bfloat16": "bfloat16", "float": "float32", "double": "float64",
    }.items()
}  # fmt: skip
"""ONNX Runtime's words for the types of tensors, as torch's names."""


def native_options(options: SessionOptions) -> tuple[ort.SessionOptions, tuple[str, ...]]:
    """ONNX Runtime's own options for ours, and the graph optimizers to leave out.

    Every attribute of `onnxruntime.SessionOptions` can be set through `native`, and every configuration entry
    (`session.…`, `mlas.…`) by its key.

    Raises:
        ConfigError: A setting that ONNX Runtime does not have.
    """
    disabled = tuple(options.native.get(DISABLED_OPTIMIZERS, ()))
    if OPTIONS_OBJECT in options.native:
        return options.native[OPTIONS_OBJECT], disabled
    made = ort.SessionOptions()
    made.intra_op_num_threads = options.threads or available_processors()
    made.inter_op_num_threads = options.inter_op_threads
    if options.inter_op_threads > 1:
        made.execution_mode = ort.ExecutionMode.ORT_PARALLEL
    made.graph_optimization_level = _LEVELS[options.graph_optimization]
    made.log_severity_level = 4  # what fails is raised; ONNX Runtime would print it as well
    # Threads that wait within a call spin a moment all the same: for a small model waking them costs a third of it.
    made.add_session_config_entry("session.intra_op.allow_spinning", "1" if options.spinning or _SPINS_SHORTLY else "0")
    if not options.spinning:
        made.add_session_config_entry("session.intra_op.spin_duration_us", _SPIN_US)
    if options.profile is not None:
        # ONNX Runtime writes nothing, and says nothing, where the folder is missing.
        Path(options.profile).mkdir(parents=True, exist_ok=True)
        made.enable_profiling = True
        made.profile_file_prefix = str(Path(options.profile) / "onnxruntime")
    known = [name for name in dir(made) if not name.startswith("_") and not callable(getattr(made, name))]
    for name, value in options.native.items():
        if name == DISABLED_OPTIMIZERS:
            continue
        if "." in name:
            made.add_session_config_entry(name, str(value))
        elif name in known:
            setattr(made, name, value)
        else:
            raise ConfigError(
                f"onnxruntime.SessionOptions has no {name!r}.{did_you_mean(name, known)}",
                fix=f"use one of {', '.join(known)}, or a configuration key with a dot in it.",
            )
    return made, disabled


def for_float8(session: SessionOptions, artifact: Artifact) -> SessionOptions:
    """The options with which ONNX Runtime opens a graph with FP8 pairs: without its rewriting of Q/DQ pairs, which takes
    them for INT8 and makes a graph that it then refuses (1.31).
    """
    if not is_float8(artifact):
        return session
    return replace(session, native={"session.disable_quant_qdq": "1", **session.native})


def is_float8(artifact: Artifact) -> bool:
    """Whether a graph has FP8 pairs, which ONNX Runtime computes in floating point."""
    quantization = artifact.manifest.quantization
    return quantization is not None and quantization.scheme.endswith("fp8")


def open_session(
    path: Path,
    component: Component,
    *,
    device: DeviceSpec,
    provider: str,
    provider_options: Mapping[str, object],
    options: SessionOptions,
    compute_dtype: str,
    disabled_optimizers: Sequence[str] = (),
    shapes: Mapping[str, int] | None = None,
    devices: Sequence[ort.OrtEpDevice] = (),
    model: bytes | None = None,
) -> OrtSession:
    """Open a graph on one provider and wrap it; see `open_runtime`."""
    session = open_runtime(
        path,
        component,
        provider=provider,
        provider_options=provider_options,
        options=options,
        disabled_optimizers=disabled_optimizers,
        shapes=shapes,
        devices=devices,
        model=model,
    )
    return OrtSession(session, component, device, compute_dtype, shapes)


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
    """Open a graph on one provider; ONNX Runtime's silent fall-back to the CPU is an error.

    A provider that took none of the graph's arithmetic is an error, too; what of it was left to the CPU is warned of. For
    providers other than the CPU's the assignment of nodes is noted, in a user's own options object as well.

    Args:
        path: The graph file.
        component: What the artifact says about it.
        provider: ONNX Runtime's name of the execution provider.
        provider_options: Its options.
        options: How to run.
        disabled_optimizers: Names of ONNX Runtime's graph optimizers to leave out.
        shapes: Fixed sizes for named axes.
        model: The serialized graph to open instead of the file's, with its weights in the file's folder.
        weights: Initializers to use where they are, instead of the graph's own; they must outlive the session.
        others: Providers that may take what this one has no kernels for, with their options.
        devices: For a provider that is not in the build but in a library of its own: ONNX Runtime's devices of it.

    Raises:
        ConfigError: An option that ONNX Runtime does not have.
        SessionError: The graph is refused.
        BackendUnavailableError: The provider does not start, or has no kernels for the graph.
    """
    if devices and OPTIONS_OBJECT in options.native:
        raise ConfigError(
            f"{provider} comes from a library of its own, and is added to the session options for each session: your own "
            f"{OPTIONS_OBJECT} object cannot be used.",
            fix="pass its settings as session_options=SessionOptions(native={...}).",
        )
    if not devices and provider not in ort.get_available_providers():
        raise BackendUnavailableError(
            f"This build of ONNX Runtime has no {provider}, only {', '.join(ort.get_available_providers())}.",
            fix="run `accel doctor`.",
        )
    native, disabled = native_options(options)
    if model is not None:
        native.add_session_config_entry(_EXTERNAL_FOLDER, str(path.resolve().parent))
    for name, value in (weights or {}).items():
        native.add_initializer(name, value)
    for axis, size in (shapes or {}).items():
        for symbol in _symbols(path, component, axis):
            native.add_free_dimension_override_by_name(symbol, size)
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
                # ONNX Runtime would print what failed, try the CPU instead and lose the reason.
                enable_fallback=0,
            )
        )
    except INVALID_GRAPH_ERRORS as error:
        raise SessionError(
            f"ONNX Runtime refuses {path}: {_one_line(error)}", fix="export the model again; see docs/troubleshooting."
        ) from error
    except INVALID_OPTION_ERRORS as error:
        raise SessionError(
            f"ONNX Runtime cannot open {path}: {_one_line(error)}",
            fix="check the session and provider options; `accel doctor` shows the versions installed.",
        ) from error
    except PROVIDER_ERRORS as error:
        raise SessionError(
            f"{provider} cannot compile {path}: {_one_line(error)}",
            fix="try a graph of another precision, or of fixed shapes (SessionOptions(buckets=...)), or another backend.",
        ) from error
    except RuntimeError as error:
        raise BackendUnavailableError(
            f"ONNX Runtime cannot start {provider} for {path.name}: {_SOURCE_LOCATION.sub('', _one_line(error))}",
            fix="check the provider's options and libraries; `accel doctor` shows what is here.",
        ) from error
    check_assignment(session, provider, path.name)
    if model is None:
        _check_declared(session, component, path)
    return session


def _check_declared(session: ort.InferenceSession, component: Component, path: Path) -> None:
    """Hold what an artifact says about a graph against the graph: all that follows believes it.

    Raises:
        IntegrityError: A tensor that the graph has not, one of another rank or type, or a name that is no text.
    """
    try:
        wrong = _undeclared(session.get_inputs(), component.inputs) or _undeclared(
            session.get_outputs(), component.outputs
        )
    except UnicodeDecodeError as error:
        wrong = f"has a name that is no text ({error.reason})"
    if wrong:
        raise IntegrityError(
            f"{path} {wrong}: the graph is not the one that is described.", fix="make the artifact again."
        )


def _undeclared(found: Sequence[Any], declared: Sequence[TensorSpec]) -> str:
    """What a graph says differently about a tensor that an artifact declares; nothing for none."""
    arguments = {one.name: one for one in found}
    for spec in declared:
        one = arguments.get(spec.name)
        if one is None:
            return f"has no {spec.name[:80]!r}"
        if one.shape and len(one.shape) != len(spec.shape):
            return f"has {spec.name!r} of {len(one.shape)} axes instead of {len(spec.shape)}"
        if one.type in _ELEMENT_TYPES and _ELEMENT_TYPES[one.type] != spec.dtype:
            return f"has {spec.name!r} of {_ELEMENT_TYPES[one.type]} instead of {spec.dtype}"
    return ""


def _symbols(path: Path, component: Component, axis: str) -> set[str]:
    """What the graph file calls an axis: a foreign graph's own name, where ours is a translation."""
    import onnx

    graph = onnx.load(str(path), load_external_data=False).graph
    declared = {spec.name: spec.shape for spec in component.inputs}
    return {
        dim.dim_param
        for value in graph.input
        # An artifact may be wrong about its graph, which is found when the session is there.
        for dim, named in zip(value.type.tensor_type.shape.dim, declared.get(value.name, ()), strict=False)
        if dim.dim_param and named == axis
    }


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split())[:600]


class OrtSession(HostSession[ort.InferenceSession]):
    """Runs a graph on host memory. Thread-safe: ONNX Runtime's `run` is."""

    runtime_name = "ONNX Runtime"
    # With IO binding ONNX Runtime raises plain errors, too.
    run_errors = (*RUN_ERRORS, RuntimeError)
    # Caches may be inputs and outputs.
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
        self._own_lengths = component.stateful and any(one.name == LENGTHS for one in session.get_inputs())
        self._presents = frozenset(spec.name for spec in component.outputs if spec.pair is not None)
        self._run = native_run(session)

    @property
    def assignment(self) -> Assignment | None:
        """Which provider runs which nodes; `None` on the CPU, which runs all of them.

        Raises:
            SessionClosedError: After `close`.
        """
        return assignment_of(self.runtime, self.runtime.get_providers()[0])

    @property
    def left_to_cpu(self) -> int:
        """Nodes that run on the CPU although another provider was asked for."""
        found = self.assignment
        return found.left_to_cpu if found is not None else 0

    def run(
        self, feeds: Feeds, *, outputs: Names | None = None, out: Feeds | None = None, state: State | None = None
    ) -> dict[str, torch.Tensor]:
        """See `accel.interfaces.protocols.Session.run`. Inputs of the declared type on the host are read in place; a subset of the
        outputs, given buffers, a state, or types that NumPy does not have go through IO binding.
        """
        if outputs is not None or out is not None or state is not None or not self._plain:
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
            # ONNX Runtime computes on a stream of its own.
            torch.cuda.current_stream(self._where).synchronize()
        session.run_with_iobinding(binding)
        values = dict(zip(names, binding.get_outputs(), strict=True))
        return {name: out[name] if name in out else self._result(values[name]) for name in names}

    def _result(self, value: ort.OrtValue) -> torch.Tensor:
        """An output, which may stay in ONNX Runtime's memory."""
        return ort_value_as_tensor(value)

    def new_state(self, batch: int) -> State:
        """An empty cache.

        Raises:
            SessionError: The graph has none.
        """
        if not self._component.stateful:
            raise no_state()
        return OrtState(self, self._component, batch, self._where, lengths=self._own_lengths)

    def steps(self, feeds: Feeds, state: State, *, calls: int) -> TokenStep | None:
        """See `accel.interfaces.protocols.Session.steps`: on the host, for graphs that write keys and values in place."""
        if not isinstance(state, OrtState):
            return None
        tensors = self._read(feeds, state)
        return OrtSteps(self, state, tensors, calls) if OrtSteps.fits(state, tensors, calls) else None

    def close(self) -> None:
        """Give ONNX Runtime's memory back."""
        super().close()
        self._run = self._closed

    def _closed(self, *_: object) -> NoReturn:
        raise session_closed()
