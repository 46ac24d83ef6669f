"""JSON responses, and error responses in the format of each protocol."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Mapping
from typing import Any

from pydantic import BaseModel
from pydantic_core import to_json
from starlette.responses import Response

from ...errors import (
    AccelError,
    ConfigError,
    EngineClosedError,
    InputError,
    NotFiniteError,
    QueueFullError,
    RequestTimeoutError,
    TaskError,
)
from ..non_finite import find_non_finite, not_finite_error

logger = logging.getLogger(__name__)


class JsonReply(Response):
    """A JSON response."""

    media_type = "application/json"

    def render(self, content: Any) -> bytes:
        """Serialize the content with pydantic, which is several times faster than the standard library for lists of numbers."""
        return write_json(content)


def write_json(content: Any) -> bytes:
    """Serialize a value as JSON.

    Raises:
        NotFiniteError: The value contains NaN or infinity, which JSON does not support.
    """
    text = to_json(content, inf_nan_mode="constants", fallback=_number)
    if b"NaN" in text or b"Infinity" in text:
        # `NaN` or `Infinity` may also occur inside a text, so check the parsed values.
        place = find_non_finite(json.loads(text))
        if place is not None:
            raise not_finite_error("the response", place)
    return text


def _number(value: Any) -> Any:
    """Convert a NumPy number, which some pipelines return, to a Python number."""
    return value.tolist()


class HttpError(AccelError):
    """An error with an HTTP status, which the server sends as the response.

    Attributes:
        status: HTTP status.
        kind: Machine-readable error type.
        param: Name of the invalid request field.
        headers: Additional response headers.
    """

    def __init__(
        self,
        status: int,
        message: str,
        *,
        fix: str | None = None,
        kind: str = "invalid_request",
        headers: Mapping[str, str] | None = None,
        param: str | None = None,
    ) -> None:
        super().__init__(message, fix=fix)
        self.status = status
        self.kind = kind
        self.param = param
        self.headers = dict(headers or {})


class ErrorDetail(BaseModel):
    """Fields of an error response."""

    message: str
    type: str
    param: str | None = None
    code: str
    fix: str | None = None
    request_id: str


class ErrorBody(BaseModel):
    """Body of an error response."""

    error: ErrorDetail


ErrorShape = Callable[[HttpError, str], Any]
"""Function that formats an error response: it takes the error and the request id and returns the body."""


_LONGEST = 1000
"""Greatest number of characters of an error text; the text may quote data that the client sent."""


def _short(text: str) -> str:
    return text if len(text) <= _LONGEST else f"{text[: _LONGEST - 3]}..."


def plain_error(error: HttpError, request_id: str) -> Any:
    """Return an error in OpenAI's format: `{"error": {"message", "type", "param", "code"}}`, extended by `fix` and `request_id`."""
    return {
        "error": {
            "message": error.message,
            "type": error.kind,
            "param": error.param,
            "code": error.kind,
            "fix": error.fix,
            "request_id": request_id,
        }
    }


def openai_error(error: HttpError, request_id: str) -> Any:
    """Return an error in OpenAI's format with the fix as part of the message, because OpenAI's clients show only the message."""
    shown = plain_error(error, request_id)
    shown["error"]["message"] = error_text(error, request_id)["error"]
    return shown


_ERROR_TYPES = {429: "Overloaded", 500: "Backend", 503: "Unhealthy", 504: "Backend"}


def text_error(error: HttpError, request_id: str) -> Any:
    """Return an error in the format of text-embeddings-inference, with additional fields.

    The format is `{"error": "...", "error_type": "Validation"}`; `message`, `fix` and `request_id` are added.
    """
    return {
        **error_text(error, request_id),
        "error_type": _ERROR_TYPES.get(error.status, "Validation"),
        "message": error.message,
        "fix": error.fix,
        "request_id": request_id,
    }


def message_error(error: HttpError, request_id: str) -> Any:
    """Return an error in Cohere's format: `{"id": ..., "message": ...}`."""
    return {"id": request_id, "message": error_text(error, request_id)["error"]}


def error_text(error: HttpError, request_id: str) -> Any:
    """Return an error in the format of the Open Inference Protocol: `{"error": "..."}`."""
    return {"error": error.message if error.fix is None else f"{error.message} Fix: {error.fix}"}


_STATUS: tuple[tuple[type[AccelError], int, str], ...] = (
    (RequestTimeoutError, 504, "timeout"),
    (EngineClosedError, 503, "closing"),
    (NotFiniteError, 500, "not_finite"),
    (InputError, 422, "invalid_request"),
    (TaskError, 422, "invalid_request"),
    (ConfigError, 422, "invalid_request"),
)


def http_error(error: Exception, request_id: str) -> HttpError:
    """Convert an exception to the error that is sent to the client. For unexpected exceptions, it contains only the request id."""
    if isinstance(error, HttpError):
        return error
    if isinstance(error, QueueFullError):
        # The header `Retry-After` takes whole seconds.
        after = {"retry-after": str(max(1, round(error.retry_after_s)))}
        return HttpError(429, error.message, fix="try again later.", kind="overloaded", headers=after)
    for cls, status, kind in _STATUS:
        if isinstance(error, cls):
            return HttpError(status, error.message, fix=error.fix, kind=kind)
    logger.error("The request %s failed.", request_id, exc_info=error)
    fix = f"search for the request id {request_id} in the server's log."
    return HttpError(500, "An unexpected error occurred in the server.", fix=fix, kind="internal_error")


def error_reply(error: Exception, request_id: str, shape: ErrorShape = plain_error) -> Response:
    """Return the error response for a failed request."""
    http = http_error(error, request_id)
    http.message, http.fix = _short(http.message), None if http.fix is None else _short(http.fix)
    return JsonReply(shape(http, request_id), status_code=http.status, headers=http.headers)
