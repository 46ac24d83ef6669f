"""The immutable folder that stages pass along: graph files, configs, processor files and the manifest `accel.json`.

The manifest is the truth about the folder: which file is which component, what goes in and out of it, how it was made
and measured. A stage reads one artifact and writes another; nothing edits one in place.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from .._version import __version__
from ..errors import ArtifactNotFoundError, IntegrityError, SchemaError
from .checksums import FileRecord, record_files, verify
from .tensors import TensorSpec

MANIFEST = "accel.json"
SCHEMA_VERSION = 1

PADDING_DIFFERENCE = "padding_difference"
"""In an export's validation: how much more padding changes the model's answers, relative to the largest."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Component:
    """One graph.

    Attributes:
        name: `model` for a single-graph task.
        file: The graph file.
        files: The graph file and what it needs beside it, with checksums.
        inputs: What it takes.
        outputs: What it returns.
        max_sizes: Largest size of a named axis, where the model has a limit (its positions).
        unused_inputs: Inputs of the model that its result does not depend on; dropped when given.
        stateful: Whether its sessions keep a KV cache (`Session.new_state`).
        domains: Domains of the operators that its nodes use, sorted: `""` is the standard's. `None` where that is unknown
            or the format has no operators.
    """

    name: str
    file: str
    files: tuple[FileRecord, ...]
    inputs: tuple[TensorSpec, ...]
    outputs: tuple[TensorSpec, ...]
    max_sizes: Mapping[str, int] = field(default_factory=dict)
    unused_inputs: tuple[str, ...] = ()
    stateful: bool = False
    domains: tuple[str, ...] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Origin:
    """Where a model came from: id or folder name, resolved revision, and a digest of its files."""

    id: str
    revision: str | None = None
    digest: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """One stage that the artifact went through."""

    stage: str
    backend: str
    config: Mapping[str, Any] = field(default_factory=dict)
    versions: Mapping[str, str] = field(default_factory=dict)
    seconds: float = 0.0
    parent: str | None = None
    validation: Mapping[str, Any] = field(default_factory=dict)
    report: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class Quantization:
    """What was quantized and with what data."""

    scheme: str
    preset: str = ""
    excluded: tuple[str, ...] = ()
    calibration: Mapping[str, Any] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class RunRecord:
    """How the artifact was measured to run best; `from_pretrained` follows it."""

    backend: str
    device: str = "cpu"
    session: Mapping[str, Any] = field(default_factory=dict)
    provider_options: Mapping[str, Any] = field(default_factory=dict)
    measured: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class Manifest:
    """The content of `accel.json`."""

    format: str
    task: str
    architecture: str = ""
    dtype: str = "float32"
    opset: int | None = None
    source: Origin | None = None
    components: tuple[Component, ...] = ()
    quantization: Quantization | None = None
    steps: tuple[Step, ...] = ()
    run: RunRecord | None = None
    target: Mapping[str, Any] | None = None
    schema: int = SCHEMA_VERSION
    accel: str = __version__

    def to_dict(self) -> dict[str, Any]:
        """As JSON values."""
        values = asdict(self)
        for component in values["components"]:
            if component["domains"] is None:
                del component["domains"]
        return values

    @classmethod
    def from_dict(cls, values: Mapping[str, Any], where: Path) -> Manifest:
        """From the JSON in the file `where`, which errors name.

        Raises:
            SchemaError: A newer schema, or not a manifest.
        """
        schema = values.get("schema")
        if not isinstance(schema, int):
            raise SchemaError(
                f"{where} is not an accel manifest: it has no schema number.",
                fix="make the artifact again; a folder of another tool's needs no accel.json.",
            )
        if schema > SCHEMA_VERSION:
            raise SchemaError(
                f"{where} has schema {schema}; this accel {__version__} reads up to {SCHEMA_VERSION}.",
                fix="upgrade accel-transformers, or make the artifact again with this version.",
            )
        try:
            parsed = dict(values)
            parsed["components"] = tuple(_component(item) for item in values["components"])
            if not parsed["components"]:
                raise SchemaError(f"{where} names no component.", fix="make the artifact again.")
            parsed["steps"] = tuple(Step(**item) for item in values.get("steps", ()))
            for name, cls_ in (("source", Origin), ("quantization", Quantization), ("run", RunRecord)):
                if values.get(name) is not None:
                    parsed[name] = cls_(**{k: _tuple(v) for k, v in values[name].items()})
            return cls(**parsed)
        except (KeyError, TypeError, AttributeError) as error:
            raise SchemaError(f"{where} is malformed: {error}.", fix="make the artifact again.") from error


def _tuple(value: Any) -> Any:
    return tuple(value) if isinstance(value, list) else value


def _component(values: Mapping[str, Any]) -> Component:
    def specs(items: Sequence[Mapping[str, Any]]) -> tuple[TensorSpec, ...]:
        return tuple(TensorSpec(**{**item, "shape": tuple(item["shape"])}) for item in items)

    return Component(
        **{
            **values,
            "files": tuple(FileRecord(**item) for item in values["files"]),
            "inputs": specs(values["inputs"]),
            "outputs": specs(values["outputs"]),
            "unused_inputs": tuple(values.get("unused_inputs", ())),
            "domains": _tuple(values.get("domains")),
        }
    )


@dataclass(frozen=True, slots=True)
class Artifact:
    """A folder and its manifest.

    Attributes:
        path: The absolute folder.
        manifest: What is in it.
    """

    path: Path
    manifest: Manifest

    @property
    def format(self) -> str:
        """`onnx`, `openvino_ir`, ..."""
        return self.manifest.format

    @property
    def task(self) -> str:
        """The task it was made for."""
        return self.manifest.task

    @property
    def dtype(self) -> str:
        """The element type that it computes in unless a session is asked for another."""
        return self.manifest.dtype

    @property
    def components(self) -> tuple[Component, ...]:
        """Its graphs."""
        return self.manifest.components

    def component(self, name: str = "model") -> Component:
        """The graph of that name.

        Raises:
            ArtifactNotFoundError: There is none.
        """
        for component in self.components:
            if component.name == name:
                return component
        raise ArtifactNotFoundError(f"{self.path} has no component {name!r}, only {[c.name for c in self.components]}.")

    def file(self, component: str = "model") -> Path:
        """The graph file of a component."""
        return self.path / self.component(component).file

    @property
    def digest(self) -> str:
        """Identifies graphs, weights and quantization; what was measured about them does not count."""
        manifest = self.manifest.to_dict()
        content = {key: manifest[key] for key in ("format", "task", "dtype", "components", "quantization", "target")}
        for component in content["components"]:
            # It follows from the graph; graphs whose manifests do not say it keep their digests.
            component.pop("domains", None)
        return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()

    @property
    def domains(self) -> tuple[str, ...] | None:
        """Domains of the operators of all its graphs; `None` where that of one is unknown."""
        found: set[str] = set()
        for component in self.components:
            if component.domains is None:
                return None
            found.update(component.domains)
        return tuple(sorted(found))

    @property
    def bytes(self) -> int:
        """Size of all graph files; a file that components share counts once."""
        return sum({record.name: record.bytes for component in self.components for record in component.files}.values())

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Artifact:
        """Read a folder that has a manifest and check its files.

        Checksums cost about a second for each gigabyte the first time; the result is remembered by inode, size and
        modification time.

        Raises:
            ArtifactNotFoundError: No folder, or no manifest in it.
            SchemaError: A manifest that this version does not understand.
            IntegrityError: A file is missing, truncated or changed.
        """
        folder = Path(path).absolute()
        file = folder / MANIFEST
        if not file.is_file():
            raise ArtifactNotFoundError(
                f"{folder} is not an accel artifact: it has no {MANIFEST}.",
                fix="export a model into it with `accel export MODEL OUT`, or check the path.",
            )
        try:
            values = json.loads(file.read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            raise IntegrityError(f"{file} cannot be read: {error}.", fix="make the artifact again.") from error
        if not isinstance(values, dict):
            raise SchemaError(f"{file} is not an accel manifest.", fix="make the artifact again.")
        artifact = cls(folder, Manifest.from_dict(values, file))
        artifact.verify()
        return artifact

    def verify(self) -> None:
        """Compare every graph file with its checksum.

        Raises:
            IntegrityError: The first file that differs, by name; a graph without a checksum, or outside of the folder.
        """
        for component in self.components:
            for record in component.files:
                verify(self.path, record)
            if component.file not in {record.name for record in component.files}:
                raise IntegrityError(
                    f"The manifest of {self.path} has no checksum of {component.file!r}.",
                    fix="make the artifact again.",
                )

    @classmethod
    def create(cls, folder: Path, manifest: Manifest) -> Artifact:
        """Write the manifest into a folder that holds everything else."""
        text = json.dumps(manifest.to_dict(), indent=2, ensure_ascii=False) + "\n"
        (folder / MANIFEST).write_text(text, encoding="utf-8")
        return cls(folder.absolute(), manifest)

    def with_step(self, **changes: Any) -> Artifact:
        """The same folder with fields of its last step replaced; for the core, before the folder is final."""
        steps = (*self.manifest.steps[:-1], replace(self.manifest.steps[-1], **changes))
        return Artifact.create(self.path, replace(self.manifest, steps=steps))


def with_files(folder: Path, components: Sequence[Component], names: Sequence[Sequence[str]]) -> tuple[Component, ...]:
    """Components with records of their files in `folder`; a file that several share is read once."""
    distinct = list(dict.fromkeys(name for of_one in names for name in of_one))
    records = {record.name: record for record in record_files(folder, distinct)}
    return tuple(
        replace(component, files=tuple(records[name] for name in of_one))
        for component, of_one in zip(components, names, strict=True)
    )
