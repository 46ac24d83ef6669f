"""OpenTelemetry: a span a request, with one for each step of the engine inside."""

from __future__ import annotations

import os
import time
from typing import Any

from ..._version import __version__
from ...errors import BackendUnavailableError
from .endpoints import Call

_STEPS = ("queue", "tokenization", "inference")


class Tracer:
    """Makes spans.

    Args:
        provider: OpenTelemetry's `TracerProvider`; one that exports by OTLP where the environment says
            (`OTEL_EXPORTER_OTLP_ENDPOINT`, `OTEL_SERVICE_NAME`) when `None`.

    Raises:
        BackendUnavailableError: OpenTelemetry is not installed.
    """

    def __init__(self, provider: Any = None) -> None:
        try:
            from opentelemetry import trace
            from opentelemetry.propagate import extract

            self._own = provider is None
            self._provider = provider if provider is not None else _exporting()
        except ImportError as error:
            raise BackendUnavailableError(
                f"Traces need {error.name}.", fix='install the extra: pip install "accel-transformers[traces]".'
            ) from error
        self._extract = extract
        self._kind = trace.SpanKind.SERVER
        self._failed = trace.Status(trace.StatusCode.ERROR)
        self._in_span = trace.set_span_in_context
        self._tracer = self._provider.get_tracer("accel.serving", __version__)

    def record(self, call: Call, path: str, status: int, start_s: float) -> None:
        """The spans of a call that was answered.

        Args:
            call: It.
            path: Of its endpoint.
            status: Of its answer.
            start_s: When it began, by `time.perf_counter`.
        """
        now = time.time_ns()
        begin = now - int((time.perf_counter() - start_s) * 1e9)
        span = self._tracer.start_span(
            f"{call.request.method} {path}",
            context=self._extract(dict(call.request.headers)),
            kind=self._kind,
            start_time=begin,
            attributes={
                "http.request.method": call.request.method,
                "http.route": path,
                "url.path": call.request.url.path,
                "url.scheme": call.request.url.scheme,
                "http.response.status_code": status,
                "accel.request_id": call.id,
                "accel.tokens": call.timing.tokens,
                "accel.batch": call.timing.batch,
            },
        )
        if status >= 500:
            span.set_status(self._failed)
        if call.worked:
            # One after another, as long as each took in all; what lies between them is the queue's.
            at = begin
            for step in _STEPS:
                seconds = getattr(call.timing, f"{step}_s")
                inner = self._tracer.start_span(step, context=self._in_span(span), start_time=at)
                at += int(seconds * 1e9)
                inner.end(end_time=at)
        span.end(end_time=now)

    def close(self) -> None:
        """Send what was not sent yet; a provider that was given goes on."""
        if self._own:
            self._provider.shutdown()
        else:
            self._provider.force_flush()


def _exporting() -> Any:
    from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
    from opentelemetry.sdk.resources import Resource
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.export import BatchSpanProcessor

    named = "OTEL_SERVICE_NAME" in os.environ or "service.name=" in os.environ.get("OTEL_RESOURCE_ATTRIBUTES", "")
    provider = TracerProvider(resource=Resource.create({} if named else {"service.name": "accel"}))
    provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter()))
    return provider
