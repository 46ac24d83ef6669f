"""Find a model by path or Hub id. A local path causes no network access; a Hub id is downloaded once."""

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
from typing import Any

from ..config import check_type
from ..errors import ArtifactNotFoundError, did_you_mean
from .hub_files import files_to_fetch
from .manifest import MANIFEST

logger = logging.getLogger(__name__)

Graphs = Callable[[Sequence[str]], Sequence[str]]
"""Type of a function that chooses the ONNX graphs to open from the file names of a folder."""

_TIMEOUT_S = 5.0
_MOST_NAMES = 1000
_OFFLINE = "set HF_HUB_OFFLINE=1 to use only cached files"


@dataclass(frozen=True, slots=True, kw_only=True)
class HubOptions:
    """Options for downloads from the Hub, with the argument names of transformers."""

    revision: str | None = None
    token: str | bool | None = None
    cache_dir: str | os.PathLike[str] | None = None
    local_files_only: bool = False
    subfolder: str = ""
    trust_remote_code: bool = False
    gguf_file: str | None = None

    def __post_init__(self) -> None:
        # Check the type: any non-empty string counts as true, even "False", and this option allows code from the
        # repository to run.
        check_type("trust_remote_code", self.trust_remote_code, (bool, NoneType))
        check_type("revision", self.revision, (str, NoneType))
        check_type("gguf_file", self.gguf_file, (str, NoneType))
        check_type("subfolder", self.subfolder, (str, os.PathLike, NoneType))


@dataclass(frozen=True, slots=True)
class Location:
    """Location of a model on this machine.

    Attributes:
        id: The user's name for the model.
        folder: The folder of the model.
        revision: The commit, if the model came from the Hub.
        root: The folder of the whole repository, if the model lies in a subfolder.
    """

    id: str
    folder: Path
    revision: str | None = None
    root: Path | None = None


def as_folder(name: str | os.PathLike[str]) -> Path | None:
    """Return the folder with this path; `None` if the name may be a Hub id.

    Raises:
        ArtifactNotFoundError: The path cannot be read or is invalid.
    """
    path = Path(name).expanduser()
    try:
        return path if path.is_dir() else None
    except OSError as error:
        if error.errno == errno.ENAMETOOLONG:
            raise ArtifactNotFoundError(
                f"The model name or path {os.fspath(name)[:80]!r}... is longer than the file system allows.",
                fix="check the name or path of the model.",
            ) from error
        raise ArtifactNotFoundError(
            f"The path {path} cannot be read: {error}.", fix="check the path and its read permissions."
        ) from error


def locate(
    name: str | os.PathLike[str],
    options: HubOptions,
    *,
    want_graph: bool | None = None,
    choose_graphs: Graphs | None = None,
) -> Location:
    """Return the location of a model given by path or Hub id. An id is downloaded if it is not in the cache.

    Args:
        name: A path, or `org/name`.
        options: Revision, token and other download options.
        want_graph: For a Hub id: download exported graphs (`True`), PyTorch weights (`False`), or graphs if there are
            any and weights if not (`None`).
        choose_graphs: For a Hub id: function that chooses the graphs to download; all graphs when `None`.

    Raises:
        ArtifactNotFoundError: The name is not a folder, and no such repository can be reached.
    """
    text = os.fspath(name)
    if (path := as_folder(text)) is not None:
        if options.revision is not None:
            _tell_without_revisions(path, options.revision)
        folder = path / options.subfolder if options.subfolder else path
        if not folder.is_dir():
            raise ArtifactNotFoundError(
                f"The folder {path} has no subfolder {options.subfolder!r}.", fix="check the argument subfolder=..."
            )
        # The path is absolute, because the manifest records it: from another working directory, a relative path could
        # be mistaken for a Hub id.
        return Location(str(folder.absolute()), folder.absolute(), root=path.absolute())
    if (path := Path(text).expanduser()).is_file():
        raise ArtifactNotFoundError(
            f"{path} is a file, and a model folder is required here.", fix="pass the folder that contains the file."
        )
    if text.startswith((".", "/", "~")) or text.count("/") > 1 or not text:
        raise ArtifactNotFoundError(f"The model folder {text!r} does not exist.", fix="check the path.")
    return _download(text, options, want_graph, choose_graphs)


@functools.cache
def _tell_without_revisions(folder: Path, revision: str) -> None:
    """Warn once that `revision` has no effect on a local folder."""
    logger.warning("revision=%r is ignored, because %s is a local folder, which has no revisions.", revision, folder)


def _download(name: str, options: HubOptions, want_graph: bool | None, choose_graphs: Graphs | None) -> Location:
    import huggingface_hub
    from huggingface_hub import constants  # the package has this attribute only after the import
    from huggingface_hub.errors import HFValidationError, LocalEntryNotFoundError

    cache = os.fspath(options.cache_dir) if options.cache_dir else None
    download_options: dict[str, Any] = {"revision": options.revision, "token": options.token, "cache_dir": cache}
    offline = options.local_files_only or constants.HF_HUB_OFFLINE
    unreachable: Exception | None = None

    def manifest() -> Path:
        file = f"{options.subfolder}/{MANIFEST}" if options.subfolder else MANIFEST
        return Path(huggingface_hub.hf_hub_download(name, file, local_files_only=offline, **download_options))

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
        patterns = None
        if files is not None:
            chosen = files_to_fetch(
                files,
                subfolder=options.subfolder or "",
                want_graph=want_graph,
                choose_graphs=choose_graphs,
                manifest=manifest,
                gguf_file=options.gguf_file,
            )
            patterns = [glob.escape(file) for file in chosen]
        folder = huggingface_hub.snapshot_download(
            name, local_files_only=offline, allow_patterns=patterns, **download_options
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
            "The Hugging Face Hub cannot be reached (%s). accel uses the cached copy of %s, which may be outdated. Set "
            "HF_HUB_OFFLINE=1 to use the cache without a request to the Hub.", one_line(unreachable), name,
        )  # fmt: skip
    path = Path(folder)
    return Location(name, path / options.subfolder if options.subfolder else path, path.name, path)


def hub_timeout_s() -> float:
    """Return the timeout for responses of the Hub in seconds: `HF_HUB_ETAG_TIMEOUT`, or 5."""
    timeout = os.environ.get("HF_HUB_ETAG_TIMEOUT", "")
    return float(timeout) if timeout.isdigit() else _TIMEOUT_S


def http_errors(*more: type[Exception]) -> tuple[type[Exception], ...]:
    """Return the error classes of the Hub client: its own class, the base class of its HTTP library's errors, and the
    classes in `more`.
    """
    from huggingface_hub.errors import HfHubHTTPError

    library = next(base for base in HfHubHTTPError.__mro__ if base.__module__.startswith("httpx"))
    return (library, HfHubHTTPError, ConnectionError, *more)


def is_outage(error: Exception) -> bool:
    """Return whether the error means that the Hub is unreachable or fails (no response, 5xx, 408 or 429). The cache may
    then be used.
    """
    response = getattr(error, "response", None)
    return response is None or response.status_code >= 500 or response.status_code in (408, 429)


def _cached_listing(name: str, options: HubOptions, cache: str | None) -> list[str] | None:
    """Return the last cached file list of a repository. `None` if no list is cached, or if huggingface_hub is older than
    2.0 and cannot cache lists.
    """
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
    """Return the reason why a repository could not be downloaded, and a remedy.

    Args:
        error: The error of the Hub's client, its HTTP library or the operating system.
        name: Name of the repository.
        kind: `model` or `data set`.
        revision: The requested revision.

    Returns:
        A sentence for the error message, and the text of its `fix`.
    """
    from huggingface_hub import constants, errors

    status = getattr(getattr(error, "response", None), "status_code", None)
    page = f"{constants.ENDPOINT}/{'datasets/' if kind != 'model' else ''}{name}"
    if isinstance(error, errors.GatedRepoError):
        return (
            f"The {kind} {name!r} on the Hub is gated: its owner must allow the download.",
            f"request access at {page}, then pass token=..., or run `hf auth login`.",
        )
    if isinstance(error, errors.RevisionNotFoundError):
        return (
            f"The {kind} {name!r} on the Hub has no revision {revision!r}.",
            "check the argument revision=..., or leave it out.",
        )
    if isinstance(error, errors.RepositoryNotFoundError):
        return (
            f"The Hub has no {kind} {name!r}, or the {kind} is private.",
            f"check the name. For a private {kind}, pass token=..., or run `hf auth login`.",
        )
    if isinstance(error, errors.HFValidationError):
        return f"{name!r} is not a valid name of a {kind} on the Hub.", "check the name, or pass a local folder."
    if isinstance(error, errors.OfflineModeIsEnabled | errors.LocalEntryNotFoundError):
        return (
            f"Files of the {kind} {name!r} are missing in the local cache, and HF_HUB_OFFLINE or local_files_only disables "
            "downloads.",
            f"download the {kind} once with network access, or pass a local folder.",
        )
    if status in (401, 403):
        return (
            f"The Hub refuses access to {name!r} (HTTP status {status}).",
            "pass a token that has access (token=...), or run `hf auth login`.",
        )
    if status == 429:
        return (
            f"The Hub received too many requests from this machine (HTTP status {status}).",
            f"wait, pass token=..., or {_OFFLINE}.",
        )
    if status is not None:
        return (
            f"The Hub at {constants.ENDPOINT} failed with HTTP status {status} for {name!r}.",
            f"try again later, or {_OFFLINE}.",
        )
    number = getattr(error, "errno", None)
    if number in (errno.ENOSPC, errno.EDQUOT):
        return (
            f"{name!r} cannot be downloaded, because the disk of the Hugging Face cache is full.",
            "free some space, or set HF_HOME or cache_dir to a folder on another disk.",
        )
    if isinstance(error, OSError) and not isinstance(error, ConnectionError | TimeoutError):
        return (
            f"{name!r} cannot be saved in the Hugging Face cache: {one_line(error)}",
            "set HF_HOME or cache_dir to a folder that you may write to.",
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
    """Return the type and text of an error in one line."""
    text = " ".join(str(error).split())[:200]
    return f"{type(error).__name__}: {text}" if text else type(error).__name__


def _unavailable(name: str, error: Exception, options: HubOptions) -> ArtifactNotFoundError:
    """Return the error for a name that is neither a local folder nor a downloadable repository."""
    reason, fix = hub_reason(error, name=name, revision=options.revision)
    near = did_you_mean(name, [other for other in _known_names(options) if other != name])
    return ArtifactNotFoundError(f"There is no local folder {name!r}. {reason}{near}", fix=fix)


def _known_names(options: HubOptions) -> Iterable[str]:
    """Yield names that an error can suggest for a mistyped name: local folders, and repositories in the Hub cache."""
    from huggingface_hub import constants

    cache = Path(options.cache_dir or constants.HF_HUB_CACHE).expanduser()
    for parent, pattern in ((Path(), "*"), (Path(), "*/*"), (cache, "models--*")):
        try:
            folders = [path for path in itertools.islice(parent.glob(pattern), _MOST_NAMES) if path.is_dir()]
        except OSError:
            continue
        for path in folders:
            text = path.name.removeprefix("models--").replace("--", "/") if parent == cache else path.as_posix()
            yield text
