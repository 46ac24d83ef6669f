"""List and remove the cache entries under `ACCEL_HOME`: exports made by `from_pretrained`, configs and tokenizers of GGUF files,
and results of searches.
"""

from __future__ import annotations

import os
import secrets
from collections.abc import Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

from ..errors import ConfigError, OutputFolderError
from .atomic_folder_writing import STAGING_PREFIX, discard, locked_file, remove_stale
from .gguf_files import GGUF_MODELS
from .home_folder import SEARCHES, accel_home, keeping

_GATE_S = 60.0


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheEntry:
    """An entry of the cache. Removing it loses no data: accel computes it again when needed, which takes time.

    Attributes:
        name: The name of the entry, as `clear` takes it.
        what: A description of the entry.
        path: The folder of the entry.
        bytes: Total size of the files in the folder, in bytes.
    """

    name: str
    what: str
    path: Path
    bytes: int


def entries() -> list[CacheEntry]:
    """Return all cache entries, exports first."""
    return [*_exports(), *_gguf_models(), *_searches()]


def clear(name: str | None = None) -> list[CacheEntry]:
    """Remove cache entries.

    Without a name, also remove the saved results of file checks, of probes, and of comparisons between padded and unpadded calls. In
    this case, the results of searches are kept while a search runs.

    Args:
        name: Remove only entries whose name starts with this text.

    Returns:
        The removed entries.

    Raises:
        ConfigError: No entry has a name that starts with `name`.
        OutputFolderError: `name` is given, and a running search uses the entry.
    """
    all_entries = entries()
    removed = [entry for entry in all_entries if name is None or entry.name.startswith(name)]
    if name is not None and not removed:
        raise ConfigError(
            f"The cache has no entry whose name starts with {name!r}.", fix="run `accel cache list` to see the entries."
        )
    for entry in list(removed):
        if entry.name != SEARCHES:
            discard(entry.path)
            continue
        with alone_with_searches() as alone:
            if alone:
                discard(entry.path)
            elif name is not None:
                raise OutputFolderError(
                    f"The cache entry {SEARCHES!r} cannot be removed, because a running search (`accel tune`) uses it.",
                    fix="wait until the search has finished.",
                )
            else:
                removed.remove(entry)
    # Remove leftovers of a `clear` call that was killed.
    for folder in (
        accel_home(),
        accel_home() / "exports",
        accel_home() / GGUF_MODELS,
        accel_home() / SEARCHES / "artifacts",
    ):
        remove_stale(folder)
    if name is None:
        discard(accel_home() / "probes")
        for remembered in ("verified.json", "forms.json"):
            (accel_home() / remembered).unlink(missing_ok=True)
    return removed


@contextmanager
def using_searches() -> Iterator[Path]:
    """Prevent the removal of search results while a search runs. Yields the lock file of this search."""
    mine = accel_home() / SEARCHES / "running" / f"{os.getpid()}-{secrets.token_hex(4)}.lock"
    with ExitStack() as running:
        with _gate():
            running.enter_context(locked_file(mine))
        yield mine


@contextmanager
def alone_with_searches(mine: Path | None = None) -> Iterator[bool]:
    """Prevent the start of new searches within the block. Yields whether no other search runs. The search with the lock
    file `mine` is not counted.
    """
    with _gate() as entered:
        others = [path for path in (accel_home() / SEARCHES / "running").glob("*.lock") if path != mine]
        yield entered and all(_is_free(path) for path in others)


def _gate() -> AbstractContextManager[bool]:
    # The lock lies next to the folder, because the folder may be deleted while it is locked.
    home = accel_home()
    with keeping("Results of searches"):
        home.mkdir(parents=True, exist_ok=True)
        if not os.access(home, os.W_OK | os.X_OK):
            raise PermissionError(f"{home} is not writable")
    return locked_file(home / f"{SEARCHES}.lock", _GATE_S, keep=True)


def _is_free(lock: Path) -> bool:
    with locked_file(lock) as free:
        return free


def _exports() -> Iterator[CacheEntry]:
    return _folders(accel_home() / "exports", "export made by from_pretrained")


def _gguf_models() -> Iterator[CacheEntry]:
    return _folders(accel_home() / GGUF_MODELS, "config and tokenizer of a GGUF file")


def _folders(folder: Path, what: str) -> Iterator[CacheEntry]:
    for path in sorted(folder.iterdir()) if folder.is_dir() else ():
        # Skip temporary folders: another process is still writing them.
        if path.is_dir() and not path.name.startswith(STAGING_PREFIX):
            yield CacheEntry(name=path.name, what=what, path=path, bytes=_size(path))


def _searches() -> Iterator[CacheEntry]:
    folder = accel_home() / SEARCHES
    if not folder.is_dir():
        return
    artifacts = sum(1 for path in (folder / "artifacts").glob("*") if path.is_dir())
    measured = sum(1 for path in folder.glob("*/*.json"))
    yield CacheEntry(
        name=SEARCHES, what=f"searches: {artifacts} artifacts, {measured} results", path=folder, bytes=_size(folder)
    )


def _size(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file() and not path.is_symlink())
