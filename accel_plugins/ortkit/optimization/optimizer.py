"""Optimization of ONNX artifacts for ONNX Runtime."""

from __future__ import annotations

import logging
from collections import Counter
from pathlib import Path
from typing import Any

import onnx_ir as ir

from accel.artifact import Artifact, Component, Step, tool_versions
from accel.capture import feeds_for, quiet
from accel.config import OptimizeConfig
from accel.errors import ConfigError, OptimizeError

from ..graph.editing import load_graphs, write_artifact
from .fusions import chosen_fusions
from .precision import clamp_fills, to_half, values_out_of_range
from .simplifications import count_nodes, infer_shapes

logger = logging.getLogger(__name__)


class OrtOptimizer:
    """Rewrites graphs into faster ones.

    Args:
        backend: Name of the backend that owns it, for the manifest.
        half_dtypes: The half precisions that the backend runs.
    """

    def __init__(self, backend: str, half_dtypes: tuple[str, ...] = ("float16",)) -> None:
        self._backend = backend
        self._half_dtypes = half_dtypes

    def optimize(self, artifact: Artifact, *, config: OptimizeConfig, out: Path) -> Artifact:
        """Write the optimized graphs; see `accel.backends.interfaces.Optimizer`. Takes seconds."""
        fusions = chosen_fusions(config)
        dtype = self._half(artifact, [fusion.name for fusion in fusions if fusion.apply is None])
        models = load_graphs(artifact)
        counts: Counter[str] = Counter()
        report: dict[str, Any] = {"fused": counts, "nodes": {}}
        before, after = 0, 0
        for component in artifact.components:
            model = models[component.name]
            before += count_nodes(model)
            with quiet():
                for fusion in fusions:
                    if fusion.apply is not None:
                        counts[fusion.name] += fusion.apply(model)
            after += count_nodes(model)
            if dtype is not None:
                report[dtype] = _to_half(artifact, component, model, dtype)
        report |= {"fused": dict(counts), "nodes": {"before": before, "after": after}}
        logger.info(
            "%s: %d nodes became %d (%s)",
            config.level,
            before,
            after,
            ", ".join(f"{name} {count}" for name, count in counts.items() if count) or "nothing fused",
        )
        step = Step(
            stage="optimize",
            backend=self._backend,
            config=config.to_dict(),
            versions=tool_versions("onnx_ir", "onnxscript", "onnxruntime"),
            report=report,
        )
        return write_artifact(artifact, models, out, step=step, dtype=dtype)

    def _half(self, artifact: Artifact, names: list[str]) -> str | None:
        """The precision to convert to, if any.

        Raises:
            ConfigError: Two precisions at once, or one that the backend cannot run.
            OptimizeError: The artifact is no float32 graph.
        """
        if not names:
            return None
        if len(names) > 1:
            raise ConfigError(
                f"{' and '.join(names)} exclude each other.", fix=f"disable one: disable=({names[0]!r},)."
            )
        if names[0] not in self._half_dtypes:
            raise ConfigError(
                f"The backend {self._backend!r} has no {names[0]} kernels.",
                fix=f"use {' or '.join(self._half_dtypes) or 'a lower level'}.",
            )
        if artifact.dtype != "float32" or artifact.manifest.quantization is not None:
            what = "quantized" if artifact.manifest.quantization is not None else artifact.dtype
            raise OptimizeError(
                f"{artifact.path} is {what} already; {names[0]} is made from float32.",
                fix="start from the float32 artifact, or use level O3.",
            )
        return names[0]


def _to_half(artifact: Artifact, component: Component, model: ir.Model, dtype: str) -> dict[str, Any]:
    """Find what must stay float32 on random inputs of two shapes, and convert the rest."""
    clamped = clamp_fills(model, dtype)
    infer_shapes(model)
    sizes = [{"batch": 2, "sequence": 5}, {"batch": 3, "sequence": min(32, component.max_sizes.get("sequence", 32))}]
    batches = [feeds_for(component.inputs, size, seed=seed, folder=artifact.path) for seed, size in enumerate(sizes)]
    found = values_out_of_range(model.clone(), component, batches, dtype)
    return {"clamped": clamped, **to_half(model, dtype, found)}
