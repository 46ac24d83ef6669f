"""Tests of helper processes: interrupts, and sockets of killed processes."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pytest

from accel import progress
from accel.measuring.processes import HelperProcess

# The script prints a line when the fork server has started. The imports of the fork server take seconds.
_SCRIPT = """
import threading, time
from multiprocessing import forkserver
from accel.measuring import processes
threading.Thread(target=processes.start_process, args=(processes._help,), daemon=True).start()
while forkserver._forkserver._forkserver_pid is None:
    time.sleep(0.01)
print("started", flush=True)
try:
    time.sleep(60)
except KeyboardInterrupt:
    pass
"""


def test_interrupted_process_prints_nothing_during_imports() -> None:
    command = [sys.executable, "-c", _SCRIPT]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True
    ) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        assert process.stdout.readline() == "started\n"
        # Wait until the fork server handles signals and imports modules.
        time.sleep(0.5)
        os.killpg(process.pid, signal.SIGINT)
        # Wait long enough for an error message, but end the process before all imports are complete.
        time.sleep(1.5)
        os.killpg(process.pid, signal.SIGKILL)
        assert process.stderr.read() == ""


def _reported(rows: int) -> int:
    for done in range(rows + 1):
        progress.report("measuring accuracy", done, rows)
    return rows


def test_progress_of_a_call_in_another_process_is_reported() -> None:
    """The first and the last report are always sent."""
    reports: list[tuple[str, int, int | None]] = []
    helper = HelperProcess()
    try:
        with progress.listening(lambda *report: reports.append(report)):
            assert helper.call(_reported, 3, timeout_s=60.0) == 3
    finally:
        helper.close()
    assert reports[0] == ("measuring accuracy", 0, 3)
    assert reports[-1] == ("measuring accuracy", 3, 3)


@pytest.mark.skipif(sys.platform != "linux", reason="only on Linux does accel use a fork server, which creates sockets")
@pytest.mark.parametrize("length", [10, 90])
def test_sockets_of_a_killed_process_are_removed_later(length: int, tmp_path: Path) -> None:
    """The next process removes the sockets of a killed process, also if the path of the temporary folder is too long
    for a socket.
    """
    folder = Path(tempfile.mkdtemp(dir="/tmp")) if length < 40 else tmp_path / ("x" * length)
    folder.mkdir(exist_ok=True)
    program = (
        "import multiprocessing.util, os\n"
        "from accel.measuring.processes import _own_socket_folder\n"
        "_own_socket_folder()\n"
        "print(multiprocessing.util.get_temp_dir(), flush=True)\n"
        "os._exit(0)\n"
    )
    run = [sys.executable, "-c", program]
    sockets = []
    for _ in range(2):
        ended = subprocess.run(
            run, env={**os.environ, "TMPDIR": str(folder)}, capture_output=True, text=True, check=True
        )
        sockets.append(Path(ended.stdout.strip()))
        assert len(str(sockets[-1])) < 100
    assert not sockets[0].exists()
    shutil.rmtree(sockets[1].parent, ignore_errors=True)
    shutil.rmtree(folder)
