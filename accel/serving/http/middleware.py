"""What happens to every request before and after its endpoint: its id, the door, the count, the log."""

from __future__ import annotations

import logging
import os
import re
import time
from collections.abc import Awaitable, Callable, Mapping

from starlette.requests import Request
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from .endpoints import Server
from .replies import HttpError, error_reply

Serve = Callable[[Request], Awaitable[ASGIApp]]
"""Answers a request, whatever happens, with an answer to be sent."""

access = logging.getLogger("accel.serving.access")

_ID = re.compile(rb"[A-Za-z0-9._-]{1,64}\Z")


class Front:
    """The outermost part of the application, in plain ASGI: it also holds while an answer is streamed.

    Args:
        app: Starlette's application.
        server: What all calls share.
        open_paths: Those that are answered while the server drains.
        direct: What answers a POST to a path that has no parts to be read, without the way through Starlette: a tenth of what
            HTTP costs.
    """

    def __init__(self, app: ASGIApp, server: Server, open_paths: frozenset[str], direct: Mapping[str, Serve]) -> None:
        self._app = app
        self.server = server
        self._open = open_paths
        self._direct = direct

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request."""
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
                # Before the client can have it: who scrapes after the last answer finds it counted.
                path = scope.get("endpoint_path", "other")
                server.metrics.requests.labels(path, scope["method"], str(status)).inc()
                server.metrics.latency.labels(path).observe(time.perf_counter() - start)
            await send(message)

        server.in_flight += 1
        server.metrics.in_flight.inc()
        try:
            if server.draining and scope["path"] not in self._open:
                error = HttpError(503, "The server is about to end.", kind="closing", headers={"retry-after": "1"})
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
    """The caller's own where it is harmless, else a new one."""
    given = headers.get(b"x-request-id", b"")
    return given.decode("ascii") if _ID.match(given) else os.urandom(8).hex()


def _printable(path: str) -> str:
    """A path in one line of a log."""
    return path[:200].encode("unicode_escape").decode("ascii")
