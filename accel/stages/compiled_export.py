"""Compile the graphs of a checked ONNX artifact for hardware that this machine may not have."""

from __future__ import annotations

import logging
import time
from pathlib import Path
from typing import Any

from .. import progress
from ..artifact.atomic_folder_writing import staging
from ..artifact.manifest import Artifact
from ..backends import registry
from ..backends.plan import RunPreferences, make_plan
from ..backends.sessions import open_plan
from ..backends.stage_backend_selection import StagePlan
from ..config import ExportConfig, check_names
from ..errors import ConfigError, TaskError
from ..interfaces.protocols import CompilingExporter
from ..interfaces.task_registry import task_spec
from .graph_comparison import compare, merged, recorded_rounding
from .optimize import parent_cases

logger = logging.getLogger(__name__)


def compiles(plan: StagePlan) -> bool:
    """Return whether the format of an export is compiled from ONNX graphs."""
    return plan.stage == "export" and plan.capability.consumes == "onnx"


def check_compilation(artifact: Artifact, plan: StagePlan, config: ExportConfig) -> None:
    """Check that a backend can compile an ONNX artifact with these settings.

    Raises:
        TaskError: The backend does not compile models of this task.
        ConfigError: The artifact is not an ONNX artifact of the data type, or an option does not exist.
    """
    name, capability = plan.backend.name, plan.capability
    if artifact.format != capability.consumes:
        raise ConfigError(
            f"{artifact.path} has the format {artifact.format}, but the backend {name!r} compiles graphs of the format "
            f"{capability.consumes}.",
            fix="export the model to ONNX first, or pass the PyTorch model.",
        )
    if not capability.does(artifact.task):
        raise TaskError(
            f"The backend {name!r} does not compile models of the task {artifact.task!r} to the format {capability.produces}.",
            fix=f"run the ONNX artifact with backend={name!r}, or use another backend.",
        )
    if config.dtype not in (ExportConfig().dtype, artifact.dtype):
        raise ConfigError(
            f"{artifact.path} has the data type {artifact.dtype}, and a compilation does not change it to {config.dtype}.",
            fix=f"leave dtype out, or convert the artifact first: accel optimize ARTIFACT OUT --level O4 --backend {name}.",
        )
    check_names(f"The exporter of the backend {name!r}", "option", config.options, capability.options)


def check_used(artifact: Artifact, config: ExportConfig, *, task: str | None, **arguments: object) -> None:
    """Check that no setting was passed that applies only to the export of a PyTorch model.

    Raises:
        ConfigError: A setting has no effect on the compilation of an artifact.
    """
    defaults = ExportConfig().to_dict()
    unused = [name for name, value in arguments.items() if value is not None]
    unused += [n for n, v in config.to_dict().items() if n not in ("dtype", "options", "atol") and v != defaults[n]]
    if task is not None and task_spec(task).name != artifact.task:
        unused.insert(0, "task")
    if unused:
        raise ConfigError(
            f"{artifact.path} already contains graphs, which are compiled unchanged, so {', '.join(unused)} would have no effect.",
            fix=f"leave {', '.join(unused)} out, or pass the PyTorch model instead of the artifact.",
        )


def compile_artifact(artifact: Artifact, out: Path, *, plan: StagePlan, config: ExportConfig) -> Artifact:
    """Compile the graphs of an ONNX artifact into a new folder.

    If the backend has a device, the outputs of the compiled graphs are compared with those of the ONNX graphs. If not, the manifest
    records that the compiled graphs were not run.

    Args:
        artifact: An ONNX artifact, already compared with the PyTorch model.
        out: The folder to create.
        plan: The backend.
        config: Settings of the export.

    Raises:
        TaskError: The backend does not compile models of this task.
        ConfigError: A setting is invalid.
        ExportError: The graphs contain operators that the compiler does not support.
        SessionError: The compiler failed.
        ValidationError: The outputs differ by more than the tolerance.
    """
    check_compilation(artifact, plan, config)
    started = time.perf_counter()
    exporter: CompilingExporter = plan.worker()
    with staging(out) as folder:
        result = exporter.compile(artifact, config=config, out=folder, report=progress.report)
        validation = _compared(artifact, result, plan, config)
        result = result.with_step(seconds=round(time.perf_counter() - started, 2), validation=validation)
    return Artifact(out, result.manifest)


def _compared(parent: Artifact, result: Artifact, plan: StagePlan, config: ExportConfig) -> dict[str, Any]:
    """Compare the compiled graphs with the ONNX graphs, if this machine can run them."""
    probe = registry.probe(plan.backend)
    if not probe.available:
        reasons = "; ".join(reason.message for reason in probe.reasons)
        logger.warning(
            "The compiled graphs were not run, because the backend %r has no device on this machine: %s. To compare them with PyTorch, "
            "run on a machine with such a device: accel validate FOLDER --backend %s",
            plan.backend.name, reasons, plan.backend.name,
        )  # fmt: skip
        return {"executed": False}
    progress.report("comparing with the ONNX graph")
    cases = parent_cases(parent)
    sessions = open_plan(make_plan(result, RunPreferences(backend=plan.backend.name)), few_calls=True)
    try:
        rounding = max(recorded_rounding(parent), 0.0 if parent.dtype == "float32" else 2e-2)
        compared = merged(
            {
                name: compare(session, cases[name], config.atol, result.dtype, rounding=rounding)
                for name, session in sessions.sessions.items()
            }
        )
    finally:
        sessions.close()
    return {"executed": True, **compared}
