"""The description of an HTTP endpoint, and a request to an endpoint while it is processed."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal, TypeVar

from pydantic import BaseModel
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response

from ...errors import RequestTimeoutError, did_you_mean
from ..engine import Engine
from ..job import Timing
from .replies import ErrorShape, HttpError, plain_error
from .server_settings import ServerSettings

if TYPE_CHECKING:
    from ..operations import Operation
    from ..server_metrics import Metrics

T = TypeVar("T")

_PATIENCE_S = 0.05
"""Seconds after which a waiting request is watched for a disconnect of the client. Watching costs an asyncio task."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Endpoint:
    """Description of one HTTP endpoint.

    Attributes:
        path: URL path, in the format of Starlette.
        answer: Function that processes a call and returns the response.
        summary: Description in one line.
        tag: Group of the endpoint in the OpenAPI description.
        method: HTTP method.
        body: Pydantic model of the request body; `None` without a body.
        raw: Whether `answer` reads and parses the body itself.
        media_type: Media type of the request body.
        operation: Operation of the engine that the model must support; empty for none.
        example: A valid request body.
        open: Whether the endpoint responds without an API key, and while the server shuts down.
        error: Function that formats error responses.
    """

    path: str
    answer: Callable[[HttpCall, Any], Awaitable[Response]]
    summary: str
    tag: str
    method: Literal["GET", "POST"] = "POST"
    body: type[BaseModel] | None = None
    raw: bool = False
    media_type: str = "application/json"
    operation: str = ""
    example: Mapping[str, Any] = field(default_factory=dict)
    open: bool = False
    error: ErrorShape = plain_error


@dataclass(slots=True)
class ServerState:
    """The state that is shared by all requests of a server.

    Attributes:
        engine: The engine; started when the application starts.
        settings: Limits, API keys and CORS origins.
        metrics: Counters and histograms.
        endpoints: All endpoints of the application.
        ready: Whether the models are open.
        draining: Whether the server is shutting down after a signal.
        in_flight: Number of requests in progress.
        reading: Timeouts of the requests whose bodies are not completely received.
        text_operations: By model name, the operation that serves the model as text. Computed at the first request, because this takes
            milliseconds.
    """

    engine: Engine
    settings: ServerSettings
    metrics: Metrics
    endpoints: Sequence[Endpoint] = ()
    ready: bool = False
    draining: bool = False
    in_flight: int = 0
    reading: set[asyncio.Timeout] = field(default_factory=set)
    text_operations: dict[str, Operation | None] = field(default_factory=dict)

    def model_for(self, name: str | None, operation: str) -> str:
        """Return the name of the requested model, or of the only model that supports the operation.

        Raises:
            HttpError: There is no such model, or several models are possible.
        """
        models = self.engine.models
        if name is not None:
            if name not in models:
                raise HttpError(
                    404, f"The server has no model {name!r}.{did_you_mean(name, models)}", kind="model_not_found",
                    fix=f"use one of {', '.join(models)}.",
                )  # fmt: skip
            if operation not in self.engine.operations(name):
                raise HttpError(
                    422,
                    f"The model {name!r} does not support the operation {operation!r}.",
                    fix=f"use one of the model's operations: {', '.join(self.engine.operations(name))}.",
                )
            return name
        fitting = [model for model in models if operation in self.engine.operations(model)]
        if len(fitting) == 1:
            return fitting[0]
        if not fitting:
            raise HttpError(
                404,
                f"No model of this server supports the operation {operation!r}.",
                kind="model_not_found",
                fix="see the operations of the models at /v1/models.",
            )
        raise HttpError(
            422,
            f"Several models of this server support the operation {operation!r}, and the request does not name a model.",
            fix=f"set the field `model` to one of {', '.join(fitting)}.",
        )


@dataclass(slots=True)
class HttpCall:
    """An HTTP request while it is processed.

    Attributes:
        request: Starlette's request.
        id: Id of the request, used in the response headers and in the log.
        server: The state that is shared by all requests.
        timing: Durations of the engine's steps in seconds.
        worked: Whether the engine processed anything for this request.
    """

    request: Request
    id: str
    server: ServerState
    timing: Timing = field(default_factory=Timing)
    worked: bool = False

    @property
    def engine(self) -> Engine:
        """The engine that processes the request."""
        return self.server.engine

    def check_batch(self, size: int) -> None:
        """Raise if a request has too many inputs.

        Raises:
            HttpError: 422: there are more inputs than the server accepts.
        """
        most = self.server.settings.max_client_batch
        if size > most:
            raise HttpError(
                422,
                f"The request has {size} inputs, but the server accepts at most {most} inputs in one request.",
                fix="divide the inputs into several requests.",
            )

    async def read(self) -> bytes:
        """Read the body of the request.

        Raises:
            HttpError: 413 if the body is too large, 415 if it is compressed, 408 if it does not arrive in time, 503 if the server is
                shutting down.
        """
        if self.request.headers.get("content-encoding", "identity").lower() not in ("", "identity"):
            raise HttpError(
                415,
                "The request body is compressed, which this server does not support.",
                fix="send the body uncompressed.",
            )
        most = self.server.settings.max_body_bytes
        too_large = HttpError(
            413,
            f"The request body has more than {most} bytes.",
            kind="too_large",
            fix="send fewer or shorter inputs at once.",
        )
        declared = self.request.headers.get("content-length", "0")
        if declared.isdecimal() and int(declared) > most:
            raise too_large
        parts: list[bytes] = []
        size = 0
        server, seconds = self.server, self.server.settings.body_timeout_s
        limit = asyncio.timeout(seconds)
        server.reading.add(limit)
        try:
            async with limit:
                async for part in self.request.stream():
                    size += len(part)
                    if size > most:
                        raise too_large
                    parts.append(part)
        except TimeoutError as error:
            # Close the connection, because the rest of this body would be read as the next request.
            ends = {"connection": "close"}
            if server.draining:
                raise HttpError(503, "The server is shutting down.", kind="closing", headers=ends) from error
            raise HttpError(
                408,
                f"The request body did not arrive completely within {seconds:g} s.",
                kind="timeout",
                fix="send the complete body without pauses.",
                headers=ends,
            ) from error
        finally:
            server.reading.discard(limit)
        return b"".join(parts)

    def check_texts(self, inputs: Any, times: int = 1) -> None:
        """Raise if the texts of a request have too many characters.

        Args:
            inputs: A text, or nested lists and mappings of texts; values of other types are ignored.
            times: Number of times that the model reads each text.

        Raises:
            HttpError: 413: there are too many characters.
        """
        most = self.server.settings.max_text_chars
        if _characters(inputs) * times > most:
            raise HttpError(
                413,
                f"The texts of the request have more than {most} characters in total.",
                kind="too_large",
                fix="send fewer or shorter texts at once.",
            )

    async def ask(self, inputs: Any, *, operation: str, model: str | None = None, **options: Any) -> Any:
        """Run a request in the engine and return its result. If the client disconnects, the request is cancelled.

        Raises:
            HttpError: No model supports the operation.
            QueueFullError: The queue is full.
            RequestTimeoutError: There is no result in time.
        """
        name = self.server.model_for(model, operation)
        self.check_texts((inputs, options))
        job = self.engine.submit(inputs, model=name, operation=operation, **options)
        timeout = self.engine.limits.timeout_s
        future = asyncio.wrap_future(job.future)
        try:
            await asyncio.wait((future,), timeout=min(_PATIENCE_S, timeout or _PATIENCE_S))
            if future.done():
                return future.result()
            return await self.finished(future, None if timeout is None else max(timeout - _PATIENCE_S, 0))
        finally:
            future.cancel()
            self._add(job.timing)

    async def finished(self, work: asyncio.Future[T], timeout: float | None = None) -> T:
        """Wait for a future while the client is connected; cancel it if the client disconnects.

        Raises:
            ClientDisconnect: The client disconnected.
            RequestTimeoutError: There is no result after `timeout` seconds, the rest of the engine's `timeout_s`.
        """
        gone = asyncio.ensure_future(self._hung_up())
        try:
            await asyncio.wait((work, gone), timeout=timeout, return_when=asyncio.FIRST_COMPLETED)
            if work.done():
                return work.result()
            if gone.done():
                raise ClientDisconnect
            limit = self.engine.limits.timeout_s
            raise RequestTimeoutError(
                f"There was no result within {limit:g} s, so the request was cancelled.",
                fix="send fewer inputs at once.",
            )
        finally:
            gone.cancel()
            work.cancel()

    async def _hung_up(self) -> None:
        while (await self.request.receive())["type"] != "http.disconnect":
            pass

    def _add(self, timing: Timing) -> None:
        mine = self.timing
        mine.tokenization_s += timing.tokenization_s
        mine.queue_s += timing.queue_s
        mine.inference_s += timing.inference_s
        mine.tokens += timing.tokens
        mine.batch = max(mine.batch, timing.batch)
        self.worked = True


def _characters(inputs: Any) -> int:
    if isinstance(inputs, str):
        return len(inputs)
    if isinstance(inputs, Mapping):
        inputs = inputs.values()
    elif not isinstance(inputs, list | tuple):
        return 0
    return sum(len(item) if isinstance(item, str) else _characters(item) for item in inputs)
