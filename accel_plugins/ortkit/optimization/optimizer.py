"""Optimizer of ONNX artifacts: graph fusions for one kind of kernels, and conversion to half precision."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import onnx_ir as ir

from accel.artifact import Artifact, Step, tool_versions
from accel.capture import quiet
from accel.config import OptimizeConfig
from accel.errors import ConfigError, OptimizeError
from accel.interfaces.protocols import Feeds

from ..graph.editing import load_graphs, write_artifact
from ..quantization.presets import WEIGHT_ONLY
from .fusions import CPU, FusionTarget, chosen_fusions
from .precision import convert
from .simplifications import count_nodes

logger = logging.getLogger(__name__)


class OrtOptimizer:
    """Optimizer that rewrites graphs into faster ones.

    Args:
        backend: The name of the backend that uses the optimizer, for the manifest.
        target: The kernels that will run the graphs; see `fusions`.
    """

    def __init__(self, backend: str, target: FusionTarget = CPU) -> None:
        self._backend = backend
        self._target = target

    def optimize(
        self, artifact: Artifact, *, config: OptimizeConfig, calibration: Iterable[Feeds] | None = None, out: Path
    ) -> Artifact:
        """Write an artifact with the optimized graphs; see `accel.interfaces.protocols.Optimizer`. Takes seconds.

        Raises:
            As `rewrite`.
        """
        models = load_graphs(artifact)
        step, dtype = self.rewrite(artifact, models, config=config, calibration=calibration)
        return write_artifact(artifact, models, out, step=step, dtype=dtype)

    def rewrite(
        self,
        artifact: Artifact,
        models: Mapping[str, ir.Model],
        *,
        config: OptimizeConfig,
        calibration: Iterable[Feeds] | None = None,
    ) -> tuple[Step, str | None]:
        """Optimize the graphs of an artifact in place.

        Args:
            artifact: The artifact; its folder is not read, except for a conversion to half precision.
            models: The graphs by component name.
            config: Optimization settings.
            calibration: Inputs for the conversion to half precision.

        Returns:
            The record of the step, and the new data type of the graphs, or `None` if it is unchanged.

        Raises:
            ConfigError: A fusion does not exist, or the caller passes calibration data that no fusion uses.
            OptimizeError: The artifact is quantized and the target's fusions do not support that, or half precision is
                requested for an artifact that is not float32.
        """
        if artifact.manifest.quantization is not None and not self._target.rewrites_quantized:
            raise OptimizeError(
                f"{artifact.path} is quantized; the fusions work only on the graph before quantization.",
                fix="optimize the float32 artifact first, then quantize the result.",
            )
        fusions = chosen_fusions(config, self._target)
        dtype = self._half(artifact, [fusion.name for fusion in fusions if fusion.rewrite is None])
        if calibration is not None and dtype is None:
            raise ConfigError(
                f"The optimization level {config.level} has no use for calibration data: only the conversion to half precision uses it.",
                fix="leave calibration=... (--calibration) out, or use level O4.",
            )
        counts: Counter[str] = Counter()
        report: dict[str, Any] = {}
        nodes_before = nodes_after = 0
        for component in artifact.components:
            model = models[component.name]
            nodes_before += count_nodes(model)
            with quiet():
                for fusion in fusions:
                    if fusion.rewrite is not None:
                        counts[fusion.name] += fusion.rewrite().apply(model)
            nodes_after += count_nodes(model)
            if dtype is not None:
                conversion = convert(artifact, component, model, dtype, calibration)
                report[dtype] = conversion if dtype not in report else _added(report[dtype], conversion)
        report |= {"fused": dict(counts), "nodes": {"before": nodes_before, "after": nodes_after}}
        done = ", ".join(f"{name} {count}" for name, count in counts.items() if count) or "nothing fused"
        logger.info(
            "Level %s reduced the graphs from %d nodes to %d nodes (%s)", config.level, nodes_before, nodes_after, done
        )
        step = Step(
            stage="optimize",
            backend=self._backend,
            config=config.to_dict(),
            versions=tool_versions("onnx_ir", "onnxscript", "onnxruntime", "onnxruntime-gpu"),
            report=report,
        )
        return step, dtype

    def _half(self, artifact: Artifact, names: list[str]) -> str | None:
        """Return the half-precision type to convert to; `None` if no type is requested or the artifact already has the type.

        Raises:
            ConfigError: Two precisions are enabled, or the target does not support the precision.
            OptimizeError: The artifact is not a float32 artifact, or its activations are quantized.
        """
        if not names:
            return None
        if len(names) > 1:
            raise ConfigError(
                f"The conversions to {' and '.join(names)} are both enabled, but a graph can have only one of these data types.",
                fix=f"disable one of them, for example disable=({names[0]!r},).",
            )
        half_dtypes = self._target.half_dtypes
        if names[0] not in half_dtypes:
            raise ConfigError(
                f"The backend {self._backend!r} has no {names[0]} kernels, so it cannot run a graph in {names[0]}.",
                fix=f"enable {' or '.join(half_dtypes)} instead." if half_dtypes else "use level O3 or lower.",
            )
        if artifact.dtype == names[0] and artifact.manifest.quantization is None:
            return None
        quantization = artifact.manifest.quantization
        # Weights in blocks leave the activations in floating point, and their kernels also compute in half precision.
        if artifact.dtype != "float32" or (quantization is not None and quantization.scheme not in WEIGHT_ONLY):
            state = "quantized" if quantization is not None else artifact.dtype
            raise OptimizeError(
                f"{artifact.path} is {state} already; accel converts only float32 graphs, with or without weights in blocks, to "
                f"{names[0]}.",
                fix="optimize the float32 artifact, or use level O3, which keeps the data type.",
            )
        return names[0]


def _added(report: dict[str, Any], other: dict[str, Any]) -> dict[str, Any]:
    """Add up the conversion reports of two graphs."""
    return {name: report[name] + other[name] if name != "watched" else report[name] for name in report}
