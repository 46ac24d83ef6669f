"""Endpoints for health, readiness and metrics of the server."""

from __future__ import annotations

from typing import Any

from starlette.responses import Response

from .endpoints import Endpoint, HttpCall
from .replies import HttpError, JsonReply


async def _health(call: HttpCall, _: Any) -> Response:
    return JsonReply({"status": "alive"})


async def ready(call: HttpCall, _: Any) -> Response:
    """Respond with 200 if the server accepts requests, or with 503."""
    if not call.server.ready or call.server.draining:
        reason = "shutting down" if call.server.draining else "starting"
        raise HttpError(
            503,
            f"The server is {reason} and accepts no requests.",
            kind="closing" if call.server.draining else "starting",
        )
    return JsonReply({"status": "ready", "models": list(call.engine.models)})


async def _metrics(call: HttpCall, _: Any) -> Response:
    return Response(call.server.metrics.page(), media_type="text/plain; version=0.0.4; charset=utf-8")


ENDPOINTS = (
    Endpoint(
        path="/health", method="GET", answer=_health, summary="Check that the process is alive", tag="health", open=True
    ),
    Endpoint(
        path="/ready",
        method="GET",
        answer=ready,
        summary="Check that the server accepts requests",
        tag="health",
        open=True,
    ),
    Endpoint(path="/metrics", method="GET", answer=_metrics, summary="Metrics for Prometheus", tag="health"),
)
