"""Optimization of ONNX artifacts: the fusions that a target's kernels want, then half precision."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from accel.artifact import Artifact, Step, tool_versions
from accel.capture import quiet
from accel.config import OptimizeConfig
from accel.errors import ConfigError, OptimizeError
from accel.interfaces.protocols import Feeds

from ..graph.editing import load_graphs, write_artifact
from .fusions import CPU, Target, chosen_fusions
from .precision import convert
from .simplifications import count_nodes

logger = logging.getLogger(__name__)


class OrtOptimizer:
    """Rewrites graphs into faster ones.

    Args:
        backend: Name of the backend that owns it, for the manifest.
        target: Who will run the graphs; see `fusions`.
    """

    def __init__(self, backend: str, target: Target = CPU) -> None:
        self._backend = backend
        self._target = target

    def optimize(
        self, artifact: Artifact, *, config: OptimizeConfig, calibration: Iterable[Feeds] | None = None, out: Path
    ) -> Artifact:
        """Write the optimized graphs; see `accel.interfaces.protocols.Optimizer`. Takes seconds.

        Raises:
            ConfigError: A fusion that does not exist, or calibration data that nothing reads.
            OptimizeError: A quantized artifact that the fusions cannot read, or one that is not float32 for half precision.
        """
        if artifact.manifest.quantization is not None and not self._target.rewrites_quantized:
            raise OptimizeError(
                f"{artifact.path} is quantized; its graph is no longer the one that fusions look for.",
                fix="optimize first, then quantize.",
            )
        fusions = chosen_fusions(config, self._target)
        dtype = self._half(artifact, [fusion.name for fusion in fusions if fusion.rewrite is None])
        if calibration is not None and dtype is None:
            raise ConfigError(
                f"Level {config.level} has no use for calibration data: only half precision has.",
                fix="leave calibration=... (--calibration) out, or use level O4.",
            )
        models = load_graphs(artifact)
        counts: Counter[str] = Counter()
        report: dict[str, Any] = {}
        before = after = 0
        for component in artifact.components:
            model = models[component.name]
            before += count_nodes(model)
            with quiet():
                for fusion in fusions:
                    if fusion.rewrite is not None:
                        counts[fusion.name] += fusion.rewrite().apply(model)
            after += count_nodes(model)
            if dtype is not None:
                found = convert(artifact, component, model, dtype, calibration)
                report[dtype] = found if dtype not in report else _added(report[dtype], found)
        report |= {"fused": dict(counts), "nodes": {"before": before, "after": after}}
        done = ", ".join(f"{name} {count}" for name, count in counts.items() if count) or "nothing fused"
        logger.info("%s: %d nodes became %d (%s)", config.level, before, after, done)
        step = Step(
            stage="optimize",
            backend=self._backend,
            config=config.to_dict(),
            versions=tool_versions("onnx_ir", "onnxscript", "onnxruntime", "onnxruntime-gpu"),
            report=report,
        )
        return write_artifact(artifact, models, out, step=step, dtype=dtype)

    def _half(self, artifact: Artifact, names: list[str]) -> str | None:
        """The precision to convert to, if any; none where the artifact has it already.

        Raises:
            ConfigError: Two precisions at once, or one that the target cannot run.
            OptimizeError: The artifact is no float32 graph.
        """
        if not names:
            return None
        if len(names) > 1:
            raise ConfigError(
                f"{' and '.join(names)} exclude each other.", fix=f"disable one: disable=({names[0]!r},)."
            )
        half_dtypes = self._target.half_dtypes
        if names[0] not in half_dtypes:
            raise ConfigError(
                f"The backend {self._backend!r} has no {names[0]} kernels.",
                fix=f"use {' or '.join(half_dtypes) or 'a lower level'}.",
            )
        if artifact.dtype == names[0] and artifact.manifest.quantization is None:
            return None
        if artifact.dtype != "float32" or artifact.manifest.quantization is not None:
            what = "quantized" if artifact.manifest.quantization is not None else artifact.dtype
            raise OptimizeError(
                f"{artifact.path} is {what} already; {names[0]} is made from float32.",
                fix="start from the float32 artifact, or use level O3.",
            )
        return names[0]


def _added(one: dict[str, Any], other: dict[str, Any]) -> dict[str, Any]:
    """What was converted in several graphs together."""
    return {name: one[name] + other[name] if name != "watched" else one[name] for name in one}
