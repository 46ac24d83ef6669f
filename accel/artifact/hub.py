"""Model ids and paths: a local path is used as it is and never opens a socket; an id is downloaded once."""

from __future__ import annotations

import errno
import functools
import logging
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from types import NoneType

from ..errors import ArtifactNotFoundError, ConfigError

logger = logging.getLogger(__name__)

_CONFIGS = ("*.json", "*.txt", "*.model", "*.jinja", "*.tiktoken", "*/config.json")
_TORCH_WEIGHTS = ("*.bin", "*.pt", "*.pth", "*.h5", "*.msgpack", "*.safetensors", "*.ot", "*.ckpt")


@dataclass(frozen=True, slots=True, kw_only=True)
class HubOptions:
    """How to reach a model on the Hub; the words are transformers'."""

    revision: str | None = None
    token: str | bool | None = None
    cache_dir: str | os.PathLike[str] | None = None
    local_files_only: bool = False
    subfolder: str = ""
    trust_remote_code: bool = False

    def __post_init__(self) -> None:
        # Any text counts as true to Python, "False" too, and this one says whose code runs.
        for name, kinds, words in (
            ("trust_remote_code", (bool, NoneType), "True or False"),
            ("revision", (str, NoneType), "a branch, a tag or a commit"),
            ("subfolder", (str, os.PathLike, NoneType), "a folder's name"),
        ):
            value = getattr(self, name)
            if not isinstance(value, kinds):
                raise ConfigError(f"{name} is {value!r}.", fix=f"pass {words}.")


@dataclass(frozen=True, slots=True)
class Location:
    """A model on this machine: what the user called it, its folder, its commit if it came from the Hub, and the folder of the
    whole repository where its own is a subfolder of it.
    """

    id: str
    folder: Path
    revision: str | None = None
    root: Path | None = None


def as_folder(name: str | os.PathLike[str]) -> Path | None:
    """The folder that a name means; `None` where it may be an id.

    Raises:
        ArtifactNotFoundError: A path that this user may not look at, or that no file can have.
    """
    path = Path(name).expanduser()
    try:
        return path if path.is_dir() else None
    except OSError as error:
        if error.errno == errno.ENAMETOOLONG:
            raise ArtifactNotFoundError(
                f"{os.fspath(name)[:80]!r}... is longer than a name can be.", fix="check the name."
            ) from error
        raise ArtifactNotFoundError(f"{path} cannot be read: {error}.", fix="ask for the right to read it.") from error


def locate(name: str | os.PathLike[str], options: HubOptions, *, want_graph: bool | None = None) -> Location:
    """The folder of a path or Hub id; an id is downloaded if it is not in the cache.

    Args:
        name: A path, or `org/name`.
        options: Revision, token and so on.
        want_graph: For an id: download exported graphs (`True`), PyTorch weights (`False`), or graphs where there
            are any (`None`).

    Raises:
        ArtifactNotFoundError: Neither a folder nor a repository that can be reached.
    """
    text = os.fspath(name)
    if (path := as_folder(text)) is not None:
        if options.revision is not None:
            _tell_without_revisions(path, options.revision)
        folder = path / options.subfolder if options.subfolder else path
        if not folder.is_dir():
            raise ArtifactNotFoundError(f"{path} has no subfolder {options.subfolder!r}.", fix="check subfolder=...")
        # Absolute: the manifest keeps it, and a relative one would read as a Hub id from another folder.
        return Location(str(folder.absolute()), folder.absolute(), root=path.absolute())
    if (path := Path(text).expanduser()).is_file():
        raise ArtifactNotFoundError(
            f"{path} is neither a folder nor a graph that can be taken by itself here.", fix="pass its folder."
        )
    if text.startswith((".", "/", "~")) or text.count("/") > 1 or not text:
        raise ArtifactNotFoundError(f"There is no folder {text!r}.", fix="check the path.")
    return _download(text, options, want_graph)


@functools.cache
def _tell_without_revisions(folder: Path, revision: str) -> None:
    """Say once that a folder is taken as it is."""
    logger.warning("%s is a folder, which has no revisions: revision=%r is passed over.", folder, revision)


def _download(name: str, options: HubOptions, want_graph: bool | None) -> Location:
    import huggingface_hub
    from huggingface_hub import constants  # not an attribute of the package until it is imported
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

    try:
        patterns = None
        if not options.local_files_only and not constants.HF_HUB_OFFLINE:
            files = huggingface_hub.HfApi(token=options.token).list_repo_files(name, revision=options.revision)
            patterns = _patterns(files, want_graph)
        folder = huggingface_hub.snapshot_download(
            name,
            revision=options.revision,
            token=options.token,
            cache_dir=os.fspath(options.cache_dir) if options.cache_dir else None,
            local_files_only=options.local_files_only,
            allow_patterns=patterns,
        )
    except (HfHubHTTPError, HFValidationError, LocalEntryNotFoundError, OSError) as error:
        raise ArtifactNotFoundError(
            f"{name!r} is neither a folder here nor a model that can be fetched from the Hub: {error}",
            fix="check the name, the network and, for a private model, token=...; or pass a local folder.",
        ) from error
    path = Path(folder)
    return Location(name, path / options.subfolder if options.subfolder else path, path.name, path)


def _patterns(files: Sequence[str], want_graph: bool | None) -> list[str]:
    """What to download: a graph repository's graphs, or the weights in the best format it has."""
    graphs = [file for file in files if file.endswith((".onnx", ".xml"))]
    if "accel.json" in files or (graphs and want_graph is not False):
        return [
            file
            for file in files
            if not any(file.endswith(suffix[1:]) for suffix in _TORCH_WEIGHTS if suffix != "*.bin")
        ]
    safe = any(file.endswith(".safetensors") for file in files)
    return [*_CONFIGS, "*.py", "*.safetensors" if safe else "*.bin"]
