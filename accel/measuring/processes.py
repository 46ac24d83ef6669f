"""Run functions in other processes, and read the memory use of a process.

Each variant runs in a separate process, for two reasons. The thread pools of two runtimes in one process would slow each other down by up
to 190 microseconds per call, because their threads wait actively for work. The crash of a runtime would end the measurement of all
variants.
"""

from __future__ import annotations

import contextlib
import enum
import functools
import importlib
import logging
import math
import multiprocessing
import multiprocessing.util
import os
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from multiprocessing import resource_tracker
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

from .. import progress
from ..artifact.atomic_folder_writing import scratch
from ..errors import AccelError, SessionError

if TYPE_CHECKING:
    from multiprocessing.connection import Connection


logger = logging.getLogger(__name__)

_PROGRESS_INTERVAL_S = 0.1
ANSWER_TIMEOUT_S = 600.0
"""Maximum duration of one request to a process; the slowest requests compile large models."""


class _Message(enum.Enum):
    """Kind of a message from a process: the progress, the result or the error of a call."""

    PROGRESS = "progress"
    RESULT = "result"
    ERROR = "error"


class WorkerLostError(SessionError):
    """Error for a process that ended or did not answer in time; a second attempt may succeed.

    Attributes:
        late: Whether the process did not answer in time.
    """

    def __init__(self, message: str, *, fix: str | None = None, late: bool = False) -> None:
        super().__init__(message, fix=fix)
        self.late = late


class HelperProcess:
    """A separate process that runs functions, so that a crash of a library ends only that process.

    The process starts at the first call. If it has ended, the next call starts it again.

    Args:
        name: Name of the process in errors.
        imports: Modules that the process imports before its first call.
    """

    def __init__(self, name: str = "", imports: Sequence[str] = ()) -> None:
        self._who = f"The process of {name}" if name else "The process"
        self._imports = imports
        self._process: Any = None
        self._pipe: Any = None
        self._ended = False

    def start(self) -> None:
        """Start the process now instead of at the first call, so that several processes import at the same time."""
        self._process, self._pipe = start_process(_help, self._imports)
        if self._ended:
            self.kill()

    def call(self, function: Callable[..., Any], *args: Any, timeout_s: float | None = None) -> Any:
        """Call `function(*args)` in the process and return its result.

        Args:
            function: A module-level function, because it is sent to the process by name.
            args: Arguments of the function.
            timeout_s: Maximum duration in seconds; `None` for no limit.

        Raises:
            AccelError: The error that the function raised; an exception of another type is raised as `SessionError`.
            WorkerLostError: The process ended, or was killed after the timeout.
        """
        if self._process is None or not self._process.is_alive():
            self.close()
            self.start()
        try:
            self._pipe.send((function, args))
            if (answer := self._receive(timeout_s)) is None:
                self.kill()
                self._process.join(timeout=5)
                raise WorkerLostError(
                    f"{self._who} was killed, because it did not finish within {timeout_s:.0f} s.",
                    fix="allow more time, or run it with smaller batches and shorter sequences.",
                    late=True,
                )
        except (EOFError, OSError) as error:
            self._process.join(timeout=5)
            raise WorkerLostError(
                f"{self._who} ended unexpectedly ({exit_reason(self._process.exitcode)}).",
                fix="check that the machine has enough free memory, and run the model alone to see the output of the crashed library.",
            ) from error
        kind, value = answer
        if kind is _Message.ERROR:
            raise value
        return value

    def _receive(self, timeout_s: float | None) -> tuple[_Message, Any] | None:
        """Wait for the result or the error of the call, and report the progress that the process sends; return `None` after the timeout."""
        deadline = None if timeout_s is None else time.perf_counter() + timeout_s
        while self._pipe.poll(None if deadline is None else max(0.0, deadline - time.perf_counter())):
            kind, value = self._pipe.recv()
            if kind is not _Message.PROGRESS:
                return kind, value
            progress.report(*value)
        return None

    def end(self) -> None:
        """Kill the process from another thread, even while the process is starting."""
        self._ended = True
        self.kill()

    def kill(self) -> None:
        """Kill the process. A call that is waiting for its result then raises `WorkerLostError`."""
        if self._process is not None and self._process.is_alive():
            self._process.kill()

    def hang_up(self) -> None:
        """Close the connection, so that the process ends by itself; `close` waits for the end."""
        if self._pipe is not None:
            self._pipe.close()

    def close(self) -> None:
        """Ask the process to end, wait for it, and kill it if it does not end within 10 seconds."""
        self.hang_up()
        if self._process is not None:
            self._process.join(timeout=10)
            self.kill()
            self._process.join(timeout=10)
            self._process = None


_not_mapped = 0  # bytes of imported libraries that are not in the resident memory of this forked process
_starting = threading.Lock()
_SOCKET_FOLDER = (
    70  # maximum length of the folder: a socket's path has at most 107 characters, of which multiprocessing adds 33
)
_GPU_DRIVERS = ("/dev/nvidiactl", "/dev/kfd", "/dev/dxg")


def start_process(target: Callable[..., None], *args: Any) -> tuple[Any, Connection]:
    """Start a process that runs `target(pipe, *args)`; return the process and the parent's end of the pipe.

    On Linux the process is forked from a server that has imported torch and transformers and done nothing else. A process then
    starts in a tenth of a second instead of five seconds. On other systems, and on machines with a GPU driver, each process
    imports the libraries itself: an import may initialize the driver, and a forked process cannot use an initialized driver.
    """
    forked = sys.platform == "linux" and hasattr(os, "fork") and not any(Path(node).exists() for node in _GPU_DRIVERS)
    context: Any = multiprocessing.get_context("forkserver" if forked else "spawn")
    if forked:
        context.set_forkserver_preload([f"{__package__}.preload"])
        _own_socket_folder()
    parent_end, child_end = context.Pipe()
    process = context.Process(target=_run, args=(target, dict(os.environ), forked, child_end, *args), daemon=True)
    with _without_main(), _interrupts_held():
        process.start()
    child_end.close()
    return process, parent_end


@functools.cache
def _own_socket_folder() -> None:
    """Make `multiprocessing` create its sockets in a scratch folder, which the next run removes if this process is killed."""
    stack = contextlib.ExitStack()
    folder = stack.enter_context(scratch())
    if len(str(folder)) > _SOCKET_FOLDER:
        stack.close()
        try:
            folder = stack.enter_context(scratch(Path("/tmp")))
        except OSError:
            # `/tmp` is not writable, so use multiprocessing's default folder. Nothing removes this folder if the process is killed.
            return
    previous, tempfile.tempdir = tempfile.tempdir, str(folder)
    try:
        multiprocessing.util.get_temp_dir()
    finally:
        tempfile.tempdir = previous
    # Priority -200 runs after the finalizer (-100) that removes multiprocessing's folder inside of the scratch folder. Finalizers do not
    # run in forked child processes.
    multiprocessing.util.Finalize(None, stack.close, exitpriority=-200)


def _run(
    target: Callable[..., None], environment: Mapping[str, str], forked: bool, pipe: Connection, *args: Any
) -> None:
    """Run `target` with the parent's current environment variables, which may have changed since the fork server was started."""
    global _not_mapped
    # A forked process shares the pages of imported libraries; they count as its memory only after it uses them.
    _not_mapped = max(0, _status("VmRSS", os.getppid()) - _status("VmRSS")) if forked else 0
    os.environ.clear()
    os.environ.update(environment)
    target(pipe, *args)


@contextlib.contextmanager
def _without_main() -> Iterator[None]:
    """Hide the user's script (`__main__`) while a process starts, because the new process would run the script again.

    The process does not need the script: it imports all functions that it receives by their module names.
    """
    with _starting:
        main = sys.modules["__main__"]
        sys.modules["__main__"] = ModuleType("__main__")
        try:
            yield
        finally:
            sys.modules["__main__"] = main


@contextlib.contextmanager
def _interrupts_held() -> Iterator[None]:
    """Block Ctrl-C in this thread and in processes that this thread starts.

    Without this block, Ctrl-C during the imports of new processes would print one traceback per process.
    """
    if not hasattr(signal, "pthread_sigmask"):
        yield
        return
    # Start the resource tracker first, because starting it unblocks signals.
    resource_tracker.ensure_running()
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def exit_reason(code: int | None) -> str:
    """Return a description of a process's exit code."""
    if code is None:
        return "it is still running"
    if code < 0:
        with contextlib.suppress(ValueError):
            return f"signal {signal.Signals(-code).name}"
    return f"exit code {code}"


# The code below runs in the separate process.


def quiet_child() -> None:
    """Set up a child process: ignore Ctrl-C, which the parent handles, and redirect stdout to stderr."""
    import tqdm  # type: ignore[import-untyped]

    signal.signal(signal.SIGINT, signal.SIG_IGN)
    os.dup2(2, 1)
    # Replace tqdm's lock, which is a semaphore shared by processes: a killed process would never release it.
    tqdm.tqdm.set_lock(threading.RLock())


def _help(pipe: Connection, imports: Sequence[str] = ()) -> None:
    """Receive functions, run them and send their progress and results, until the pipe closes."""
    quiet_child()
    for name in imports:
        importlib.import_module(name)
    while True:
        try:
            function, args = pipe.recv()
        except EOFError:
            return
        try:
            with progress.listening(_sender(pipe)):
                answer = (_Message.RESULT, function(*args))
        except AccelError as error:
            answer = (_Message.ERROR, error)
        # Catch all exceptions: third-party code may raise any type, and the parent process raises the error for this call.
        except Exception as error:  # noqa: BLE001
            answer = (_Message.ERROR, SessionError(f"{type(error).__name__}: {error}"))
        try:
            pipe.send(answer)
        except OSError:
            return


def _sender(pipe: Connection) -> progress.Listener:
    """Return a listener that sends progress through the pipe, at most ten times a second for each description."""
    last: tuple[str, float] = ("", -math.inf)

    def send(what: str, done: int, total: int | None) -> None:
        nonlocal last
        now = time.perf_counter()
        if what != last[0] or now - last[1] >= _PROGRESS_INTERVAL_S or done == total:
            last = (what, now)
            with contextlib.suppress(OSError):
                pipe.send((_Message.PROGRESS, (what, done, total)))

    return send


def peak_memory() -> int:
    """Return the largest resident memory of this process so far, in bytes.

    The value is read from `/proc`, because `getrusage` includes the parent's peak. For a forked process, the library pages that the process
    has not used are added, so that forked and other processes are comparable. On systems without `/proc` and `getrusage`, such as Windows,
    the result is 0.
    """
    if peak := _status("VmHWM"):
        return peak + _not_mapped
    try:
        import resource
    except ImportError:
        return 0

    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


def _status(name: str, pid: int | str = "self") -> int:
    """Return a field of `/proc/PID/status` in bytes; 0 on systems without `/proc`."""
    try:
        lines = Path(f"/proc/{pid}/status").read_text(encoding="ascii").splitlines()
    except OSError:
        return 0
    return next((int(line.split()[1]) * 1024 for line in lines if line.startswith(f"{name}:")), 0)
