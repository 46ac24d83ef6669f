"""Tests of `accel serve` as a process: it starts, shuts down under load, and completes all accepted requests."""

from __future__ import annotations

import http.client
import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from typer.testing import CliRunner

from accel.cli import app


@contextmanager
def process(*arguments: str, home: str) -> Iterator[tuple[subprocess.Popen[str], int]]:
    """Start the command. Yield its process and its port when the server is ready."""
    environment = {**os.environ, "ACCEL_HOME": home}
    started = subprocess.Popen(
        [sys.executable, "-m", "accel", "serve", *arguments, "--port", "0"],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment,
    )  # fmt: skip
    errors: list[str] = []
    reader = threading.Thread(target=lambda: errors.extend(started.stderr or ()), daemon=True)
    reader.start()
    try:
        port = None
        for line in started.stdout or ():
            if match := re.match(r"http://127\.0\.0\.1:(\d+)/docs", line):
                port = int(match[1])
                break
        assert port, "".join(errors)
        yield started, port
    finally:
        started.kill()
        started.wait(30)
        reader.join(30)
        for pipe in (started.stdout, started.stderr):
            assert pipe is not None
            pipe.close()


class Caller(threading.Thread):
    """Thread that sends requests over one connection until the server refuses a request or closes the connection.

    Attributes:
        answered: Number of complete responses.
        refused: Number of responses with the error that the server is shutting down.
        lost: Errors of requests whose responses began and were not completed.
    """

    def __init__(self, port: int) -> None:
        super().__init__(daemon=True)
        self.port = port
        self.answered = self.refused = 0
        self.lost: list[str] = []

    def run(self) -> None:
        body = json.dumps({"inputs": ["where is my card", "help"]})
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=30)
        try:
            while True:
                try:
                    connection.request("POST", "/classify", body)
                    answer = connection.getresponse()
                except (ConnectionError, http.client.RemoteDisconnected):
                    return  # no response: the request was not accepted
                try:
                    answer.read()
                except (ConnectionError, http.client.IncompleteRead) as error:
                    self.lost.append(repr(error))
                    return
                if answer.status == 200:
                    self.answered += 1
                elif answer.status == 503:
                    self.refused += 1
                    return
                else:
                    self.lost.append(str(answer.status))
        finally:
            connection.close()


def test_signal_completes_accepted_requests(tiny_folder: Callable[..., Path], tmp_path: Path) -> None:
    folder = tiny_folder("bert", "text-classification")
    # Set a large maximum wait. On a busy machine the event loop is late, and the server would refuse requests only for
    # this reason.
    with process(str(folder), "--backend", "pytorch", "--max-wait-ms", "600000", home=str(tmp_path)) as (server, port):
        callers = [Caller(port) for _ in range(8)]
        for caller in callers:
            caller.start()
        deadline = time.monotonic() + 30
        while sum(caller.answered for caller in callers) < 50:
            assert time.monotonic() < deadline
            time.sleep(0.01)
        server.send_signal(signal.SIGTERM)
        for caller in callers:
            caller.join(30)
        assert server.wait(30) == 0
    assert [caller.lost for caller in callers] == [[]] * 8
    assert sum(caller.refused for caller in callers) == 8, "some found the door closed instead of being told"


def test_port_in_use_raises_with_fix(tiny_folder: Callable[..., Path]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = str(listener.getsockname()[1])
        done = CliRunner().invoke(app, ["serve", str(tiny_folder("bert", "text-classification")), "--port", port])
    assert done.exit_code == 2
    assert "--port" in done.output


def test_foreign_address_raises_with_fix(tiny_folder: Callable[..., Path]) -> None:
    # Addresses in 192.0.2.0/24 are reserved for documentation, so no machine has this address.
    arguments = ["serve", str(tiny_folder("bert", "text-classification")), "--port", "0", "--host", "192.0.2.1"]
    done = CliRunner().invoke(app, arguments)
    assert (done.exit_code, "--host" in done.output) == (2, True)


@pytest.mark.parametrize("option", ["--replicas", "--cpus", "--gpus"])
@pytest.mark.parametrize("arguments", [["serve", "model"], ["batch", "model", "--data", "a.csv", "--out", "out"]])
def test_ray_options_are_refused_without_ray(arguments: list[str], option: str) -> None:
    done = CliRunner().invoke(app, [*arguments, option, "2"])
    assert (done.exit_code, f"{option} can be used only with --ray" in done.output) == (2, True)


def test_missing_model_raises(tmp_path: Path) -> None:
    done = CliRunner().invoke(app, ["serve", str(tmp_path / "nothing"), "--port", "0"])
    assert done.exit_code == 1
    assert "Error:" in done.output


def test_invalid_model_names_and_key_files_raise(tmp_path: Path) -> None:
    (tmp_path / "keys.txt").write_text("# none\n\n")
    done = CliRunner().invoke(app, ["serve", "a=model", "a=other", "--port", "0"])
    assert (done.exit_code, "the same name" in done.output) == (2, True)
    done = CliRunner().invoke(app, ["serve", "model", "--api-keys", str(tmp_path / "keys.txt")])
    assert (done.exit_code, "contains no key" in done.output) == (2, True)
