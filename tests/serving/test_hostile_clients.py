"""Tests of a server on a real socket with many clients, and with clients that are slow, send nothing, or disconnect."""

from __future__ import annotations

import http.client
import json
import random
import re
import socket
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

import accel
from accel.serving.http.app import create_app
from accel.serving.http.middleware import OuterMiddleware
from accel.serving.http.server_process import serve
from accel.serving.http.server_settings import ServerSettings
from accel.testing.generative_models import save_generator
from tests.serving.conftest import Gate

Served = Callable[[str], accel.ORTModel]
HELP = json.dumps({"inputs": "help"}).encode()


@contextmanager
def running(front: OuterMiddleware) -> Iterator[int]:
    """Run the server in a thread and yield its port. Shut the server down at the end of the `with` block."""
    ready = threading.Event()
    url: list[str] = []

    def set_address(address: str) -> None:
        url.append(address)
        ready.set()

    thread = threading.Thread(target=serve, args=(front,), kwargs={"port": 0, "on_ready": set_address}, daemon=True)
    thread.start()
    assert ready.wait(60)
    try:
        yield int(url[0].rpartition(":")[2])
    finally:
        front.server.draining = True
        thread.join(60)
        assert not thread.is_alive()


def ask(port: int, path: str, body: bytes | None = None) -> tuple[int, bytes]:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
    try:
        connection.request("GET" if body is None else "POST", path, body)
        answer = connection.getresponse()
        return answer.status, answer.read()
    finally:
        connection.close()


def sent(port: int, path: str, body: bytes, length: int | None = None) -> socket.socket:
    """Open a connection, send a request, and return the connection. With `length`, only the beginning of the request is
    sent.
    """
    connection = socket.create_connection(("127.0.0.1", port), timeout=60)
    connection.sendall(
        b"POST %s HTTP/1.1\r\nHost: a\r\nContent-Length: %d\r\n\r\n%s" % (path.encode(), length or len(body), body)
    )
    return connection


def until(condition: Callable[[], bool]) -> None:
    end = time.monotonic() + 30
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.005)


def until_pending(engine: accel.Engine, count: int, port: int) -> None:
    """Wait until exactly `wanted` inputs wait or run. If this fails, the error shows the request counts from the
    server's metrics.
    """
    try:
        until(lambda: engine.pending() == count)
    except AssertionError:
        page = ask(port, "/metrics")[1].decode()
        counts = re.findall(r"^accel_(?:requests|refused|inputs)_total.*$", page, re.MULTILINE)
        pytest.fail(f"{engine.pending()} inputs are pending instead of {count}: {counts}")


def read(connection: socket.socket) -> bytes:
    """Read from a connection until the server closes it, and return all bytes."""
    parts = []
    while part := connection.recv(65536):
        parts.append(part)
    connection.close()
    return b"".join(parts)


def test_incomplete_body_times_out(served: Served) -> None:
    engine = accel.Engine({"labels": served("text-classification")})
    front = create_app(engine, ServerSettings(body_timeout_s=0.2))
    with running(front) as port:
        answer = read(sent(port, "/classify", HELP[:5], length=len(HELP)))
        assert answer.startswith(b"HTTP/1.1 408")
        assert ask(port, "/classify", HELP)[0] == 200


def test_incomplete_body_does_not_delay_shutdown(served: Served) -> None:
    front = create_app(accel.Engine({"labels": served("text-classification")}), ServerSettings(linger_s=0.0))
    with running(front) as port:
        half = sent(port, "/classify", HELP[:5], length=len(HELP))
        until(lambda: bool(front.server.reading))
        front.server.draining = True
        assert read(half).startswith(b"HTTP/1.1 503")


def test_pipelined_requests_are_all_answered(served: Served) -> None:
    with running(create_app(accel.Engine({"labels": served("text-classification")}))) as port:
        head = b"POST /classify HTTP/1.1\r\nHost: a\r\nContent-Length: %d\r\n" % len(HELP)
        with socket.create_connection(("127.0.0.1", port), timeout=60) as connection:
            connection.sendall((head + b"\r\n" + HELP) * 9 + head + b"Connection: close\r\n\r\n" + HELP)
            assert read(connection).count(b"HTTP/1.1 200") == 10


@pytest.fixture(scope="module")
def chat(shared: Callable[..., Path]) -> accel.ORTModel:
    folder = shared("served-long", lambda folder: save_generator(folder, "llama", max_position_embeddings=100_000))
    return accel.ORTModel.from_pretrained(folder, backend="pytorch")


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("wait", [True, False])
def test_disconnected_client_frees_its_row(stream: bool, wait: bool, chat: accel.ORTModel) -> None:
    engine = accel.Engine({"chat": chat})
    body = json.dumps({"inputs": "help", "max_new_tokens": 3000, "ignore_eos": True, "stream": stream}).encode()
    with running(create_app(engine)) as port:
        scheduler = engine.generator("chat").scheduler
        for _ in range(3):
            connection = sent(port, "/generate", body)
            if wait:
                until(lambda: scheduler.running > 0)
            connection.close()
            until(
                lambda: (
                    not scheduler.running and not scheduler.waiting and "in_flight 1.0" in str(ask(port, "/metrics"))
                )
            )
        assert scheduler.steps < 3 * 3000


def counted(page: str, name: str, **labels: str) -> int:
    """Return the sum of a Prometheus counter over all values of the labels that are not given."""
    required_labels = [f'{key}="{value}"' for key, value in labels.items()]
    samples = re.findall(rf"^{name}(?:{{(.*)}})? ([0-9.e+]+)$", page, re.MULTILINE)
    return int(
        sum(
            float(value) for sample_labels, value in samples if all(label in sample_labels for label in required_labels)
        )
    )


@pytest.mark.thorough
def test_metrics_equal_the_counts_of_sixteen_clients(served: Served) -> None:
    """The metrics are exact for all outcomes of a request.

    The requests succeed, are refused by the queue, are invalid, name an unknown model, or come from clients that
    disconnect.
    """
    model = served("sentence-similarity")
    gate = Gate(model._session)
    model._session = gate
    # Set a large `max_wait_s`. On a busy machine the event loop is late, and the server would refuse requests only for
    # this reason.
    engine = accel.Engine({"vectors": model}, max_queue=6, max_wait_s=600)
    statuses: Counter[str] = Counter()
    tokens = inputs = 0
    lock = threading.Lock()

    def call(port: int, seed: int) -> None:
        nonlocal tokens, inputs
        chance = random.Random(seed)
        for _ in range(125):
            texts = ["where is my card"] * chance.randint(1, 3)
            body: Any = {"input": texts}
            wrong = chance.random()
            if wrong < 0.05:
                body = {"input": 3}
            elif wrong < 0.1:
                body = {"input": texts, "model": "other"}
            status, answer = ask(port, "/v1/embeddings", b"{" if wrong > 0.97 else json.dumps(body).encode())
            with lock:
                statuses[str(status)] += 1
                if status == 200:
                    tokens += json.loads(answer)["usage"]["prompt_tokens"]
                    inputs += len(texts)

    try:
        with running(create_app(engine)) as port:
            # The following clients disconnect while the model is busy.
            abandoned = [sent(port, "/v1/embeddings", b'{"input": ["help", "card"]}') for _ in range(3)]
            until_pending(engine, 6, port)
            statuses[str(ask(port, "/v1/embeddings", b'{"input": "help"}')[0])] += 1
            time.sleep(0.1)
            for connection in abandoned:
                connection.close()
            until_pending(engine, 0, port)
            gate.open()
            callers = [threading.Thread(target=call, args=(port, seed)) for seed in range(16)]
            for caller in callers:
                caller.start()
            for caller in callers:
                caller.join(300)
            until(lambda: "in_flight 1.0" in str(ask(port, "/metrics")))
            page = ask(port, "/metrics")[1].decode()
    finally:
        gate.open()
        model._session = gate._session
    assert set(statuses) == {"200", "400", "404", "422", "429"}
    assert statuses.total() == 2001
    statuses["499"] = len(abandoned)
    for status, count in statuses.items():
        assert counted(page, "accel_requests_total", path="/v1/embeddings", status=status) == count, status
    assert counted(page, "accel_requests_total", path="/v1/embeddings") == statuses.total()
    assert counted(page, "accel_request_seconds_count", path="/v1/embeddings") == statuses.total()
    assert counted(page, "accel_refused_total") == statuses["429"]
    assert counted(page, "accel_inputs_total", outcome="answered") == inputs
    assert counted(page, "accel_inputs_total", outcome="cancelled") == 6
    assert counted(page, "accel_inputs_total", outcome="failed") == 0
    assert counted(page, "accel_queue_seconds_count") == statuses["200"]
    # The metrics count rows of disconnected clients if the rows were already in a running call.
    first_call = gate.calls[0]
    assert counted(page, "accel_tokens_total") == tokens + first_call[0] * 3
    assert counted(page, "accel_pending_inputs") == 0
