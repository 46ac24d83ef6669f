"""Endpoints for health, readiness and metrics of the server."""

from __future__ import annotations

from typing import Any

from starlette.responses import Response

from .endpoints import Call, Endpoint
from .replies import HttpError, Json


async def _health(call: Call, _: Any) -> Response:
    return Json({"status": "alive"})


async def ready(call: Call, _: Any) -> Response:
    """Respond with 200 if the server accepts requests, or with 503."""
    if not call.server.ready or call.server.draining:
        raise HttpError(503, "The server accepts no requests.", kind="closing" if call.server.draining else "starting")
    return Json({"status": "ready", "models": list(call.engine.models)})


async def _metrics(call: Call, _: Any) -> Response:
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
