"""One endpoint as data, and a call of it while it is answered."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

from pydantic import BaseModel
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response

from ...errors import RequestTimeoutError, did_you_mean
from ..engine import Engine
from ..job import Timing
from .replies import ErrorShape, HttpError, plain_error
from .server_settings import ServerSettings

if TYPE_CHECKING:
    from ..server_metrics import Metrics

_PATIENCE_S = 0.05
"""Until a caller that waits so long is watched, for it may hang up: watching costs a task."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Endpoint:
    """One endpoint.

    Attributes:
        path: As Starlette writes it.
        method: Of HTTP.
        answer: Answers a call.
        body: What it takes; `None`: nothing.
        raw: Whether it reads the body itself, which then is not parsed for it.
        summary: A line about it.
        tag: What it is listed under.
        operation: Of the engine; it is offered where a model does it. Empty: always.
        example: A body that works.
        returns: What it answers.
        open: Whether it is answered without a key, and while the server drains.
        error: The shape of its errors.
    """

    path: str
    answer: Callable[[Call, Any], Awaitable[Response]]
    summary: str
    tag: str
    method: Literal["GET", "POST"] = "POST"
    body: type[BaseModel] | None = None
    raw: bool = False
    operation: str = ""
    example: Mapping[str, Any] = field(default_factory=dict)
    returns: type[BaseModel] | None = None
    open: bool = False
    error: ErrorShape = plain_error


@dataclass(slots=True)
class Server:
    """What all calls share.

    Attributes:
        engine: Started when the application starts.
        settings: What is let in.
        metrics: What is counted.
        endpoints: All of the application's.
        ready: Whether models are open.
        draining: Whether it was told to end.
        in_flight: Calls that are being answered.
        reading: Of those whose bodies are not all there, the time that they have.
    """

    engine: Engine
    settings: ServerSettings
    metrics: Metrics
    endpoints: Sequence[Endpoint] = ()
    ready: bool = False
    draining: bool = False
    in_flight: int = 0
    reading: set[asyncio.Timeout] = field(default_factory=set)

    def models_for(self, operation: str) -> list[str]:
        """Names of the models that do an operation."""
        engine = self.engine
        return [name for name in engine.models if operation in engine.operations(name)]

    def model_for(self, name: str | None, operation: str) -> str:
        """The model that a caller named, or the only one that does the operation.

        Raises:
            HttpError: There is none, or there are several.
        """
        models = self.engine.models
        if name is not None:
            if name not in models:
                raise HttpError(
                    404, f"There is no model {name!r}.{did_you_mean(name, models)}", kind="model_not_found",
                    fix=f"use one of {', '.join(models)}.",
                )  # fmt: skip
            if operation not in self.engine.operations(name):
                raise HttpError(
                    422, f"{name!r} does not do {operation}.", fix=f"it does {', '.join(self.engine.operations(name))}."
                )
            return name
        fitting = self.models_for(operation)
        if len(fitting) == 1:
            return fitting[0]
        if not fitting:
            raise HttpError(
                404, f"No model here does {operation}.", kind="model_not_found", fix="see /v1/models for what there is."
            )
        raise HttpError(422, f"Several models do {operation}.", fix=f"set model to one of {', '.join(fitting)}.")


@dataclass(slots=True)
class Call:
    """A request while it is answered.

    Attributes:
        request: Starlette's.
        id: In the answer's headers and in the log.
        server: What all calls share.
        timing: Of the engine's work for it.
        worked: Whether the engine did any.
    """

    request: Request
    id: str
    server: Server
    timing: Timing = field(default_factory=Timing)
    worked: bool = False

    @property
    def engine(self) -> Engine:
        """The engine."""
        return self.server.engine

    def check_batch(self, size: int) -> None:
        """Refuse a request of too many inputs.

        Raises:
            HttpError: It has.
        """
        most = self.server.settings.max_client_batch
        if size > most:
            raise HttpError(
                422, f"The request has {size} inputs; at most {most} are taken.", fix="send several requests."
            )

    async def read(self) -> bytes:
        """The bytes of the request.

        Raises:
            HttpError: More than the server takes: 413; compressed: 415.
        """
        if self.request.headers.get("content-encoding", "identity").lower() not in ("", "identity"):
            raise HttpError(415, "Compressed bodies are not taken.", fix="send it as it is.")
        most = self.server.settings.max_body_bytes
        too_large = HttpError(413, f"The body has more than {most} bytes.", kind="too_large", fix="send less at once.")
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
            # What it has to do next cannot be read either: the connection ends.
            ends = {"connection": "close"}
            if server.draining:
                raise HttpError(503, "The server is about to end.", kind="closing", headers=ends) from error
            raise HttpError(
                408,
                f"The body was not there within {seconds:g} s.",
                kind="timeout",
                fix="send it at once.",
                headers=ends,
            ) from error
        finally:
            server.reading.discard(limit)
        return b"".join(parts)

    def check_texts(self, inputs: Any, times: int = 1) -> None:
        """Refuse texts that are too long to be read.

        Args:
            inputs: A text, or lists and mappings of them; what is none does not count.
            times: How often each is read.

        Raises:
            HttpError: They are: 413.
        """
        most = self.server.settings.max_text_chars
        if _letters(inputs) * times > most:
            raise HttpError(
                413, f"The texts have more than {most} letters.", kind="too_large", fix="send less at once."
            )

    async def ask(self, inputs: Any, *, operation: str, model: str | None = None, **options: Any) -> Any:
        """The engine's answer. A caller that hangs up frees its place.

        Raises:
            HttpError: No model does it.
            QueueFullError: Too much is waiting.
            RequestTimeoutError: Not in time.
        """
        name = self.server.model_for(model, operation)
        self.check_texts((inputs, options))
        job = self.engine.submit(inputs, model=name, operation=operation, **options)
        timeout = self.engine.limits.timeout_s
        future = asyncio.wrap_future(job.future)
        try:
            await asyncio.wait((future,), timeout=min(_PATIENCE_S, timeout or _PATIENCE_S))
            if not future.done():
                await self._wait(future, timeout)
            answer = future.result()
        finally:
            if not future.done():
                future.cancel()
            self._add(job.timing)
        return answer

    async def _wait(self, future: asyncio.Future[Any], timeout: float | None) -> None:
        gone = asyncio.ensure_future(self.hung_up())
        try:
            left = None if timeout is None else max(timeout - _PATIENCE_S, 0)
            await asyncio.wait((future, gone), timeout=left, return_when=asyncio.FIRST_COMPLETED)
            if not future.done():
                if gone.done():
                    raise ClientDisconnect
                raise RequestTimeoutError(f"There was no answer within {timeout:g} s.", fix="send less at once.")
        finally:
            gone.cancel()

    async def hung_up(self) -> None:
        """Until the caller has."""
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


def _letters(inputs: Any) -> int:
    if isinstance(inputs, str):
        return len(inputs)
    if isinstance(inputs, Mapping):
        inputs = inputs.values()
    elif not isinstance(inputs, list | tuple):
        return 0
    return sum(len(one) if isinstance(one, str) else _letters(one) for one in inputs)
