"""Building of a serialized engine (a plan) from an ONNX file, with `tensorrt` or `tensorrt_rtx`."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from accel.errors import ConfigError, SessionError
from accel.interfaces.shape_profiles import Shape

from .libraries import TENSORRT, EngineLibrary
from .product_types import Products, network_products

Report = Callable[[str, int, int | None], None]
"""Function that is called with a description, the number of finished steps and the total number of steps."""
# A parser error repeats the node in every line; the first errors contain the cause.
_LONGEST_ERROR = 600


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """A serialized engine.

    Attributes:
        data: The content of a `.plan` file.
        products: The number of matrix products and convolutions of the parsed network by the type in which they compute. The
            network is strongly typed: the builder does not change the types.
    """

    data: bytes
    products: Products


def build_plan(
    graph: Path,
    shapes: Mapping[str, tuple[Shape, Shape, Shape]],
    *,
    library: EngineLibrary = TENSORRT,
    capabilities: Sequence[str] = (),
    times: Path | None = None,
    report: Report | None = None,
) -> Plan:
    """Build an engine and return it in serialized form.

    `tensorrt` builds for the current GPU and takes minutes. `tensorrt_rtx` needs no GPU: BERT-base takes seconds.

    Args:
        graph: An ONNX file. Its data types determine the precision of each operator (a strongly typed network).
        shapes: The smallest, usual and largest shape of each input.
        library: The library that builds.
        capabilities: The compute capabilities of the GPUs that run the engine, such as `("8.6", "8.9")`, for a library that
            builds for other GPUs.
        times: A file of kernel times, which is read if it exists, and updated. Only for a library that measures kernels.
        report: Function that is called with the progress.

    Raises:
        BackendUnavailableError: The library is not installed.
        ConfigError: The library does not build for one of the compute capabilities.
        SessionError: The library cannot parse the graph, or has no kernels for it.
    """
    levels = check_capabilities(capabilities, library)
    trt = library.load()
    logger = _messages(trt)
    builder = trt.Builder(logger)
    # The parser owns the weights of the network, so it must exist until the engine is built.
    network, parser = _parsed(trt, builder, logger, graph, library)
    config = builder.create_builder_config()
    # The engine inspector reports data types only for engines built with detailed profiling verbosity.
    config.profiling_verbosity = trt.ProfilingVerbosity.DETAILED
    # Disable TF32, because it rounds the inputs of float32 products to 10 bits of mantissa.
    config.clear_flag(trt.BuilderFlag.TF32)
    if levels:
        config.num_compute_capabilities = len(levels)
        for index, level in enumerate(levels):
            config.set_compute_capability(getattr(trt.ComputeCapability, level), index)
    profile = builder.create_optimization_profile()
    for name, (least, usual, most) in shapes.items():
        profile.set_shape(name, least, usual, most)
    config.add_optimization_profile(profile)
    if times is not None and library.times_kernels:
        cache = config.create_timing_cache(times.read_bytes() if times.exists() else b"")
        config.set_timing_cache(cache, False)
    if report is not None:
        config.progress_monitor = _monitor(trt, report)
    plan = builder.build_serialized_network(network, config)
    if plan is None:
        raise SessionError(
            f"{library.title} cannot build an engine for the graph {graph.name}: {logger.text()}",
            fix="use a profile whose sizes fit the graph, with smaller maxima if memory is too small.",
        )
    if times is not None and library.times_kernels:
        partial = times.with_suffix(".partial")
        partial.write_bytes(bytes(config.get_timing_cache().serialize()))
        partial.replace(times)
    products = network_products(network)
    del parser
    return Plan(data=bytes(plan), products=products)


def parse(graph: Path, library: EngineLibrary) -> Products:
    """Parse an ONNX file without building an engine, and count its products by type.

    Raises:
        BackendUnavailableError: The library is not installed.
        SessionError: The library cannot parse the graph.
    """
    trt = library.load()
    logger = _messages(trt)
    builder = trt.Builder(logger)
    network, parser = _parsed(trt, builder, logger, graph, library)
    products = network_products(network)
    del parser
    return products


def check_capabilities(capabilities: Sequence[str], library: EngineLibrary) -> tuple[str, ...]:
    """Return the library's names of compute capabilities.

    Raises:
        ConfigError: The library does not build for one of them.
    """
    names = dict(library.builds_for)
    unknown = [text for text in capabilities if text not in names]
    if unknown:
        supported = ", ".join(names) or "only the GPU of this machine"
        raise ConfigError(
            f"{library.title} does not build engines for the compute capability {', '.join(unknown)}.",
            fix=f"use {supported}."
            if names
            else f"leave the compute capabilities out: the library builds for {supported}.",
        )
    return tuple(names[text] for text in dict.fromkeys(capabilities))


def _parsed(trt: Any, builder: Any, logger: Any, graph: Path, library: EngineLibrary) -> tuple[Any, Any]:
    """Return the network of a graph, and the parser, which owns the network's weights."""
    # TensorRT 10 needs the flag for strongly typed networks. TensorRT 11 ignores the flag, because all of its networks
    # are strongly typed.
    network = builder.create_network(1 << int(trt.NetworkDefinitionCreationFlag.STRONGLY_TYPED))
    parser = trt.OnnxParser(network, logger)
    if not parser.parse_from_file(str(graph)):
        errors = "; ".join(_message(parser.get_error(i)) for i in range(parser.num_errors))
        raise SessionError(
            f"{library.title} cannot read the ONNX graph {graph.name}: {errors[:_LONGEST_ERROR]}",
            fix="run the model with another backend, such as cuda or cpu, which have kernels for these operators.",
        )
    return network, parser


def _message(error: Any) -> str:
    """Return a parser error in one line: the operator, the name of the node and the description."""
    return f"{error.node_operator()} {error.node_name()}: {' '.join(str(error.desc()).split())}"


def _messages(trt: Any) -> Any:
    """Return a logger that prints nothing, and whose method `text` returns the errors in one line."""

    class Messages(trt.ILogger):  # type: ignore[misc]
        def __init__(self) -> None:
            trt.ILogger.__init__(self)
            self._errors: list[str] = []

        def log(self, severity: Any, msg: str) -> None:
            if severity in (trt.ILogger.ERROR, trt.ILogger.INTERNAL_ERROR):
                self._errors.append(" ".join(msg.split()))

        def text(self) -> str:
            return "; ".join(dict.fromkeys(self._errors))[:_LONGEST_ERROR] or "it gave no reason."

    return Messages()


def _monitor(trt: Any, report: Report) -> Any:
    """Return a progress monitor that reports the builder's outermost phase."""

    class Monitor(trt.IProgressMonitor):  # type: ignore[misc]
        def __init__(self) -> None:
            trt.IProgressMonitor.__init__(self)
            self._totals: dict[str, int] = {}

        def phase_start(self, phase_name: str, parent_phase: str | None, num_steps: int) -> None:
            if parent_phase is None:
                self._totals[phase_name] = num_steps

        def step_complete(self, phase_name: str, step: int) -> bool:
            if phase_name in self._totals:
                report("building the engine", step + 1, self._totals[phase_name])
            return True

        def phase_finish(self, phase_name: str) -> None:
            total = self._totals.pop(phase_name, None)
            if total is not None:
                report("building the engine", total, total)

    return Monitor()
