"""`accel convert`: one command from a model to artifacts, checked, timed next to PyTorch, with a report.

The flow and the flags are those of transformer-deploy's `convert_model`.
"""

from __future__ import annotations

import logging
import os
import shutil
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from ..artifact.hub import HubOptions, as_folder
from ..artifact.json_text import json_text
from ..artifact.manifest import Artifact
from ..artifact.writing import check_output, staging
from ..backends import registry
from ..config import check_number
from ..errors import BackendUnavailableError, ConfigError
from ..interfaces.specs import WEIGHTS
from ..measuring.disturbance import MachineWatch
from ..measuring.latency.benchmark import Effort, measure_variants, pytorch_variant
from ..measuring.latency.results import Benchmark
from ..measuring.latency.variants import Traffic
from ..measuring.latency.workloads import Load
from ..measuring.report import write_html
from ..stages.resolution import original, resolve
from .builder import Builder
from .candidates import Recipe, Space
from .jobs import CalibrationData
from .store import Store
from .subject import Clock, Subject

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class Conversion:
    """Artifacts and measurements of a conversion.

    Attributes:
        path: The folder: one subfolder for each artifact, `benchmark.json` and `report.html`.
        artifacts: By subfolder.
        benchmark: All of them next to PyTorch.
        failed: What could not be made, and why.
    """

    path: Path
    artifacts: dict[str, Artifact]
    benchmark: Benchmark
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
) -> Conversion:
    """Export, optimize and quantize for every backend that can, check each result, and time all next to PyTorch.

    Takes one export for each format (4 to 25 s), seconds for each further artifact, and the benchmark. To let the machine
    choose among everything, with an accuracy budget, use `accel.tune`.

    Args:
        model: Hub id or transformers folder.
        out: Folder to make.
        backends: Which ones; all that are available here when `None`.
        task: Inferred when `None`.
        level: Optimization level where a backend has it; `None` for no optimized artifacts.
        scheme: Quantization scheme where a backend has it; `None` for no quantized artifacts.
        calibration: Rows for schemes that need activation ranges.
        batch: Rows a call; each with each sequence.
        sequence: Tokens a row.
        atol: Accepted absolute difference of exports from PyTorch; by dtype when `None`.
        nb_measures: Timed calls of each variant and shape.
        warmup: Calls before them.
        threads: Threads of each variant; what the process may use when `None`.
        revision, token, trust_remote_code: As in transformers.

    Raises:
        BackendUnavailableError: No backend here can export the model, or none that was named.
        ConfigError: Settings that cannot work, or a level or scheme that no backend has.
    """
    check_number("nb_measures", nb_measures, 1)
    watch = MachineWatch()
    hub = HubOptions(revision=revision, token=token, trust_remote_code=trust_remote_code)
    target = check_output(out, as_folder(model))
    resolved = original(resolve(model, task=task, hub=hub, weights=True))
    space = Space(
        task=resolved.task, device=None, backends=backends, half_exports=False, calibrated=calibration is not None
    )
    # PyTorch itself is the baseline and not converted to.
    recipes = [
        replace(recipe, settings={"atol": atol} if atol is not None else {})
        for recipe in space.exports()
        if recipe.format != WEIGHTS and recipe.setting == "float32"
    ]
    if not recipes:
        table = "\n".join(f"  {skipped.name}: {skipped.reason}" for skipped in space.skipped)
        raise BackendUnavailableError(
            f"No backend here exports for {resolved.task}. Considered:\n{table}",
            fix="run `accel doctor`: it says what each backend lacks.",
        )
    _check_words(recipes, space, level, scheme)
    subject = Subject(model=resolved, baseline=pytorch_variant(resolved), digest="")
    rows = CalibrationData(data=calibration) if calibration is not None else None
    failed: dict[str, str] = {}
    artifacts: dict[str, Artifact] = {}
    variants = [subject.baseline]
    with staging(target) as folder:
        builder = Builder(subject, Store(folder / "search"), Clock(limit_s=None), calibration=rows, processes=0)
        for recipe in recipes:
            exported = builder.build([recipe], 1.0)
            if not exported:
                raise builder.errors[str(recipe)]
            dtype = exported[0].facts.dtype
            rewrites = [r for r in space.optimizations(recipe, dtype) if r.setting == level]
            rewrites += [r for r in space.quantizations(recipe, dtype) if r.setting == scheme and not r.settings]
            made = [*exported, *builder.build(rewrites, 1.0)]
            for rewrite in rewrites:
                if (error := builder.errors.get(str(rewrite))) is not None:
                    failed[_label(rewrite)] = error.message.splitlines()[0]
                    logger.warning("%s could not be made: %s", _label(rewrite), error.message)
            for one in made:
                label = _label(one.recipe)
                path = one.path.replace(folder / label)
                artifacts[label] = Artifact(target / label, Artifact.load(path).manifest)
                for candidate in space.candidates(one.recipe, one.facts.dtype):
                    name = f"{registry.describe(candidate.backend).summary} ({label})"
                    variants.append(replace(subject.variant(candidate, path), name=name, options=None))
        builder.close()
        shutil.rmtree(folder / "search")
        rounds = min(12, nb_measures)
        measured = measure_variants(
            variants,
            Load(batch=tuple(batch), sequence=tuple(sequence), threads=threads),
            Effort(warmup=warmup, rounds=rounds, calls=max(1, nb_measures // rounds)),
            Traffic(),
            watch=watch,
        )
        moved = tuple(replace(v, path=v.path.replace(str(folder), str(target))) for v in measured.variants)
        measured = replace(measured, variants=moved)
        values = measured.to_dict()
        (folder / "benchmark.json").write_text(json_text(values) + "\n", encoding="utf-8")
        write_html(values, folder / "report.html", title=f"accel convert {model}")
    return Conversion(path=target, artifacts=artifacts, benchmark=measured, failed=failed)


def _label(recipe: Recipe) -> str:
    """Name of the subfolder of an artifact."""
    return recipe.format if recipe.parent is None else f"{recipe.parent.format}-{recipe.setting.lower()}"


def _check_words(recipes: Sequence[Recipe], space: Space, level: str | None, scheme: str | None) -> None:
    """Refuse a level or a scheme that no backend has, before anything is exported."""
    levels = {r.setting for recipe in recipes for r in space.optimizations(recipe, recipe.setting)}
    schemes = {r.setting for recipe in recipes for r in space.quantizations(recipe, recipe.setting)}
    if scheme is not None and scheme not in schemes:
        why = "; ".join(s.reason for s in space.skipped if s.name.endswith(f": {scheme}"))
        raise ConfigError(
            f"No backend here quantizes with {scheme!r}{f': {why}' if why else '.'}",
            fix=f"use one of {', '.join(sorted(schemes)) or 'none'}.",
        )
    if level is not None and levels and level not in levels:
        raise ConfigError(f"No backend here optimizes at {level!r}.", fix=f"use one of {', '.join(sorted(levels))}.")
