"""Artifacts with engines, built from the graphs of an ONNX artifact."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import onnx_ir as ir

from accel.artifact import Artifact, Step, copy_companions, record_files, tool_versions
from accel.capture import usual_sizes_in
from accel.errors import ConfigError, ExportError
from accel.interfaces.shape_profiles import Profile, shapes_of

from ..graph.editing import MICROSOFT, load_graph
from ..runtime.session import is_float8
from .libraries import EngineLibrary
from .plans import Report, build_plan, check_capabilities
from .product_types import check_products, quantized_products
from .profiles import complete


def engine_dtype(artifact: Artifact) -> str:
    """Return the data type in which the engines of an artifact compute their products: `int8` or `float8_e4m3fn` for quantized graphs."""
    if artifact.manifest.quantization is None:
        return artifact.dtype
    return "float8_e4m3fn" if is_float8(artifact) else "int8"


def build_engines(
    artifact: Artifact,
    out: Path,
    *,
    library: EngineLibrary,
    format: str,
    target: Mapping[str, Any],
    profile: Profile | None = None,
    capabilities: Sequence[str] = (),
    times: Path | None = None,
    inspect: Callable[[bytes, ir.Model], None] | None = None,
    report: Report | None = None,
) -> Artifact:
    """Build an engine for every graph of an ONNX artifact into the existing folder `out`.

    The engine has the precision of the graph. An error is raised if a quantized product of the graph is not quantized in the
    network that the library parses.

    Args:
        artifact: An artifact in the format `onnx`, without operators of ONNX Runtime.
        out: The output folder.
        library: The library that builds.
        format: The format of the new artifact.
        target: The hardware and software that the engines require.
        profile: Sizes of axes; `complete` adds the missing axes.
        capabilities: The compute capabilities of the GPUs that run the engines; see `build_plan`.
        times: A file of kernel times; see `build_plan`.
        inspect: Function that checks each engine, and raises an error if the engine is wrong.
        report: Function that is called with the progress of each build.

    Raises:
        ConfigError: The artifact has another format, the profile does not fit a graph, or the library does not build for one
            of the compute capabilities.
        ExportError: A graph has operators that TensorRT does not support.
        SessionError: The library cannot build an engine for a graph.
    """
    if artifact.format != "onnx":
        raise ConfigError(
            f"Engines are built from ONNX graphs, but the artifact has the format {artifact.format}.",
            fix="export the model to ONNX.",
        )
    check_capabilities(capabilities, library)
    started = time.perf_counter()
    components, sizes, products = [], {}, {}
    for component in artifact.components:
        model = load_graph(artifact, component)
        ort_operators = sorted({node.op_type for graph in model.graphs() for node in graph if node.domain == MICROSOFT})
        if ort_operators:
            raise ExportError(
                f"The graph {component.file} has operators of ONNX Runtime that TensorRT does not support: {', '.join(ort_operators)}.",
                fix=f"use the artifact from before it was optimized, or optimize it with --backend {library.backend}.",
            )
        full_profile = complete(component, profile or {}, usual_sizes_in(artifact.path, component.inputs))
        sizes[component.name] = {axis: str(size) for axis, size in full_profile.items()}
        plan = build_plan(
            artifact.path / component.file,
            {spec.name: shapes_of(spec, full_profile) for spec in component.inputs},
            library=library,
            capabilities=capabilities,
            times=times,
            report=report,
        )
        check_products(plan.products, quantized_products(model), graph=component.file)
        if inspect is not None:
            inspect(plan.data, model)
        products[component.name] = dict(plan.products)
        file = f"{component.name}.plan"
        (out / file).write_bytes(plan.data)
        components.append(replace(component, file=file, files=record_files(out, [file]), domains=None))
    copy_companions(artifact.path, out)
    step = Step(
        stage="export",
        backend=library.backend,
        config={"profile": sizes} | ({"capabilities": list(capabilities)} if capabilities else {}),
        versions=tool_versions(*library.distributions),
        seconds=round(time.perf_counter() - started, 2),
        report={"products": products},
    )
    return artifact.after(step, out, components=components, format=format, target=dict(target))
