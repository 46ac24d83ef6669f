"""The application: an engine's endpoints as Starlette routes."""

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
from .admission import Admission, ended
from .bodies import parse
from .endpoints import Call, Endpoint, Server
from .middleware import Front, Serve
from .replies import HttpError, error_reply
from .server_settings import ServerSettings
from .unserved_paths import absent, shape_of

if TYPE_CHECKING:
    from .request_traces import Tracer

PROTOCOLS = (
    "health",
    "text_bodies",
    "openai",
    "generation_endpoints",
    "cohere",
    "inference_protocol",
    "sagemaker",
    "api_page",
)
"""Modules beside this one, each with a table `ENDPOINTS`."""

_EXPOSED = ("x-request-id", "retry-after", "x-queue-ms", "x-tokenization-ms", "x-inference-ms")
"""Of the answers' headers, those that pages of other origins may read."""


def endpoints() -> list[Endpoint]:
    """Every endpoint of every operation and protocol."""
    package = __name__.rpartition(".")[0]
    found = [made for one in all_operations().values() if (made := one.endpoint()) is not None]
    for name in PROTOCOLS:
        found += importlib.import_module(f"{package}.{name}").ENDPOINTS
    return found


def create_app(
    engine: Engine,
    settings: ServerSettings | None = None,
    *,
    metrics: Metrics | None = None,
    more: Sequence[Endpoint] = (),
    traces: bool | Any = False,
) -> Front:
    """An ASGI application over an engine.

    Args:
        engine: What answers; started and closed with the application unless it was started before.
        settings: What is let in.
        metrics: The engine's observer, where it has one of these; else the application becomes it.
        more: Endpoints of your own.
        traces: Send OpenTelemetry traces; or its `TracerProvider`.
    """
    settings = settings or ServerSettings()
    metrics = metrics or Metrics()
    engine.observe(metrics)
    table = [*endpoints(), *more]
    server = Server(engine, settings, metrics, table)
    keys = _Keys(settings.api_keys)
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
            await ended(watching)
            if opened_here:
                await asyncio.to_thread(engine.close)
            if tracer is not None:
                await asyncio.to_thread(tracer.close)

    serving = [_serve(one, server, keys, admission, tracer) for one in table]
    routes = [Route(one.path, serve, methods=[one.method]) for one, serve in zip(table, serving, strict=True)]
    app = Starlette(routes=routes, lifespan=lifespan, exception_handlers={HTTPException: _not_found})
    app.state.server = server
    inside: ASGIApp = app
    if settings.cors_origins:
        inside = CORSMiddleware(
            app, allow_origins=settings.cors_origins, allow_methods=("GET", "POST"), allow_headers=("*",),
            expose_headers=_EXPOSED, max_age=3600,
        )  # fmt: skip
    # What Starlette would find out about a request is known of those.
    own = zip(table[: len(table) - len(more)], serving, strict=False)
    direct = {one.path: serve for one, serve in own if one.method == "POST" and "{" not in one.path}
    return Front(
        inside, server, frozenset(one.path for one in table if one.open), {} if settings.cors_origins else direct
    )


class _Keys:
    """Checks API keys in constant time: every key is looked at, by digests of one length."""

    def __init__(self, keys: Sequence[str]) -> None:
        self._digests = [hashlib.sha256(key.encode()).digest() for key in keys]

    def check(self, request: Request) -> None:
        """Refuse a request without a key.

        Raises:
            HttpError: 401.
        """
        if not self._digests:
            return
        scheme, _, given = request.headers.get("authorization", "").partition(" ")
        digest = hashlib.sha256(given.strip().encode("utf-8", "surrogateescape")).digest()
        found = [hmac.compare_digest(digest, one) for one in self._digests]
        if scheme.lower() != "bearer" or not any(found):
            raise HttpError(
                401, "The request has no valid API key.", kind="unauthorized", fix="send Authorization: Bearer <key>.",
                headers={"www-authenticate": "Bearer"},
            )  # fmt: skip


class _Traced:
    """An answer that is recorded when it is sent: a stream is computed meanwhile."""

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


def _serve(endpoint: Endpoint, server: Server, keys: _Keys, admission: Admission, tracer: Tracer | None) -> Serve:
    async def serve(request: Request) -> ASGIApp:
        request.scope["endpoint_path"] = endpoint.path
        call = Call(request, request.scope["request_id"], server)
        start = time.perf_counter()
        try:
            if not endpoint.open:
                if endpoint.method == "POST":
                    admission.check(server.in_flight - 1)
                keys.check(request)
                if not server.ready:
                    raise HttpError(503, "The models are not open yet.", kind="starting", headers={"retry-after": "1"})
            body: Any = None
            if endpoint.body is not None and not endpoint.raw:
                body = parse(endpoint.body, await call.read())
            response = await endpoint.answer(call, body)
        except ClientDisconnect:
            # Nobody reads it; the status is for the log.
            response = Response(status_code=499)
        except Exception as error:  # noqa: BLE001  # the last one who can answer
            response = error_reply(error, call.id, endpoint.error)
        if call.worked:
            timing = call.timing
            response.raw_headers += (
                (b"x-queue-ms", b"%.3f" % (timing.queue_s * 1e3)),
                (b"x-tokenization-ms", b"%.3f" % (timing.tokenization_s * 1e3)),
                (b"x-inference-ms", b"%.3f" % (timing.inference_s * 1e3)),
            )
        if tracer is not None and not endpoint.open:
            return _Traced(response, functools.partial(tracer.record, call, endpoint.path, response.status_code, start))
        return response

    return serve


async def _not_found(request: Request, error: Exception) -> Response:
    """Starlette's own 404 and 405 in our shape."""
    assert isinstance(error, HTTPException)
    path = request.url.path
    made = absent(path, error.status_code, str(error.detail), [one.path for one in request.app.state.server.endpoints])
    made.headers.update(error.headers or {})
    return error_reply(made, request.scope["request_id"], shape_of(path))
