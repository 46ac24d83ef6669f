"""ONNX graphs that exist already as OpenVINO IR.

OpenVINO optimizes a graph when it compiles it, so this only converts: the folder then needs no ONNX and loads faster. A graph that
is exported from PyTorch with `backend="openvino"` is the better start, above all for int8.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import openvino as ov

from accel.artifact import Artifact, Step, copy_companions, record_files, tool_versions
from accel.capture import quiet
from accel.config import OptimizeConfig
from accel.errors import ConfigError

from . import FORMAT
from .exporter import GRAPH, WEIGHTS
from .runtime import read_model


class OnnxConverter:
    """Reads ONNX, writes OpenVINO IR."""

    def optimize(self, artifact: Artifact, *, config: OptimizeConfig, out: Path) -> Artifact:
        """Convert the graph as it is; see `accel.backends.interfaces.Optimizer`. Takes a second for encoders.

        Raises:
            ConfigError: Named fusions were asked for or left out.
        """
        if config.enable or config.disable:
            raise ConfigError("OpenVINO has no named fusions.", fix="leave enable and disable out.")
        component = artifact.components[0]
        model = read_model(artifact, component)
        with quiet():
            ov.save_model(model, out / GRAPH, compress_to_fp16=False)
        copy_companions(artifact.path, out)
        made = replace(component, file=GRAPH, files=record_files(out, (GRAPH, WEIGHTS)), domains=None)
        step = Step(
            stage="optimize", backend="openvino", config=config.to_dict(), versions=tool_versions("openvino"),
            parent=artifact.digest,
        )  # fmt: skip
        manifest = replace(
            artifact.manifest,
            format=FORMAT,
            opset=None,
            components=(made,),
            steps=(*artifact.manifest.steps, step),
            run=None,
        )
        return Artifact.create(out, manifest)
