"""Processes of one's own."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time

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
