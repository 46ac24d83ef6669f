"""The ASGI application: the endpoints of an engine as Starlette routes."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import hashlib
import hmac
import importlib
import time
from collections.abc import AsyncIterator, Callable, Sequence
from typing import TYPE_CHECKING, Any

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send

from ..engine import Engine
from ..operations import all_operations
from ..server_metrics import Metrics
from . import shadow_endpoints
from .admission import Admission
from .bodies import parse
from .endpoints import Endpoint, HttpCall, ServerState
from .middleware import OuterMiddleware, Serve
from .replies import HttpError, error_reply
from .server_settings import ServerSettings
from .unserved_paths import absent, shape_of

if TYPE_CHECKING:
    from .request_traces import Tracer

PROTOCOLS = (
    "health",
    "text_bodies",
    "text_pairs",
    "openai",
    "openai_chat",
    "openai_responses",
    "generation_endpoints",
    "cohere",
    "inference_protocol",
    "sagemaker",
    "api_page",
)
"""Names of the modules in this package that have a table `ENDPOINTS`."""

_EXPOSED = ("x-request-id", "retry-after", "x-queue-ms", "x-tokenization-ms", "x-inference-ms")
"""Response headers that web pages of other origins may read (CORS)."""


def endpoints() -> list[Endpoint]:
    """Return the endpoints of all operations and protocols."""
    package = __name__.rpartition(".")[0]
    table = [endpoint for operation in all_operations().values() if (endpoint := operation.endpoint()) is not None]
    for name in PROTOCOLS:
        table += importlib.import_module(f"{package}.{name}").ENDPOINTS
    return table


def create_app(
    engine: Engine,
    settings: ServerSettings | None = None,
    *,
    more: Sequence[Endpoint] = (),
    traces: bool | Any = False,
) -> OuterMiddleware:
    """Return the ASGI application that serves an engine.

    Args:
        engine: The engine. The application starts and closes it, unless it is already started.
        settings: Limits, API keys and CORS origins.
        more: Further endpoints.
        traces: Whether to send OpenTelemetry traces, or a `TracerProvider` to use.
    """
    settings = settings or ServerSettings()
    metrics = Metrics()
    engine.observe(metrics)
    if engine.shadow is not None:
        more = (*more, *shadow_endpoints.ENDPOINTS)
    table = [*endpoints(), *more]
    server = ServerState(engine, settings, metrics, table)
    keys = _ApiKeyCheck(settings.api_keys)
    tracer = _tracer(traces)
    admission = Admission(engine, metrics)

    @contextlib.asynccontextmanager
    async def lifespan(_: Starlette) -> AsyncIterator[None]:
        opened_here = not engine.models
        await asyncio.to_thread(engine.start)
        metrics.watch(engine)
        watching = asyncio.create_task(admission.watch())
        server.ready = True
        try:
            yield
        finally:
            server.ready = False
            watching.cancel()
            await asyncio.gather(watching, return_exceptions=True)
            if opened_here:
                await asyncio.to_thread(engine.close)
            if tracer is not None:
                await asyncio.to_thread(tracer.close)

    serving = [_serve(endpoint, server, keys, admission, tracer) for endpoint in table]
    routes = [
        Route(endpoint.path, serve, methods=[endpoint.method]) for endpoint, serve in zip(table, serving, strict=True)
    ]
    app = Starlette(routes=routes, lifespan=lifespan, exception_handlers={HTTPException: _not_found})
    app.state.server = server
    inside: ASGIApp = app
    if settings.cors_origins:
        inside = CORSMiddleware(
            app, allow_origins=settings.cors_origins, allow_methods=("GET", "POST"), allow_headers=("*",),
            expose_headers=_EXPOSED, max_age=3600,
        )  # fmt: skip
    # Endpoints without path parameters do not need Starlette's routing.
    own_endpoints = zip(table[: len(table) - len(more)], serving, strict=False)
    direct = {
        endpoint.path: serve
        for endpoint, serve in own_endpoints
        if endpoint.method == "POST" and "{" not in endpoint.path
    }
    return OuterMiddleware(
        inside,
        server,
        frozenset(endpoint.path for endpoint in table if endpoint.open),
        {} if settings.cors_origins else direct,
    )


class _ApiKeyCheck:
    """Check API keys in constant time: the digest of the request's key is compared with the digest of every key."""

    def __init__(self, keys: Sequence[str]) -> None:
        self._digests = [hashlib.sha256(key.encode()).digest() for key in keys]

    def check(self, request: Request) -> None:
        """Raise if a request has no valid API key.

        Raises:
            HttpError: 401: the key is missing or invalid.
        """
        if not self._digests:
            return
        scheme, _, key = request.headers.get("authorization", "").partition(" ")
        digest = hashlib.sha256(key.strip().encode("utf-8", "surrogateescape")).digest()
        matches = [hmac.compare_digest(digest, stored) for stored in self._digests]
        if scheme.lower() != "bearer" or not any(matches):
            raise HttpError(
                401, "The request has no valid API key.", kind="unauthorized", fix="send the header Authorization: Bearer <key>.",
                headers={"www-authenticate": "Bearer"},
            )  # fmt: skip


class _TracedResponse:
    """Wrap a response and record its trace after it is sent, because a streamed response is computed while it is sent."""

    def __init__(self, response: Response, record: Callable[[], None]) -> None:
        self._response, self._record = response, record

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await self._response(scope, receive, send)
        finally:
            self._record()


def _tracer(traces: Any) -> Tracer | None:
    if traces is False:
        return None
    from .request_traces import Tracer

    return Tracer(None if traces is True else traces)


def _serve(
    endpoint: Endpoint, server: ServerState, keys: _ApiKeyCheck, admission: Admission, tracer: Tracer | None
) -> Serve:
    async def serve(request: Request) -> ASGIApp:
        request.scope["endpoint_path"] = endpoint.path
        call = HttpCall(request, request.scope["request_id"], server)
        start = time.perf_counter()
        try:
            if not endpoint.open:
                if endpoint.method == "POST":
                    admission.check(server.in_flight - 1)
                keys.check(request)
                if not server.ready:
                    raise HttpError(
                        503,
                        "The server is starting, and its models are not loaded yet.",
                        kind="starting",
                        headers={"retry-after": "1"},
                    )
            body: Any = None
            if endpoint.body is not None and not endpoint.raw:
                body = parse(endpoint.body, await call.read())
            response = await endpoint.answer(call, body)
        except ClientDisconnect:
            # The client has disconnected, so this status is only written to the log.
            response = Response(status_code=499)
        except Exception as error:  # noqa: BLE001  # every request gets a response
            response = error_reply(error, call.id, endpoint.error)
        if call.worked:
            timing = call.timing
            response.raw_headers += (
                (b"x-queue-ms", b"%.3f" % (timing.queue_s * 1e3)),
                (b"x-tokenization-ms", b"%.3f" % (timing.tokenization_s * 1e3)),
                (b"x-inference-ms", b"%.3f" % (timing.inference_s * 1e3)),
            )
        if tracer is not None and not endpoint.open:
            return _TracedResponse(
                response, functools.partial(tracer.record, call, endpoint.path, response.status_code, start)
            )
        return response

    return serve


async def _not_found(request: Request, error: Exception) -> Response:
    """Convert Starlette's errors 404 and 405 to the server's error responses."""
    assert isinstance(error, HTTPException)
    path = request.url.path
    server: ServerState = request.app.state.server
    operations = {operation for model in server.engine.models for operation in server.engine.operations(model)}
    served = [
        endpoint.path for endpoint in server.endpoints if not endpoint.operation or endpoint.operation in operations
    ]
    absence = absent(path, error.status_code, str(error.detail), served)
    absence.headers.update(error.headers or {})
    return error_reply(absence, request.scope["request_id"], shape_of(path))
