"""Answers: JSON, and errors in the shapes that clients of each protocol read."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
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


class Json(Response):
    """A JSON answer."""

    media_type = "application/json"

    def render(self, content: Any) -> bytes:
        """Written by pydantic's serializer: several times as fast as the standard library's on lists of numbers."""
        return write_json(content)


def write_json(content: Any) -> bytes:
    """A JSON text.

    Raises:
        NotFiniteError: It would hold NaN or infinity, which JSON does not have.
    """
    text = to_json(content, inf_nan_mode="constants", fallback=_number)
    if b"NaN" in text or b"Infinity" in text:
        # Perhaps in a text.
        place = find_non_finite(json.loads(text))
        if place is not None:
            raise not_finite_error("an answer", place)
    return text


def _number(value: Any) -> Any:
    """NumPy's numbers, which some pipelines answer with, as Python's."""
    return value.tolist()


class HttpError(AccelError):
    """A request that gets another status than 200.

    Attributes:
        status: Of HTTP.
        kind: A word for programs.
        headers: More of them.
        param: The field of the request that is wrong.
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


@dataclass(frozen=True, slots=True)
class Problem:
    """An error as it is told to a client."""

    status: int
    message: str
    kind: str
    fix: str | None = None
    headers: Mapping[str, str] = field(default_factory=dict)
    param: str | None = None


class ErrorDetail(BaseModel):
    """What went wrong."""

    message: str
    type: str
    param: str | None = None
    code: str
    fix: str | None = None
    request_id: str


class ErrorBody(BaseModel):
    """An error."""

    error: ErrorDetail


ErrorShape = Callable[[Problem, str], Any]


_LONGEST = 1000
"""Letters of an error's words: they may quote what the client sent."""


def _short(text: str) -> str:
    return text if len(text) <= _LONGEST else f"{text[: _LONGEST - 3]}..."


def plain_error(problem: Problem, request_id: str) -> Any:
    """OpenAI's: `{"error": {"message", "type", "param", "code"}}`, with `fix` and `request_id` in addition."""
    return {
        "error": {
            "message": problem.message,
            "type": problem.kind,
            "param": problem.param,
            "code": problem.kind,
            "fix": problem.fix,
            "request_id": request_id,
        }
    }


def openai_error(problem: Problem, request_id: str) -> Any:
    """The same with the remedy in the message, which is all that OpenAI's clients show."""
    shown = plain_error(problem, request_id)
    shown["error"]["message"] = error_text(problem, request_id)["error"]
    return shown


_ERROR_TYPES = {429: "Overloaded", 500: "Backend", 503: "Unhealthy", 504: "Backend"}


def text_error(problem: Problem, request_id: str) -> Any:
    """text-embeddings-inference's: `{"error": "...", "error_type": "Validation"}`, with the parts of the text in addition."""
    return {
        **error_text(problem, request_id),
        "error_type": _ERROR_TYPES.get(problem.status, "Validation"),
        "message": problem.message,
        "fix": problem.fix,
        "request_id": request_id,
    }


def message_error(problem: Problem, request_id: str) -> Any:
    """Cohere's: `{"id": ..., "message": ...}`."""
    return {"id": request_id, "message": error_text(problem, request_id)["error"]}


def error_text(problem: Problem, request_id: str) -> Any:
    """`{"error": "..."}`, as the Open Inference Protocol has it."""
    return {"error": problem.message if problem.fix is None else f"{problem.message} Fix: {problem.fix}"}


_STATUS: tuple[tuple[type[AccelError], int, str], ...] = (
    (RequestTimeoutError, 504, "timeout"),
    (EngineClosedError, 503, "closing"),
    (InputError, 422, "invalid_request"),
    (TaskError, 422, "invalid_request"),
    (ConfigError, 422, "invalid_request"),
)


def problem_of(error: Exception, request_id: str) -> Problem:
    """What a client is told of an error: of one that is nobody's intention, only the request's id."""
    if isinstance(error, HttpError):
        return Problem(error.status, error.message, error.kind, error.fix, error.headers, error.param)
    if isinstance(error, QueueFullError):
        # Whole seconds are all that the header knows.
        after = {"retry-after": str(max(1, round(error.retry_after_s)))}
        return Problem(429, error.message, "overloaded", "try again later.", after)
    for kind, status, word in _STATUS:
        if isinstance(error, kind):
            return Problem(status, error.message, word, error.fix)
    if isinstance(error, NotFiniteError):
        return Problem(500, error.message, "not_finite", error.fix)
    logger.error("%s failed", request_id, exc_info=error)
    return Problem(500, "Something went wrong here.", "internal_error", f"ask for {request_id} in the server's log.")


def error_reply(error: Exception, request_id: str, shape: ErrorShape = plain_error) -> Response:
    """The answer to a request that failed."""
    problem = problem_of(error, request_id)
    problem = replace(
        problem, message=_short(problem.message), fix=None if problem.fix is None else _short(problem.fix)
    )
    return Json(shape(problem, request_id), status_code=problem.status, headers=dict(problem.headers))
