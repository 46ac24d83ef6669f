"""What a plugin implements. Protocols: a plugin need not inherit from them.

A `Backend` opens an `Artifact` as named `Session`s and may offer an `Exporter`, an `Optimizer`, a `Quantizer` and a `Preparer`. The
conformance suite (`accel.testing.conformance`) checks the contract that the docstrings here state.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Protocol, runtime_checkable

from ..artifact.manifest import Artifact
from ..artifact.tensors import TensorSpec
from ..config import ExportConfig, OptimizeConfig, PrepareConfig, QuantizeConfig, SessionOptions
from . import forks  # noqa: F401  # lets go of torch's threads before a process forks, for whoever implements a session
from .specs import DeviceSpec, Probe
from .state import State

if TYPE_CHECKING:
    import numpy as np
    import torch

    from ..capture import Source

Feeds = Mapping[str, "torch.Tensor"]
Batches = Iterable[Feeds]
Names = Sequence[str]
Evaluate = Callable[[Artifact], float]
Shapes = Mapping[str, int]
TokenStep = Callable[[Sequence[int]], "np.ndarray"]


@dataclass(frozen=True, slots=True, kw_only=True)
class OpenRequest:
    """How an artifact is to be opened.

    Attributes:
        device: One of the probed devices.
        options: The vendor's own device or provider options.
        session: How to run.
        shapes: Fixed sizes for named axes (`{"batch": 1, "sequence": 128}`), for runtimes that are faster with
            static shapes; the core pads up to them.
        trust_remote_code: Run code that comes with a PyTorch model.
        few_calls: The session is for a handful of calls, as a comparison makes: what costs memory to make calls faster may be left out.
    """

    device: DeviceSpec
    options: Mapping[str, object] = field(default_factory=dict)
    session: SessionOptions = field(default_factory=SessionOptions)
    shapes: Shapes = field(default_factory=dict)
    trust_remote_code: bool = False
    few_calls: bool = False


@runtime_checkable
class Session(Protocol):
    """A graph opened on a device."""

    @property
    def inputs(self) -> tuple[TensorSpec, ...]:
        """What `run` takes, in the graph's order."""

    @property
    def outputs(self) -> tuple[TensorSpec, ...]:
        """What `run` returns, in the graph's order."""

    @property
    def device(self) -> DeviceSpec:
        """Where it runs, read from the opened runtime and not from what was asked for."""

    @property
    def compute_dtype(self) -> str:
        """What the kernels really compute in: `float32`, `bfloat16`, `int8`, ..."""

    def run(
        self, feeds: Feeds, *, outputs: Names | None = None, out: Feeds | None = None, state: State | None = None
    ) -> dict[str, torch.Tensor]:
        """Compute the outputs.

        Args:
            feeds: Exactly the declared inputs, each of the shape that its `TensorSpec` has. Any device, stride or integer
                width; converted once where needed.
            outputs: Names of the outputs wanted; all when `None`.
            out: Buffers that receive outputs of these names, each of its output's shape.
            state: From `new_state`; read and advanced.

        Returns:
            Output by name, of the shape that its `TensorSpec` has for these inputs, in the declared dtype, on the session's
            device. It does not alias the next call's
            (except what was written into `out`).

        Raises:
            InputError: Missing or extra names, a wrong rank or a fixed axis with another size.
            SessionClosedError: After `close`.
            SessionError: The runtime failed.
        """

    def new_state(self, batch: int) -> State:
        """An empty state for `batch` rows.

        Raises:
            SessionError: The graph keeps no state.
        """

    def steps(self, feeds: Feeds, state: State, *, calls: int) -> TokenStep | None:
        """A shorter way than `run` for the calls after the last one, for greedy and sampled decoding: each brings one new token a row, a
        column of ones more in the mask, and positions greater by one.

        Args:
            feeds: Inputs of the last call of `run` with this state, with one token a row.
            state: Continued in place.
            calls: How many calls come, at most.

        Returns:
            A function of each row's new token that returns the logits after it, `(batch, vocabulary) float32`, which the next call
            may write over; `None` where `run` has to be called.
        """

    def close(self) -> None:
        """Give the runtime's memory back. A second call does nothing."""


@runtime_checkable
class Exporter(Protocol):
    """Turns a PyTorch model into an artifact of the backend's format."""

    def export(self, source: Source, *, task: str, config: ExportConfig, out: Path) -> Artifact:
        """Write the graph and its manifest into the existing, empty folder `out`.

        The core calls this with a temporary folder, compares the result with the PyTorch model, and moves the folder
        into place only then.

        Raises:
            ExportError: The model could not be captured.
        """


@runtime_checkable
class Optimizer(Protocol):
    """Rewrites a graph into a faster one that computes the same."""

    def optimize(
        self, artifact: Artifact, *, config: OptimizeConfig, calibration: Iterable[Feeds] | None = None, out: Path
    ) -> Artifact:
        """Write the optimized graph into the existing, empty folder `out`.

        Args:
            artifact: What to optimize.
            config: How.
            calibration: Batches of what a processor makes for the first graph (text: `(batch, sequence)`), which can be
                iterated more than once, for changes that depend on values: half precision.
            out: Where to write.

        Raises:
            ConfigError: A setting that does not exist, or calibration data that nothing reads.
            OptimizeError: The graph could not be optimized.
        """


@runtime_checkable
class Quantizer(Protocol):
    """Rewrites a graph into one with fewer bits."""

    def quantize(
        self,
        artifact: Artifact,
        *,
        config: QuantizeConfig,
        calibration: Batches | None,
        evaluate: Evaluate | None,
        out: Path,
    ) -> Artifact:
        """Write the quantized graph into the existing, empty folder `out`.

        The report of its step lists what was quantized as `layers`, by names that `QuantizeConfig.exclude` takes: the
        search inside an accuracy budget puts some of them back to float.

        Args:
            artifact: What to quantize.
            config: How.
            calibration: Batches of inputs, which can be iterated more than once; needed by static schemes. Of a model of several
                graphs its `parts`, where it has some, are the batches of each by component.
            evaluate: A measure of an artifact, higher is better, for backends that search with it.
            out: Where to write.

        Raises:
            QuantizeError: The graph could not be quantized.
        """


@runtime_checkable
class Preparer(Protocol):
    """Changes a PyTorch model that its user keeps: to run faster where it is, or to be trained for another precision."""

    def prepare(
        self, model: torch.nn.Module, *, config: PrepareConfig, calibration: Batches | None = None
    ) -> torch.nn.Module:
        """The prepared model: the given one, or another that shares its parameters, as the scheme says. It takes the same
        inputs and returns the same outputs by name. Where the call fails, the given model is as it was.

        Args:
            model: The model, where it runs.
            config: Which of the capability's `schemes`, and its settings: of the class that belongs to the scheme.
            calibration: Batches of inputs, which can be iterated more than once, for schemes that need activation ranges.

        Raises:
            ConfigError: A scheme or a setting that does not exist or does not fit the model, or calibration data that nothing
                reads.
            PrepareError: The model could not be prepared; with the reason.
        """


@runtime_checkable
class Backend(Protocol):
    """A plugin's one class; made without arguments."""

    def probe(self) -> Probe:
        """Devices that can be used here, and reasons for those that cannot. Imports the vendor library, touches no
        device, never raises.
        """

    def exporter(self) -> Exporter | None:
        """The exporter, or `None`."""

    def optimizer(self) -> Optimizer | None:
        """The optimizer, or `None`."""

    def quantizer(self) -> Quantizer | None:
        """The quantizer, or `None`."""

    def open(self, artifact: Artifact, request: OpenRequest) -> Mapping[str, Session]:
        """Open every component of the artifact; components that share weights share them in memory.

        Args:
            artifact: A format that the spec says it runs.
            request: Where, and how.

        Raises:
            ConfigError: An option that does not exist.
            SessionError: The runtime refused the graph.
        """


@runtime_checkable
class PreparingBackend(Backend, Protocol):
    """A backend that prepares PyTorch models; one without a capability for it need not have the method."""

    def preparer(self) -> Preparer | None:
        """The preparer, or `None`."""


@runtime_checkable
class WeightsBackend(Backend, Protocol):
    """A backend that opens PyTorch weights as they are; the one that exports `WEIGHTS` has the method."""

    def adopt(self, folder: Path, *, task: str, config: ExportConfig, trust_remote_code: bool = False) -> Artifact:
        """Return an artifact for a transformers folder; nothing is written.

        Args:
            folder: The folder.
            task: Its task.
            config: In which dtype, with which pooling.
            trust_remote_code: Run code that comes with the model.

        Raises:
            ArtifactNotFoundError: There are no weights.
            IntegrityError: They cannot be read.
        """
