"""Statements about how an artifact was made and measured: an in-toto statement and a CycloneDX bill of materials.

All numbers come from the manifest: differences from PyTorch, accuracy with its interval, and latency with its conditions.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .checksums import sha256
from .manifest import MANIFEST, Artifact, Manifest
from .signatures import MATERIALS, STATEMENT

_HUB_ID = re.compile(r"[\w.-]+/[\w.-]+")


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasuredNumber:
    """A number that a stage measured.

    Attributes:
        name: What was measured: a metric, `difference from PyTorch`, `latency`.
        value: The value.
        low, high: The 95 % confidence interval, if it was computed.
        unit: Unit of the value, or an empty text.
        conditions: Rows, data, backend or workload of the measurement.
    """

    name: str
    value: float
    low: float | None = None
    high: float | None = None
    unit: str = ""
    conditions: str = ""

    def __str__(self) -> str:
        interval = (
            "" if self.low is None or self.high is None else f" (95 % interval {self.low:.4g} to {self.high:.4g})"
        )
        return f"{self.value:.4g}{' ' if self.unit else ''}{self.unit}{interval}"


def measured_numbers(manifest: Manifest) -> list[MeasuredNumber]:
    """Return all measured numbers that a manifest records."""
    return list(_measured(manifest))


def _measured(manifest: Manifest) -> Iterator[MeasuredNumber]:
    for step in manifest.steps:
        difference = step.validation.get("max_abs_difference")
        if isinstance(difference, int | float):
            accepted = step.validation.get("tolerance")
            against = "PyTorch" if step.stage == "export" else "the input of the stage"
            yield MeasuredNumber(
                name=f"largest difference of {step.stage}", value=float(difference),
                conditions=f"from {against}, with {step.backend}; at most {accepted} was accepted",
            )  # fmt: skip
        accuracy = step.validation.get("accuracy")
        if isinstance(accuracy, Mapping) and isinstance(accuracy.get("value"), int | float):
            yield from _accuracy(accuracy)
    measured = manifest.run.measured if manifest.run is not None else {}
    if isinstance(measured.get("value"), int | float):
        yield MeasuredNumber(
            name=str(measured.get("metric", "metric")), value=float(measured["value"]),
            conditions=f"{measured.get('rows')} rows of {_data(measured.get('data'))}; PyTorch in float32: "
            f"{measured.get('pytorch_float32')}",
        )  # fmt: skip
    for workload, milliseconds in dict(measured.get("median_ms") or {}).items():
        assert manifest.run is not None
        before = dict(measured.get("pytorch_float32_ms") or {}).get(workload)
        yield MeasuredNumber(
            name=f"median latency of {workload}", value=float(milliseconds), unit="ms",
            conditions=f"{manifest.run.backend} on {manifest.run.device}; PyTorch in float32: {before} ms",
        )  # fmt: skip


def _accuracy(accuracy: Mapping[str, Any]) -> Iterator[MeasuredNumber]:
    data = accuracy.get("data")
    rows = data.get("n") if isinstance(data, Mapping) else None
    conditions = f"{rows} rows of {_data(data)}"
    yield MeasuredNumber(
        name=str(accuracy.get("metric", "metric")), value=float(accuracy["value"]),
        conditions=f"{conditions}; in float: {accuracy.get('float')}",
    )  # fmt: skip
    if isinstance(accuracy.get("drop"), int | float):
        low, high = accuracy.get("drop_interval") or (None, None)
        yield MeasuredNumber(
            name=f"drop of {accuracy.get('metric', 'metric')}", value=float(accuracy["drop"]), low=low, high=high, unit="points",
            conditions=conditions,
        )  # fmt: skip


def _data(data: Any) -> str:
    if isinstance(data, Mapping):
        return Path(str(data.get("source") or data.get("name") or "the data")).name
    return Path(str(data)).name if data else "the data"


def write_provenance(artifact: Artifact) -> tuple[Path, Path]:
    """Write `accel.intoto.json` and `accel.cdx.json` into the folder of an artifact, and return both paths."""
    statement, materials = artifact.path / STATEMENT, artifact.path / MATERIALS
    for path, values in ((statement, in_toto_statement(artifact)), (materials, bill_of_materials(artifact))):
        path.write_text(json.dumps(values, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
    return statement, materials


def _digests(artifact: Artifact) -> dict[str, str]:
    """Return the SHA-256 checksum of each recorded file, and of the manifest."""
    records = {record.name: record for component in artifact.components for record in component.files}
    records |= {record.name: record for record in artifact.manifest.files}
    return {**{name: record.sha256 for name, record in records.items()}, MANIFEST: sha256(artifact.path / MANIFEST)}


def _source_name(manifest: Manifest) -> str:
    """Return the Hub id of the source, or the name of its folder without the path of this machine."""
    source = manifest.source.id if manifest.source is not None else "unknown"
    return source if _HUB_ID.fullmatch(source) else Path(source).name


def in_toto_statement(artifact: Artifact) -> dict[str, Any]:
    """Return an in-toto statement (v1) with SLSA provenance (v1): files, source, stages, versions and measured numbers."""
    manifest = artifact.manifest
    source = manifest.source
    dependencies: list[dict[str, Any]] = []
    if source is not None:
        entry: dict[str, Any] = {"name": _source_name(manifest)}
        if source.digest:
            entry["digest"] = {"accel_folder_sha256": source.digest}
        if source.revision:
            entry["annotations"] = {"revision": source.revision}
        dependencies.append(entry)
    dependencies += [
        {"name": name, "uri": f"pkg:pypi/{name}@{version}"} for name, version in _versions(manifest).items()
    ]
    steps = [{"stage": step.stage, "backend": step.backend, "config": dict(step.config)} for step in manifest.steps]
    numbers = [
        {key: value for key, value in _fields(number).items() if value not in (None, "")}
        for number in measured_numbers(manifest)
    ]
    return {
        "_type": "https://in-toto.io/Statement/v1",
        "subject": [
            {"name": name, "digest": {"sha256": digest}} for name, digest in sorted(_digests(artifact).items())
        ],
        "predicateType": "https://slsa.dev/provenance/v1",
        "predicate": {
            "buildDefinition": {
                "buildType": "https://accel-transformers/artifact/v1",
                "externalParameters": {"task": manifest.task, "format": manifest.format, "steps": steps},
                "resolvedDependencies": dependencies,
            },
            "runDetails": {
                "builder": {
                    "id": "https://accel-transformers/builder",
                    "version": {"accel-transformers": manifest.accel},
                },
                "byproducts": [{"name": "measurements", "annotations": {"numbers": numbers}}],
            },
        },
    }


def _fields(number: MeasuredNumber) -> dict[str, Any]:
    names = ("name", "value", "low", "high", "unit", "conditions")
    return {name: getattr(number, name) for name in names}


def _versions(manifest: Manifest) -> dict[str, str]:
    versions: dict[str, str] = {}
    for step in manifest.steps:
        versions |= {name: version for name, version in step.versions.items() if name != "accel"}
    return versions


def bill_of_materials(artifact: Artifact) -> dict[str, Any]:
    """Return a CycloneDX bill of materials (1.6): the model with its card, its files, its source and the libraries."""
    manifest = artifact.manifest
    metrics = []
    for number in measured_numbers(manifest):
        metric: dict[str, Any] = {
            "type": number.name,
            "value": f"{number.value:.6g}{' ' if number.unit else ''}{number.unit}",
        }
        if number.conditions:
            metric["slice"] = number.conditions
        if number.low is not None and number.high is not None:
            metric["confidenceInterval"] = {"lowerBound": f"{number.low:.6g}", "upperBound": f"{number.high:.6g}"}
        metrics.append(metric)
    files: list[dict[str, Any]] = [
        {"type": "file", "bom-ref": f"file:{name}", "name": name, "hashes": [{"alg": "SHA-256", "content": digest}]}
        for name, digest in sorted(_digests(artifact).items())
    ]
    libraries: list[dict[str, Any]] = [
        {"type": "library", "bom-ref": f"pkg:pypi/{name}@{version}", "name": name, "version": version, "purl": f"pkg:pypi/{name}@{version}"}
        for name, version in _versions(manifest).items()
    ]  # fmt: skip
    parent = []
    if manifest.source is not None:
        revision = {"version": manifest.source.revision} if manifest.source.revision else {}
        parent = [{"type": "machine-learning-model", "bom-ref": "source", "name": _source_name(manifest), **revision}]
    parameters: dict[str, Any] = {"task": manifest.task, "modelArchitecture": manifest.architecture}
    return {
        "bomFormat": "CycloneDX",
        "specVersion": "1.6",
        "version": 1,
        "metadata": {
            "tools": {"components": [{"type": "application", "name": "accel-transformers", "version": manifest.accel}]},
            "component": {
                "type": "machine-learning-model",
                "bom-ref": "model",
                "name": _source_name(manifest),
                "version": artifact.digest[:12],
                "description": f"{manifest.format}, {manifest.dtype}",
                "modelCard": {
                    "modelParameters": {name: value for name, value in parameters.items() if value},
                    "quantitativeAnalysis": {"performanceMetrics": metrics},
                },
                "pedigree": {"ancestors": parent},
            },
        },
        "components": [*files, *libraries],
        "dependencies": [{"ref": "model", "dependsOn": [entry["bom-ref"] for entry in (*files, *libraries)]}],
    }
