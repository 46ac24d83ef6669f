"""Conversion of ONNX graphs to OpenVINO IR.

OpenVINO optimizes a graph when it compiles it, so this module only converts. The converted folder needs no ONNX package
and loads faster. A model that is exported from PyTorch with `backend="openvino"` runs faster than a converted graph,
above all in int8.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from accel.artifact import Artifact, Step, copy_companions, tool_versions
from accel.config import OptimizeConfig
from accel.errors import ConfigError, OptimizeError, QuantizeError
from accel.interfaces.protocols import Feeds

from . import FORMAT
from .exporter import write_graph
from .runtime import read_model


class OnnxConverter:
    """Optimizer that reads ONNX and writes OpenVINO IR."""

    def optimize(
        self, artifact: Artifact, *, config: OptimizeConfig, calibration: Iterable[Feeds] | None = None, out: Path
    ) -> Artifact:
        """Convert the graphs to OpenVINO IR without optimizing them; see `accel.interfaces.protocols.Optimizer`. Takes
        about a second for encoders.

        Raises:
            ConfigError: The config names fusions, or calibration data is given, which is not used.
            OptimizeError: The artifact has a decoder with a KV cache.
        """
        if config.enable or config.disable:
            raise ConfigError(
                "enable and disable select graph fusions by name, but OpenVINO has no named fusions.",
                fix="leave enable and disable out.",
            )
        if calibration is not None:
            raise ConfigError(
                "Calibration data was passed, but OpenVINO converts ONNX graphs without calibration data.",
                fix="leave calibration=... (--calibration) out.",
            )
        refuse_onnx_decoders(artifact)
        alone = len(artifact.components) == 1
        components = tuple(
            write_graph(read_model(artifact, component), component, out, alone=alone)
            for component in artifact.components
        )
        copy_companions(artifact.path, out)
        step = Step(stage="optimize", backend="openvino", config=config.to_dict(), versions=tool_versions("openvino"))
        return artifact.after(step, out, components=components, format=FORMAT, opset=None)


def refuse_onnx_decoders(artifact: Artifact) -> None:
    """Raise if an ONNX artifact has a decoder with a KV cache. In OpenVINO IR, the KV cache must be inside the graph.

    Raises:
        OptimizeError: The artifact has such a decoder; the message names a remedy.
    """
    stateful = [component.name for component in artifact.components if component.stateful]
    if artifact.format == "onnx" and stateful:
        raise OptimizeError(
            f"The ONNX graphs of {', '.join(stateful)} have the KV cache as inputs and outputs, and OpenVINO IR needs the KV cache "
            "inside the graph.",
            fix="export the PyTorch model: accel export MODEL OUT --backend openvino.",
        )


def refuse_outer_caches(artifact: Artifact) -> None:
    """Raise if a decoder has its KV cache as graph inputs and outputs.

    `accel` moves the KV cache into the graph only when the artifact is opened, so it cannot be quantized.

    Raises:
        QuantizeError: The artifact has such a decoder.
    """
    if any(spec.pair is not None for component in artifact.components for spec in component.inputs):
        raise QuantizeError(
            f"The decoder in {artifact.path} has its KV cache as graph inputs and outputs, and OpenVINO can only quantize decoders "
            "with the KV cache inside the graph.",
            fix="export the model with `accel export MODEL OUT --backend openvino`, or with optimum-intel without "
            "--disable-stateful, and quantize that export.",
        )
