"""The immutable folder that stages pass along: graph files, configs, processor files and the manifest `accel.json`.

The manifest is the truth about the folder: which file is which component, what goes in and out of it, how it was made
and measured. A stage reads one artifact and writes another; nothing edits one in place.
"""

from __future__ import annotations

import functools
import hashlib
import json
import logging
import os
import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

from .._version import __version__
from ..config import checked_arguments
from ..errors import ArtifactNotFoundError, IntegrityError, SchemaError
from .checksums import FileRecord, record_files, verify
from .reading import build, read_bytes_and_json
from .tensors import TensorSpec
from .unrecorded import check_nothing_added

logger = logging.getLogger(__name__)

MANIFEST = "accel.json"
MARK = "accel.manifest"
"""A key in the metadata of graphs that were written with a manifest: without it they are not taken for a foreign tool's."""
SCHEMA_VERSION = 2
_WITH_FILES = 2
"""The schema that began to record companions and its own checksum."""
_SEAL, _UNSEALED = "sha256", "0" * 64
"""The manifest's own checksum: of its text with zeros in this place."""
_CHECKSUM, _NAME = re.compile(r"[0-9a-f]{64}"), re.compile(r"[A-Za-z0-9_.-]{1,100}")
_LARGEST = 1 << 40

DTYPES = frozenset(
    ("bool", "uint8", "int8", "int16", "int32", "int64", "uint16", "uint32", "uint64", "float8_e4m3fn", "float8_e5m2",
     "float16", "bfloat16", "float32", "float64", "complex64")
)  # fmt: skip
"""Element types of tensors, by torch's names."""

PADDING_DIFFERENCE = "padding_difference"
"""In an export's validation: how much more padding changes the model's answers, relative to the largest."""

ROW_DIFFERENCE = "row_difference"
"""In an export's validation: the largest difference between rows of a batch and the same rows alone."""

OWN_ROUNDING = "own_rounding"
"""In an export's validation, where it was asked for: how far float32 is from float64 in PyTorch, for each 1 of an output's scale."""


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
        own_defaults: Inputs of the model for which it computes something of its own where they are left out, and not what
            others assume: the zeros of `token_type_ids`. Never filled in, and never dropped when given.
        stateful: Whether its sessions keep something between calls: a KV cache, a state (`Session.new_state`).
        croppable: Whether tokens can be taken back out of what they keep: keys and values can be cut off, a state of one size
            cannot.
        continues: Of a decoder: how many new tokens it takes behind those of earlier calls. `any` number; `one`, where its
            graph was made for single steps; `none`, where it keeps no cache and computes all tokens again at each call.
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
    own_defaults: tuple[str, ...] = ()
    stateful: bool = False
    croppable: bool = True
    continues: Literal["any", "one", "none"] = "any"
    domains: tuple[str, ...] | None = None

    @property
    def most_tokens(self) -> int:
        """Cached and new tokens of a decoder's text at most; 0 where its model has no limit."""
        return self.max_sizes.get("total", self.max_sizes.get("sequence", 0))


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
    """The content of `accel.json`.

    Attributes:
        format: `onnx`, `openvino_ir`, ...
        task: What it was made for.
        architecture: The class of the model.
        dtype: What it computes in unless a session is asked for another.
        opset: Of ONNX graphs.
        source: Where the model came from.
        components: Its graphs.
        quantization: What was quantized.
        steps: The stages it went through, oldest first.
        run: How it was measured to run best.
        target: What it was built for, where it runs nowhere else.
        files: Everything else that belongs to it: configs, tokenizers, processors. Schema 1 did not record them.
        schema: Which fields there are.
        accel: The version that wrote it.
    """

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
    files: tuple[FileRecord, ...] = ()
    schema: int = SCHEMA_VERSION
    accel: str = __version__

    def to_dict(self) -> dict[str, Any]:
        """As JSON values."""
        values = asdict(self)
        for component in values["components"]:
            if component["domains"] is None:
                del component["domains"]
            for spec in (*component["inputs"], *component["outputs"]):
                for name, default in (("bounds", None), ("required", None), ("equal_counts", False)):
                    if spec[name] is default:
                        del spec[name]
            if not component["own_defaults"]:
                del component["own_defaults"]
            if component["croppable"]:
                del component["croppable"]
            if component["continues"] == "any":
                del component["continues"]
        return values

    @classmethod
    def from_dict(cls, values: Mapping[str, Any], where: Path) -> Manifest:
        """From the JSON in the file `where`, which errors name.

        Raises:
            SchemaError: A newer schema, or not a manifest.
        """
        schema = values.get("schema")
        if not isinstance(schema, int) or isinstance(schema, bool):
            raise SchemaError(
                f"{where} is not an accel manifest: it has no schema number.",
                fix="make the artifact again; a folder of another tool's needs no accel.json.",
            )
        if schema > SCHEMA_VERSION:
            raise SchemaError(
                f"{where} has schema {schema}; this accel {__version__} reads up to {SCHEMA_VERSION}.",
                fix="upgrade accel-transformers, or make the artifact again with this version.",
            )
        manifest = build(cls, values, str(where))
        manifest.check(where)
        return manifest

    def check(self, where: Path) -> None:
        """Whether it can be true; `where` is what errors name.

        Raises:
            SchemaError: Names that are no names, sizes that are no sizes, types that no tensor has.
        """
        wrong = next(self._faults(), None)
        if wrong is not None:
            raise SchemaError(f"{where}: {wrong}.", fix="make the artifact again.")

    def _faults(self) -> Iterator[str]:
        if not self.components:
            yield "it names no component"
        if len({component.name for component in self.components}) < len(self.components):
            yield "two components have one name"
        for component in self.components:
            yield from _faults_of(component)
        recorded: dict[str, FileRecord] = {}
        for record in (*(record for component in self.components for record in component.files), *self.files):
            if _CHECKSUM.fullmatch(record.sha256) is None or record.bytes < 0:
                yield f"{record.name[:80]!r} has {record.bytes} bytes and the checksum {record.sha256[:80]!r}"
            if recorded.setdefault(record.name, record) != record:
                yield f"two records of {record.name[:80]!r} differ"
        for step in self.steps:
            for measured in (PADDING_DIFFERENCE, ROW_DIFFERENCE, OWN_ROUNDING):
                value = step.validation.get(measured, 0)
                if not _is_finite(value) or value < 0:
                    yield f"{measured!r} of the step {step.stage!r} is {value!r}"


def _faults_of(component: Component) -> Iterator[str]:
    # Stages name files after it.
    if _NAME.fullmatch(component.name) is None or not component.name.strip("."):
        yield f"{component.name[:80]!r} is no name of a component"
    for word, given in (("takes", component.inputs), ("returns", component.outputs)):
        if not given:
            yield f"{component.name!r} {word} nothing"
        if len({spec.name for spec in given}) < len(given):
            yield f"two tensors of {component.name!r} have one name"
    for specs, others in ((component.inputs, component.outputs), (component.outputs, component.inputs)):
        counterparts = {spec.name: len(spec.shape) for spec in others}
        for spec in specs:
            if spec.dtype not in DTYPES:
                yield f"{spec.name!r} is of {spec.dtype!r}, which is no type of tensors"
            if any(isinstance(size, int) and not 0 <= size <= _LARGEST for size in spec.shape):
                yield f"{spec.name!r} has an impossible shape"
            if not _is_finite(spec.pad_value) or ("float" not in spec.dtype and not _is_integer(spec.pad_value)):
                yield f"{spec.name!r} is padded with {spec.pad_value!r}"
            if spec.pair is not None and counterparts.get(spec.pair) != len(spec.shape):
                yield f"{spec.pair[:80]!r} is no counterpart of {spec.name!r}"
    for axis, size in component.max_sizes.items():
        if not 0 < size <= _LARGEST:
            yield f"the largest size of {axis!r} is {size}"


def _is_integer(value: float) -> bool:
    return value == int(value) and abs(value) < 1 << 31


def _is_finite(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and abs(value) <= sys.float_info.max


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
        raise ArtifactNotFoundError(
            f"{self.path} has no component {name!r}, only {[c.name for c in self.components]}.",
            fix="name one of these.",
        )

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
    @checked_arguments()
    def load(cls, path: str | os.PathLike[str]) -> Artifact:
        """Read a folder that has a manifest and check its files.

        Checksums cost about a second for each gigabyte the first time; of files over a mebibyte the result is remembered
        by inode, size and times of change.

        Raises:
            ArtifactNotFoundError: No folder, or no manifest in it.
            SchemaError: A manifest that this version does not understand.
            IntegrityError: A file is missing, truncated or changed.
        """
        artifact = cls._read(path)
        artifact.verify()
        return artifact

    @classmethod
    @checked_arguments()
    def accept_files(cls, path: str | os.PathLike[str]) -> Artifact:
        """Record the configs and tokenizer files of a folder as they are now; graphs have to be what they were.

        For files that were changed on purpose: the one way in which a folder changes after it was made.

        Raises:
            ArtifactNotFoundError: No folder, or no manifest in it.
            SchemaError: A manifest that this version does not understand.
            IntegrityError: A graph, or the manifest itself, is missing, truncated or changed.
        """
        artifact = cls._read(path)
        cls(artifact.path, replace(artifact.manifest, files=(), schema=SCHEMA_VERSION)).verify()
        return cls.create(artifact.path, artifact.manifest)

    @classmethod
    def _read(cls, path: str | os.PathLike[str]) -> Artifact:
        folder = Path(path).absolute()
        file = folder / MANIFEST
        if not file.is_file():
            raise ArtifactNotFoundError(
                f"{folder} is not an accel artifact: it has no {MANIFEST}.",
                fix="export a model into it with `accel export MODEL OUT`, or check the path.",
            )
        content, values = read_bytes_and_json(file)
        _check_seal(file, content, values)
        return cls(folder, Manifest.from_dict(values, file))

    def verify(self) -> None:
        """Compare every file that the manifest records with its checksum; others must be none that would be read with them.

        Raises:
            IntegrityError: The first file that differs, by name; a graph without a checksum, or outside of the folder; a file
                of the tokenizer's, say, that was added.
        """
        records = {record.name: record for component in self.components for record in component.files}
        for component in self.components:
            if component.file not in {record.name for record in component.files}:
                raise IntegrityError(
                    f"The manifest of {self.path} has no checksum of {component.file!r}.",
                    fix="make the artifact again.",
                )
        verify(self.path, [*records.values(), *self.manifest.files])
        if self.manifest.schema < _WITH_FILES:
            _tell_unrecorded(self.path)
        else:
            check_nothing_added(self.path, [*records, *(record.name for record in self.manifest.files)])

    @classmethod
    def create(cls, folder: Path, manifest: Manifest, *, companions: bool = True) -> Artifact:
        """Write the manifest into a folder that holds everything else, whose files it records.

        Args:
            folder: The folder.
            manifest: What is in it.
            companions: Whether configs and tokenizer files are recorded, too. Without, somebody else may write them again.
        """
        graphs = {record.name for component in manifest.components for record in component.files}
        names = [
            name
            for name in sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file())
            if companions
            and name not in graphs
            and name != MANIFEST
            and not any(part.startswith(".") for part in Path(name).parts)
        ]
        manifest = replace(manifest, files=record_files(folder, names), schema=SCHEMA_VERSION)
        # In one step: a folder that is complete already keeps its manifest, whatever happens meanwhile.
        written = folder / f".{MANIFEST}.{os.getpid()}"
        written.write_text(sealed(manifest.to_dict()), encoding="utf-8")
        written.replace(folder / MANIFEST)
        return cls(folder.absolute(), manifest)

    def with_step(self, **changes: Any) -> Artifact:
        """The same folder with fields of its last step replaced; for the core, before the folder is final."""
        steps = (*self.manifest.steps[:-1], replace(self.manifest.steps[-1], **changes))
        return Artifact.create(self.path, replace(self.manifest, steps=steps))


def sealed(values: Mapping[str, Any]) -> str:
    """The text of a manifest, with its own checksum in it."""
    text = json.dumps({**values, _SEAL: _UNSEALED}, indent=2, ensure_ascii=False) + "\n"
    return text.replace(_UNSEALED, hashlib.sha256(text.encode()).hexdigest())


def _check_seal(file: Path, content: bytes, values: dict[str, Any]) -> None:
    """Hold a manifest against its own checksum, which is taken out of `values`.

    Raises:
        IntegrityError: It was changed.
    """
    seal, schema = values.pop(_SEAL, None), values.get("schema")
    if not isinstance(schema, int) or schema > SCHEMA_VERSION or (seal is None and schema < _WITH_FILES):
        return
    sealed = isinstance(seal, str) and _CHECKSUM.fullmatch(seal) is not None
    if not sealed or hashlib.sha256(content.replace(seal.encode(), _UNSEALED.encode())).hexdigest() != seal:
        raise IntegrityError(
            f"{file} was changed: it does not fit the checksum in it.",
            fix="make the artifact again, or copy the file again from where it came.",
        )


@functools.lru_cache(maxsize=256)
def _tell_unrecorded(folder: Path) -> None:
    """Say once that a manifest of an older schema records graphs alone."""
    logger.warning(
        "%s was made by an older accel, which recorded no checksums of tokenizers and configs: changes to them are not "
        "found. Making the artifact again, or saving it with save_pretrained, records them.",
        folder,
    )


def lost_manifest(graph: Path) -> IntegrityError:
    """What to raise for a graph with our mark in a folder without a manifest."""
    return IntegrityError(
        f"{graph} was written with a manifest, and {graph.parent / MANIFEST} is missing: what goes in and out of the graph, "
        "and which files belong to it, is not known.",
        fix="copy the whole folder again, or make the artifact again.",
    )


def with_files(folder: Path, components: Sequence[Component], names: Sequence[Sequence[str]]) -> tuple[Component, ...]:
    """Components with records of their files in `folder`; a file that several share is read once."""
    distinct = list(dict.fromkeys(name for of_one in names for name in of_one))
    records = {record.name: record for record in record_files(folder, distinct)}
    return tuple(
        replace(component, files=tuple(records[name] for name in of_one))
        for component, of_one in zip(components, names, strict=True)
    )
