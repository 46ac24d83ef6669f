"""Run slow, crashing or noisy work in processes of its own, and read the memory use of a process.

One process a variant: two spinning thread pools in one process slow each other by up to 190 microseconds a call, and a
runtime that crashes takes nobody with it.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import logging
import multiprocessing
import multiprocessing.util
import os
import signal
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from multiprocessing import resource_tracker
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

from ..artifact.writing import scratch
from ..errors import AccelError, SessionError

if TYPE_CHECKING:
    from multiprocessing.connection import Connection


logger = logging.getLogger(__name__)

ANSWER_TIMEOUT_S = 600.0
"""How long a process may take for one request; compiling a large model is the slowest."""


class WorkerLostError(SessionError):
    """A process that died or did not answer in time; another try may go better.

    Attributes:
        late: It did not answer in time.
    """

    def __init__(self, message: str, *, fix: str | None = None, late: bool = False) -> None:
        super().__init__(message, fix=fix)
        self.late = late


class Helper:
    """A process that runs functions of modules, so that a library that crashes takes nobody with it.

    It is started at the first call, and again after it died.

    Args:
        name: Named in errors.
        imports: Modules that the process imports before its first call.
    """

    def __init__(self, name: str = "", imports: Sequence[str] = ()) -> None:
        self._who = f"The process of {name}" if name else "The process"
        self._imports = imports
        self._process: Any = None
        self._pipe: Any = None
        self._ended = False

    def start(self) -> None:
        """Start the process now, so that several import at the same time."""
        self._process, self._pipe = start_process(_help, self._imports)
        if self._ended:
            self.kill()

    def call(self, function: Callable[..., Any], *args: Any, timeout_s: float | None = None) -> Any:
        """`function(*args)` in the process.

        Args:
            function: Of a module.
            args: Its arguments.
            timeout_s: How long it may take; `None`: as long as it needs.

        Raises:
            AccelError: What the function raised; anything that is no `AccelError` comes as a `SessionError`.
            WorkerLostError: The process died, or took too long and was ended.
        """
        if self._process is None or not self._process.is_alive():
            self.close()
            self.start()
        try:
            self._pipe.send((function, args))
            if not self._pipe.poll(timeout_s):
                self.kill()
                self._process.join(timeout=5)
                raise WorkerLostError(
                    f"{self._who} was stopped: it did not answer for {timeout_s:.0f} s.",
                    fix="allow more time, or measure it alone, with smaller batches and shorter sequences.",
                    late=True,
                )
            good, value = self._pipe.recv()
        except (EOFError, OSError) as error:
            self._process.join(timeout=5)
            raise WorkerLostError(
                f"{self._who} died ({exit_reason(self._process.exitcode)}).", fix="run this step alone to see why."
            ) from error
        if not good:
            raise value
        return value

    def end(self) -> None:
        """Kill the process from another thread, even while it is starting."""
        self._ended = True
        self.kill()

    def kill(self) -> None:
        """End the process in the middle of a call, which then raises `WorkerLostError`."""
        if self._process is not None and self._process.is_alive():
            self._process.kill()

    def hang_up(self) -> None:
        """Let the process end by itself; `close` waits for it."""
        if self._pipe is not None:
            self._pipe.close()

    def close(self) -> None:
        """End the process."""
        self.hang_up()
        if self._process is not None:
            self._process.join(timeout=10)
            self.kill()
            self._process.join(timeout=10)
            self._process = None


_not_mapped = 0  # bytes of imported libraries that a process of its own would hold in memory
_starting = threading.Lock()
_SOCKET_FOLDER = 70  # characters: the path of a socket has at most 107, and 33 are multiprocessing's
_GPU_DRIVERS = ("/dev/nvidiactl", "/dev/kfd", "/dev/dxg")


def start_process(target: Callable[..., None], *args: Any) -> tuple[Any, Connection]:
    """A process that runs `target(pipe, *args)`, and the other end of its pipe.

    On Linux it is forked from a server that has imported torch and transformers and done nothing else, so that a process
    costs a tenth of a second and not five. Where that is not safe, each imports for itself: on other systems, and beside a GPU
    driver, which a library may start while it is imported, and which no forked process can use.
    """
    forked = sys.platform == "linux" and hasattr(os, "fork") and not any(Path(node).exists() for node in _GPU_DRIVERS)
    context: Any = multiprocessing.get_context("forkserver" if forked else "spawn")
    if forked:
        context.set_forkserver_preload([f"{__package__}.preload"])
        _own_socket_folder()
    ours, theirs = context.Pipe()
    process = context.Process(target=_run, args=(target, dict(os.environ), forked, theirs, *args), daemon=True)
    with _without_main(), _interrupts_held():
        process.start()
    theirs.close()
    return process, ours


@functools.cache
def _own_socket_folder() -> None:
    """Let `multiprocessing` put its sockets into a folder that the next run removes where this one is killed, once a process."""
    stack = contextlib.ExitStack()
    folder = stack.enter_context(scratch())
    if len(str(folder)) > _SOCKET_FOLDER:
        stack.close()
        try:
            folder = stack.enter_context(scratch(Path("/tmp")))
        except OSError:
            # Nobody writes there: multiprocessing's own folder stays where this process is killed.
            return
    usual, tempfile.tempdir = tempfile.tempdir, str(folder)
    try:
        multiprocessing.util.get_temp_dir()
    finally:
        tempfile.tempdir = usual
    # After multiprocessing has removed its own folder in there (priority -100), and in no child that was forked by others.
    multiprocessing.util.Finalize(None, stack.close, exitpriority=-200)


def _run(
    target: Callable[..., None], environment: Mapping[str, str], forked: bool, pipe: Connection, *args: Any
) -> None:
    """Run `target` in the process, with the parent's environment of now; the server has that of its start."""
    global _not_mapped
    # A forked process has the imported libraries, but not their pages until it touches them.
    _not_mapped = max(0, _status("VmRSS", os.getppid()) - _status("VmRSS")) if forked else 0
    os.environ.clear()
    os.environ.update(environment)
    target(pipe, *args)


@contextlib.contextmanager
def _without_main() -> Iterator[None]:
    """Hide the user's script from a process that starts: it would run the script again, up to the line that got here.

    Everything that is sent to a process is found by the name of its module, so nothing there needs the script.
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
    """Block Ctrl-C in this thread and in the processes that it starts; else each importing process prints a traceback."""
    if not hasattr(signal, "pthread_sigmask"):
        yield
        return
    # Where it has to be started first, it lets signals through again.
    resource_tracker.ensure_running()
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def exit_reason(code: int | None) -> str:
    """A process's exit code in words."""
    if code is None:
        return "it is still running"
    if code < 0:
        with contextlib.suppress(ValueError):
            return f"signal {signal.Signals(-code).name}"
    return f"exit code {code}"


# In the process


def quiet_child() -> None:
    """Set a child process up: ignore Ctrl-C, which the parent handles, and send stdout to stderr."""
    import tqdm  # type: ignore[import-untyped]

    signal.signal(signal.SIGINT, signal.SIG_IGN)
    os.dup2(2, 1)
    # tqdm's own lock is a semaphore, which a process that is ended from outside leaves behind.
    tqdm.tqdm.set_lock(threading.RLock())


def _help(pipe: Connection, imports: Sequence[str] = ()) -> None:
    """A helper: run functions until the pipe closes."""
    quiet_child()
    for name in imports:
        importlib.import_module(name)
    while True:
        try:
            function, args = pipe.recv()
        except EOFError:
            return
        try:
            answer = (True, function(*args))
        except AccelError as error:
            answer = (False, error)
        # Foreign code: whatever it raises is a report about this one step.
        except Exception as error:  # noqa: BLE001
            answer = (False, SessionError(f"{type(error).__name__}: {error}"))
        try:
            pipe.send(answer)
        except OSError:
            return


def peak_memory() -> int:
    """Largest resident memory of this process in bytes.

    From `/proc`, because `getrusage` hands the parent's peak down to a process that it starts; with the pages of libraries
    that a process started alone would have mapped. 0 where the system has neither, as Windows.
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
    """Read a number of bytes from `/proc/PID/status`; 0 on other systems."""
    try:
        lines = Path(f"/proc/{pid}/status").read_text(encoding="ascii").splitlines()
    except OSError:
        return 0
    return next((int(line.split()[1]) * 1024 for line in lines if line.startswith(f"{name}:")), 0)
