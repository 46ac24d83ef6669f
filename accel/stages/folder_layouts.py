"""Write a model as a folder for another library, in several precisions, and compare each precision with PyTorch."""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from .. import capture, progress
from ..artifact.atomic_folder_writing import check_output, discard, paths_shown_as, scratch, staging, tool_versions
from ..artifact.hub import HubOptions, as_folder
from ..artifact.json_writing import json_text
from ..artifact.manifest import Artifact
from ..artifact.resolved_model import ResolvedModel
from ..backends import registry
from ..backends.plan import RunPreferences, make_plan
from ..backends.sessions import open_plan
from ..backends.stage_backend_selection import plan_stage
from ..config import ExportConfig, OptimizeConfig, QuantizeConfig, check_names
from ..errors import AccelError, ValidationError
from ..interfaces.folder_writer import FolderWriter, LayoutVariant
from .checked_export import export_resolved, load_source
from .graph_comparison import differences, merged, recorded_rounding
from .optimize import optimize
from .quantize import quantize
from .resolution import original, resolve
from .validate import cases_for_graph

logger = logging.getLogger(__name__)

REPORT = "accel_layout.json"
"""File of a written folder that records the variants, their files and their differences from PyTorch."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WrittenVariant:
    """A precision of the model in a written folder.

    Attributes:
        files: The graph and data files, relative to the folder.
        bytes: Size of the files.
        max_abs_difference: Largest difference from PyTorch over all graphs, outputs and shapes.
        tolerance: The accepted difference for the output with this difference.
        output: The output with this difference.
        compared_on: The backend and device on which the variant was compared with PyTorch.
    """

    files: tuple[str, ...]
    bytes: int
    max_abs_difference: float
    tolerance: float
    output: str
    compared_on: str


@dataclass(frozen=True, slots=True, kw_only=True)
class WrittenFolder:
    """A folder for another library.

    Attributes:
        path: The folder.
        layout: Name of the layout.
        variants: The variants by the library's name.
        failed: Reasons for variants that could not be made, by name.
    """

    path: Path
    layout: str
    variants: Mapping[str, WrittenVariant]
    failed: Mapping[str, str]


def write_layout(
    model: str | os.PathLike[str],
    out: str | os.PathLike[str],
    *,
    layout: str,
    variants: Sequence[str] | None = None,
    task: str | None = None,
    revision: str | None = None,
    token: str | bool | None = None,
    trust_remote_code: bool = False,
) -> WrittenFolder:
    """Export a model and write it as a folder for another library, such as transformers.js.

    The variants are made from one float32 export. The written files of each variant are read again, and their outputs are compared with
    PyTorch on several shapes with padded rows. Takes 4 to 25 s for the export and some seconds for each variant; needs as much disk space
    as all variants twice.

    Args:
        model: Hub id or transformers folder, or an artifact, whose recorded source is exported.
        out: Folder to create.
        layout: Name of the layout. `registry.written_layouts()` lists the names.
        variants: Names of variants; `None` for all variants of the layout.
        task: The task; `None` to infer it.
        revision, token, trust_remote_code: As in transformers.

    Raises:
        ConfigError: There is no such layout or variant.
        ExportError: The model cannot be traced or converted.
        TaskError: The layout has no file names for a model of this kind.
        ValidationError: The float32 variant differs from PyTorch by more than the tolerance. Other variants with such a difference are
            left out, and the result has the reason.
    """
    spec, writer = registry.folder_writer(layout)
    chosen = list(writer.variants) if variants is None else list(dict.fromkeys(variants))
    check_names(f"The layout {layout!r}", "variant", chosen, list(writer.variants))
    hub = HubOptions(revision=revision, token=token, trust_remote_code=trust_remote_code)
    target = check_output(out, as_folder(model))
    resolved = original(resolve(model, task=task, hub=hub, weights=True))
    with scratch(target.parent) as work, paths_shown_as(target, work), staging(target) as folder:
        config = ExportConfig()
        exported = export_resolved(resolved, work / "export", plan=plan_stage("export", None, spec.name), config=config)
        writer.check(exported)
        comparison = _Comparison(resolved, exported, config, spec.name)
        written: dict[str, WrittenVariant] = {}
        failed: dict[str, str] = {}
        for name in chosen:
            progress.report(f"writing the variant {name}", len(written) + len(failed), len(chosen))
            files: list[str] = []
            try:
                artifact = _variant(exported, writer.variants[name], work / name, spec.name)
                files = writer.write(artifact, name, folder)
                written[name] = comparison.of(writer, artifact, name, files, folder)
            except AccelError as error:
                for file in files:
                    (folder / file).unlink()
                if writer.variants[name] == LayoutVariant(provider=writer.variants[name].provider):
                    raise
                failed[name] = error.message
                logger.warning("The variant %s could not be written: %s", name, error.message)
        writer.finish(exported, {name: list(variant.files) for name, variant in written.items()}, folder)
        report = {
            "layout": layout,
            "task": exported.manifest.task,
            "source": asdict(exported.manifest.source) if exported.manifest.source is not None else None,
            "versions": tool_versions(*spec.distributions),
            "variants": {name: asdict(variant) for name, variant in written.items()},
            "failed": failed,
        }
        (folder / REPORT).write_text(json_text(report) + "\n", encoding="utf-8")
    return WrittenFolder(path=target, layout=layout, variants=written, failed=failed)


def _variant(exported: Artifact, variant: LayoutVariant, out: Path, backend: str) -> Artifact:
    """Return the artifact of a variant: the export, quantized, optimized, or both in this order.

    The order is different from that of `accel tune`: the integer schemes need float32 weights, and an optimization level may convert the
    rest of the graph to half precision.
    """
    artifact = exported
    if variant.scheme is not None:
        # The folder runs on the users' machines, so the preset must not depend on the CPU of this machine.
        config = QuantizeConfig(scheme=variant.scheme, preset="avx2", operators=variant.operators)
        artifact = quantize(artifact, out / "quantized", backend=backend, config=config)
    if variant.level is not None:
        levels = OptimizeConfig.from_dict({"level": variant.level, "enable": variant.enable})
        artifact = optimize(artifact, out / "optimized", backend=backend, config=levels)
    return artifact


class _Comparison:
    """Comparison of written variants with the PyTorch model, whose outputs are computed once."""

    def __init__(self, resolved: ResolvedModel, exported: Artifact, config: ExportConfig, backend: str) -> None:
        source = load_source(resolved, config)
        if not any(axis in spec.shape for axis in capture.IMAGE_AXES for spec in exported.components[0].inputs):
            source = source.with_fixed_images() or source
        self._source, self._cases, self._backend = source, capture.cases_by_part(source), backend
        self._rounding = recorded_rounding(exported)

    def of(self, writer: FolderWriter, artifact: Artifact, name: str, files: list[str], folder: Path) -> WrittenVariant:
        """Read the files of a variant again and compare their outputs.

        Raises:
            ValidationError: An output differs by more than the tolerance of the variant.
        """
        opened = writer.read(artifact, name, files, folder)
        single = len(opened.components) == 1
        cases = {n: cases_for_graph(opened, self._source, c) if single else c for n, c in self._cases.items()}
        plan = make_plan(ResolvedModel.of_artifact(opened, HubOptions()), RunPreferences(backend=self._backend))
        # The libraries round activations as the graph allows, so the comparison does.
        sessions = open_plan(plan, few_calls=True, probes=False)
        rounding = max(writer.variants[name].tolerance, self._rounding)
        try:
            record = merged(
                {
                    part: differences(session, cases[part], None, "float32", rounding=rounding)
                    for part, session in sessions.sessions.items()
                }
            )
        finally:
            sessions.close()
            if opened.path != folder:
                discard(opened.path)
        if not record["max_abs_difference"] <= record["tolerance"]:
            raise ValidationError(
                f"The output {record['output']!r} of the variant {name} differs from PyTorch by {record['max_abs_difference']:.3g}. At "
                f"most {record['tolerance']:.3g} is accepted.",
                fix="leave the variant out, or use a variant with a higher precision.",
            )
        return WrittenVariant(
            files=tuple(files), bytes=sum((folder / file).stat().st_size for file in files),
            max_abs_difference=record["max_abs_difference"], tolerance=record["tolerance"], output=record["output"],
            compared_on=f"{sessions.backend.name} on {plan.device}",
        )  # fmt: skip
