"""Simulate another operating system: remove the Python names that the system lacks before `accel` is imported. Python
imports this module at its start if the folder is on the path. The simulation is active if `ACCEL_TEST_PLATFORM` is
set.

`sys.platform` does not change. Other libraries are imported first, because they choose their code by `sys.platform`.
"""

# ruff: noqa: PTH110, PTH112, PTH119

from __future__ import annotations

import builtins
import contextlib
import importlib
import io
import os
import shutil
import sys
from collections.abc import Sequence
from importlib.abc import MetaPathFinder
from multiprocessing import resource_tracker
from types import ModuleType
from typing import Any

_MISSING = {
    "macos": {
        "os": (
            *("O_PATH", "copy_file_range", "memfd_create", "posix_fadvise", "posix_fallocate"),
            *("sched_getaffinity", "sched_setaffinity"),
        ),
        "mmap": ("MADV_DONTNEED", "MADV_HUGEPAGE"),
        "resource": ("prlimit",),
        "time": ("CLOCK_BOOTTIME",),
    },
    "windows": {
        "os": (
            *("O_CLOEXEC", "O_DIRECTORY", "O_NOFOLLOW", "O_PATH", "EX_OK", "EX_USAGE", "chown", "copy_file_range", "fchmod"),
            *("fork", "forkpty", "getloadavg", "killpg", "memfd_create", "mkfifo", "nice", "pipe2"),
            *("posix_fadvise", "posix_fallocate", "register_at_fork", "sched_getaffinity", "sched_setaffinity", "sendfile"),
            *("setsid", "sysconf", "uname"),
        ),
        "mmap": ("MADV_DONTNEED", "MADV_HUGEPAGE", "MAP_ANONYMOUS", "MAP_PRIVATE", "MAP_SHARED", "PROT_READ", "PROT_WRITE"),
        "signal": ("SIGALRM", "SIGHUP", "SIGPIPE", "SIGUSR1", "SIGUSR2", "alarm", "pthread_sigmask", "setitimer"),
        "socket": ("SO_REUSEPORT",),
        "time": ("CLOCK_MONOTONIC", "clock_gettime", "pthread_getcpuclockid"),
    },
}  # fmt: skip
_MODULES = {"macos": (), "windows": ("fcntl", "grp", "pty", "pwd", "resource", "termios", "tty")}
_OTHERS = ("asyncio", "datasets", "filelock", "multiprocessing.util", "numpy", "onnxruntime", "openvino", "sklearn", "torch",
           "transformers", "transformers.pipelines", "uvicorn")  # fmt: skip


class _BeforeAccel(MetaPathFinder):
    def find_spec(self, name: str, path: Sequence[str] | None, target: ModuleType | None = None) -> None:
        if name == "accel":
            sys.meta_path.remove(self)
            _become(os.environ["ACCEL_TEST_PLATFORM"])


def _become(platform: str) -> None:
    for name in _OTHERS:
        try:
            importlib.import_module(name)
        except ImportError:
            continue
    if platform == "windows":
        resource_tracker._HAVE_SIGMASK = False  # type: ignore[attr-defined]
        _files_of_windows()
    _no_files_under("/proc", "/sys")
    shutil._USE_CP_SENDFILE = False  # type: ignore[attr-defined]
    for name, attributes in _MISSING[platform].items():
        module = importlib.import_module(name)
        for attribute in attributes:
            if hasattr(module, attribute):
                delattr(module, attribute)
    for name in _MODULES[platform]:
        sys.modules[name] = None  # type: ignore[assignment]  # importing the name raises an ImportError


def _no_files_under(*folders: str) -> None:
    """Hide the files below these folders from `accel`, but not from other libraries, which choose by `sys.platform`
    which files they read.
    """
    opened = io.open

    def asked_by_accel() -> bool:
        frame = sys._getframe(2)
        while frame.f_back is not None and frame.f_globals.get("__name__", "").startswith("pathlib"):
            frame = frame.f_back
        return str(frame.f_globals.get("__name__")).startswith("accel")

    def refusing(file: Any, *args: Any, **kwargs: Any) -> Any:
        if isinstance(file, str | os.PathLike) and str(file).startswith(folders) and asked_by_accel():
            raise FileNotFoundError(2, "No such file or directory", os.fspath(file))
        return opened(file, *args, **kwargs)

    io.open = builtins.open = refusing  # type: ignore[assignment]


def _files_of_windows() -> None:
    """Simulate the file rules of Windows: folders cannot be opened, open files cannot be removed, and a folder cannot
    replace another folder.
    """
    shutil._use_fd_functions = False  # type: ignore[attr-defined]
    real = {name: getattr(os, name) for name in ("open", "unlink", "replace", "rename", "readlink", "listdir")}
    import filelock

    class Lock(filelock.FileLock):
        """Lock that removes its file when it is released, as `filelock.WindowsFileLock` does, but without that class's
        checks of the file system.
        """

        def _release(self) -> None:
            super()._release()
            with contextlib.suppress(OSError):
                real["unlink"](self.lock_file)

    filelock.FileLock = Lock  # type: ignore[misc]

    def is_open(path: Any) -> bool:
        real_path = os.path.realpath(path)
        for number in real["listdir"]("/proc/self/fd"):
            try:
                target = real["readlink"](f"/proc/self/fd/{number}")
            except OSError:
                continue
            if target == real_path or target.startswith(real_path + os.sep):
                return True
        return False

    def refused(path: Any) -> PermissionError:
        return PermissionError(13, "The process cannot access the file", os.fspath(path))

    def open_file(path: Any, flags: int, *args: Any, **kwargs: Any) -> int:
        if os.path.isdir(path):
            raise refused(path)
        return int(real["open"](path, flags, *args, **kwargs))

    def unlink(path: Any, **kwargs: Any) -> None:
        if is_open(path) and not os.path.basename(path).startswith(".filelock-probe"):
            raise refused(path)
        real["unlink"](path, **kwargs)

    def moving(name: str) -> Any:
        def move(source: Any, target: Any, **kwargs: Any) -> None:
            if is_open(source) or os.path.isdir(target) or (os.path.exists(target) and is_open(target)):
                raise refused(source)
            real[name](source, target, **kwargs)

        return move

    os.open, os.unlink, os.remove = open_file, unlink, unlink
    os.replace, os.rename = moving("replace"), moving("rename")


if os.environ.get("ACCEL_TEST_PLATFORM"):
    sys.meta_path.insert(0, _BeforeAccel())
