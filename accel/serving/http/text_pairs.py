"""Endpoints that compare texts: `/similarity` of text-embeddings-inference, and `/score` of vLLM."""

from __future__ import annotations

import asyncio
import time
from typing import Annotated, Any

import numpy as np
from pydantic import BaseModel, ConfigDict, Field, model_validator
from starlette.responses import Response

from .bodies import Body
from .endpoints import Endpoint, HttpCall
from .replies import JsonReply, text_error
from .text_bodies import Direction, Texts, cut_options


class SimilarityInputs(BaseModel):
    """The texts of a request to `/similarity`."""

    model_config = ConfigDict(extra="forbid")

    source_sentence: str
    sentences: Texts


class SimilarityParameters(BaseModel):
    """The options of a request to `/similarity`."""

    model_config = ConfigDict(extra="forbid")

    truncate: bool | None = None
    truncation_direction: Direction = "right"
    prompt_name: str | None = None


class SimilarityBody(Body):
    """Request body of `/similarity`."""

    model: str | None = None
    inputs: SimilarityInputs
    parameters: SimilarityParameters | None = None


class ScoreBody(Body):
    """Request body of `/score`. One text in `text_1` is compared with each text in `text_2`; several texts form pairs in their order."""

    model: str | None = None
    text_1: str | Texts
    text_2: str | Annotated[list[str], Field(min_length=1)]
    truncate: bool | None = None
    truncation_direction: Direction = "right"

    @model_validator(mode="after")
    def _equal_lengths(self) -> ScoreBody:
        if not isinstance(self.text_1, str):
            seconds = [self.text_2] if isinstance(self.text_2, str) else self.text_2
            if len(self.text_1) not in (1, len(seconds)):
                raise ValueError(
                    f"must contain one text in text_1, or as many as in text_2: they have {len(self.text_1)} and {len(seconds)} texts"
                )
        return self


async def _similarity(call: HttpCall, body: SimilarityBody) -> Response:
    texts = [body.inputs.source_sentence, *body.inputs.sentences]
    call.check_batch(len(texts))
    options = body.parameters or SimilarityParameters()
    vectors: np.ndarray[Any, Any] = await call.ask(
        texts, operation="embed", model=body.model, normalize_embeddings=True, prompt_name=options.prompt_name,
        **cut_options(options.truncate, options.truncation_direction),
    )  # fmt: skip
    return JsonReply((vectors[1:] @ vectors[0]).tolist())


async def _score(call: HttpCall, body: ScoreBody) -> Response:
    seconds = [body.text_2] if isinstance(body.text_2, str) else body.text_2
    firsts = [body.text_1] if isinstance(body.text_1, str) else body.text_1
    firsts = firsts * len(seconds) if len(firsts) == 1 else firsts
    call.check_batch(len(seconds))
    model = call.server.model_for(body.model, "rank")
    places: dict[str, list[int]] = {}
    for i, text in enumerate(firsts):
        places.setdefault(text, []).append(i)
        call.check_texts(text)
    # All requests are sent before the first answer, so that the engine can compute them in one batch.
    ranked = await asyncio.gather(
        *(
            call.ask(
                (text, [seconds[i] for i in rows]),
                operation="rank",
                model=model,
                **cut_options(body.truncate, body.truncation_direction),
            )
            for text, rows in places.items()
        )
    )
    scores = {
        rows[entry["corpus_id"]]: entry["score"]
        for rows, entries in zip(places.values(), ranked, strict=True)
        for entry in entries
    }
    return JsonReply(
        {
            "id": call.id,
            "object": "list",
            "created": int(time.time()),
            "model": model,
            "data": [{"index": i, "object": "score", "score": scores[i]} for i in range(len(seconds))],
            "usage": {"prompt_tokens": call.timing.tokens, "total_tokens": call.timing.tokens},
        }
    )


ENDPOINTS = (
    Endpoint(
        path="/similarity", answer=_similarity, body=SimilarityBody,
        summary="Return the cosine similarity of a text to each of several texts",
        tag="tasks", operation="embed", error=text_error,
        example={"inputs": {"source_sentence": "a lost card", "sentences": ["a stolen card", "the exchange rate"]}},
    ),
    Endpoint(
        path="/score", answer=_score, body=ScoreBody, summary="Return the scores of pairs of texts, with a cross-encoder", tag="tasks",
        operation="rank", error=text_error, example={"text_1": "a lost card", "text_2": ["I cannot find my card", "the exchange rate"]},
    ),
)  # fmt: skip
