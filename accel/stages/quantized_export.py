"""Export, optimize and quantize a model with one call, and write only the quantized artifact.

If the backend and the checkpoint allow it, this takes one pass, which reads each weight of the checkpoint when it is quantized. The files
are the same as those of the three stages. One check replaces those of the stages: the PyTorch model gets the quantized weights of the new
files, and its outputs are compared with those of the graph within the tolerance for float32. Each quantized weight is also compared with
the checkpoint.
"""

from __future__ import annotations

import logging
import shutil
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .. import capture, progress
from ..artifact.atomic_folder_writing import copy_companions, paths_shown_as, staging
from ..artifact.manifest import CHECKPOINT_METHODS, PADDING_DIFFERENCE, ROW_DIFFERENCE, WEIGHT_ERROR, Artifact
from ..artifact.resolved_model import ResolvedModel
from ..backends.stage_backend_selection import SchemePlan
from ..capture.probes import make_probes
from ..config import ExportConfig, QuantizeConfig
from ..errors import ExportError, QuantizeError, ValidationError
from ..interfaces.protocols import QuantizedExport, QuantizingExporter
from ..interfaces.task_registry import task_spec
from .checked_export import check_export, check_outputs, export_resolved, load_source, opened, with_bounds
from .graph_comparison import compare, compare_rows, merged
from .optimize import optimize
from .probe_recording import record_probes
from .quantize import check_settings, quantize

if TYPE_CHECKING:
    import torch

logger = logging.getLogger(__name__)

# Largest accepted relative error of a quantized weight. Rounding to 4 bits makes errors of about 0.1, and weights in a wrong order make
# errors of 1.4.
_MOST_ERROR = 0.5


def export_to_scheme(
    resolved: ResolvedModel,
    out: Path,
    *,
    plan: SchemePlan,
    config: ExportConfig,
    calibration: Any = None,
    quantizer: Callable[..., Artifact] = quantize,
    **others: Any,
) -> Artifact:
    """Export, optimize and quantize a model, and write only the quantized artifact.

    If one pass is not possible, the three stages run one after another, and each intermediate folder is removed as soon as the next is
    written.

    Args:
        resolved: The model, which is already on this machine.
        out: The folder to create.
        plan: The backends and settings.
        config: Settings of the export.
        calibration: Data for schemes that need activation ranges.
        quantizer: The function that quantizes in the last stage; it decides which kinds of calibration data are accepted.
        others: More arguments of `export_resolved`, for models in memory.

    Raises:
        ExportError: The model cannot be traced or converted.
        QuantizeError: The model is already quantized, the quantization failed, or calibration data is missing.
        ValidationError: Outputs differ by more than the tolerance.
    """
    if plan.is_one_pass and calibration is None and not any(value is not None for value in others.values()):
        check_export(resolved, plan.exporter, config)
        check_settings(plan.quantize, plan.quantizer.backend)
        artifact = _export_in_one_pass(resolved, out, plan, config)
        if artifact is not None:
            return artifact
    with staging(out) as folder, paths_shown_as(out, *(folder / name for name in ("export", "optimized", "quantized"))):
        artifact = export_resolved(resolved, folder / "export", plan=plan.exporter, config=config, **others)
        quantization = artifact.manifest.quantization
        if quantization is not None:
            model = resolved.location.id if resolved.module is None else "The model"
            if quantization.scheme != plan.quantize.scheme or quantization.preset not in CHECKPOINT_METHODS:
                raise QuantizeError(
                    f"{model} is already quantized (scheme {quantization.scheme}).",
                    fix="run `accel export MODEL OUT`, which keeps the integers of the checkpoint.",
                )
            logger.info("%s is already quantized (%s): only its other layers are quantized", model, quantization.preset)
        name = plan.quantizer.backend.name
        if plan.optimize is not None:
            artifact = optimize(artifact, folder / "optimized", backend=name, config=plan.optimize)
            shutil.rmtree(folder / "export")
        quantized = quantizer(
            artifact, folder / "quantized", calibration=calibration, backend=name, config=plan.quantize
        )
        shutil.rmtree(artifact.path)
        for path in quantized.path.iterdir():
            path.rename(folder / path.name)
        quantized.path.rmdir()
    return Artifact(out, quantized.manifest)


@capture.one_thread_at_a_time()
def _export_in_one_pass(resolved: ResolvedModel, out: Path, plan: SchemePlan, config: ExportConfig) -> Artifact | None:
    """Export, optimize and quantize a model in one pass.

    Return `None` if this is not possible. Nothing is written then.
    """
    started = time.perf_counter()
    exporter = plan.exporter.worker()
    if resolved.module is not None or not isinstance(exporter, QuantizingExporter):
        return None
    progress.report("loading the model", 0, 4)
    try:
        source = load_source(resolved, config, stream=True)
        if source.streamed is None:
            return None
        with staging(out, needs=_needs(source, plan.quantize)) as folder:
            assert source.folder is not None
            copy_companions(source.folder, folder, linked=True)
            progress.report("tracing, converting and quantizing", 1, 4)
            result = exporter.export_quantized(
                source, task=source.task, config=config, optimize=plan.optimize, quantize=plan.quantize, out=folder
            )
            result = replace(result, artifact=with_bounds(result.artifact, source))
            validation = _check(source, result, plan.exporter.backend.name, config, resolved)
            seconds = round(time.perf_counter() - started, 2)
            artifact = result.artifact.with_step(seconds=seconds, validation=validation)
            logger.info(
                "exported and quantized %s (%s) to %s in %.1f s", source.origin.id, plan.quantize.scheme, out, seconds
            )
    except (ExportError, ValidationError) as error:
        # The export in the three stages tries again with fixed image sizes or with eager attention, and its check accepts larger
        # differences if PyTorch itself rounds as much.
        logger.warning("One pass is not possible, so the three stages run one after another: %s", error.message)
        return None
    progress.report("exported and quantized", 4, 4)
    return Artifact(out, artifact.manifest)


def _needs(source: capture.Source, config: QuantizeConfig) -> int:
    """Return an estimate of the number of bytes that will be written."""
    import torch

    assert source.streamed is not None
    bits: dict[type, int] = {torch.nn.Linear: 8 if config.scheme == "weight-int8" else 4, torch.nn.Embedding: 8}
    needs = 0.0
    for module in source.model.modules():
        width = next((width for kind, width in bits.items() if isinstance(module, kind)), None)
        factor = 1 if width is None else width / 32 + 1 / config.block_size
        needs += factor * sum(parameter.numel() * 4 for parameter in module.parameters(recurse=False))
    return int(needs)


def _check(
    source: capture.Source, result: QuantizedExport, backend: str, config: ExportConfig, resolved: ResolvedModel
) -> dict[str, Any]:
    """Compare the new artifact with the PyTorch model that has the quantized weights; compare these weights with the checkpoint.

    Raises:
        StreamingError: The PyTorch model computes NaN.
        TaskError: The class of the model does not belong to the task.
        ExportError: The backend cannot run a graph.
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
        # The sample inputs of a decoder may be results of an encoder. Then the model is split again while it has weights.
        cases = capture.cases_by_part(source, parts=parts if len(parts) == 1 else None, few=True)
        changed = None if task_spec(source.task).generates else capture.padding_difference(source)
    for name in result.weights.keys() - errors.keys():
        readers[name]()
    worst = max(errors, key=lambda name: errors[name], default=None)
    if worst is not None and not errors[worst] <= _MOST_ERROR:
        raise ValidationError(
            f"The quantized weight {worst} differs from the checkpoint by {errors[worst]:.3g} of its size, and at most {_MOST_ERROR} is "
            "accepted.",
            fix="exclude the layer from the quantization: exclude=(...). If its weights are not unusual, report this as an issue.",
        )
    outputs = (tensor for part in cases.values() for case in part for tensor in case.expected.values())
    if any(tensor.is_floating_point() and tensor.isnan().any() for tensor in outputs):
        raise capture.StreamingError(
            "The PyTorch model computes NaN: its code reads weights outside of their modules, or the checkpoint contains NaN.",
            fix="export, optimize and quantize the model with three commands.",
        )
    check_outputs(source, cases)
    progress.report("checking against PyTorch", 3, 4)
    with opened(result.artifact, backend, resolved.hub, exact=True) as opened_sessions:
        sessions = opened_sessions.sessions
        compared = {name: compare(session, cases[name], config.atol, "float32") for name, session in sessions.items()}
        rows = [
            compare_rows(session, cases[name], source.config, config.atol, "float32")
            for name, session in sessions.items()
        ]
    # Calls may round the activations to 8 bits, so the probes are measured with the settings of a user.
    record_probes(result.artifact, make_probes(result.artifact.components, cases))
    validation = {**merged(compared), ROW_DIFFERENCE: max(rows), WEIGHT_ERROR: max(errors.values(), default=0.0)}
    return validation if changed is None else {**validation, PADDING_DIFFERENCE: changed}


def _compared(
    name: str, original: capture.ModelWeight, read: Callable[[], torch.Tensor], errors: dict[str, float]
) -> torch.Tensor:
    """Read a quantized weight. The first time, compare it with the checkpoint and store the relative error in `errors`."""
    quantized = read()
    if name not in errors:
        values = original.read().flatten()
        size = float(values.dot(values))
        difference = (
            values.sub_(quantized.flatten())
            if isinstance(original, capture.StreamedWeight)
            else values - quantized.flatten()
        )
        errors[name] = (float(difference.dot(difference)) / size) ** 0.5 if size else 0.0
    return quantized
