"""ONNX graphs that exist already as OpenVINO IR.

OpenVINO optimizes a graph when it compiles it, so this only converts: the folder then needs no ONNX and loads faster. A graph that
is exported from PyTorch with `backend="openvino"` is the better start, above all for int8.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path

from accel.artifact import Artifact, Step, copy_companions, tool_versions
from accel.config import OptimizeConfig
from accel.errors import ConfigError, OptimizeError, QuantizeError
from accel.interfaces.protocols import Feeds

from . import FORMAT
from .exporter import write_graph
from .runtime import read_model


class OnnxConverter:
    """Reads ONNX, writes OpenVINO IR."""

    def optimize(
        self, artifact: Artifact, *, config: OptimizeConfig, calibration: Iterable[Feeds] | None = None, out: Path
    ) -> Artifact:
        """Convert the graphs as they are; see `accel.interfaces.protocols.Optimizer`. Takes a second for encoders.

        Raises:
            ConfigError: Named fusions were asked for or left out, or there is calibration data, which nothing reads.
            OptimizeError: A decoder with a cache.
        """
        if config.enable or config.disable:
            raise ConfigError("OpenVINO has no named fusions.", fix="leave enable and disable out.")
        if calibration is not None:
            raise ConfigError(
                "OpenVINO converts graphs as they are: calibration data changes nothing.",
                fix="leave calibration=... (--calibration) out.",
            )
        refuse_onnx_decoders(artifact)
        alone = len(artifact.components) == 1
        components = tuple(
            write_graph(read_model(artifact, component), component, out, alone=alone)
            for component in artifact.components
        )
        copy_companions(artifact.path, out)
        step = Step(
            stage="optimize", backend="openvino", config=config.to_dict(), versions=tool_versions("openvino"),
            parent=artifact.digest,
        )  # fmt: skip
        manifest = replace(
            artifact.manifest,
            format=FORMAT,
            opset=None,
            components=components,
            steps=(*artifact.manifest.steps, step),
            run=None,
        )
        return Artifact.create(out, manifest)


def refuse_onnx_decoders(artifact: Artifact) -> None:
    """Refuse ONNX graphs with a cache, which OpenVINO would have inside of its graph.

    Raises:
        OptimizeError: With the way that works.
    """
    stateful = [component.name for component in artifact.components if component.stateful]
    if artifact.format == "onnx" and stateful:
        raise OptimizeError(
            f"{', '.join(stateful)}: an ONNX decoder keeps its cache outside of the graph, which OpenVINO IR cannot take over.",
            fix="export the PyTorch model: accel export MODEL OUT --backend openvino.",
        )


def refuse_outer_caches(artifact: Artifact) -> None:
    """Refuse a decoder whose cache goes in and out of its graph: it is moved into the graph's state when it is opened.

    Raises:
        QuantizeError: The artifact holds one.
    """
    if any(spec.pair is not None for component in artifact.components for spec in component.inputs):
        raise QuantizeError(
            f"{artifact.path} keeps its KV cache outside of its graph.",
            fix="quantize a graph with the cache inside: `accel export MODEL OUT --backend openvino`, or an export of "
            "optimum-intel's without --disable-stateful.",
        )
