"""Cohere's endpoints `rerank` and `embed`, version 2."""

from __future__ import annotations

import base64
from collections.abc import Mapping
from typing import Any, ClassVar, Literal

import numpy as np
from pydantic import Field
from starlette.responses import Response

from ...artifact.embedding_ranges import EMBEDDING_RANGES, embedding_ranges
from ...models.vector_functions import Precision, quantize_embeddings
from .bodies import Body
from .endpoints import Endpoint, HttpCall
from .replies import HttpError, JsonReply, message_error

_PRIORITY = {"priority": "The server has one queue for all requests."}


class CohereRerankBody(Body):
    """Request body of `/v2/rerank`."""

    model: str | None = None
    query: str
    documents: list[str] = Field(min_length=1)
    top_n: int | None = Field(default=None, ge=1)
    priority: int | None = None

    ignored: ClassVar[Mapping[str, str]] = _PRIORITY
    refused: ClassVar[Mapping[str, str]] = {
        "max_tokens_per_doc": "remove max_tokens_per_doc: the server truncates documents to the model's maximum length.",
        "relevant_spans": "remove relevant_spans, and send passages instead of complete documents.",
    }
    remedies: ClassVar[Mapping[str, str]] = {
        "documents": "send a list of texts; join the fields of each document into one text."
    }


class CohereEmbedBody(Body):
    """Request body of `/v2/embed`."""

    model: str | None = None
    texts: list[str] = Field(min_length=1)
    input_type: Literal["search_document", "search_query", "classification", "clustering"] | None = None
    embedding_types: list[Literal["float", "int8", "uint8", "base64", "binary", "ubinary"]] | None = Field(
        default=None, min_length=1
    )
    output_dimension: int | None = Field(default=None, ge=1)
    truncate: Literal["NONE", "START", "END"] = "END"
    priority: int | None = None

    ignored: ClassVar[Mapping[str, str]] = _PRIORITY
    refused: ClassVar[Mapping[str, str]] = {
        "images": "send texts in the field `texts`: this server does not embed images.",
        "inputs": "send texts in the field `texts`: this server does not embed images.",
        "max_tokens": "remove max_tokens: the server truncates texts to the model's maximum length.",
    }
    remedies: ClassVar[Mapping[str, str]] = {
        "embedding_types": "request float, int8, uint8, base64, binary or ubinary.",
        "input_type": "use an input type for text: this server does not embed images.",
    }


_PROMPTS: Mapping[str, tuple[str, ...]] = {
    "search_query": ("query",),
    "search_document": ("document", "passage", "corpus"),
    "classification": ("classification",),
    "clustering": ("clustering",),
}
"""Prompt names by Cohere's `input_type`, equal to those of `encode_query` and `encode_document` in sentence-transformers."""
_SIDES = {"search_query": "query", "search_document": "document"}
_CUT: Mapping[str, dict[str, Any]] = {
    "NONE": {"truncation": False},
    "START": {"truncation_side": "left"},
    "END": {},
}


def _meta(call: HttpCall) -> dict[str, Any]:
    return {"api_version": {"version": "2"}, "tokens": {"input_tokens": call.timing.tokens}}


async def _rerank(call: HttpCall, body: CohereRerankBody) -> Response:
    call.check_batch(len(body.documents))
    call.check_texts(body.query, times=len(body.documents))
    ranked = await call.ask((body.query, body.documents), operation="rank", model=body.model, top_k=body.top_n)
    results = [{"index": document["corpus_id"], "relevance_score": document["score"]} for document in ranked]
    return JsonReply({"id": call.id, "results": results, "meta": _meta(call)})


def _ranges(call: HttpCall, body: CohereEmbedBody) -> np.ndarray[Any, Any]:
    """Return the ranges of the model's embeddings, `(2, size)`.

    The texts of one request cannot define the ranges: the same text would then have other integers in another request.

    Raises:
        HttpError: The model has no ranges, or the request changes the dimensions that they belong to.
    """
    name = call.server.model_for(body.model, "embed")
    saved = embedding_ranges(call.engine.models[name].artifact.path)
    if saved is None:
        raise HttpError(
            422,
            f"`embedding_types` contains int8 or uint8, but the folder of the model {name!r} has no file {EMBEDDING_RANGES} with the "
            "ranges of its embeddings.",
            fix="write this file from the embeddings of many documents, or request float, binary or ubinary.",
        )
    if body.output_dimension is not None and body.output_dimension != len(saved[0]):
        raise HttpError(
            422,
            f"`output_dimension` is {body.output_dimension}, but the ranges for int8 and uint8 belong to {len(saved[0])} dimensions.",
            fix="leave output_dimension out, or request float, binary or ubinary.",
        )
    return np.array(saved, np.float32)


async def _embed(call: HttpCall, body: CohereEmbedBody) -> Response:
    call.check_batch(len(body.texts))
    kinds = body.embedding_types or ["float"]
    ranges = _ranges(call, body) if {"int8", "uint8"} & set(kinds) else None
    vectors: np.ndarray[Any, Any] = await call.ask(
        body.texts, operation="embed", model=body.model, normalize_embeddings=True, truncate_dim=body.output_dimension,
        prompt_name=_PROMPTS[body.input_type] if body.input_type is not None else None,
        side=_SIDES.get(body.input_type or "", ""), **_CUT[body.truncate],
    )  # fmt: skip
    embeddings: dict[str, Any] = {}
    for kind in kinds:
        if kind == "base64":
            embeddings[kind] = [encoded(row) for row in vectors]
        else:
            precision: Precision = "float32" if kind == "float" else kind
            embeddings[kind] = quantize_embeddings(vectors, precision, ranges=ranges).tolist()
    return JsonReply(
        {
            "id": call.id,
            "embeddings": embeddings,
            "texts": body.texts,
            "response_type": "embeddings_by_type",
            "meta": _meta(call),
        }
    )


def encoded(row: np.ndarray[Any, Any]) -> str:
    """Return an embedding as base64 of little-endian float32 values."""
    return base64.b64encode(row.astype("<f4").tobytes()).decode("ascii")


ENDPOINTS = (
    Endpoint(
        path="/v2/rerank", answer=_rerank, body=CohereRerankBody, summary="Rank documents by relevance to a query",
        tag="cohere", operation="rank", error=message_error,
        example={"query": "a lost card", "documents": ["I cannot find my card", "the exchange rate"]},
    ),
    Endpoint(
        path="/v2/embed", answer=_embed, body=CohereEmbedBody, summary="Compute embeddings of texts", tag="cohere",
        operation="embed", error=message_error, example={"texts": ["a lost card", "a stolen card"], "input_type": "search_document"},
    ),
)  # fmt: skip
