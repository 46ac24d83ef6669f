"""Handle request ids, shutdown, metrics and the access log, for every request."""

from __future__ import annotations

import logging
import os
import re
import time
from collections.abc import Awaitable, Callable, Mapping

from starlette.requests import Request
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from .endpoints import ServerState
from .replies import HttpError, error_reply

Serve = Callable[[Request], Awaitable[ASGIApp]]
"""Function that returns the response to a request; it returns error responses instead of raising."""

access = logging.getLogger("accel.serving.access")

_ID = re.compile(rb"[A-Za-z0-9._-]{1,64}\Z")


class OuterMiddleware:
    """The outermost ASGI application. It also runs while a response is streamed.

    Args:
        app: Starlette's application.
        server: The state that is shared by all requests.
        open_paths: Paths that respond while the server shuts down.
        direct: Functions for POST requests by path, for paths without parameters. These requests skip Starlette's routing, which takes a
            tenth of the time for HTTP.
    """

    def __init__(
        self, app: ASGIApp, server: ServerState, open_paths: frozenset[str], direct: Mapping[str, Serve]
    ) -> None:
        self._app = app
        self.server = server
        self._open = open_paths
        self._direct = direct

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Process one ASGI connection, and count and log the request."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        start = time.perf_counter()
        server = self.server
        request_id = scope["request_id"] = _request_id(dict(scope["headers"]))
        status = 0

        async def answer(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                headers = message["headers"] = [*message.get("headers", ()), (b"x-request-id", request_id.encode())]
                if server.draining and not any(name == b"connection" for name, _ in headers):
                    headers.append((b"connection", b"close"))
                # Count the response before the client receives it, so that a later request for metrics includes it.
                path = scope.get("endpoint_path", "other")
                server.metrics.requests.labels(path, scope["method"], str(status)).inc()
                server.metrics.latency.labels(path).observe(time.perf_counter() - start)
            await send(message)

        server.in_flight += 1
        server.metrics.in_flight.inc()
        try:
            if server.draining and scope["path"] not in self._open:
                error = HttpError(503, "The server is shutting down.", kind="closing", headers={"retry-after": "1"})
                await error_reply(error, request_id)(scope, receive, answer)
            elif scope["method"] == "POST" and scope["path"] in self._direct and not scope.get("root_path"):
                serve = self._direct[scope["path"]]
                response = await serve(Request(scope, receive))
                await response(scope, receive, answer)
            else:
                await self._app(scope, receive, answer)
        finally:
            server.in_flight -= 1
            server.metrics.in_flight.dec()
            if access.isEnabledFor(logging.INFO):
                seconds = time.perf_counter() - start
                access.info(
                    "%s %s %s %d %.1f ms", request_id, scope["method"], _printable(scope["path"]), status, seconds * 1e3
                )


def _request_id(headers: Mapping[bytes, bytes]) -> str:
    """Return the client's request id if it has only safe characters, or a new id."""
    sent = headers.get(b"x-request-id", b"")
    return sent.decode("ascii") if _ID.match(sent) else os.urandom(8).hex()


def _printable(path: str) -> str:
    """Return a URL path with control characters escaped, for one line of a log."""
    return path[:200].encode("unicode_escape").decode("ascii")
