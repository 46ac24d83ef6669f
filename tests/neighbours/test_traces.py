"""Tests of the server's traces, as the SDK of OpenTelemetry receives them."""

from __future__ import annotations

import http.server
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from starlette.testclient import TestClient

import accel
from accel.serving.http.app import create_app
from accel.testing.generative_models import save_generator

pytest.importorskip("opentelemetry.sdk", reason="the extra `traces` is not installed")
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import StatusCode

TRACE, PARENT = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
STEPS = ["queue", "tokenization", "inference"]


@pytest.fixture(scope="module")
def exporter() -> InMemorySpanExporter:
    return InMemorySpanExporter()


@pytest.fixture(scope="module")
def client(
    tiny_folder: Callable[..., Path], shared: Callable[..., Path], exporter: InMemorySpanExporter
) -> Iterator[TestClient]:
    provider = TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    folders = {
        "labels": tiny_folder("bert", "text-classification"),
        "chat": shared("traced-chat", lambda folder: save_generator(folder, "llama")),
    }
    with TestClient(create_app(accel.Engine(folders, backend="pytorch"), traces=provider)) as test_client:
        yield test_client
    # The trace provider belongs to the caller, so the server must not shut it down.
    exporter.clear()
    provider.get_tracer("mine").start_span("after").end()
    assert [span.name for span in exporter.get_finished_spans()] == ["after"]


def spans(exporter: InMemorySpanExporter) -> tuple[Any, list[Any]]:
    """Return the span of the request, and the spans inside it in the order of their start times."""
    finished = exporter.get_finished_spans()
    exporter.clear()
    (outer,) = (span for span in finished if span.name.startswith("POST"))
    inner = [span for span in finished if span is not outer]
    assert all(span.parent.span_id == outer.context.span_id for span in inner)
    return outer, sorted(inner, key=lambda span: span.start_time)


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/classify", {"model": "labels", "inputs": ["help", "the bank"]}),
        ("/generate", {"model": "chat", "inputs": "help", "max_new_tokens": 8}),
        ("/v1/completions", {"model": "chat", "prompt": "help", "max_tokens": 8}),
    ],
)
def test_request_is_a_span_of_the_callers_trace(
    path: str, body: dict[str, Any], client: TestClient, exporter: InMemorySpanExporter
) -> None:
    answer = client.post(path, json=body, headers={"traceparent": f"00-{TRACE}-{PARENT}-01"})
    outer, inner = spans(exporter)
    assert outer.name == f"POST {path}"
    assert f"{outer.context.trace_id:032x}" == TRACE
    assert f"{outer.parent.span_id:016x}" == PARENT
    assert outer.attributes["accel.request_id"] == answer.headers["x-request-id"]
    assert outer.attributes["http.response.status_code"] == 200
    assert [span.name for span in inner] == STEPS
    times = [outer.start_time, *(time for span in inner for time in (span.start_time, span.end_time)), outer.end_time]
    assert times == sorted(times)
    # A streamed response is computed while it is sent, so the last step has a duration.
    assert inner[-1].end_time - inner[-1].start_time > 0


def test_unsampled_trace_of_the_caller_is_not_recorded(client: TestClient, exporter: InMemorySpanExporter) -> None:
    headers = {"traceparent": f"00-{TRACE}-{PARENT}-00"}
    assert client.post("/classify", json={"model": "labels", "inputs": "help"}, headers=headers).status_code == 200
    assert not exporter.get_finished_spans()


@pytest.mark.parametrize("header", ["", "garbage", f"00-{'0' * 32}-{PARENT}-01"])
def test_invalid_trace_header_starts_a_new_trace(
    header: str, client: TestClient, exporter: InMemorySpanExporter
) -> None:
    client.post("/classify", json={"model": "labels", "inputs": 3}, headers={"traceparent": header})
    outer, inner = spans(exporter)
    assert (outer.parent, inner, outer.attributes["http.response.status_code"]) == (None, [], 422)
    assert outer.status.status_code is StatusCode.UNSET


def test_failed_request_is_marked_as_an_error(
    client: TestClient, exporter: InMemorySpanExporter, monkeypatch: pytest.MonkeyPatch
) -> None:
    app: Any = client.app
    monkeypatch.setattr(app.server.engine.models["labels"], "_session", None)
    assert client.post("/classify", json={"model": "labels", "inputs": "help"}).status_code == 500
    outer, _ = spans(exporter)
    assert outer.status.status_code is StatusCode.ERROR


def test_traces_are_sent_to_the_configured_collector(
    tiny_folder: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("opentelemetry.exporter.otlp", reason="the extra `traces` is not installed")
    bodies: list[tuple[str, bytes]] = []

    class Collector(http.server.BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            bodies.append((self.path, self.rfile.read(int(self.headers["content-length"]))))
            self.send_response(200)
            self.end_headers()

        def log_message(self, *_: Any) -> None:
            return

    with http.server.HTTPServer(("127.0.0.1", 0), Collector) as collector:
        threading.Thread(target=collector.serve_forever, daemon=True).start()
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", f"http://127.0.0.1:{collector.server_port}")
        engine = accel.Engine(tiny_folder("bert", "text-classification"), backend="pytorch")
        with TestClient(create_app(engine, traces=True)) as client:
            client.post("/classify", json={"inputs": "help"})
        # The server sends the remaining traces when it shuts down.
        collector.shutdown()
    ((path, body),) = bodies
    assert path == "/v1/traces"
    assert all(word in body for word in (b"POST /classify", b"service.name", b"accel", b"tokenization"))


def test_health_requests_are_not_traced(client: TestClient, exporter: InMemorySpanExporter) -> None:
    assert client.get("/health").status_code == 200
    assert not exporter.get_finished_spans()
