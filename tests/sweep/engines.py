"""Build float16 engines with TensorRT for RTX, whose parser and builder need no GPU. The engines are not run."""

from __future__ import annotations

import shutil
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

import accel
from accel.artifact import Artifact
from accel.capture import usual_sizes_in
from accel.errors import AccelError
from accel.interfaces.shape_profiles import shapes_of
from accel_plugins.ortkit.engines.libraries import TENSORRT_RTX
from accel_plugins.ortkit.engines.plans import build_plan
from accel_plugins.ortkit.engines.profiles import complete

from .cases import Pair
from .cells import ENGINE, FAILED, OK, REFUSED, RTX, Announce, Report, built, cell_of, reason_of
from .gpu import folder_of

Skip = Sequence[tuple[str, str]]


def sweep_engines(
    root: Path | None, pair: Pair, backends: Sequence[str], report: Report, announce: Announce, skip: Skip = ()
) -> None:
    """Export the model of a pair (architecture and task), convert it to float16, and build an engine for every graph.

    Args:
        root: Folder in which the float16 graphs are stored, so that a later run only builds; `None` to store nothing.
        pair: Architecture and task to test.
        backends: Not used: the backend is always `tensorrt-rtx`.
        report: Function that is called with the result.
        announce: Function that is called before the model is built and before the stage begins.
        skip: (backend, stage) combinations that are already known.
    """
    with tempfile.TemporaryDirectory(prefix="sweep-") as name:
        folder = folder_of(root if root is not None else Path(name), pair)
        announce(RTX, ENGINE)
        started = time.perf_counter()
        status, reason = OK, ""
        try:
            if not (folder / "O4").is_dir():
                model = built(pair, report, announce)
                if model is None:
                    return
                announce(RTX, ENGINE)
                shutil.rmtree(folder, ignore_errors=True)
                exported = accel.export(model[0], folder / "export", task=pair.task, backend=RTX)
                accel.optimize(exported, folder / "O4", backend=RTX, level="O4")
                shutil.rmtree(folder / "export")
            build_engines(Artifact.load(folder / "O4"))
        except AccelError as error:
            status, reason = REFUSED, reason_of(error)
        # Record every other type of error as a failure of accel.
        except Exception as error:  # noqa: BLE001
            status, reason = FAILED, reason_of(error)
        report(cell_of(pair, RTX, ENGINE, status, started, reason=reason))


def build_engines(artifact: Artifact) -> None:
    """Build an engine for every graph of an artifact, decoders included, for all compute capabilities of the library."""
    for component in artifact.components:
        profile = complete(component, {}, usual_sizes_in(artifact.path, component.inputs))
        build_plan(
            artifact.path / component.file,
            {spec.name: shapes_of(spec, profile) for spec in component.inputs},
            library=TENSORRT_RTX,
            capabilities=[capability for capability, _ in TENSORRT_RTX.builds_for],
        )
