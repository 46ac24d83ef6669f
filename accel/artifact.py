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
import platform
import secrets
import shutil
import socket
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from . import __version__
from .errors import ArtifactNotFoundError, IntegrityError, OutputFolderError, SchemaError
from .specs import TensorSpec

logger = logging.getLogger(__name__)

MANIFEST = "accel.json"
SCHEMA_VERSION = 1
_CHUNK_BYTES = 1 << 20
_STAGING_PREFIX = ".accel-staging-"
_STAGING_MAX_AGE_S = 24 * 3600

PADDING_DIFFERENCE = "padding_difference"
"""In an export's validation: how much more padding changes the model's answers, relative to the largest."""

# Small files that travel with a model: configs, tokenizers, processors, sentence-transformers' module list.
_COMPANION_SUFFIXES = (".json", ".txt", ".model", ".jinja", ".tiktoken", ".bpe")
_NOT_COMPANIONS = (
    ".index.json",
    MANIFEST,
    "export.json",
    "ort_config.json",
    "trainer_state.json",
    "adapter_config.json",
)
_COMPANION_MAX_BYTES = 64 << 20


def accel_home() -> Path:
    """Where on-the-fly exports and caches live: `$ACCEL_HOME`, or `accel` in the user's cache folder."""
    if home := os.environ.get("ACCEL_HOME"):
        return Path(home).expanduser().absolute()
    return Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")).expanduser().absolute() / "accel"


@dataclass(frozen=True, slots=True, kw_only=True)
class FileRecord:
    """One file of a component: its name relative to the folder, its size in bytes and its checksum."""

    name: str
    bytes: int
    sha256: str


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
    """

    name: str
    file: str
    files: tuple[FileRecord, ...]
    inputs: tuple[TensorSpec, ...]
    outputs: tuple[TensorSpec, ...]
    max_sizes: Mapping[str, int] = field(default_factory=dict)
    unused_inputs: tuple[str, ...] = ()
    stateful: bool = False


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
        return asdict(self)

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
        return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()

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
            IntegrityError: The first file that differs, by name.
        """
        for component in self.components:
            for record in component.files:
                _verify(self.path, record)

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


def sha256(path: Path) -> str:
    """The file's checksum in hexadecimal."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def record_files(folder: Path, names: Sequence[str]) -> tuple[FileRecord, ...]:
    """Sizes and checksums of files in `folder`."""
    return tuple(FileRecord(name=n, bytes=(folder / n).stat().st_size, sha256=sha256(folder / n)) for n in names)


def with_files(folder: Path, components: Sequence[Component], names: Sequence[Sequence[str]]) -> tuple[Component, ...]:
    """Components with records of their files in `folder`; a file that several share is read once."""
    distinct = list(dict.fromkeys(name for of_one in names for name in of_one))
    records = {record.name: record for record in record_files(folder, distinct)}
    return tuple(
        replace(component, files=tuple(records[name] for name in of_one))
        for component, of_one in zip(components, names, strict=True)
    )


def _verify(folder: Path, record: FileRecord) -> None:
    path = folder / record.name
    remedy = "make the artifact again, or copy the file again from where it came."
    if Path(record.name).is_absolute() or ".." in Path(record.name).parts:
        raise IntegrityError(f"The manifest of {folder} names a file outside the folder: {record.name!r}.", fix=remedy)
    try:
        stat = path.stat()
    except OSError as error:
        raise IntegrityError(f"{path} is missing.", fix=remedy) from error
    if stat.st_size != record.bytes:
        raise IntegrityError(
            f"{path} has {stat.st_size} bytes instead of {record.bytes}: truncated or changed.", fix=remedy
        )
    key = f"{stat.st_dev}:{stat.st_ino}:{stat.st_size}:{stat.st_mtime_ns}"
    verified = _verified()
    if verified.get(key) == record.sha256:
        return
    found = sha256(path)
    if found != record.sha256:
        raise IntegrityError(
            f"{path} has checksum {found[:12]}… instead of {record.sha256[:12]}…: changed.", fix=remedy
        )
    _remember_verified({**verified, key: found})


def _verified() -> dict[str, str]:
    try:
        values = json.loads((accel_home() / "verified.json").read_text(encoding="utf-8"))
        return values if isinstance(values, dict) else {}
    except (OSError, ValueError):
        return {}


def _remember_verified(entries: Mapping[str, str]) -> None:
    """Best effort: a read-only home only costs the next load another checksum."""
    path = accel_home() / "verified.json"
    temporary = path.with_name(f"{path.name}.{os.getpid()}.{secrets.token_hex(4)}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        temporary.write_text(json.dumps(dict(list(entries.items())[-2000:])), encoding="utf-8")
        temporary.replace(path)
    except OSError as error:
        logger.debug("cannot remember verified checksums in %s: %s", path, error)


# Writing: a temporary folder beside the target, moved into place when it is complete.


def check_output(out: str | os.PathLike[str], *inputs: Path | None) -> Path:
    """The absolute output folder, refused when it is an input or holds something.

    Raises:
        OutputFolderError: With what is in the way.
    """
    target = Path(out).expanduser().absolute()
    for source in inputs:
        if source is not None and source.exists() and target.resolve() == source.resolve():
            raise OutputFolderError(f"{target} is also the input.", fix="name another output folder.")
    if target.is_dir() and any(target.iterdir()):
        raise OutputFolderError(f"{target} is not empty.", fix="name a new folder, or remove this one first.")
    if target.exists() and not target.is_dir():
        raise OutputFolderError(f"{target} is a file.", fix="name a folder.")
    return target


@contextmanager
def staging(out: str | os.PathLike[str]) -> Iterator[Path]:
    """A new folder beside `out` that becomes `out` when the block ends well and vanishes when it does not.

    A killed process leaves at most a folder whose name starts with `.accel-staging-`; the next run beside it removes
    those whose process is gone.
    """
    target = check_output(out)
    temporary = target.parent / f"{_STAGING_PREFIX}{_host()}-{os.getpid()}-{secrets.token_hex(4)}"
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        _remove_stale(target.parent)
        temporary.mkdir()
    except OSError as error:
        raise OutputFolderError(
            f"{target} cannot be made: {error}.", fix="name a folder that can be written."
        ) from error
    try:
        yield temporary
        try:
            temporary.replace(target)
        except OSError as error:
            raise OutputFolderError(
                f"{target} appeared while it was being made: {error}.", fix="use that one."
            ) from error
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


@functools.cache
def _host() -> str:
    return hashlib.sha256(socket.gethostname().encode()).hexdigest()[:8]


def _remove_stale(folder: Path) -> None:
    for entry in folder.glob(f"{_STAGING_PREFIX}*"):
        host, pid, *_ = entry.name.removeprefix(_STAGING_PREFIX).split("-")
        try:
            old = time.time() - entry.stat().st_mtime > _STAGING_MAX_AGE_S
        except OSError:
            continue
        if old or (host == _host() and pid.isdigit() and not _alive(int(pid))):
            logger.info("removing %s, left by an interrupted run", entry)
            shutil.rmtree(entry, ignore_errors=True)


def _alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True


def copy_companions(source: Path, target: Path) -> None:
    """Copy configs, tokenizer and processor files (and sentence-transformers' folders of them), but no weights."""
    for path in sorted(source.iterdir()):
        if path.is_dir() and any(path.glob("config.json")) and path.name[:1].isdigit():
            (target / path.name).mkdir(exist_ok=True)
            shutil.copyfile(path / "config.json", target / path.name / "config.json")
        elif (
            path.is_file()
            and path.name.endswith((*_COMPANION_SUFFIXES, ".py"))
            and not path.name.endswith(_NOT_COMPANIONS)
            and path.stat().st_size <= _COMPANION_MAX_BYTES
            and not (target / path.name).exists()
        ):
            shutil.copyfile(path, target / path.name)


@functools.cache
def tool_versions(*distributions: str) -> dict[str, str]:
    """Versions of installed distributions, `accel` and Python; those not installed are left out."""
    from importlib import metadata

    versions = {"accel": __version__, "python": platform.python_version()}
    for name in distributions:
        try:
            versions[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return versions
