"""An endpoint for each task: texts in, answers as the stock pipelines give them out."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Annotated, Any, Literal

from pydantic import Field, field_validator, model_validator
from starlette.responses import Response

from .bodies import Body
from .endpoints import Call, Endpoint
from .replies import Json, text_error


class Pair(Body):
    """Two texts that are read together."""

    text: str
    text_pair: str


class Texts(Body):
    """What all endpoints for texts take."""

    model: str | None = None
    inputs: str | list[str] = Field(min_length=1)


Direction = Literal["left", "right", "Left", "Right"]
"""The side at which a text is cut."""


class ClassifyBody(Body):
    """What `/classify` takes; `truncate` cuts texts that are longer than the model reads."""

    model: str | None = None
    inputs: str | Pair | list[str | Pair]
    top_k: int | None = Field(default=None, ge=1)
    function_to_apply: Literal["sigmoid", "softmax", "none"] | None = None
    truncate: bool = False


class NerBody(Texts):
    """What `/ner` takes."""

    aggregation_strategy: Literal["none", "simple", "first", "average", "max"] = "simple"
    ignore_labels: list[str] | None = None


class QaBody(Body):
    """What `/qa` takes."""

    model: str | None = None
    question: str = Field(min_length=1)
    context: str = Field(min_length=1)
    top_k: int = Field(default=1, ge=1, le=100)
    max_answer_len: int = Field(default=15, ge=1, le=1000)
    handle_impossible_answer: bool = False


class ZeroShotBody(Texts):
    """What `/zero-shot` takes."""

    candidate_labels: list[str] = Field(min_length=1)
    hypothesis_template: str = Field(default="This example is {}.", max_length=1000)
    multi_label: bool = False

    @field_validator("hypothesis_template")
    @classmethod
    def _plain(cls, template: str) -> str:
        """Python's formatting does more than to put a label in: `{:999999999}` makes a text of that length."""
        if template.count("{}") != 1 or set("{}") & set(template.replace("{}", "")):
            raise ValueError("has {} once, where the label goes, and no other braces")
        return template


class FillMaskBody(Texts):
    """What `/fill-mask` takes."""

    top_k: int = Field(default=5, ge=1, le=1000)


TokenIds = Annotated[list[Annotated[int, Field(strict=True, ge=0)]], Field(min_length=1)]
"""A text as the model's own tokenizer makes tokens of it, special tokens included."""


def listed(inputs: Any) -> list[Any]:
    """One text or several as a list of texts; a text may be token ids."""
    one = isinstance(inputs, str) or isinstance(inputs[0], int)
    return [inputs] if one else list(inputs)


class EmbedBody(Body):
    """What `/embed` takes; texts that are longer than the model reads are cut unless `truncate` is false."""

    model: str | None = None
    inputs: str | TokenIds | list[str | TokenIds] = Field(min_length=1)
    normalize: bool = True
    truncate: bool | None = None
    truncation_direction: Direction = "right"
    prompt_name: str | None = None
    dimensions: int | None = Field(default=None, ge=1)


class RerankBody(Body):
    """What `/rerank` takes; with `texts` instead of `documents` it is asked, and answers, as text-embeddings-inference does."""

    model: str | None = None
    query: str
    documents: list[str] | None = Field(default=None, min_length=1)
    top_n: int | None = Field(default=None, ge=1)
    return_documents: bool = False
    raw_scores: bool = False
    texts: list[str] | None = Field(default=None, min_length=1)
    return_text: bool = False
    truncate: bool | None = None
    truncation_direction: Direction = "right"

    @model_validator(mode="after")
    def _either(self) -> RerankBody:
        others = ("return_text", "truncate", "truncation_direction"), ("top_n", "return_documents")
        if (self.documents is None) == (self.texts is None):
            raise ValueError("either documents or texts are ranked")
        wrong = [name for name in others[self.documents is None] if name in self.model_fields_set]
        if wrong:
            raise ValueError(f"{', '.join(wrong)} belong to {'texts' if self.texts is None else 'documents'}")
        return self


class TokenizeBody(Texts):
    """What `/tokenize` takes."""

    add_special_tokens: bool = True
    prompt_name: str | None = None


def _cut(body: EmbedBody | RerankBody) -> dict[str, Any]:
    """How long texts are cut, as options of the engine."""
    side = {} if body.truncation_direction.lower() == "right" else {"truncation_side": "left"}
    return {**side, **({"truncation": False} if body.truncate is False else {})}


Answer = Callable[[Call, Any], Awaitable[Response]]


def _pipeline(operation: str, *names: str) -> Answer:
    """Answers a body whose fields are a pipeline's options."""

    async def answer(call: Call, body: Any) -> Response:
        if isinstance(body.inputs, list):
            call.check_batch(len(body.inputs))
        options = {name: value for name in names if (value := getattr(body, name)) is not None}
        found = await call.ask(_plain(body.inputs), operation=operation, model=body.model, **options)
        return Json(found)

    return answer


def _plain(inputs: Any) -> Any:
    """Pairs as the pipelines take them."""
    if isinstance(inputs, list):
        return [_plain(one) for one in inputs]
    return inputs.model_dump() if isinstance(inputs, Pair) else inputs


async def _classify(call: Call, body: ClassifyBody) -> Response:
    inputs = _plain(body.inputs)
    if isinstance(inputs, list):
        call.check_batch(len(inputs))
    options: dict[str, Any] = {"truncation": True} if body.truncate else {}
    # null is all labels, as the pipeline has it; without it an answer is the best one.
    if "top_k" in body.model_fields_set:
        options["top_k"] = body.top_k
    if body.function_to_apply is not None:
        options["function_to_apply"] = body.function_to_apply
    return Json(await call.ask(inputs, operation="text-classification", model=body.model, **options))


async def _zero_shot(call: Call, body: ZeroShotBody) -> Response:
    call.check_batch(len(body.candidate_labels) * (len(body.inputs) if isinstance(body.inputs, list) else 1))
    # Each text is read with each label, and each query with each document.
    call.check_texts(body.inputs, times=len(body.candidate_labels))
    return await _ZERO_SHOT(call, body)


async def _qa(call: Call, body: QaBody) -> Response:
    inputs = {"question": body.question, "context": body.context}
    names = ("top_k", "max_answer_len", "handle_impossible_answer")
    options = {name: getattr(body, name) for name in names}
    return Json(await call.ask(inputs, operation="question-answering", model=body.model, **options))


async def _embed(call: Call, body: EmbedBody) -> Response:
    texts = listed(body.inputs)
    call.check_batch(len(texts))
    found = await call.ask(
        texts, operation="embed", model=body.model, normalize_embeddings=body.normalize, truncate_dim=body.dimensions,
        prompt_name=body.prompt_name, **_cut(body),
    )  # fmt: skip
    return Json(found.tolist())


async def _rerank(call: Call, body: RerankBody) -> Response:
    documents = body.texts or body.documents or []
    call.check_batch(len(documents))
    call.check_texts(body.query, times=len(documents))
    model = call.server.model_for(body.model, "rank")
    ranked = await call.ask(
        (body.query, documents), operation="rank", model=model, top_k=body.top_n,
        return_documents=body.return_documents or body.return_text, raw_scores=body.raw_scores,
        **_cut(body),
    )  # fmt: skip
    if body.texts is not None:
        return Json(
            [
                {"index": one["corpus_id"], "score": one["score"], **({"text": one["text"]} if "text" in one else {})}
                for one in ranked
            ]
        )
    results = [
        {
            "index": one["corpus_id"],
            "relevance_score": one["score"],
            **({"document": one["text"]} if "text" in one else {}),
        }
        for one in ranked
    ]
    return Json({"model": model, "results": results, "usage": {"total_tokens": call.timing.tokens}})


async def _tokenize(call: Call, body: TokenizeBody) -> Response:
    texts = [body.inputs] if isinstance(body.inputs, str) else body.inputs
    call.check_batch(len(texts))
    found = await call.ask(
        texts, operation="tokenize", model=body.model, add_special_tokens=body.add_special_tokens,
        prompt_name=body.prompt_name,
    )  # fmt: skip
    return Json(found)


_ZERO_SHOT = _pipeline("zero-shot-classification", "candidate_labels", "hypothesis_template", "multi_label")
_CONTEXT = "My name is Wolfgang and I live in Berlin."

ENDPOINTS = (
    Endpoint(
        path="/classify", answer=_classify, body=ClassifyBody, summary="Labels of texts, or of pairs", tag="tasks",
        operation="text-classification", example={"inputs": "I lost my card"},
    ),
    Endpoint(
        path="/ner", answer=_pipeline("token-classification", "aggregation_strategy", "ignore_labels"), body=NerBody,
        summary="Named entities and the like", tag="tasks", operation="token-classification", example={"inputs": _CONTEXT},
    ),
    Endpoint(
        path="/qa", answer=_qa, body=QaBody, summary="The part of a text that answers a question", tag="tasks",
        operation="question-answering", example={"question": "Where do I live?", "context": _CONTEXT},
    ),
    Endpoint(
        path="/zero-shot", answer=_zero_shot, body=ZeroShotBody, summary="Which of your labels fit a text", tag="tasks",
        operation="zero-shot-classification", example={"inputs": "I lost my card", "candidate_labels": ["bank", "sports"]},
    ),
    Endpoint(
        path="/fill-mask", answer=_pipeline("fill-mask", "top_k"), body=FillMaskBody, summary="What a mask stands for",
        tag="tasks", operation="fill-mask", example={"inputs": "I lost my [MASK]."},
    ),
    Endpoint(
        path="/embed", answer=_embed, body=EmbedBody, summary="Embeddings of texts, and nothing around them", tag="tasks",
        error=text_error, operation="embed", example={"inputs": ["a lost card", "a stolen card"]},
    ),
    Endpoint(
        path="/rerank", answer=_rerank, body=RerankBody, summary="Documents by how well they answer a query", tag="tasks",
        error=text_error, operation="rank", example={"query": "a lost card", "documents": ["I cannot find my card", "the exchange rate"]},
    ),
    Endpoint(
        path="/tokenize", answer=_tokenize, body=TokenizeBody, summary="The tokens of texts", tag="tasks",
        error=text_error, operation="tokenize", example={"inputs": "I lost my card"},
    ),
)  # fmt: skip
