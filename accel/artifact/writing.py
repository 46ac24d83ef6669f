"""Folders come into being whole or not at all: a temporary folder beside the target, moved into place when complete."""

from __future__ import annotations

import errno
import functools
import logging
import os
import platform
import secrets
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from filelock import FileLock, Timeout

from .._version import __version__
from ..errors import OutputFolderError
from .checksums import is_inside
from .manifest import MANIFEST

logger = logging.getLogger(__name__)

STAGING_PREFIX = ".accel-staging-"
"""Names of what is not finished start with this."""
_NO_ROOM = 64 << 10
_FICLONE = 0x40049409  # linux/fs.h: the blocks of one file become those of another, copied when written to
_TRIES = 20  # names that are taken, or file systems that keep no locks
# What `rename` says of a target that holds files, or is one.
_TAKEN = (errno.ENOTEMPTY, errno.EEXIST, errno.ENOTDIR)
# NumPy's errors of a write have no number.
_SHORT_WRITES = ("problem writing element", "requested and")

_inherited: list[FileLock] = []

# Small files that travel with a model: configs, tokenizers, processors, sentence-transformers' module list.
_COMPANION_SUFFIXES = (".json", ".txt", ".model", ".jinja", ".tiktoken", ".bpe")
_NOT_COMPANIONS = (
    "accel_quantized.json",
    ".index.json",
    MANIFEST,
    "export.json",
    "ort_config.json",
    "trainer_state.json",
    "adapter_config.json",
)
_COMPANION_MAX_BYTES = 64 << 20
_WEIGHTED_MODULES = ("_Dense", "_LayerNorm")
_MODULE_WEIGHTS = ("model.safetensors", "pytorch_model.bin")


def check_output(out: str | os.PathLike[str], *inputs: Path | None) -> Path:
    """The absolute output folder, refused when it is an input or holds something.

    Raises:
        OutputFolderError: With what is in the way.
    """
    if not isinstance(out, str | os.PathLike):
        raise OutputFolderError(f"{out!r} is no folder.", fix="name a folder.")
    target = Path(out).expanduser().absolute()
    for source in inputs:
        if source is not None and source.exists() and target.resolve() == source.resolve():
            raise OutputFolderError(f"{target} is also the input.", fix="name another output folder.")
    if target.is_dir() and any(target.iterdir()):
        raise OutputFolderError(f"{target} is not empty.", fix="name a new folder, or remove this one first.")
    if target.exists() and not target.is_dir():
        raise OutputFolderError(f"{target} is a file.", fix="name a folder.")
    above = next(parent for parent in target.parents if parent.exists())
    if not above.is_dir() or not os.access(above, os.W_OK | os.X_OK):
        raise OutputFolderError(f"{target} cannot be made: {above} cannot be written.", fix="name another folder.")
    return target


@contextmanager
def staging(out: str | os.PathLike[str], *, needs: int = 0) -> Iterator[Path]:
    """A new folder beside `out` that becomes `out` when the block ends well and vanishes when it does not.

    A killed process leaves at most a folder whose name starts with `.accel-staging-`; the next run beside it removes
    those whose lock nobody holds.

    Args:
        out: The folder to be.
        needs: Bytes that are about to be written, where that is known.

    Raises:
        OutputFolderError: It cannot be made, its disk is full or has less than `needs` left, or it was removed meanwhile.
    """
    target = check_output(out)
    with _temporary(target, needs) as (temporary, made):
        yield temporary
        _finish(temporary, target, made)


@contextmanager
def merging(out: str | os.PathLike[str], *, needs: int = 0) -> Iterator[Path]:
    """Like `staging`, for a folder that holds other files already: those written move into it one by one, the manifest last.

    A process that is killed on the way leaves graphs without the manifest that they say they had, which do not open.

    Args:
        out: The folder, which need not exist. Files of the same names in it are replaced, and so is an artifact.
        needs: As in `staging`.

    Raises:
        OutputFolderError: As in `staging`.
    """
    target = Path(out).expanduser().absolute()
    with _temporary(target, needs) as (temporary, made):
        yield temporary
        if not target.exists():
            _finish(temporary, target, made)
            return
        _check_made(temporary, target, made)
        (target / MANIFEST).unlink(missing_ok=True)
        files = [path.relative_to(temporary) for path in temporary.rglob("*") if path.is_file()]
        for name in sorted(files, key=lambda name: name == Path(MANIFEST)):
            (target / name).parent.mkdir(parents=True, exist_ok=True)
            (temporary / name).replace(target / name)


@contextmanager
def _temporary(target: Path, needs: int) -> Iterator[tuple[Path, os.stat_result]]:
    """A folder beside the target, what it was when it was made, and a clear error where there is no room for what goes in."""
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        remove_stale(target.parent)
        temporary, lock = _locked(target.parent)
        temporary.mkdir()
        # Held open, where folders can be: the number of a folder that was removed is not given to another one meanwhile.
        held = os.open(temporary, os.O_RDONLY | os.O_DIRECTORY) if hasattr(os, "O_DIRECTORY") else None
        owner = os.getpid()
    except OSError as error:
        raise _cannot_be_made(target, error) from error
    try:
        check_space(target.parent, needs)
        try:
            yield temporary, temporary.stat()
        # Whoever wrote says it in words of its own: compilers and runtimes know no `errno`.
        except Exception as error:
            if _is_full(error, temporary):
                raise _full(target.parent, _bytes_in(temporary), error) from error
            raise
    finally:
        if held is not None:
            os.close(held)
        _remove(temporary, lock, owner)


@contextmanager
def held(path: Path, timeout_s: float = 0.0, *, keep: bool = False) -> Iterator[bool]:
    """Hold a lock file for the time of the block, against other processes and threads; whether it was to be had.

    Args:
        path: The file.
        timeout_s: How long to wait for whoever holds it.
        keep: Leave the file, for others to wait for the same one; else it is removed.

    Raises:
        OutputFolderError: The file cannot be made.
    """
    lock = FileLock(path)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        lock.acquire(timeout=max(0.0, timeout_s))
    except Timeout:
        yield False
        return
    except OSError as error:
        raise _cannot_be_made(path, error) from error
    try:
        yield True
    finally:
        if keep:
            lock.release()
        else:
            _unlock(lock)


def _cannot_be_made(target: Path, error: OSError) -> OutputFolderError:
    return OutputFolderError(f"{target} cannot be made: {error}.", fix="name a folder that can be written.")


def _finish(temporary: Path, target: Path, made: os.stat_result) -> None:
    """Put what is complete in its place.

    Raises:
        OutputFolderError: Somebody removed it, and it was made again on the way; or the target has appeared.
    """
    _check_made(temporary, target, made)
    try:
        # Windows puts no folder in the place of another one, not even of an empty one.
        with suppress(OSError):
            target.rmdir()
        temporary.replace(target)
    except OSError as error:
        if error.errno not in _TAKEN:
            raise _cannot_be_made(target, error) from error
        raise OutputFolderError(
            f"Another process wrote to {target} while this one was making it; what that wrote was kept, and what this made was "
            "removed.",
            fix="use what is there, or run it again with another output folder.",
        ) from error


def _check_made(temporary: Path, target: Path, made: os.stat_result) -> None:
    try:
        now = temporary.stat()
    except FileNotFoundError:
        now = None
    if now is None or (now.st_dev, now.st_ino) != (made.st_dev, made.st_ino):
        raise OutputFolderError(
            f"What was to become {target} was removed while it was being made.", fix="run it again."
        )


@contextmanager
def scratch(parent: Path | None = None) -> Iterator[Path]:
    """A folder for files that nobody is to see; what killed runs left beside it is removed, too.

    Args:
        parent: Where it is made; the system's folder for such files when `None`.
    """
    parent = parent or Path(tempfile.gettempdir())
    remove_stale(parent)
    folder, lock = _locked(parent)
    owner = os.getpid()
    try:
        folder.mkdir()
        yield folder
    finally:
        _remove(folder, lock, owner)


def discard(folder: Path) -> None:
    """Remove a folder such that nobody ever sees half of it: it gets another name first.

    Raises:
        OutputFolderError: It cannot be removed.
    """
    gone = folder.parent / f"{STAGING_PREFIX}{secrets.token_hex(6)}"
    try:
        folder.rename(gone)
    except (FileNotFoundError, NotADirectoryError):
        return
    except OSError as error:
        raise OutputFolderError(
            f"{folder} cannot be removed: {error}.", fix="remove it yourself, or name another folder."
        ) from error
    shutil.rmtree(gone, ignore_errors=True)


def check_space(folder: Path, needs: int) -> None:
    """Whether a folder's disk has room for that many bytes.

    Raises:
        OutputFolderError: With what is needed and what is free.
    """
    free = shutil.disk_usage(folder).free
    if needs > free:
        raise OutputFolderError(
            f"{_megabytes(needs)} are about to be written into {folder}, whose disk has {_megabytes(free)} left.",
            fix="free some space, or name a folder on another disk.",
        )


def _is_full(error: BaseException, folder: Path) -> bool:
    seen: BaseException | None = error
    while seen is not None:
        if isinstance(seen, OSError):
            unnumbered = seen.errno is None and any(words in str(seen) for words in _SHORT_WRITES)
            if unnumbered or seen.errno in (errno.ENOSPC, errno.EDQUOT):
                return True
        seen = seen.__cause__ or seen.__context__
    try:
        return shutil.disk_usage(folder).free < _NO_ROOM
    except OSError:
        return False


def _full(folder: Path, written: int, error: Exception) -> OutputFolderError:
    free = shutil.disk_usage(folder).free
    return OutputFolderError(
        f"The disk of {folder} is full: {_megabytes(written)} were written, {_megabytes(free)} are left "
        f"({' '.join(str(error).split())[:200]}).",
        fix="free some space, or name a folder on another disk.",
    )


def _bytes_in(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())


def _megabytes(count: int) -> str:
    return f"{count / 1e6:,.1f} MB"


def _locked(parent: Path) -> tuple[Path, FileLock]:
    """A name for a folder that is about to be made, and the lock that says that somebody makes it."""
    for _ in range(_TRIES):
        temporary = parent / f"{STAGING_PREFIX}{secrets.token_hex(6)}"
        lock = FileLock(_lock_of(temporary))
        try:
            lock.acquire(timeout=0)
        except Timeout:
            continue
        # Another process that cleans up may have taken the new file for a leftover, and removed it, before it was locked.
        if _lock_of(temporary).exists():
            return temporary, lock
        lock.release()
    raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK), str(parent))


def _lock_of(temporary: Path) -> Path:
    return temporary.with_name(f"{temporary.name}.lock")


def _remove(temporary: Path, lock: FileLock, owner: int) -> None:
    """Remove a temporary folder and its lock, if this process made it: one that was forked meanwhile, and ends, has them as well."""
    if os.getpid() == owner:
        shutil.rmtree(temporary, ignore_errors=True)
        _unlock(lock)
    else:
        # Collected, it would be released, for the other process too.
        _inherited.append(lock)


def _unlock(lock: FileLock) -> None:
    # Removed while it is held: who waits for it does so to remove it. Windows removes no open file, but this one when it is released.
    with suppress(PermissionError):
        Path(lock.lock_file).unlink(missing_ok=True)
    lock.release()


def remove_stale(folder: Path) -> None:
    """Remove what interrupted runs left beside: folders and locks that nobody holds."""
    for entry in folder.glob(f"{STAGING_PREFIX}*"):
        temporary = entry.with_name(entry.name.removesuffix(".lock"))
        lock = FileLock(_lock_of(temporary))
        try:
            lock.acquire(timeout=0)
        except (Timeout, OSError):
            continue
        try:
            logger.info("removing %s, left by an interrupted run", temporary)
            shutil.rmtree(temporary, ignore_errors=True)
        finally:
            _unlock(lock)


def is_companion(path: Path) -> bool:
    """Whether a file is one of the small ones that travel with a model, by its name and size."""
    return (
        path.is_file()
        and path.name.endswith((*_COMPANION_SUFFIXES, ".py"))
        and not path.name.endswith(_NOT_COMPANIONS)
        and path.stat().st_size <= _COMPANION_MAX_BYTES
    )


def checkpoint_weights(folder: Path) -> list[Path]:
    """The files of a transformers checkpoint's weights, in PyTorch's formats."""
    return sorted([*folder.glob("*.safetensors"), *folder.glob("pytorch_model*.bin")])


def copy_file(source: Path, target: Path) -> None:
    """A file under another name, sharing its blocks on disk where the file system can.

    Never a hard link: onnx and onnx_ir refuse weights that have a second name, the user's own ones then, too.
    """
    with suppress(ImportError, OSError), source.open("rb") as read, target.open("wb") as write:
        import fcntl  # not on every system

        fcntl.ioctl(write.fileno(), _FICLONE, read.fileno())
        return
    shutil.copyfile(source, target)


def copy_companions(source: Path, target: Path) -> None:
    """Copy configs, tokenizer and processor files, and sentence-transformers' folders of modules, but no weights of a transformer; links
    only to what is inside the folder, or in its Hub repository's blobs.
    """
    for path in sorted(source.iterdir()):
        if path.is_dir() and any(path.glob("config.json")) and path.name[:1].isdigit():
            # Layers after the pooling are computed after a graph that has none in it.
            weights = _MODULE_WEIGHTS if path.name.endswith(_WEIGHTED_MODULES) else ()
            for name in ("config.json", *weights):
                if (path / name).is_file() and is_inside(path / name, source):
                    (target / path.name).mkdir(exist_ok=True)
                    shutil.copyfile(path / name, target / path.name / name)
        elif is_companion(path) and not (target / path.name).exists():
            if is_inside(path, source):
                shutil.copyfile(path, target / path.name)
            else:
                logger.warning("%s is a link that leaves its folder; it is not copied.", path)


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
