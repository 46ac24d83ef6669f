"""`accel serve` as a process: it starts, is told to end under load, and loses nothing that it accepted."""

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
    """The command, and its port when it is ready."""
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
            if found := re.match(r"http://127\.0\.0\.1:(\d+)/docs", line):
                port = int(found[1])
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
    """Calls again and again over one connection until the server refuses or is gone.

    Attributes:
        answered: Complete answers.
        refused: Answers that said that it ends.
        lost: Requests that it began to answer, and did not.
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
                    return  # nothing came back: it was not accepted
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


def end_under_load(folder: Path, home: str) -> None:
    with process(str(folder), "--backend", "pytorch", home=home) as (server, port):
        callers = [Caller(port) for _ in range(8)]
        for one in callers:
            one.start()
        deadline = time.monotonic() + 30
        while sum(one.answered for one in callers) < 50:
            assert time.monotonic() < deadline
            time.sleep(0.01)
        server.send_signal(signal.SIGTERM)
        for one in callers:
            one.join(30)
        assert server.wait(30) == 0
    assert [one.lost for one in callers] == [[]] * 8
    assert sum(one.refused for one in callers) == 8, "some found the door closed instead of being told"


def test_told_to_end_it_answers_what_it_accepted_and_refuses_the_rest(
    tiny_folder: Callable[..., Path], tmp_path: Path
) -> None:
    end_under_load(tiny_folder("bert", "text-classification"), str(tmp_path))


@pytest.mark.thorough
def test_told_to_end_twenty_times(tiny_folder: Callable[..., Path], tmp_path: Path) -> None:
    for _ in range(20):
        end_under_load(tiny_folder("bert", "text-classification"), str(tmp_path))


def test_a_port_that_is_taken_is_an_error_with_a_remedy(tiny_folder: Callable[..., Path]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        done = CliRunner().invoke(app, ["serve", str(tiny_folder("bert", "text-classification")), "--port", port])
    assert done.exit_code == 2
    assert "--port" in done.output


def test_an_address_that_is_not_this_machines_is_an_error_with_a_remedy(tiny_folder: Callable[..., Path]) -> None:
    # Reserved for documentation.
    asked = ["serve", str(tiny_folder("bert", "text-classification")), "--port", "0", "--host", "192.0.2.1"]
    done = CliRunner().invoke(app, asked)
    assert (done.exit_code, "--host" in done.output) == (2, True)


@pytest.mark.parametrize("option", ["--replicas", "--cpus", "--gpus"])
@pytest.mark.parametrize("asked", [["serve", "model"], ["batch", "model", "--data", "a.csv", "--out", "out"]])
def test_what_is_for_ray_alone_is_refused_without_it(asked: list[str], option: str) -> None:
    done = CliRunner().invoke(app, [*asked, option, "2"])
    assert (done.exit_code, f"{option}: for Ray alone" in done.output) == (2, True)


def test_a_model_that_is_not_there_is_an_error(tmp_path: Path) -> None:
    done = CliRunner().invoke(app, ["serve", str(tmp_path / "nothing"), "--port", "0"])
    assert done.exit_code == 1
    assert "Error:" in done.output


def test_names_keys_and_a_key_file_without_keys(tmp_path: Path) -> None:
    (tmp_path / "keys.txt").write_text("# none\n\n")
    done = CliRunner().invoke(app, ["serve", "a=model", "a=other", "--port", "0"])
    assert (done.exit_code, "taken" in done.output) == (2, True)
    done = CliRunner().invoke(app, ["serve", "model", "--api-keys", str(tmp_path / "keys.txt")])
    assert (done.exit_code, "holds no key" in done.output) == (2, True)
