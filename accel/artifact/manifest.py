"""The artifact: an immutable folder with graph files, configs, processor files and the manifest `accel.json`.

The manifest records the files, inputs and outputs of each component, and how the artifact was made and measured. A
stage reads one artifact and writes a new one; an existing artifact is never changed.
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
from .json_reading import build, read_bytes_and_json
from .probe_file import without_tokens
from .signatures import MATERIALS, SIGNATURE, STATEMENT, check_required
from .tensor_specs import TensorSpec
from .unrecorded_files import check_nothing_added

logger = logging.getLogger(__name__)

MANIFEST = "accel.json"
MARK = "accel.manifest"
"""Metadata key in graphs that were written with a manifest. Graphs without it are treated as graphs of other tools."""
SCHEMA_VERSION = 2
_WITH_FILES = 2
"""First schema version that records checksums of configs and tokenizer files, and a checksum of the manifest itself."""
_SEAL, _UNSEALED = "sha256", "0" * 64
"""Key of the manifest's own checksum, and its placeholder. The checksum is computed while the text contains the
placeholder.
"""
_CHECKSUM, _NAME = re.compile(r"[0-9a-f]{64}"), re.compile(r"[A-Za-z0-9_.-]{1,100}")
_LARGEST = 1 << 40

DTYPES = frozenset(
    ("bool", "uint8", "int8", "int16", "int32", "int64", "uint16", "uint32", "uint64", "float8_e4m3fn", "float8_e5m2",
     "float16", "bfloat16", "float32", "float64", "complex64")
)  # fmt: skip
"""Allowed element types of tensors, as torch names."""

PADDING_DIFFERENCE = "padding_difference"
"""Key in the validation record of an export: how much padding changes the outputs, relative to the largest output."""

ROW_DIFFERENCE = "row_difference"
"""Key in the validation record of an export: largest difference between rows of a batch and the same rows run alone."""

WEIGHT_ERROR = "weight_error"
"""Key in the validation record of a quantization in one pass: largest error of a quantized weight, relative to the weight's norm."""

OWN_ROUNDING = "own_rounding"
"""Key in the validation record of an export, if measured: difference between float32 and float64 in PyTorch, relative
to the scale of an output.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Component:
    """A graph of an artifact, with its files, inputs and outputs.

    Attributes:
        name: Name of the component; `model` for tasks with a single graph.
        file: The graph file.
        files: The graph file and its weight files, with checksums.
        inputs: Inputs of the graph.
        outputs: Outputs of the graph.
        max_sizes: Largest size of each limited axis by axis name, such as the number of positions.
        unused_inputs: Inputs of the model that do not affect its result. They are dropped when passed.
        own_defaults: Inputs for which the PyTorch model computes its own default. accel never adds a default for these
            inputs, and never drops a value that the caller passed.
        stateful: Whether sessions keep a KV cache or another state between calls (`Session.new_state`).
        croppable: Whether tokens can be removed from the state. True for a KV cache; false for a state of fixed size, as
            in state-space models.
        continues: For decoders: how many new tokens a call accepts after earlier calls. `any` number; `one`, if the
            graph was made for single steps; `none`, if the graph has no cache and computes all tokens again in each
            call.
        domains: Operator domains of the graph's nodes, sorted; `""` is the standard domain. `None` if the domains are
            unknown or the format has no operators.
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
        """Largest total number of cached and new tokens of a decoder; 0 if the model has no limit."""
        return self.max_sizes.get("total", self.max_sizes.get("sequence", 0))


@dataclass(frozen=True, slots=True, kw_only=True)
class Origin:
    """The source of a model: Hub id or folder name, resolved revision, and a digest of its files."""

    id: str
    revision: str | None = None
    digest: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """A record of a stage that produced the artifact: its backend, settings, package versions, duration and validation."""

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
    """The quantization scheme of an artifact, and its calibration data."""

    scheme: str
    preset: str = ""
    excluded: tuple[str, ...] = ()
    calibration: Mapping[str, Any] | None = None


CHECKPOINT_METHODS = ("auto-round", "awq", "compressed-tensors", "gptq", "torchao")
"""Values of `Quantization.preset` for quantizations by other tools: the integers are those of the checkpoint."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FastestRunSettings:
    """The fastest measured settings for running the artifact. `from_pretrained` uses them."""

    backend: str
    device: str = "cpu"
    session: Mapping[str, Any] = field(default_factory=dict)
    provider_options: Mapping[str, Any] = field(default_factory=dict)
    measured: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class Manifest:
    """The content of `accel.json`.

    Attributes:
        format: Format of the graphs: `onnx`, `openvino_ir`, ...
        task: The task of the model.
        architecture: Class name of the model.
        dtype: Default data type for computation in sessions.
        opset: Opset of ONNX graphs.
        source: The source of the model.
        components: The graphs.
        quantization: The quantization.
        steps: The stages that produced the artifact, oldest first.
        run: The fastest measured settings for running the artifact.
        target: The required hardware and software, if the artifact runs nowhere else.
        files: The other files: configs, tokenizers, processors. Schema 1 did not record them.
        schema: Version of the manifest's schema.
        accel: The version of accel that wrote the manifest.
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
    run: FastestRunSettings | None = None
    target: Mapping[str, Any] | None = None
    files: tuple[FileRecord, ...] = ()
    schema: int = SCHEMA_VERSION
    accel: str = __version__

    def to_dict(self) -> dict[str, Any]:
        """Return the manifest as JSON values."""
        values = asdict(self)
        for component in values["components"]:
            for spec in (*component["inputs"], *component["outputs"]):
                for name, default in (("bounds", None), ("required", None), ("equal_counts", False)):
                    if spec[name] is default:
                        del spec[name]
            for name, unwritten in (("domains", None), ("own_defaults", ()), ("croppable", True), ("continues", "any")):
                if component[name] == unwritten:
                    del component[name]
        return values

    @classmethod
    def from_dict(cls, values: Mapping[str, Any], where: Path) -> Manifest:
        """Make a manifest from the JSON values of the file `where`.

        Raises:
            SchemaError: The schema is newer than this version of accel, or the JSON is not a manifest.
        """
        schema = values.get("schema")
        if not isinstance(schema, int) or isinstance(schema, bool):
            raise SchemaError(
                f"{where} is not a manifest of accel: it has no schema number.",
                fix="create the artifact again. If another tool exported the model, delete accel.json; accel does not need it.",
            )
        if schema > SCHEMA_VERSION:
            raise SchemaError(
                f"{where} has schema version {schema}, but accel {__version__} reads only versions up to {SCHEMA_VERSION}.",
                fix="upgrade accel-transformers, or create the artifact again with this version.",
            )
        manifest = build(cls, values, str(where))
        manifest.check(where)
        return manifest

    def check(self, where: Path) -> None:
        """Check names, sizes and types in the manifest of the file `where`.

        Raises:
            SchemaError: A value is invalid.
        """
        wrong = next(self._faults(), None)
        if wrong is not None:
            raise SchemaError(f"The manifest {where} is invalid: {wrong}.", fix="create the artifact again.")

    def _faults(self) -> Iterator[str]:
        if not self.components:
            yield "it has no component"
        if len({component.name for component in self.components}) < len(self.components):
            yield "two components have the same name"
        for component in self.components:
            yield from _faults_of(component)
        recorded: dict[str, FileRecord] = {}
        for record in (*(record for component in self.components for record in component.files), *self.files):
            if _CHECKSUM.fullmatch(record.sha256) is None or record.bytes < 0:
                yield (
                    f"the record of {record.name[:80]!r} has the invalid size {record.bytes} or the invalid checksum "
                    f"{record.sha256[:80]!r}"
                )
            if recorded.setdefault(record.name, record) != record:
                yield f"the file {record.name[:80]!r} is recorded twice with different values"
        for step in self.steps:
            for measured in (PADDING_DIFFERENCE, ROW_DIFFERENCE, WEIGHT_ERROR, OWN_ROUNDING):
                value = step.validation.get(measured, 0)
                if not _is_finite(value) or value < 0:
                    yield f"{measured!r} of the step {step.stage!r} is {value!r}, not a number of at least 0"


def _faults_of(component: Component) -> Iterator[str]:
    # The component name must be valid in file names, because stages name files after it.
    if _NAME.fullmatch(component.name) is None or not component.name.strip("."):
        yield f"{component.name[:80]!r} is not a valid name of a component"
    for word, specs in (("input", component.inputs), ("output", component.outputs)):
        if not specs:
            yield f"the component {component.name!r} has no {word}"
        if len({spec.name for spec in specs}) < len(specs):
            yield f"two {word}s of the component {component.name!r} have the same name"
    for specs, others in ((component.inputs, component.outputs), (component.outputs, component.inputs)):
        counterparts = {spec.name: len(spec.shape) for spec in others}
        for spec in specs:
            if spec.dtype not in DTYPES:
                yield f"the tensor {spec.name!r} has the unknown type {spec.dtype!r}"
            if any(isinstance(size, int) and not 0 <= size <= _LARGEST for size in spec.shape):
                yield f"the tensor {spec.name!r} has the impossible shape {list(spec.shape)}"
            if not _is_finite(spec.pad_value) or ("float" not in spec.dtype and not _is_integer(spec.pad_value)):
                yield f"the padding value {spec.pad_value!r} of {spec.name!r} is not valid for {spec.dtype}"
            if spec.pair is not None and counterparts.get(spec.pair) != len(spec.shape):
                yield f"{spec.pair[:80]!r}, the pair of the cache tensor {spec.name!r}, is missing or has another rank"
    for axis, size in component.max_sizes.items():
        if not 0 < size <= _LARGEST:
            yield f"the largest size of the axis {axis!r} is {size}, not a number from 1 to {_LARGEST}"


def _is_integer(value: float) -> bool:
    return value == int(value) and abs(value) < 1 << 31


def _is_finite(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and abs(value) <= sys.float_info.max


@dataclass(frozen=True, slots=True)
class Artifact:
    """A folder with a manifest.

    Attributes:
        path: The absolute path of the folder.
        manifest: The manifest of the folder.
    """

    path: Path
    manifest: Manifest

    @property
    def format(self) -> str:
        """Format of the graphs: `onnx`, `openvino_ir`, ..."""
        return self.manifest.format

    @property
    def task(self) -> str:
        """The task of the model."""
        return self.manifest.task

    @property
    def dtype(self) -> str:
        """Default data type for computation in sessions."""
        return self.manifest.dtype

    @property
    def components(self) -> tuple[Component, ...]:
        """The graphs of the artifact."""
        return self.manifest.components

    def component(self, name: str = "model") -> Component:
        """Return the component with this name.

        Raises:
            ArtifactNotFoundError: There is no such component.
        """
        for component in self.components:
            if component.name == name:
                return component
        raise ArtifactNotFoundError(
            f"The artifact {self.path} has no component {name!r}; its components are {[c.name for c in self.components]}.",
            fix="use the name of an existing component.",
        )

    def file(self, component: str = "model") -> Path:
        """Return the graph file of a component."""
        return self.path / self.component(component).file

    @property
    def digest(self) -> str:
        """Digest of the graphs, weights and quantization. Measurements do not change it."""
        manifest = self.manifest.to_dict()
        content = {key: manifest[key] for key in ("format", "task", "dtype", "components", "quantization", "target")}
        for component in content["components"]:
            # Remove the domains, because older manifests did not record them, and the digest must be the same for both.
            component.pop("domains", None)
        return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()

    @property
    def domains(self) -> tuple[str, ...] | None:
        """Operator domains of all graphs; `None` if the domains of a graph are unknown."""
        domains: set[str] = set()
        for component in self.components:
            if component.domains is None:
                return None
            domains.update(component.domains)
        return tuple(sorted(domains))

    @property
    def bytes(self) -> int:
        """Total size of all graph files in bytes; a shared file counts once."""
        return sum({record.name: record.bytes for component in self.components for record in component.files}.values())

    @classmethod
    @checked_arguments()
    def load(cls, path: str | os.PathLike[str]) -> Artifact:
        """Read a folder with a manifest and check its files.

        The first check takes about one second per gigabyte. Checksums of files over 1 MiB are then cached by inode,
        size and modification times.

        Raises:
            ArtifactNotFoundError: The folder or its manifest does not exist.
            SchemaError: This version of accel cannot read the manifest.
            IntegrityError: A file is missing, truncated or changed, or a signature is required and not valid.
        """
        folder = Path(path).absolute()
        if (folder / MANIFEST).is_file():
            check_required(folder)
        return cls.read_unsigned(path)

    @classmethod
    def read_unsigned(cls, path: str | os.PathLike[str]) -> Artifact:
        """Read a folder like `load`, also if a signature is required."""
        artifact = cls._read(path)
        artifact.verify()
        return artifact

    @classmethod
    @checked_arguments()
    def accept_files(cls, path: str | os.PathLike[str]) -> Artifact:
        """Record the current configs and tokenizer files of a folder in its manifest. The graphs must be unchanged.

        Use it after such a file was changed on purpose. Nothing else changes a finished folder.

        Raises:
            ArtifactNotFoundError: The folder or its manifest does not exist.
            SchemaError: This version of accel cannot read the manifest.
            IntegrityError: A graph, or the manifest itself, is missing, truncated or changed.
        """
        artifact = cls._read(path)
        cls(artifact.path, replace(artifact.manifest, files=(), schema=SCHEMA_VERSION)).verify()
        without_tokens(artifact.path)
        return cls.create(artifact.path, artifact.manifest)

    @classmethod
    def _read(cls, path: str | os.PathLike[str]) -> Artifact:
        folder = Path(path).absolute()
        file = folder / MANIFEST
        if not file.is_file():
            raise ArtifactNotFoundError(
                f"{folder} is not an artifact of accel: it has no {MANIFEST}.",
                fix="check the path, or export a model with `accel export MODEL OUT`.",
            )
        content, values = read_bytes_and_json(file)
        _check_seal(file, content, values)
        return cls(folder, Manifest.from_dict(values, file))

    def verify(self) -> None:
        """Compare every recorded file with its checksum, and refuse unrecorded files that a library would read.

        Raises:
            IntegrityError: A file differs or lies outside the folder, a graph has no checksum, or a file (such as a
                tokenizer file) was added.
        """
        records = {record.name: record for component in self.components for record in component.files}
        for component in self.components:
            if component.file not in {record.name for record in component.files}:
                raise IntegrityError(
                    f"The manifest of {self.path} has no checksum of the graph {component.file!r}.",
                    fix="create the artifact again.",
                )
        verify(self.path, [*records.values(), *self.manifest.files])
        if self.manifest.schema < _WITH_FILES:
            _tell_unrecorded(self.path)
        else:
            check_nothing_added(self.path, [*records, *(record.name for record in self.manifest.files)])

    @classmethod
    def create(cls, folder: Path, manifest: Manifest, *, companions: bool = True) -> Artifact:
        """Write the manifest as the last file of a folder, and record the other files in it.

        Args:
            folder: The folder.
            manifest: The manifest.
            companions: Whether configs and tokenizer files are recorded. Pass `False` if another library may rewrite
                them.
        """
        graphs = {record.name for component in manifest.components for record in component.files}
        names = [
            name
            for name in sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file())
            if companions
            and name not in graphs
            and name not in (MANIFEST, SIGNATURE, STATEMENT, MATERIALS)
            and not any(part.startswith(".") for part in Path(name).parts)
        ]
        manifest = replace(manifest, files=record_files(folder, names), schema=SCHEMA_VERSION)
        # Replace the file in one step, so that a complete folder always has a manifest.
        written = folder / f".{MANIFEST}.{os.getpid()}"
        written.write_text(sealed(manifest.to_dict()), encoding="utf-8")
        written.replace(folder / MANIFEST)
        return cls(folder.absolute(), manifest)

    def after(self, step: Step, out: Path, *, components: Sequence[Component], **changes: Any) -> Artifact:
        """Write the manifest of a new artifact that a stage made from this artifact.

        Args:
            step: The record of the stage.
            out: The folder of the new artifact, complete except for the manifest.
            components: The new graphs.
            changes: Other changed fields of the manifest.
        """
        manifest = replace(
            self.manifest,
            components=tuple(components),
            steps=(*self.manifest.steps, replace(step, parent=self.digest)),
            # The measured settings of the parent do not apply to the new graph.
            run=None,
            **changes,
        )
        return Artifact.create(out, manifest)

    def with_step(self, **changes: Any) -> Artifact:
        """Replace fields of the last step and write the manifest again, before the folder is finished."""
        steps = (*self.manifest.steps[:-1], replace(self.manifest.steps[-1], **changes))
        return Artifact.create(self.path, replace(self.manifest, steps=steps))


def sealed(values: Mapping[str, Any]) -> str:
    """Return the text of a manifest with its own checksum inserted."""
    text = json.dumps({**values, _SEAL: _UNSEALED}, indent=2, ensure_ascii=False) + "\n"
    return text.replace(_UNSEALED, hashlib.sha256(text.encode()).hexdigest())


def _check_seal(file: Path, content: bytes, values: dict[str, Any]) -> None:
    """Check a manifest's own checksum, and remove it from `values`.

    Raises:
        IntegrityError: The manifest was changed.
    """
    seal, schema = values.pop(_SEAL, None), values.get("schema")
    if not isinstance(schema, int) or schema > SCHEMA_VERSION or (seal is None and schema < _WITH_FILES):
        return
    sealed = isinstance(seal, str) and _CHECKSUM.fullmatch(seal) is not None
    if not sealed or hashlib.sha256(content.replace(seal.encode(), _UNSEALED.encode())).hexdigest() != seal:
        raise IntegrityError(
            f"The manifest {file} was changed: its content does not match the checksum that it contains.",
            fix="create the artifact again, or copy the file again from the original artifact.",
        )


@functools.lru_cache(maxsize=256)
def _tell_unrecorded(folder: Path) -> None:
    """Warn once that an older manifest records only graphs and has no checksums of configs and tokenizers."""
    logger.warning(
        "%s was created by an older version of accel, which recorded no checksums of tokenizers and configs. accel cannot "
        "detect changes to these files. Create the artifact again, or save it with save_pretrained, to record the checksums.",
        folder,
    )


def lost_manifest(graph: Path) -> IntegrityError:
    """Return the error for a graph that accel exported (it has the metadata key of accel) in a folder without a manifest."""
    return IntegrityError(
        f"{graph} is a graph of accel, but its manifest {graph.parent / MANIFEST} is missing. Without the manifest, the "
        "inputs, outputs and files of the graph are unknown.",
        fix="copy the whole folder again, or create the artifact again.",
    )


def with_files(folder: Path, components: Sequence[Component], names: Sequence[Sequence[str]]) -> tuple[Component, ...]:
    """Return the components with records of their files in `folder`. `names` are the files of each component; a shared
    file is read once.
    """
    distinct = list(dict.fromkeys(name for of_one in names for name in of_one))
    records = {record.name: record for record in record_files(folder, distinct)}
    return tuple(
        replace(component, files=tuple(records[name] for name in of_one))
        for component, of_one in zip(components, names, strict=True)
    )
