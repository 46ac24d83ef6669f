"""OpenTelemetry traces: one span for each request, with a child span for each step of the engine."""

from __future__ import annotations

import os
import time
from typing import Any

from ..._version import __version__
from ...errors import BackendUnavailableError
from .endpoints import HttpCall

_STEPS = ("queue", "tokenization", "inference")


class Tracer:
    """Create and send OpenTelemetry spans.

    Args:
        provider: An OpenTelemetry `TracerProvider`. `None` exports by OTLP to the address in the environment variables
            `OTEL_EXPORTER_OTLP_ENDPOINT` and `OTEL_SERVICE_NAME`.

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
                f"Sending OpenTelemetry traces requires the package {error.name}, which is not installed.",
                fix='install the extra: pip install "accel-transformers[traces]".',
            ) from error
        self._extract = extract
        self._kind = trace.SpanKind.SERVER
        self._failed = trace.Status(trace.StatusCode.ERROR)
        self._in_span = trace.set_span_in_context
        self._tracer = self._provider.get_tracer("accel.serving", __version__)

    def record(self, call: HttpCall, path: str, status: int, start_s: float) -> None:
        """Create the spans of a request that has been answered.

        Args:
            call: The HTTP request.
            path: Path of the endpoint.
            status: HTTP status of the response.
            start_s: Start time, from `time.perf_counter`.
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
            # Show the steps one after another. The length of each span is the total duration of the step.
            at = begin
            for step in _STEPS:
                seconds = getattr(call.timing, f"{step}_s")
                inner = self._tracer.start_span(step, context=self._in_span(span), start_time=at)
                at += int(seconds * 1e9)
                inner.end(end_time=at)
        span.end(end_time=now)

    def close(self) -> None:
        """Send the remaining spans. A provider that the caller passed stays open."""
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
