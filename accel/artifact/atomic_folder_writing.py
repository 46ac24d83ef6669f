"""Write folders completely or not at all: files go to a temporary folder next to the target, which is renamed when
complete.
"""

from __future__ import annotations

import errno
import functools
import logging
import os
import platform
import re
import secrets
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from filelock import FileLock, Timeout

from .._version import __version__
from ..errors import AccelError, OutputFolderError
from .checksums import is_inside
from .manifest import MANIFEST
from .probe_file import PROBES
from .sentence_fields import STANFORD_CONFIG
from .signatures import MATERIALS, STATEMENT

logger = logging.getLogger(__name__)

STAGING_PREFIX = ".accel-staging-"
"""Prefix of the names of temporary folders."""
_NO_ROOM = 64 << 10
# Number of the ioctl `FICLONE` in linux/fs.h. It makes a file share the disk blocks of another file until one file changes.
_FICLONE = 0x40049409
_TRIES = 20  # largest number of attempts to lock a temporary folder, because its random name may already be used
# Error numbers of `rename` if the target is a file, or a folder that is not empty.
_TAKEN = (errno.ENOTEMPTY, errno.EEXIST, errno.ENOTDIR)
# Parts of the messages of NumPy's write errors. These errors have no `errno`.
_SHORT_WRITES = ("problem writing element", "requested and")

_inherited: list[FileLock] = []

# Extensions of small files that are copied with a model: configs, tokenizers, processors, the module list of
# sentence-transformers.
_COMPANION_SUFFIXES = (".json", ".txt", ".model", ".jinja", ".tiktoken", ".bpe", STANFORD_CONFIG)
_NOT_COMPANIONS = (
    "accel_quantized.json",
    ".index.json",
    MANIFEST,
    "export.json",
    STATEMENT,
    MATERIALS,
    "ort_config.json",
    "trainer_state.json",
    "adapter_config.json",
)
_COMPANION_MAX_BYTES = 64 << 20
_WEIGHTED_MODULES = ("_Dense", "_LayerNorm", "_SparseAutoEncoder", "_SparseStaticEmbedding", "_IDF")
_MODULE_WEIGHTS = ("model.safetensors", "pytorch_model.bin")
# Modules of a router start with the name of its path: `query_0_SparseStaticEmbedding`.
_MODULE_FOLDER = re.compile(r"(\w+_)?\d+_\w+\Z")
_TRANSFORMERS = ("_Transformer", "_MLMTransformer")
_MODULE_CONFIGS = ("config.json", "router_config.json", "idf.json")


def check_output(out: str | os.PathLike[str], *inputs: Path | None) -> Path:
    """Return the absolute path of the output folder.

    Raises:
        OutputFolderError: The folder is one of the inputs, is not empty, or cannot be written.
    """
    if not isinstance(out, str | os.PathLike):
        raise OutputFolderError(f"The output folder {out!r} is not a path.", fix="pass the path of a folder.")
    target = Path(out).expanduser().absolute()
    for source in inputs:
        if source is not None and source.exists() and target.resolve() == source.resolve():
            raise OutputFolderError(
                f"The output folder {target} is the same as the input folder.", fix="use another output folder."
            )
    if target.is_dir() and any(target.iterdir()):
        raise OutputFolderError(
            f"The output folder {target} is not empty.", fix="use a new output folder, or delete this folder first."
        )
    if target.exists() and not target.is_dir():
        raise OutputFolderError(f"The output path {target} is a file, not a folder.", fix="use the path of a folder.")
    above = next(parent for parent in target.parents if parent.exists())
    if not above.is_dir() or not _accepts_folders(above):
        raise OutputFolderError(
            f"The output folder {target} cannot be created, because {above} is not writable.",
            fix="use an output folder in a place that you may write to.",
        )
    return target


def _accepts_folders(folder: Path) -> bool:
    """Return whether a folder can be created in a folder. Creates one and removes it, because file systems such as `/proc`
    report write permission for root and then refuse.
    """
    if not os.access(folder, os.W_OK | os.X_OK):
        return False
    try:
        probe = Path(tempfile.mkdtemp(prefix=STAGING_PREFIX, dir=folder))
    except OSError as error:
        # A full disk has its own error message, which is raised when the files are written.
        return error.errno in (errno.ENOSPC, errno.EDQUOT)
    # Another process may remove the folder first, as a leftover of an interrupted run.
    with suppress(OSError):
        probe.rmdir()
    return True


@contextmanager
def staging(out: str | os.PathLike[str], *, needs: int = 0) -> Iterator[Path]:
    """Yield a temporary folder next to `out`. It is renamed to `out` at the end of the block, or removed after an
    error.

    A killed process leaves only a folder whose name starts with `.accel-staging-`. Its lock is then free, so the next
    run in the same parent folder removes it.

    Args:
        out: The folder to create.
        needs: Number of bytes that will be written, if known.

    Raises:
        OutputFolderError: The folder cannot be created, the disk is full or has fewer than `needs` bytes left, or the
            temporary folder was removed by another process.
    """
    target = check_output(out)
    with _temporary(target, needs) as (temporary, identity):
        with paths_shown_as(out, temporary):
            yield temporary
        _finish(temporary, target, identity)


@contextmanager
def paths_shown_as(target: str | os.PathLike[str], *paths: Path) -> Iterator[None]:
    """Replace temporary paths in the errors of `accel` by the path that the user named, while the context is open."""

    def shown(text: str) -> str:
        for path in paths:
            text = text.replace(str(path), os.fspath(target))
        return text

    try:
        yield
    except AccelError as error:
        error.message = shown(error.message)
        error.fix = None if error.fix is None else shown(error.fix)
        error.args = (error.message,)
        raise


@contextmanager
def merging(out: str | os.PathLike[str], *, needs: int = 0) -> Iterator[Path]:
    """Yield a temporary folder, like `staging`, for a target folder that already contains files. At the end of the block,
    the new files move into the target one by one, the manifest last.

    If the process is killed while the files move, the target contains graphs with the metadata key of accel but no
    manifest. accel refuses to open graphs in this state.

    Args:
        out: The folder; it is created if missing. An artifact in it, and files with the same names, are replaced.
        needs: Number of bytes that will be written, if known.

    Raises:
        OutputFolderError: The folder cannot be created, the disk is full or has fewer than `needs` bytes left, or the
            temporary folder was removed by another process.
    """
    target = Path(out).expanduser().absolute()
    with _temporary(target, needs) as (temporary, identity):
        yield temporary
        if not target.exists():
            _finish(temporary, target, identity)
            return
        _check_made(temporary, target, identity)
        (target / MANIFEST).unlink(missing_ok=True)
        files = [path.relative_to(temporary) for path in temporary.rglob("*") if path.is_file()]
        for name in sorted(files, key=lambda name: name == Path(MANIFEST)):
            (target / name).parent.mkdir(parents=True, exist_ok=True)
            (temporary / name).replace(target / name)


@contextmanager
def _temporary(target: Path, needs: int) -> Iterator[tuple[Path, os.stat_result]]:
    """Make a temporary folder next to the target. Yields the folder and its `stat` result. A full disk raises
    `OutputFolderError`.
    """
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        remove_stale(target.parent)
        temporary, lock = _locked(target.parent)
        temporary.mkdir()
        # While the folder is open, its inode number is not reused. The number therefore identifies the folder even
        # after its removal.
        handle = os.open(temporary, os.O_RDONLY | os.O_DIRECTORY) if hasattr(os, "O_DIRECTORY") else None
        owner = os.getpid()
    except OSError as error:
        raise _cannot_be_made(target, error) from error
    try:
        check_space(target.parent, needs)
        try:
            yield temporary, temporary.stat()
        # Compilers and runtimes report a full disk without `errno`, so any error is checked.
        except Exception as error:
            if _is_full(error, temporary):
                raise _full(target.parent, _bytes_in(temporary), error) from error
            raise
    finally:
        if handle is not None:
            os.close(handle)
        _remove(temporary, lock, owner)


@contextmanager
def locked_file(path: Path, timeout_s: float = 0.0, *, keep: bool = False) -> Iterator[bool]:
    """Lock a file within the block, so that other processes and threads cannot lock it. Yields whether the file was locked.

    Args:
        path: The lock file.
        timeout_s: Seconds to wait for the lock.
        keep: Whether the lock file stays after the block, because other processes use the same file.

    Raises:
        OutputFolderError: The lock file cannot be created.
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
    return OutputFolderError(
        f"{target} cannot be created: {error}.", fix="use a path in a folder that you may write to."
    )


def _finish(temporary: Path, target: Path, identity: os.stat_result) -> None:
    """Rename the complete temporary folder to its target.

    Raises:
        OutputFolderError: The temporary folder was removed or replaced, or another process has created the target.
    """
    _check_made(temporary, target, identity)
    try:
        # Remove an empty target first: Windows cannot replace a folder, even if it is empty.
        with suppress(OSError):
            target.rmdir()
        temporary.replace(target)
    except OSError as error:
        if error.errno not in _TAKEN:
            raise _cannot_be_made(target, error) from error
        raise OutputFolderError(
            f"Another process wrote to the output folder {target} while this process was working. The files of the other "
            "process were kept, and the result of this process was deleted.",
            fix="use the files in the folder, or run the command again with another output folder.",
        ) from error


def _check_made(temporary: Path, target: Path, identity: os.stat_result) -> None:
    try:
        now = temporary.stat()
    except FileNotFoundError:
        now = None
    if now is None or (now.st_dev, now.st_ino) != (identity.st_dev, identity.st_ino):
        raise OutputFolderError(
            f"The result for {target} was lost: another process removed its temporary folder {temporary.name}.",
            fix="run the command again.",
        )


@contextmanager
def scratch(parent: Path | None = None) -> Iterator[Path]:
    """Yield a temporary folder, and remove temporary folders of killed processes in the same parent.

    Args:
        parent: The parent folder; the system's folder for temporary files when `None`.
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
    """Remove a folder. It is renamed first, so that no process sees a partly removed folder.

    Raises:
        OutputFolderError: The folder cannot be removed.
    """
    renamed = folder.parent / f"{STAGING_PREFIX}{secrets.token_hex(6)}"
    try:
        folder.rename(renamed)
    except (FileNotFoundError, NotADirectoryError):
        return
    except OSError as error:
        raise OutputFolderError(
            f"The folder {folder} cannot be deleted: {error}.", fix="delete the folder yourself, or use another folder."
        ) from error
    shutil.rmtree(renamed, ignore_errors=True)


def check_space(folder: Path, needs: int) -> None:
    """Check that the disk of a folder has `needs` bytes free.

    Raises:
        OutputFolderError: There is not enough space. The message has the needed and the free size.
    """
    free = shutil.disk_usage(folder).free
    if needs > free:
        raise OutputFolderError(
            f"The disk of {folder} does not have enough space: {_megabytes(needs)} are needed, {_megabytes(free)} are free.",
            fix="free some space, or use a folder on another disk.",
        )


def _is_full(error: BaseException, folder: Path) -> bool:
    cause: BaseException | None = error
    while cause is not None:
        if isinstance(cause, OSError):
            unnumbered = cause.errno is None and any(words in str(cause) for words in _SHORT_WRITES)
            if unnumbered or cause.errno in (errno.ENOSPC, errno.EDQUOT):
                return True
        cause = cause.__cause__ or cause.__context__
    try:
        return shutil.disk_usage(folder).free < _NO_ROOM
    except OSError:
        return False


def _full(folder: Path, written: int, error: Exception) -> OutputFolderError:
    free = shutil.disk_usage(folder).free
    return OutputFolderError(
        f"The disk of {folder} is full: {_megabytes(written)} were written, {_megabytes(free)} are free "
        f"({' '.join(str(error).split())[:200]}).",
        fix="free some space, or use a folder on another disk.",
    )


def _bytes_in(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())


def _megabytes(count: int) -> str:
    return f"{count / 1e6:,.1f} MB"


def _locked(parent: Path) -> tuple[Path, FileLock]:
    """Return the path of a new temporary folder, and its acquired lock."""
    for _ in range(_TRIES):
        temporary = parent / f"{STAGING_PREFIX}{secrets.token_hex(6)}"
        lock = FileLock(_lock_of(temporary))
        try:
            lock.acquire(timeout=0)
        except Timeout:
            continue
        # Another process may have removed the new lock file as a leftover before it was locked.
        if _lock_of(temporary).exists():
            return temporary, lock
        lock.release()
    raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK), str(parent))


def _lock_of(temporary: Path) -> Path:
    return temporary.with_name(f"{temporary.name}.lock")


def _remove(temporary: Path, lock: FileLock, owner: int) -> None:
    """Remove a temporary folder and its lock file, but only in the process that created them. A forked child process, which
    inherits the folder's path and the lock object, removes nothing.
    """
    if os.getpid() == owner:
        shutil.rmtree(temporary, ignore_errors=True)
        _unlock(lock)
    else:
        # Keep a reference in the child: garbage collection of the lock object would release the parent's lock.
        _inherited.append(lock)


def _unlock(lock: FileLock) -> None:
    # Delete the file while the lock is held, because waiting processes may delete it as well. On Windows, `release`
    # deletes it.
    with suppress(PermissionError):
        Path(lock.lock_file).unlink(missing_ok=True)
    lock.release()


def remove_stale(folder: Path) -> None:
    """Remove the temporary folders and lock files of interrupted runs. A run was interrupted if its lock is free."""
    for entry in folder.glob(f"{STAGING_PREFIX}*"):
        temporary = entry.with_name(entry.name.removesuffix(".lock"))
        lock = FileLock(_lock_of(temporary))
        try:
            lock.acquire(timeout=0)
        except (Timeout, OSError):
            continue
        try:
            logger.info("removing %s, a temporary folder of an interrupted run", temporary)
            shutil.rmtree(temporary, ignore_errors=True)
        finally:
            _unlock(lock)


def is_companion(path: Path) -> bool:
    """Return whether a file is a small file of a model (config, tokenizer, ...), judged by name and size."""
    return path.name == PROBES or (
        path.is_file()
        and path.name.endswith((*_COMPANION_SUFFIXES, ".py"))
        and not path.name.endswith(_NOT_COMPANIONS)
        and path.stat().st_size <= _COMPANION_MAX_BYTES
    )


def checkpoint_weights(folder: Path) -> list[Path]:
    """Return the weight files of a transformers checkpoint: safetensors and PyTorch files."""
    files = [*folder.glob("*.safetensors"), *folder.glob("pytorch_model*.bin")]
    return sorted(path for path in files if path.name != PROBES)


def copy_file(source: Path, target: Path) -> None:
    """Copy a file. The copy shares disk blocks with the source if the file system supports it.

    Hard links are not used: onnx and onnx_ir refuse weight files with several names, and would then refuse the source
    file as well.
    """
    with suppress(ImportError, OSError), source.open("rb") as read, target.open("wb") as write:
        import fcntl  # this module exists only on Unix

        fcntl.ioctl(write.fileno(), _FICLONE, read.fileno())
        return
    shutil.copyfile(source, target)


def copy_companions(source: Path, target: Path, *, linked: bool = False) -> None:
    """Copy configs, tokenizer files, processor files and sentence-transformers modules, but not the transformer's
    weights.

    Links are copied if they point into the folder or into the `blobs` folder of its Hub repository. Other links are not
    copied, because a stranger's folder could contain links to private files.

    Args:
        source: The folder to copy from.
        target: The folder to copy to. Its existing files are kept.
        linked: Whether `source` may consist of links to the files of another model folder. Links into the folder with the
            model's real config are then copied.
    """
    roots = [source]
    if linked:
        configs = (source / name for name in ("config.json", "adapter_config.json"))
        roots += [config.resolve().parent for config in configs if config.is_file()]

    def allowed(path: Path) -> bool:
        return any(is_inside(path, root) for root in roots)

    for path in sorted(source.iterdir()):
        if (
            path.is_dir()
            and any((path / name).is_file() for name in _MODULE_CONFIGS)
            and _MODULE_FOLDER.match(path.name)
        ):
            if path.name.endswith(_TRANSFORMERS):
                continue
            # Also copy the weights of sentence-transformers modules that follow the pooling, because a graph without pooling
            # does not contain these modules.
            weights = _MODULE_WEIGHTS if path.name.endswith(_WEIGHTED_MODULES) else ()
            for name in (*_MODULE_CONFIGS, *weights):
                if (path / name).is_file() and allowed(path / name):
                    (target / path.name).mkdir(exist_ok=True)
                    shutil.copyfile(path / name, target / path.name / name)
        elif is_companion(path) and not (target / path.name).exists():
            if allowed(path):
                shutil.copyfile(path, target / path.name)
            else:
                logger.warning(
                    "%s is a link to a file outside its folder, so it is not copied. To include the file, replace the link with a "
                    "copy of the file.",
                    path,
                )


@functools.cache
def tool_versions(*distributions: str) -> dict[str, str]:
    """Return the versions of accel, Python and the named packages; packages that are not installed are skipped."""
    from importlib import metadata

    versions = {"accel": __version__, "python": platform.python_version()}
    for name in distributions:
        try:
            versions[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return versions
