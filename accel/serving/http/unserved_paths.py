"""URL paths of other APIs that this server does not have, and their replacements."""

from __future__ import annotations

import re
from collections.abc import Sequence

from ...errors import did_you_mean
from .replies import ErrorShape, HttpError, error_text, message_error, plain_error, text_error

UNSUPPORTED = {
    "/predict": "use `/classify`, which returns labels with scores.",
    "/decode": "decode the token ids in the client, with the tokenizer of the model.",
    "/info": "use `/v1/models` for the list of models, or `/v2/models/NAME` for the inputs and outputs of one model.",
    "/v2/chat": "use `/v1/chat/completions` with an OpenAI client.",
    "/v1/audio/translations": "use `/v1/audio/transcriptions`, and translate the text with a translation model.",
}
"""Advice for each path of another API that is not supported."""
_COHERE = re.compile(r"/v[12]/(chat|embed|rerank|tokenize|detokenize)\Z")


def absent(path: str, status: int, detail: str, paths: Sequence[str]) -> HttpError:
    """Return the error for a path that does not exist, or does not support the HTTP method.

    Args:
        path: Path of the request.
        status: 404 or 405.
        detail: Error text of Starlette.
        paths: Paths that a model of the server supports, and paths that need no model.
    """
    if status != 404:
        return HttpError(
            status,
            f"The path {path[:200]} does not support the HTTP method of the request ({detail}).",
            kind="method_not_allowed",
            fix="use the method that /docs shows for this path.",
        )
    if path in UNSUPPORTED:
        return HttpError(
            501, f"This server does not support the path {path}.", kind="not_supported", fix=UNSUPPORTED[path]
        )
    head = path.split("/")[1]
    near = [candidate for candidate in paths if candidate.split("/")[1] == head] or [
        candidate for candidate in paths if candidate.count("/") == 1
    ]
    return HttpError(
        404, f"The server has no path {path[:200]} (Not Found).{did_you_mean(path, paths)}", kind="not_found",
        fix=f"use one of {', '.join(dict.fromkeys(near))}; /docs describes them.",
    )  # fmt: skip


def shape_of(path: str) -> ErrorShape:
    """Return the function that formats errors like the API that the URL path belongs to."""
    if path in UNSUPPORTED and not path.startswith("/v"):
        # Paths of text-embeddings-inference have no version.
        return text_error
    if _COHERE.match(path):
        return message_error
    # Clients of the Open Inference Protocol expect the field `error` to be a text and fail if it is an object.
    return error_text if path.startswith("/v2/") else plain_error
