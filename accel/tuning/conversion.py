"""`accel convert`: convert a model to artifacts with one command, check them, time them next to PyTorch, and write a report.

The procedure and the flags are those of transformer-deploy's `convert_model`.
"""

from __future__ import annotations

import logging
import os
import shutil
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from ..artifact.atomic_folder_writing import check_output, staging
from ..artifact.hub import HubOptions, as_folder
from ..artifact.json_writing import json_text
from ..artifact.manifest import Artifact
from ..backends import registry
from ..backends.stage_backend_selection import plan_scheme, plan_stage
from ..config import ExportConfig, check_number
from ..errors import AccelError, BackendUnavailableError, ConfigError
from ..interfaces.specs import WEIGHTS
from ..measuring.disturbance import MachineWatch
from ..measuring.latency.benchmark import BenchmarkEffort, measure_variants, pytorch_variant
from ..measuring.latency.results import BenchmarkResult
from ..measuring.latency.variants import Traffic
from ..measuring.latency.workloads import WorkloadSettings
from ..measuring.report import write_html
from ..stages.quantized_export import export_to_scheme
from ..stages.resolution import original, resolve
from .candidates import Recipe, SearchSpace
from .jobs import CalibrationData
from .quantize_within_budget import quantize
from .search import Preset, Proposal, Search
from .search_data import BuiltArtifact, SearchSubject, TimeBudget
from .store import ResultStore
from .trials import Constraints, Goal

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class ConversionResult:
    """Artifacts and measurements of a conversion.

    Attributes:
        path: Output folder, with one subfolder for each artifact, `benchmark.json` and `report.html`.
        artifacts: Artifacts by name of their subfolder.
        benchmark: Benchmark of all artifacts and PyTorch.
        failed: Reasons of failed builds, by name of the subfolder.
    """

    path: Path
    artifacts: dict[str, Artifact]
    benchmark: BenchmarkResult
    failed: dict[str, str]


def convert(
    model: str | os.PathLike[str],
    out: str | os.PathLike[str],
    *,
    backends: Sequence[str] | None = None,
    task: str | None = None,
    level: str | None = "O2",
    scheme: str | None = None,
    calibration: Any = None,
    batch: Sequence[int] = (1,),
    sequence: Sequence[int] = (16, 128),
    atol: float | None = None,
    nb_measures: int = 240,
    warmup: int = 10,
    threads: int | None = None,
    revision: str | None = None,
    token: str | bool | None = None,
    trust_remote_code: bool = False,
) -> ConversionResult:
    """Export, optimize and quantize a model for all available backends, check each artifact, and time all of them next to PyTorch.

    The conversion takes 4 to 25 s for the export to each format, some seconds for each optimized or quantized artifact, and the
    time of the benchmark. To find the best artifact by a search with an accuracy budget, use `accel.tune`.

    Args:
        model: Hub id or transformers folder.
        out: Folder to create.
        backends: Names of backends; `None` for all backends that are available here.
        task: The task; `None` to infer it.
        level: Optimization level, for backends that have it; `None` for no optimized artifacts.
        scheme: Quantization scheme, for backends that have it; `None` for no quantized artifacts.
        calibration: Rows for schemes that need activation ranges.
        batch: Number of rows in each call. Each batch size is measured with each sequence length.
        sequence: Number of tokens in each row.
        atol: Accepted absolute difference of exports from PyTorch; `None` for a default that depends on the dtype.
        nb_measures: Number of timed calls for each variant and shape.
        warmup: Number of calls before the timed calls.
        threads: Threads of each variant; `None` for all processors that the process may use.
        revision, token, trust_remote_code: As in transformers.

    Raises:
        BackendUnavailableError: No requested backend can export the model on this machine.
        ConfigError: A setting is invalid, or no backend has the level or scheme.
    """
    check_number("nb_measures", nb_measures, 1)
    watch = MachineWatch()
    hub = HubOptions(revision=revision, token=token, trust_remote_code=trust_remote_code)
    target = check_output(out, as_folder(model))
    resolved = original(resolve(model, task=task, hub=hub, weights=True))
    space = SearchSpace(
        task=resolved.task, device=None, backends=backends, half_exports=False, calibrated=calibration is not None
    )
    # Skip the format of PyTorch weights: PyTorch is the baseline, not a target of the conversion.
    recipes = [
        replace(recipe, settings={"atol": atol} if atol is not None else {})
        for recipe in space.exports()
        if recipe.format != WEIGHTS and recipe.setting == "float32"
    ]
    if not recipes:
        table = "\n".join(f"  {skipped.name}: {skipped.reason}" for skipped in space.skipped)
        raise BackendUnavailableError(
            f"No installed backend can export models of the task {resolved.task!r}. Backends that were considered:\n{table}",
            fix="run `accel doctor` to see what each backend requires.",
        )
    _check_words(recipes, space, level, scheme)
    subject = SearchSubject(model=resolved, baseline=pytorch_variant(resolved), digest="")
    load = WorkloadSettings(batch=tuple(batch), sequence=tuple(sequence), threads=threads)
    artifacts: dict[str, Artifact] = {}
    variants = [subject.baseline]
    with staging(target) as folder:
        search = Search(
            subject=subject, data=None, calibration=CalibrationData(data=calibration) if calibration is not None else None,
            goal=Goal(objective="latency", constraints=Constraints()), load=load, store=ResultStore(folder / "search"),
            clock=TimeBudget(limit_s=None), watch=watch, processes=0,
        )  # fmt: skip
        try:
            built, errors = search.run(_preset(search, space, recipes, level, scheme))
        finally:
            search.close()
        for label, error in errors.items():
            logger.warning("The artifact %s could not be created: %s", label, error.message)
        for artifact in built:
            label = _label(artifact.recipe)
            path = artifact.path.replace(folder / label)
            artifacts[label] = Artifact(target / label, Artifact.load(path).manifest)
            for candidate in space.candidates(artifact.recipe, artifact.facts.dtype):
                name = f"{registry.describe(candidate.backend).summary} ({label})"
                variants.append(replace(subject.variant(candidate, path), name=name, options=None))
        shutil.rmtree(folder / "search")
        rounds = min(12, nb_measures)
        measured = measure_variants(
            variants,
            load,
            BenchmarkEffort(warmup=warmup, rounds=rounds, calls=max(1, nb_measures // rounds)),
            Traffic(),
            watch=watch,
        )
        moved = tuple(replace(v, path=v.path.replace(str(folder), str(target))) for v in measured.variants)
        measured = replace(measured, variants=moved)
        values = measured.to_dict()
        (folder / "benchmark.json").write_text(json_text(values) + "\n", encoding="utf-8")
        write_html(values, folder / "report.html", title=f"accel convert {model}")
    failed = {label: error.message.splitlines()[0] for label, error in errors.items()}
    return ConversionResult(path=target, artifacts=artifacts, benchmark=measured, failed=failed)


def convert_to_scheme(
    model: str | os.PathLike[str],
    out: str | os.PathLike[str],
    *,
    scheme: str,
    backend: str | None = None,
    task: str | None = None,
    level: str | None = "O2",
    calibration: Any = None,
    atol: float | None = None,
    revision: str | None = None,
    token: str | bool | None = None,
    trust_remote_code: bool = False,
) -> Artifact:
    """Export, optimize and quantize a model for one backend, and write only the quantized artifact. Nothing is timed.

    The graph and weight files are the same as those of `accel.export`, `accel.optimize` and `accel.quantize`, one after another.
    Weight-only schemes read a checkpoint in half precision (safetensors, on Linux) in one pass, in which the complete weights are never in
    float32. Otherwise, the three stages run, and each intermediate artifact is removed as soon as the next one is written. If the backend
    has no optimization levels, the export is quantized.

    Args:
        model: Hub id or transformers folder.
        out: Folder to create.
        scheme: Quantization scheme of the backend.
        backend: The backend that exports, optimizes and quantizes; `None` for the default backend of ONNX graphs.
        task: The task; `None` to infer it.
        level: Optimization level, for backends that have it; `None` for no optimization.
        calibration: Rows for schemes that need activation ranges.
        atol: Accepted absolute difference of the export from PyTorch; `None` for a default that depends on the dtype.
        revision, token, trust_remote_code: As in transformers.

    Raises:
        BackendUnavailableError: The backend cannot export the model, or has no such scheme.
        ConfigError: A setting is invalid, or the backend has optimization levels and `level` is another one.
        ExportError: The model cannot be traced or converted.
        QuantizeError: The model is already quantized, the quantization failed, or calibration data is missing.
        ValidationError: The outputs of the export or of the optimized graph differ by more than the tolerance.
    """
    target = check_output(out, as_folder(model))
    plan = plan_scheme(scheme, exporter=plan_stage("export", None, backend), backend=backend, level=level)
    hub = HubOptions(revision=revision, token=token, trust_remote_code=trust_remote_code)
    resolved = resolve(model, task=task, hub=hub, weights=True, export=True)
    return export_to_scheme(
        resolved, target, plan=plan, config=ExportConfig(atol=atol), calibration=calibration, quantizer=quantize
    )


def _preset(
    search: Search, space: SearchSpace, recipes: Sequence[Recipe], level: str | None, scheme: str | None
) -> Preset[tuple[list[BuiltArtifact], dict[str, AccelError]]]:
    """Build every export, and its optimized and quantized artifacts; return all artifacts, and the errors by subfolder."""
    built: list[BuiltArtifact] = []
    errors: dict[str, AccelError] = {}
    for recipe in recipes:
        exports: list[BuiltArtifact] = yield Proposal(stage="export", action="build", items=[recipe])
        if not exports:
            raise search.builder.errors[str(recipe)]
        dtype = exports[0].facts.dtype
        rewrites = [r for r in space.optimizations(recipe, dtype) if r.setting == level]
        rewrites += [r for r in space.quantizations(recipe, dtype) if r.setting == scheme and not r.settings]
        built += exports
        built += yield Proposal(stage="optimize and quantize", action="build", items=rewrites)
        errors |= {_label(r): search.builder.errors[str(r)] for r in rewrites if str(r) in search.builder.errors}
    return built, errors


def _label(recipe: Recipe) -> str:
    """Return the subfolder name of an artifact."""
    return recipe.format if recipe.parent is None else f"{recipe.parent.format}-{recipe.setting.lower()}"


def _check_words(recipes: Sequence[Recipe], space: SearchSpace, level: str | None, scheme: str | None) -> None:
    """Raise if no backend has the level or scheme; called before anything is exported."""
    levels = {r.setting for recipe in recipes for r in space.optimizations(recipe, recipe.setting)}
    schemes = {r.setting for recipe in recipes for r in space.quantizations(recipe, recipe.setting)}
    if scheme is not None and scheme not in schemes:
        why = "; ".join(s.reason for s in space.skipped if s.name.endswith(f": {scheme}"))
        raise ConfigError(
            f"No installed backend can quantize with the scheme {scheme!r}{f': {why}' if why else '.'}",
            fix=f"use one of {', '.join(sorted(schemes))}." if schemes else "convert without --quantize.",
        )
    if level is not None and levels and level not in levels:
        raise ConfigError(
            f"No installed backend has the optimization level {level!r}.",
            fix=f"use one of {', '.join(sorted(levels))}.",
        )
