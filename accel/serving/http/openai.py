"""OpenAI's endpoints for embeddings and the list of models."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal

import numpy as np
from pydantic import Field
from starlette.responses import Response

from ...artifact.sentence_settings import PROMPTS
from .bodies import Body
from .cohere import encoded
from .endpoints import Endpoint, HttpCall
from .replies import HttpError, JsonReply, openai_error
from .text_bodies import Texts, TokenIds, listed

_STARTED = int(time.time())


class EmbeddingsBody(Body):
    """Request body of `/v1/embeddings`."""

    model: str | None = None
    input: str | Texts | TokenIds | Annotated[list[TokenIds], Field(min_length=1)]
    encoding_format: Literal["float", "base64"] = "float"
    dimensions: int | None = Field(default=None, ge=1)
    normalize: bool = True
    input_type: Literal["query", "document", "passage"] | None = None
    user: str | None = None

    ignored: ClassVar[Mapping[str, str]] = {"user": "The field identifies the end user for OpenAI."}


async def _embeddings(call: HttpCall, body: EmbeddingsBody) -> Response:
    texts = listed(body.input)
    call.check_batch(len(texts))
    model = call.server.model_for(body.model, "embed")
    side = "" if body.input_type is None else "query" if body.input_type == "query" else "document"
    prompts = {"prompt_name": PROMPTS[side], "side": side} if side else {}
    vectors: np.ndarray[Any, Any] = await call.ask(
        texts,
        operation="embed",
        model=model,
        truncate_dim=body.dimensions,
        normalize_embeddings=body.normalize,
        **prompts,
    )
    rows: list[Any] = [encoded(row) for row in vectors] if body.encoding_format == "base64" else vectors.tolist()
    data = [{"object": "embedding", "index": i, "embedding": row} for i, row in enumerate(rows)]
    usage = {"prompt_tokens": call.timing.tokens, "total_tokens": call.timing.tokens}
    return JsonReply({"object": "list", "data": data, "model": model, "usage": usage})


def _card(call: HttpCall, name: str) -> dict[str, Any]:
    model = call.engine.models[name]
    return {
        "id": name,
        "object": "model",
        "created": _STARTED,
        "owned_by": "accel",
        "task": model.artifact.task,
        "operations": list(call.engine.operations(name)),
        "backend": model.backend,
        "compute_dtype": model.compute_dtype,
    }


async def _models(call: HttpCall, _: Any) -> Response:
    return JsonReply({"object": "list", "data": [_card(call, name) for name in call.engine.models]})


async def _model(call: HttpCall, _: Any) -> Response:
    name = call.request.path_params["model"]
    if name not in call.engine.models:
        raise HttpError(
            404, f"The server has no model {name!r}.", kind="model_not_found", fix="see the models at /v1/models."
        )
    return JsonReply(_card(call, name))


ENDPOINTS = (
    Endpoint(
        path="/v1/embeddings", answer=_embeddings, body=EmbeddingsBody, summary="Compute embeddings of texts", tag="openai",
        error=openai_error, operation="embed", example={"input": ["a lost card", "a stolen card"]},
    ),
    Endpoint(path="/v1/models", method="GET", answer=_models, summary="List the models", tag="openai"),
    Endpoint(path="/v1/models/{model:path}", method="GET", answer=_model, summary="Describe one model", tag="openai"),
)  # fmt: skip
