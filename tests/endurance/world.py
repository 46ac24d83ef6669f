"""Folders and processes for the experiments: a model, a home folder, a folder for temporary files, and watched
processes.

The processes are forked from a process that has imported all libraries. A kill therefore interrupts the command, and
not its imports.
"""

from __future__ import annotations

import atexit
import os
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import psutil

from accel.testing.models import save_tiny

ROWS = "text,label\n" + "".join(
    f"{words},LABEL_{i % 3}\n"
    for i, words in enumerate(
        (
            "my card is lost",
            "the fee is bad",
            "top up my account",
            "where is the money",
            "new phone pin",
            "cash machine",
        )
        * 4
    )
)
_TAIL = 3_000


@dataclass(frozen=True)
class Ended:
    """Result of a process that ended.

    Attributes:
        code: Exit code, which is negative if a signal ended the process.
        text: Last part of the output of the process.
        seconds: Duration in seconds.
        peak_bytes: Peak memory in bytes.
    """

    code: int
    text: str
    seconds: float
    peak_bytes: int

    @property
    def raw(self) -> bool:
        """Whether the output contains a traceback."""
        return "Traceback (most recent call last)" in self.text


class World:
    """Folders of one experiment, and functions that run processes with these folders.

    Args:
        root: Folder in which all folders are created.
    """

    def __init__(self, root: Path) -> None:
        self.root, self.home, self.temporary, self.work = root, root / "home", root / "tmp", root / "work"
        for folder in (self.home, self.temporary, self.work):
            folder.mkdir(parents=True)
        self.rows = root / "rows.csv"
        self.rows.write_text(ROWS)
        self.model = save_tiny(root / "model", "bert")
        self._log = root / "log"

    def run(self, action: Callable[[], object], *, kill_after_s: float | None = None, limit_s: float = 600.0) -> Ended:
        """Run a function in a separate process, and return its result.

        Args:
            action: Function to run. `SystemExit` gives the exit code. Other exceptions give exit code 1 and a
                traceback.
            kill_after_s: Kill the process after this time in seconds, but not the processes that it started.
            limit_s: Kill the process and all processes that it started after this time in seconds.
        """
        started = time.monotonic()
        number = self.start(action)
        deadline = started + (limit_s if kill_after_s is None else kill_after_s)
        while True:
            ended, status, usage = os.wait4(number, os.WNOHANG)
            if ended:
                break
            if time.monotonic() >= deadline:
                if kill_after_s is None:
                    self.end_children(number)
                os.kill(number, signal.SIGKILL)
                _, status, usage = os.wait4(number, 0)
                break
            time.sleep(0.002)
        text = self._log.read_bytes()[-_TAIL:].decode(errors="replace")
        return Ended(os.waitstatus_to_exitcode(status), text, time.monotonic() - started, usage.ru_maxrss * 1024)

    def start(self, action: Callable[[], object], log: Path | None = None) -> int:
        """Start a process that runs a function in its own session, and return the process id."""
        sys.stdout.flush()
        sys.stderr.flush()
        number = os.fork()
        if number:
            return number
        code = 1
        try:
            os.setsid()
            file = os.open(log or self._log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
            os.dup2(file, 1)
            os.dup2(file, 2)
            os.environ |= {"ACCEL_HOME": str(self.home), "TMPDIR": str(self.temporary), "HF_HUB_OFFLINE": "1"}
            import tempfile

            tempfile.tempdir = None
            os.chdir(self.work)
            action()
            code = 0
        except SystemExit as error:
            code = error.code if isinstance(error.code, int) else int(error.code is not None)
        except BaseException:
            traceback.print_exc()
        finally:
            atexit._run_exitfuncs()
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(code)

    @staticmethod
    def end_children(number: int) -> None:
        """Kill all processes that a process started."""
        for child in psutil.Process(number).children(recursive=True):
            child.kill()

    def orphans(self, patience_s: float = 60.0) -> list[str]:
        """Return the names of processes that still run in this experiment's folder after the process that started them
        has ended. Kill these processes.
        """
        deadline = time.monotonic() + patience_s
        while processes := [p for p in psutil.process_iter() if self._is_mine(p)]:
            if time.monotonic() > deadline:
                names = [" ".join(p.cmdline())[:120] for p in processes]
                for process in processes:
                    process.kill()
                return names
            time.sleep(0.1)
        return []

    def _is_mine(self, process: psutil.Process) -> bool:
        try:
            return process.pid != os.getpid() and Path(process.cwd()).is_relative_to(self.work)
        except (psutil.Error, OSError):
            return False

    def leftovers(self) -> list[str]:
        """Return the files that interrupted runs left: all files in the folder for temporary files, staging folders,
        and incomplete files.
        """
        # Ignore the file `.ses`, to which ONNX Runtime writes its session number in the folder for temporary files.
        paths = [str(path.relative_to(self.root)) for path in self.temporary.iterdir() if path.name != ".ses"]
        for folder in (self.home, self.work):
            paths += [
                str(path.relative_to(self.root))
                for path in folder.rglob("*")
                if any(part in path.name for part in (".accel-staging-", ".json.", "candidate"))
            ]
        return paths


def accel_command(arguments: Sequence[object]) -> Callable[[], None]:
    """Return a function that runs `accel ARGUMENTS` in the current process."""

    def run() -> None:
        from accel.cli import main

        sys.argv = ["accel", *map(str, arguments)]
        main()

    return run


def import_everything() -> None:
    """Import all libraries that commands import, so that forked processes do not import them again."""
    import datasets
    import evaluate
    import nncf
    import onnxruntime
    import openvino
    import torch.onnx
    import transformers.exporters

    from accel.backends import registry
    from accel.stages.export import export

    for name in ("cpu", "openvino", "pytorch"):
        registry.probe(registry.describe(name))
    # Run an export, because exporters import many modules at their first use. Use one thread, because a forked process
    # has no other threads.
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        export(save_tiny(Path(folder) / "model", "bert", num_hidden_layers=1), Path(folder) / "onnx")
    del datasets, evaluate, nncf, onnxruntime, openvino, transformers
