"""Paths of other APIs that are not served, and what a client may ask instead."""

from __future__ import annotations

from collections.abc import Sequence

from ...errors import did_you_mean
from .replies import ErrorShape, HttpError, error_text, message_error, plain_error, text_error

UNSUPPORTED = {
    "/embed_all": "send the tokens to /v2/models/NAME/infer, which returns what the graph returns for each of them.",
    "/embed_sparse": "use /embed: no model here makes sparse vectors.",
    "/predict": "use /classify, which takes `top_k` and `function_to_apply`.",
    "/similarity": "use /embed, whose vectors have length 1: their products are the similarities.",
    "/decode": "decode the tokens with the model's tokenizer.",
    "/info": "use /v1/models, or /v2/models/NAME.",
    "/v2/chat": "use /v1/chat/completions, with a client of OpenAI's.",
    "/v1/responses": "use /v1/chat/completions.",
}
"""Remedy by path."""
_TEI = frozenset(("/embed_all", "/embed_sparse", "/predict", "/similarity", "/decode", "/info"))
_COHERE = (
    "/v2/chat",
    "/v2/embed",
    "/v2/rerank",
    "/v1/chat",
    "/v1/embed",
    "/v1/rerank",
    "/v1/tokenize",
    "/v1/detokenize",
)


def absent(path: str, status: int, detail: str, paths: Sequence[str]) -> HttpError:
    """The error for a path that is not served, or not with this method.

    Args:
        path: The request's.
        status: 404 or 405.
        detail: What Starlette says.
        paths: Those that are served.
    """
    if status != 404:
        return HttpError(status, f"{detail}: {path[:200]}.", kind="method_not_allowed", fix="see /docs.")
    if path in UNSUPPORTED:
        return HttpError(501, f"{path} is not supported.", kind="not_supported", fix=UNSUPPORTED[path])
    head = path.split("/")[1]
    near = [one for one in paths if one.split("/")[1] == head] or [one for one in paths if one.count("/") == 1]
    return HttpError(
        404, f"There is no {path[:200]} (Not Found).{did_you_mean(path, paths)}", kind="not_found",
        fix=f"use one of {', '.join(dict.fromkeys(near))}; /docs describes them.",
    )  # fmt: skip


def shape_of(path: str) -> ErrorShape:
    """The shape of errors that the clients of a path's API read."""
    if path in _TEI:
        return text_error
    if path in _COHERE:
        return message_error
    # Clients of the Open Inference Protocol find a text there, and fail over an object.
    return error_text if path.startswith("/v2/") else plain_error
