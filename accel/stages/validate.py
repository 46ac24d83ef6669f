"""Compare an artifact with the PyTorch model that it was made from."""

from __future__ import annotations

import logging
import math
import os
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from .. import capture, progress
from ..artifact.hub import HubOptions
from ..artifact.manifest import MANIFEST, Artifact
from ..artifact.probe_file import PROBES
from ..artifact.resolved_model import ResolvedModel
from ..backends.plan import RunPreferences, make_plan
from ..backends.probe_checks import ProbeResult, conditions_of, results_of
from ..backends.sessions import open_plan
from ..capture.fast_path_verification import FastPathComparison, SessionWithFastPaths
from ..capture.probes import read_probes
from ..config import ExportConfig, SessionOptions, check_number, checked_arguments
from ..errors import ArtifactNotFoundError, ConfigError, OutputFolderError
from ..interfaces.task_registry import features_task, task_spec
from .checked_export import load_source
from .graph_comparison import differences, merged, recorded_rounding
from .probe_recording import probes_for, record_probes
from .resolution import artifact_of, original, resolve

if TYPE_CHECKING:
    import torch

logger = logging.getLogger(__name__)

_HIDDEN_STATES = "last_hidden_state"


@dataclass(frozen=True, slots=True, kw_only=True)
class ValidationResult:
    """The comparison of an artifact with its PyTorch model.

    Attributes:
        passed: Whether the largest difference is within the tolerance.
        max_abs_difference: Largest absolute difference over all outputs and shapes.
        tolerance: The accepted absolute difference.
        shapes: The sizes that were compared.
        backend: The backend that ran the artifact.
        forms: Comparisons of the ways in which the backend computes the graph on the device, such as padding to a fixed length, with
            the plain call of the graph. Ways with different results are not used.
    """

    passed: bool
    max_abs_difference: float
    tolerance: float
    shapes: tuple[Mapping[str, int], ...]
    backend: str
    forms: tuple[FastPathComparison, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class ProbeValidation:
    """The comparison of an artifact with PyTorch's stored outputs on this machine.

    Attributes:
        passed: Whether all outputs are within their tolerances.
        outputs: The difference of each output, and its tolerance.
        backend: The backend that ran the artifact.
        conditions: Processor, versions and settings here.
        measured: Processor, versions and settings where the tolerances were measured.
    """

    passed: bool
    outputs: tuple[ProbeResult, ...]
    backend: str
    conditions: Mapping[str, str]
    measured: Mapping[str, str]


@checked_arguments(artifact=(Artifact, str, os.PathLike), device=str, hub=HubOptions)
def validate(
    artifact: Artifact | str | os.PathLike[str],
    *,
    against: str | os.PathLike[str] | torch.nn.Module | None = None,
    backend: str | None = None,
    device: str | None = None,
    atol: float | None = None,
    hub: HubOptions | None = None,
) -> ValidationResult:
    """Compare an artifact with the PyTorch model that it was made from, on five shapes with padded rows.

    Args:
        artifact: The artifact or its folder.
        against: The PyTorch model; the recorded source when `None`.
        backend: The backend that runs the artifact.
        device: The device that runs the artifact.
        atol: Accepted absolute difference; chosen by dtype when `None`.
        hub: Options for downloading a source from the Hub.

    Raises:
        ArtifactNotFoundError: The source does not exist.
        IntegrityError: A file of the artifact is damaged.
        ValidationError: The artifact lacks outputs of the model.
    """
    check_number("atol", atol, above=0, below=math.inf)
    hub = hub or HubOptions()
    return _compared(artifact_of(artifact, hub=hub), against, backend, device, atol, hub)


def _compared(
    artifact: Artifact,
    against: str | os.PathLike[str] | torch.nn.Module | None,
    backend: str | None,
    device: str | None,
    atol: float | None,
    hub: HubOptions,
    *,
    writes_probes: bool = False,
) -> ValidationResult:
    """Compare an artifact with its PyTorch model. If they agree, write probes into the folder if the caller asks for it."""
    if against is not None:
        other = resolve(against, task=_task_of_graph(artifact), hub=hub, weights=True)
    elif any(step.stage == "export" for step in artifact.manifest.steps):
        other = original(resolve(artifact, hub=hub))
    else:
        raise ArtifactNotFoundError(
            f"{artifact.path} does not record the PyTorch model from which it was exported.",
            fix="pass the PyTorch model with against=... (--against).",
        )
    recorded = next((step.config for step in artifact.manifest.steps if step.stage == "export"), {})
    source = load_source(other, ExportConfig.from_dict(recorded))
    if not any(axis in spec.shape for axis in capture.IMAGE_AXES for spec in artifact.components[0].inputs):
        source = source.with_fixed_images() or source
    progress.report("computing reference outputs", 0, 2)
    cases = {
        name: cases_for_graph(artifact, source, of_part) if len(artifact.components) == 1 else of_part
        for name, of_part in capture.cases_by_part(source).items()
    }
    plan = make_plan(ResolvedModel.of_artifact(artifact, hub), RunPreferences(backend=backend, device=device))
    sessions = open_plan(plan, probes=False)
    progress.report("comparing the graph with PyTorch", 1, 2)
    rounding = recorded_rounding(artifact)
    try:
        comparison = merged(
            {
                name: differences(session, cases[name], atol, artifact.dtype, rounding=rounding)
                for name, session in sessions.sessions.items()
            }
        )
        forms = [
            v
            for session in sessions.sessions.values()
            if isinstance(session, SessionWithFastPaths)
            for v in session.check_forms()
        ]
        passed = comparison["max_abs_difference"] <= comparison["tolerance"]
        if passed and writes_probes:
            record_probes(artifact, probes_for(artifact, cases, source), sessions)
    finally:
        sessions.close()
    progress.report("compared", 2, 2)
    return ValidationResult(
        passed=passed,
        max_abs_difference=comparison["max_abs_difference"],
        tolerance=comparison["tolerance"],
        shapes=tuple(comparison["shapes"]),
        backend=sessions.backend.name,
        forms=tuple(forms),
    )


@checked_arguments(artifact=(Artifact, str, os.PathLike), device=str, hub=HubOptions)
def validate_here(
    artifact: Artifact | str | os.PathLike[str],
    *,
    backend: str | None = None,
    device: str | None = None,
    session_options: SessionOptions | None = None,
    hub: HubOptions | None = None,
) -> ProbeValidation:
    """Run the probes of an artifact on this machine, and compare the outputs with those of PyTorch. The PyTorch model is not needed.

    The probes run even if they have run before, and the options are not changed if an output is wrong.

    Args:
        artifact: The artifact or its folder.
        backend: The backend that runs the artifact.
        device: The device that runs the artifact.
        session_options: Options of the sessions.
        hub: Options for downloading the artifact from the Hub.

    Raises:
        ArtifactNotFoundError: The artifact has no probes.
        IntegrityError: A file of the artifact is damaged.
    """
    hub = hub or HubOptions()
    artifact = artifact_of(artifact, hub=hub)
    probes = read_probes(artifact)
    if probes is None:
        raise ArtifactNotFoundError(
            f"{artifact.path} has no probes.",
            fix="run `accel adopt FOLDER --against MODEL` to add probes, or export the model again with this version of accel.",
        )
    settings = RunPreferences(backend=backend, device=device, options=session_options)
    opened = open_plan(make_plan(ResolvedModel.of_artifact(artifact, hub), settings), probes=False)
    try:
        outputs = results_of(opened, probes)
    finally:
        opened.close()
    return ProbeValidation(
        passed=bool(outputs) and all(output.passed for output in outputs),
        outputs=tuple(outputs),
        backend=opened.backend.name,
        conditions=conditions_of(opened.plan),
        measured=probes.conditions,
    )


@checked_arguments(artifact=(str, os.PathLike), hub=HubOptions)
def adopt(
    artifact: str | os.PathLike[str],
    *,
    against: str | os.PathLike[str] | torch.nn.Module,
    backend: str | None = None,
    atol: float | None = None,
    hub: HubOptions | None = None,
) -> ValidationResult:
    """Compare a folder with its PyTorch model, and write probes into the folder.

    For folders of other tools, and artifacts of earlier versions of accel. The only new file is `probes.safetensors`; the manifest, if
    there is one, records it.

    Args:
        artifact: The folder.
        against: The PyTorch model.
        backend: The backend that runs the artifact.
        atol: Accepted absolute difference; chosen by dtype when `None`.
        hub: Options for downloading the PyTorch model from the Hub.

    Returns:
        The comparison. If it did not pass, nothing is written.

    Raises:
        ConfigError: The graphs are too unusual for probes.
        IntegrityError: A file of the artifact is damaged.
        OutputFolderError: The folder is not writable.
        ValidationError: The artifact lacks outputs of the model.
    """
    folder = Path(artifact).expanduser().absolute()
    adopted = artifact_of(folder)
    if adopted.path != folder:
        raise ConfigError(
            f"{folder} is read through a changed copy in the cache of accel, and probes belong to the original files.",
            fix="load the folder with its ORTModelFor... class, save it with save_pretrained, and adopt the new folder.",
        )
    if not os.access(folder, os.W_OK):
        raise OutputFolderError(f"The folder {folder} is not writable.", fix="copy the folder, and adopt the copy.")
    result = _compared(adopted, against, backend, None, atol, hub or HubOptions(), writes_probes=True)
    if result.passed and not (folder / PROBES).is_file():
        raise ConfigError(
            f"{folder} agrees with PyTorch, but no probes can be stored: the inputs of its graphs are too large or unusual.",
            fix="compare the folder with `accel validate` on each machine.",
        )
    if result.passed and (folder / MANIFEST).is_file():
        Artifact.create(folder, adopted.manifest)
    return result


def _task_of_graph(artifact: Artifact) -> str:
    """Return the task that the graph itself computes. It is hidden states, if the pooling is computed after the graph."""
    pooled = {"sentence_embedding"} & {spec.name for spec in artifact.components[0].outputs}
    return features_task() if task_spec(artifact.task).embeds and not pooled else artifact.task


def cases_for_graph(artifact: Artifact, source: capture.Source, cases: list[capture.Case]) -> list[capture.Case]:
    """Remove from the cases the inputs and outputs that a graph of another tool does not have.

    Inputs that the graph does not have, such as token types, are left out, and PyTorch uses its default. If the
    graph returns only some of the model's outputs, such as hidden states without BERT's `pooler_output`, the others are not compared.
    """
    component = artifact.components[0]
    if any(case.stateful for case in cases):
        return cases
    graph_inputs = {spec.name for spec in component.inputs} | set(component.unused_inputs)
    unknown_inputs = {name for case in cases for name in case.feeds if name not in graph_inputs}
    if unknown_inputs:
        logger.warning(
            "The graph of %s has no input %s. The comparison uses PyTorch's default for each missing input.",
            artifact.path,
            ", ".join(sorted(unknown_inputs)),
        )
        feeds = [{name: tensor for name, tensor in case.feeds.items() if name in graph_inputs} for case in cases]
        cases = [
            replace(case, feeds=some, expected=capture.reference(source.model, some))
            for case, some in zip(cases, feeds, strict=True)
        ]
    returned = {spec.name for spec in component.outputs}
    missing = {name for case in cases for name in case.expected if name not in returned}
    exported = any(step.stage == "export" for step in artifact.manifest.steps)
    if exported or not missing or _HIDDEN_STATES not in returned:
        return cases
    logger.warning(
        "The graph of %s does not return %s. These outputs of the PyTorch model are not compared.",
        artifact.path,
        ", ".join(sorted(missing)),
    )
    return [
        replace(case, expected={name: value for name, value in case.expected.items() if name in returned})
        for case in cases
    ]
