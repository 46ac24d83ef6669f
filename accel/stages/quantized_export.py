"""Export, optimize and quantize a model in one pass, which reads each weight of the checkpoint when it is quantized.

The files are the same as those of the three stages, one after another. The check replaces those of the stages: the PyTorch model gets the
quantized weights of the new files, and computes the same outputs as the graph within the tolerance for float32. Each quantized weight is
also compared with the checkpoint.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .. import capture, progress
from ..artifact.atomic_folder_writing import copy_companions, staging
from ..artifact.manifest import Artifact
from ..artifact.resolved_model import ResolvedModel
from ..backends import registry
from ..backends.plan import RunPreferences, make_plan
from ..backends.sessions import open_plan
from ..backends.stage_backend_selection import StagePlan
from ..config import ExportConfig, OptimizeConfig, QuantizeConfig
from ..errors import ValidationError
from ..interfaces.protocols import QuantizedExport, QuantizingExporter
from .export import check_numbers, load_source, with_bounds
from .graph_comparison import ROW_DIFFERENCE, compare, compare_rows, merged

if TYPE_CHECKING:
    import torch

logger = logging.getLogger(__name__)

# Largest accepted relative error of a quantized weight. Rounding to 4 bits makes errors of about 0.1, and weights in a wrong order make
# errors of 1.4.
_MOST_ERROR = 0.5
WEIGHT_ERROR = "weight_error"
"""Field in the manifest's record of the comparison: the largest relative error of a quantized weight."""


def can_export_quantized(plan: StagePlan, optimize: OptimizeConfig | None, quantize: QuantizeConfig) -> bool:
    """Return whether a backend can export, optimize and quantize in one pass with these settings."""
    # Approximations (O3) change the outputs by more than the tolerance for float32.
    return quantize.scheme in plan.capability.schemes and (optimize is None or optimize.level in ("O1", "O2"))


@capture.one_thread_at_a_time()
def export_quantized(
    resolved: ResolvedModel,
    out: Path,
    *,
    plan: StagePlan,
    config: ExportConfig,
    optimize: OptimizeConfig | None,
    quantize: QuantizeConfig,
) -> Artifact | None:
    """Export, optimize and quantize a model in one pass.

    Args:
        resolved: The model, which is already on this machine.
        out: The folder to create.
        plan: The backend that exports, optimizes and quantizes; see `can_export_quantized`.
        config: Settings of the export.
        optimize: Settings of the optimization, or `None` for no optimization.
        quantize: Settings of the quantization.

    Returns:
        The artifact, or `None` if the weights of this model cannot be read one after another. Nothing is written then.

    Raises:
        ExportError: The model cannot be traced or converted.
        QuantizeError: The quantization failed.
        ValidationError: The graph differs from the PyTorch model with the quantized weights, or the weights differ from the checkpoint.
    """
    started = time.perf_counter()
    exporter = plan.worker()
    if resolved.module is not None or not isinstance(exporter, QuantizingExporter):
        return None
    progress.report("loading the model", 0, 4)
    try:
        source = load_source(resolved, config, stream=True)
        if source.streamed is None:
            return None
        with staging(out, needs=_needs(source)) as folder:
            assert source.folder is not None
            copy_companions(source.folder, folder, linked=True)
            progress.report("tracing, converting and quantizing", 1, 4)
            result = exporter.export_quantized(
                source, task=source.task, config=config, optimize=optimize, quantize=quantize, out=folder
            )
            result = replace(result, artifact=with_bounds(result.artifact, source))
            validation = _check(source, result, plan.backend.name, config, resolved)
            seconds = round(time.perf_counter() - started, 2)
            artifact = result.artifact.with_step(seconds=seconds, validation=validation)
    except capture.StreamingError as error:
        logger.info("The weights of this model cannot be read one after another: %s", error.message)
        return None
    progress.report("exported and quantized", 4, 4)
    return Artifact(out, artifact.manifest)


def _needs(source: capture.Source) -> int:
    """Return the number of bytes that will be written at most."""
    assert source.streamed is not None
    streamed = {weight.address: weight.nbytes for weight in source.streamed.of(source.model).values()}
    return source.nbytes - sum(streamed.values()) + sum(streamed.values()) // 3


def _check(
    source: capture.Source, result: QuantizedExport, backend: str, config: ExportConfig, resolved: ResolvedModel
) -> dict[str, Any]:
    """Compare the new artifact with the PyTorch model that has the quantized weights; compare these weights with the checkpoint.

    Raises:
        ValidationError: An output or a weight differs by more than the tolerance.
    """
    assert source.streamed is not None
    progress.report("computing reference outputs", 2, 4)
    originals = source.streamed.of(source.model)
    errors: dict[str, float] = {}
    readers: dict[str, capture.WeightReader] = {name: weight.read for name, weight in originals.items()}
    for name, read in result.weights.items():
        readers[name] = partial(_compared, name, originals[name], read, errors)
    with source.streamed.without_values(source.model):
        parts = capture.split(source)
    with capture.weights_loaded(source.model, readers):
        cases = capture.cases_by_part(source, parts=parts, few=True)
    for name in result.weights.keys() - errors.keys():
        readers[name]()
    check_numbers(source, cases)
    progress.report("checking against PyTorch", 3, 4)
    on_host = any(device.type == "cpu" for device in registry.probe(registry.describe(backend)).devices)
    preferences = RunPreferences(backend=backend, device="cpu" if on_host else None)
    plan = make_plan(ResolvedModel.of_artifact(result.artifact, resolved.hub), preferences)
    sessions = open_plan(plan, few_calls=True, states=False, exact=True)
    try:
        compared = {
            name: compare(session, cases[name], config.atol, "float32") for name, session in sessions.sessions.items()
        }
        rows = [
            compare_rows(session, cases[name], source.config, config.atol, "float32")
            for name, session in sessions.sessions.items()
        ]
    finally:
        sessions.close()
    return {**merged(compared), ROW_DIFFERENCE: max(rows), WEIGHT_ERROR: max(errors.values(), default=0.0)}


def _compared(
    name: str, original: capture.StreamedWeight, read: Callable[[], torch.Tensor], errors: dict[str, float]
) -> torch.Tensor:
    """Read a quantized weight. The first time, compare it with the checkpoint and store the relative error in `errors`.

    Raises:
        ValidationError: The error is too large.
    """
    quantized = read()
    if name not in errors:
        values = original.read().flatten()
        size = float(values.dot(values))
        values -= quantized.flatten()
        errors[name] = (float(values.dot(values)) / size) ** 0.5 if size else 0.0
        if not errors[name] <= _MOST_ERROR:
            raise ValidationError(
                f"The quantized weight {name} differs from the checkpoint by {errors[name]:.3g} of its size, and at most {_MOST_ERROR} is "
                "accepted.",
                fix="exclude the layer from the quantization: exclude=(...). If its weights are not unusual, report this as an issue.",
            )
    return quantized
