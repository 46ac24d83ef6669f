"""Model ids and paths: a local path is used as it is and never opens a socket; an id is downloaded once."""

from __future__ import annotations

import errno
import functools
import glob
import itertools
import logging
import os
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import NoneType

from ..config import check_type
from ..errors import ArtifactNotFoundError, did_you_mean
from .hub_files import files_to_fetch
from .manifest import MANIFEST

logger = logging.getLogger(__name__)

Graphs = Callable[[Sequence[str]], Sequence[str]]
"""Chooses the ONNX graphs that will be opened among the files of a folder."""

_TIMEOUT_S = 5.0
_MOST_NAMES = 1000
_OFFLINE = "set HF_HUB_OFFLINE=1 to use only what is in the cache"


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
        check_type("trust_remote_code", self.trust_remote_code, (bool, NoneType))
        check_type("revision", self.revision, (str, NoneType))
        check_type("subfolder", self.subfolder, (str, os.PathLike, NoneType))


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


def locate(
    name: str | os.PathLike[str],
    options: HubOptions,
    *,
    want_graph: bool | None = None,
    choose_graphs: Graphs | None = None,
) -> Location:
    """The folder of a path or Hub id; an id is downloaded if it is not in the cache.

    Args:
        name: A path, or `org/name`.
        options: Revision, token and so on.
        want_graph: For an id: download exported graphs (`True`), PyTorch weights (`False`), or graphs where there
            are any (`None`).
        choose_graphs: For an id: which of its graphs to download; all of them when `None`.

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
    return _download(text, options, want_graph, choose_graphs)


@functools.cache
def _tell_without_revisions(folder: Path, revision: str) -> None:
    """Say once that a folder is taken as it is."""
    logger.warning("%s is a folder, which has no revisions: revision=%r is passed over.", folder, revision)


def _download(name: str, options: HubOptions, want_graph: bool | None, choose_graphs: Graphs | None) -> Location:
    import huggingface_hub
    from huggingface_hub import constants  # not an attribute of the package until it is imported
    from huggingface_hub.errors import HFValidationError, LocalEntryNotFoundError

    cache = os.fspath(options.cache_dir) if options.cache_dir else None
    offline = options.local_files_only or constants.HF_HUB_OFFLINE
    unreachable: Exception | None = None

    def wanted(files: Sequence[str]) -> list[str]:
        def manifest() -> Path:
            file = f"{options.subfolder}/{MANIFEST}" if options.subfolder else MANIFEST
            return Path(
                huggingface_hub.hf_hub_download(
                    name,
                    file,
                    revision=options.revision,
                    token=options.token,
                    cache_dir=cache,
                    local_files_only=offline,
                )
            )

        return files_to_fetch(
            files,
            subfolder=options.subfolder or "",
            want_graph=want_graph,
            choose_graphs=choose_graphs,
            manifest=manifest,
        )

    try:
        files = None
        if not offline:
            try:
                info = huggingface_hub.HfApi(token=options.token).model_info(
                    name, revision=options.revision, timeout=hub_timeout_s()
                )
                files = [sibling.rfilename for sibling in info.siblings or ()]
            except http_errors() as error:
                if not is_outage(error):
                    raise
                unreachable, offline = error, True
        if files is None:
            files = _cached_listing(name, options, cache)
        folder = huggingface_hub.snapshot_download(
            name,
            revision=options.revision,
            token=options.token,
            cache_dir=cache,
            local_files_only=offline,
            allow_patterns=None if files is None else [glob.escape(file) for file in wanted(files)],
        )
    except LocalEntryNotFoundError as error:
        if unreachable is not None:
            raise _unavailable(name, unreachable, options) from unreachable
        raise _unavailable(name, error, options) from error
    except http_errors(HFValidationError, OSError) as error:
        if isinstance(error, ArtifactNotFoundError):
            raise
        raise _unavailable(name, error, options) from error
    if unreachable is not None:
        logger.warning(
            "The Hub cannot be reached (%s): %s is taken from the cache, and may have changed since. HF_HUB_OFFLINE=1 does so "
            "without asking.", one_line(unreachable), name,
        )  # fmt: skip
    path = Path(folder)
    return Location(name, path / options.subfolder if options.subfolder else path, path.name, path)


def hub_timeout_s() -> float:
    """How long the Hub may take to answer; longer where the user said so."""
    told = os.environ.get("HF_HUB_ETAG_TIMEOUT", "")
    return float(told) if told.isdigit() else _TIMEOUT_S


def http_errors(*more: type[Exception]) -> tuple[type[Exception], ...]:
    """What the Hub's client raises: its own errors, and those of its HTTP library, which derive from one class."""
    from huggingface_hub.errors import HfHubHTTPError

    library = next(one for one in HfHubHTTPError.__mro__ if one.__module__.startswith("httpx"))
    return (library, HfHubHTTPError, ConnectionError, *more)


def is_outage(error: Exception) -> bool:
    """Whether the Hub was not reached, or is out of order, so that what is in the cache may do."""
    response = getattr(error, "response", None)
    return response is None or response.status_code >= 500 or response.status_code in (408, 429)


def _cached_listing(name: str, options: HubOptions, cache: str | None) -> list[str] | None:
    """The files of a repository as the Hub listed them last; `None` where its client keeps no listings (before 2.0)."""
    import huggingface_hub
    from huggingface_hub import errors

    listed = getattr(huggingface_hub, "get_cached_repo_tree", None)
    if listed is None:
        return None
    try:
        return [file.path for file in listed(name, revision=options.revision, cache_dir=cache)]
    except errors.CachedRepoTreeNotFoundError:
        return None


def hub_reason(error: Exception, *, name: str, kind: str = "model", revision: str | None = None) -> tuple[str, str]:
    """What kept something from the Hub, and what to do about it.

    Args:
        error: Of the Hub's client or its HTTP library, or of the system.
        name: Of the repository.
        kind: `model` or `data set`.
        revision: That was asked for.

    Returns:
        A sentence and the text of `fix`.
    """
    from huggingface_hub import constants, errors

    status = getattr(getattr(error, "response", None), "status_code", None)
    page = f"{constants.ENDPOINT}/{'datasets/' if kind != 'model' else ''}{name}"
    if isinstance(error, errors.GatedRepoError):
        return (
            f"{name!r} is gated: its owner decides who may read it.",
            f"ask for access at {page}, then pass token=..., or run `hf auth login`.",
        )
    if isinstance(error, errors.RevisionNotFoundError):
        return f"{name!r} has no revision {revision!r}.", "check revision=..., or leave it out."
    if isinstance(error, errors.RepositoryNotFoundError):
        return (
            f"The Hub has no {kind} {name!r}, or it is private.",
            "check the name; for a private one pass token=..., or run `hf auth login`.",
        )
    if isinstance(error, errors.HFValidationError):
        return f"{name!r} is no name that a {kind} on the Hub can have.", "check the name, or pass a local folder."
    if isinstance(error, errors.OfflineModeIsEnabled | errors.LocalEntryNotFoundError):
        return (
            f"{name!r} is not complete in the cache, and the network is not to be used (HF_HUB_OFFLINE or local_files_only).",
            "download it once with the network, or pass a local folder.",
        )
    if status in (401, 403):
        return (
            f"The Hub refuses access to {name!r} ({status}).",
            "pass a token with the right to it: token=..., or run `hf auth login`.",
        )
    if status == 429:
        return f"The Hub has had too many requests from here ({status}).", f"wait, pass token=..., or {_OFFLINE}."
    if status is not None:
        return f"The Hub at {constants.ENDPOINT} answered {status} about {name!r}.", f"try again later, or {_OFFLINE}."
    number = getattr(error, "errno", None)
    if number in (errno.ENOSPC, errno.EDQUOT):
        return (
            f"The disk of the cache is full: {name!r} cannot be downloaded.",
            "free some space, or name another folder in HF_HOME or cache_dir.",
        )
    if isinstance(error, OSError) and not isinstance(error, ConnectionError | TimeoutError):
        return (
            f"{name!r} cannot be kept in the cache: {one_line(error)}",
            "name a folder that can be written in HF_HOME or cache_dir.",
        )
    proxies = [
        word for word in ("HTTPS_PROXY", "https_proxy", "HTTP_PROXY", "http_proxy", "ALL_PROXY") if os.environ.get(word)
    ]
    through = f" through the proxy in {proxies[0]}" if proxies else ""
    return (
        f"The Hub cannot be reached at {constants.ENDPOINT}{through} ({one_line(error)}).",
        f"check the network{', the proxy' if proxies else ''} and HF_ENDPOINT, {_OFFLINE}, or pass a local folder.",
    )


def one_line(error: Exception) -> str:
    """An error in one line, with its type where its text alone says little."""
    text = " ".join(str(error).split())[:200]
    return f"{type(error).__name__}: {text}" if text else type(error).__name__


def _unavailable(name: str, error: Exception, options: HubOptions) -> ArtifactNotFoundError:
    """The error of a name that is no folder, and that the Hub did not give."""
    said, fix = hub_reason(error, name=name, revision=options.revision)
    near = did_you_mean(name, [known for known in _known_names(options) if known != name])
    return ArtifactNotFoundError(f"There is no folder {name!r} here. {said}{near}", fix=fix)


def _known_names(options: HubOptions) -> Iterable[str]:
    """Folders that are here, and repositories that are in the cache."""
    from huggingface_hub import constants

    cache = Path(options.cache_dir or constants.HF_HUB_CACHE).expanduser()
    for parent, pattern in ((Path(), "*"), (Path(), "*/*"), (cache, "models--*")):
        try:
            found = [path for path in itertools.islice(parent.glob(pattern), _MOST_NAMES) if path.is_dir()]
        except OSError:
            continue
        for path in found:
            text = path.name.removeprefix("models--").replace("--", "/") if parent == cache else path.as_posix()
            yield text
