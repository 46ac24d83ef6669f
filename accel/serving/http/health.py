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
        raise HttpError(503, "The server accepts no requests.", kind="closing" if call.server.draining else "starting")
    return JsonReply({"status": "ready", "models": list(call.engine.models)})


async def _metrics(call: HttpCall, _: Any) -> Response:
    return Response(call.server.metrics.page(), media_type="text/plain; version=0.0.4; charset=utf-8")


ENDPOINTS = (
    Endpoint(
        path="/health", method="GET", answer=_health, summary="Whether the process lives", tag="health", open=True
    ),
    Endpoint(
        path="/ready",
        method="GET",
        answer=ready,
        summary="Whether the server accepts requests",
        tag="health",
        open=True,
    ),
    Endpoint(path="/metrics", method="GET", answer=_metrics, summary="Counters, for Prometheus", tag="health"),
)
