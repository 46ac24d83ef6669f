"""Protocols that plugins implement. A plugin does not have to inherit from them.

A `Backend` opens an `Artifact` as named `Session`s. A backend may also have an `Exporter`, an `Optimizer`, a `Quantizer` and a
`Preparer`. The conformance suite (`accel.testing.conformance`) checks that a plugin does what these docstrings describe.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

from ..artifact.manifest import Artifact
from ..artifact.tensor_specs import TensorSpec
from ..config import ExportConfig, OptimizeConfig, PrepareConfig, QuantizeConfig, SessionOptions
from . import fork_safety  # noqa: F401  # releases torch's threads before a process fork_safety, for all sessions
from .specs import DeviceSpec, Probe
from .state import State

if TYPE_CHECKING:
    import numpy as np
    import torch

Feeds = Mapping[str, "torch.Tensor"]
Batches = Iterable[Feeds]
Names = Sequence[str]
Shapes = Mapping[str, int]
TokenStep = Callable[[Sequence[int]], "np.ndarray"]


@dataclass(frozen=True, slots=True, kw_only=True)
class OpenRequest:
    """Device and options for opening an artifact.

    Attributes:
        device: One of the devices that `Backend.probe` returned.
        options: Device or provider options of the vendor.
        session: Options of the session, such as the number of threads.
        shapes: Fixed sizes of named axes (`{"batch": 1, "sequence": 128}`), for runtimes that are faster with static shapes.
            accel pads the inputs to these sizes.
        trust_remote_code: Whether custom code of a PyTorch model may run.
        few_calls: Whether the session will run only a few times, for example to compare two graphs. The backend may then skip
            optimizations that need much memory.
        exact: Whether layers with quantized weights compute in float32. By default, a backend may round their activations to 8 bits.
    """

    device: DeviceSpec
    options: Mapping[str, object] = field(default_factory=dict)
    session: SessionOptions = field(default_factory=SessionOptions)
    shapes: Shapes = field(default_factory=dict)
    trust_remote_code: bool = False
    few_calls: bool = False
    exact: bool = False


@runtime_checkable
class Session(Protocol):
    """An opened graph on a device."""

    @property
    def inputs(self) -> tuple[TensorSpec, ...]:
        """Specs of the inputs of `run`, in the graph's order."""

    @property
    def outputs(self) -> tuple[TensorSpec, ...]:
        """Specs of the outputs of `run`, in the graph's order."""

    @property
    def device(self) -> DeviceSpec:
        """Device of the opened runtime, which may differ from the requested one."""

    @property
    def compute_dtype(self) -> str:
        """Data type in which the kernels actually compute: `float32`, `bfloat16`, `int8`, ..."""

    def run(
        self, feeds: Feeds, *, outputs: Names | None = None, out: Feeds | None = None, state: State | None = None
    ) -> dict[str, torch.Tensor]:
        """Compute the outputs.

        Args:
            feeds: Exactly the declared inputs, in the shapes of their `TensorSpec`s. Any device, stride or integer width is
                accepted and converted if needed.
            outputs: Names of the requested outputs; all if `None`.
            out: Buffers that outputs are written to, by output name. Each buffer has the shape of its output.
            state: State from `new_state`. The call reads the state and adds the new tokens to it.

        Returns:
            Outputs by name, in the shape and dtype of their `TensorSpec`s, on the session's device. The next call does not
            overwrite the outputs, except for outputs in buffers from `out`.

        Raises:
            InputError: Missing or extra names, a wrong rank, or a wrong size of a fixed axis.
            SessionClosedError: The session was closed.
            SessionError: The runtime failed.
        """

    def new_state(self, batch: int) -> State:
        """Return an empty state for `batch` rows.

        Raises:
            SessionError: The graph has no state.
        """

    def steps(self, feeds: Feeds, state: State, *, calls: int) -> TokenStep | None:
        """Return a function for the next decoding steps that is faster than `run`, or `None` if `run` has to be used.

        Each step adds one new token to each row, adds one column of ones to the mask, and increases the position ids by one.

        Args:
            feeds: Inputs of the last call of `run` with this state, with one token for each row.
            state: The state, which the steps continue in place.
            calls: Largest number of steps.

        Returns:
            A function that gets the new token of each row, and returns the logits of the next tokens, `(batch, vocabulary) float32`.
            The next step may overwrite the logits.
        """

    def close(self) -> None:
        """Release the runtime's memory. A second call does nothing."""


@runtime_checkable
class Exporter(Protocol):
    """Converts a PyTorch model to an artifact in the backend's format."""

    def export(self, source: Any, *, task: str, config: ExportConfig, out: Path) -> Artifact:
        """Write the graph and its manifest.

        accel calls this method with a temporary folder and compares the result with the PyTorch model. If the results agree, accel moves
        the folder to its final path.

        Args:
            source: The model, an `accel.capture.Source`.
            task: Name of the task.
            config: Export settings.
            out: An existing, empty folder.

        Raises:
            ExportError: The model could not be captured.
        """


@runtime_checkable
class CompilingExporter(Exporter, Protocol):
    """An exporter for a format that is compiled from ONNX graphs, also on machines that cannot run the format.

    `export` writes an ONNX artifact. accel compares this artifact with the PyTorch model on a CPU, and then calls `compile`. If a
    device of the backend is available, accel also compares the compiled artifact. The capability for the compiled format has
    `consumes="onnx"`, so `accel export` also compiles existing ONNX artifacts, such as quantized artifacts.
    """

    def compile(
        self, artifact: Artifact, *, config: ExportConfig, out: Path, report: Callable[[str, int, int | None], None]
    ) -> Artifact:
        """Write the compiled graphs and their manifest, and copy the other files of the artifact.

        Args:
            artifact: An artifact in the format `onnx`.
            config: Export settings; `options` are the options of the capability for the compiled format.
            out: An existing folder.
            report: Function that is called with a description of the current step, the number of finished steps and the total
                number of steps.

        Raises:
            ExportError: The graphs contain operators that the compiler does not support.
            SessionError: The compiler failed.
        """


@dataclass(frozen=True, slots=True)
class QuantizedExport:
    """Result of `QuantizingExporter.export_quantized`.

    Attributes:
        artifact: The artifact. Its manifest has a step for each stage.
        weights: Functions that read quantized weights from the files of the artifact, by parameter name of the PyTorch model. Each function
            returns the weight in float32, as the kernels compute with it, in the shape of the parameter.
    """

    artifact: Artifact
    weights: Mapping[str, Callable[[], torch.Tensor]]


@runtime_checkable
class QuantizingExporter(Exporter, Protocol):
    """An exporter that exports, optimizes and quantizes a model in one pass: it reads each weight of a checkpoint when it quantizes it, so
    neither memory nor disk ever contain all weights in float32.

    `schemes` of the backend's capability for exports lists the quantization schemes.
    """

    def export_quantized(
        self,
        source: Any,
        *,
        task: str,
        config: ExportConfig,
        optimize: OptimizeConfig | None,
        quantize: QuantizeConfig,
        out: Path,
    ) -> QuantizedExport:
        """Write the quantized graph and its manifest. The files are the same as those of the three stages, one after another.

        accel compares the artifact with the PyTorch model that has the weights in `QuantizedExport.weights`.

        Args:
            source: The model, an `accel.capture.Source` with streamed weights.
            task: Name of the task.
            config: Export settings.
            optimize: Optimization settings, or `None` for no optimization.
            quantize: Quantization settings.
            out: An existing folder with the configs and tokenizer files of the model.

        Raises:
            ExportError: The model could not be captured, or needs weights whose values are not in the checkpoint.
            OptimizeError: The graph could not be optimized.
            QuantizeError: The graph could not be quantized.
        """


@runtime_checkable
class Optimizer(Protocol):
    """Rewrites a graph into a faster one with the same outputs."""

    def optimize(
        self, artifact: Artifact, *, config: OptimizeConfig, calibration: Iterable[Feeds] | None = None, out: Path
    ) -> Artifact:
        """Write the optimized graph into the existing, empty folder `out`.

        Args:
            artifact: The artifact to optimize.
            config: Optimization settings.
            calibration: Batches of inputs for the first graph (for texts: `(batch, sequence)`). The batches can be iterated more than
                once. Optimizations that depend on values, such as half precision, read the batches.
            out: Output folder.

        Raises:
            ConfigError: A setting does not exist, or no step reads the calibration data.
            OptimizeError: The graph could not be optimized.
        """


@runtime_checkable
class Quantizer(Protocol):
    """Rewrites a graph into one with fewer bits for each value."""

    def quantize(
        self,
        artifact: Artifact,
        *,
        config: QuantizeConfig,
        calibration: Batches | None,
        out: Path,
    ) -> Artifact:
        """Write the quantized graph into the existing, empty folder `out`.

        The report of this step lists the quantized layers under `layers`, by names that `QuantizeConfig.exclude` accepts. A search for a
        quantization within an accuracy budget excludes layers by these names.

        Args:
            artifact: The artifact to quantize.
            config: Quantization settings.
            calibration: Batches of inputs, which can be iterated more than once. Static schemes need them. For a model with several
                graphs, an attribute `parts` of this object may contain the batches of each graph by component name.
            out: Output folder.

        Raises:
            QuantizeError: The graph could not be quantized.
        """


@runtime_checkable
class Preparer(Protocol):
    """Changes a PyTorch model for its user: to run faster, or for quantization-aware training."""

    def prepare(
        self, model: torch.nn.Module, *, config: PrepareConfig, calibration: Batches | None = None
    ) -> torch.nn.Module:
        """Return the prepared model. Depending on the scheme, this is the given model or a new model with the same parameters.

        The prepared model has the same input and output names. If the preparation fails, the given model is unchanged.

        Args:
            model: The model, on the device where it runs.
            config: Scheme (one of the capability's `schemes`) and its settings, in the settings class of the scheme.
            calibration: Batches of inputs, which can be iterated more than once, for schemes that need activation ranges.

        Raises:
            ConfigError: A scheme or setting does not exist or does not fit the model, or no step reads the calibration data.
            PrepareError: The model could not be prepared. The message contains the reason.
        """


@runtime_checkable
class Backend(Protocol):
    """The class of a plugin, created without arguments."""

    def probe(self) -> Probe:
        """Return the usable devices, and the reasons why other devices cannot be used.

        The method imports the vendor's library. It must not allocate memory on a device, and it must not raise an exception.
        """

    def exporter(self) -> Exporter | None:
        """Return the exporter, or `None` if the backend has none."""

    def optimizer(self) -> Optimizer | None:
        """Return the optimizer, or `None` if the backend has none."""

    def quantizer(self) -> Quantizer | None:
        """Return the quantizer, or `None` if the backend has none."""

    def open(self, artifact: Artifact, request: OpenRequest) -> Mapping[str, Session]:
        """Open every component (graph) of the artifact. Weights that several components share are in memory only once.

        Args:
            artifact: An artifact in a format that the backend can run.
            request: Device and options.

        Raises:
            ConfigError: An option does not exist.
            SessionError: The runtime rejected the graph.
        """


@runtime_checkable
class PreparingBackend(Backend, Protocol):
    """A backend that prepares PyTorch models. Backends without this capability need no `preparer`."""

    def preparer(self) -> Preparer | None:
        """Return the preparer, or `None` if the backend has none."""


@runtime_checkable
class WeightsBackend(Backend, Protocol):
    """A backend that opens PyTorch weights without conversion. The backend with an exporter for the format `WEIGHTS` implements it."""

    def adopt(self, folder: Path, *, task: str, config: ExportConfig, trust_remote_code: bool = False) -> Artifact:
        """Return an artifact for a transformers folder. Nothing is written.

        Args:
            folder: Folder of the model.
            task: Name of the task.
            config: Export settings, for the dtype and the pooling.
            trust_remote_code: Whether custom code of the model may run.

        Raises:
            ArtifactNotFoundError: The folder has no weights.
            IntegrityError: The weights cannot be read.
        """
