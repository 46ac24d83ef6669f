"""Processes of one's own."""

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

# Prints a line as soon as the server of processes was started, whose imports take seconds.
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


def test_an_interrupt_while_a_process_imports_is_told_by_nobody_but_the_parent() -> None:
    command = [sys.executable, "-c", _SCRIPT]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True
    ) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        assert process.stdout.readline() == "started\n"
        # Where it has begun to import, and handles signals.
        time.sleep(0.5)
        os.killpg(process.pid, signal.SIGINT)
        # Time to tell, and not all that its imports take.
        time.sleep(1.5)
        os.killpg(process.pid, signal.SIGKILL)
        assert process.stderr.read() == ""


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere processes are spawned, without sockets of a server")
@pytest.mark.parametrize("length", [10, 90])
def test_sockets_of_a_killed_process_are_removed_by_the_next(length: int, tmp_path: Path) -> None:
    """Also where the folder for temporary files has a path that leaves a socket's no room."""
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
    made = []
    for _ in range(2):
        ended = subprocess.run(
            run, env={**os.environ, "TMPDIR": str(folder)}, capture_output=True, text=True, check=True
        )
        made.append(Path(ended.stdout.strip()))
        assert len(str(made[-1])) < 100
    assert not made[0].exists()
    shutil.rmtree(made[1].parent, ignore_errors=True)
    shutil.rmtree(folder)
