"""Request bodies and functions for endpoints that take texts, and the endpoint `/tokenize`."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Annotated, Any, Literal

from pydantic import Field
from starlette.responses import Response

from .bodies import Body
from .endpoints import Endpoint, HttpCall
from .replies import JsonReply, text_error

Direction = Literal["left", "right", "Left", "Right"]
"""Side from which a text is truncated."""
TokenIds = Annotated[list[Annotated[int, Field(strict=True, ge=0)]], Field(min_length=1)]
"""A text as token ids of the model's tokenizer, including special tokens."""
Texts = Annotated[list[str], Field(min_length=1)]
"""Several texts. The list must not be empty, but a text may be: most tokenizers add special tokens to an empty text."""


class TextsBody(Body):
    """Request body with one text or several texts."""

    model: str | None = None
    inputs: str | Texts


def listed(inputs: Any) -> list[Any]:
    """Return one text or several texts as a list; each text may be a list of token ids."""
    is_single = isinstance(inputs, str) or isinstance(inputs[0], int)
    return [inputs] if is_single else list(inputs)


def cut_options(truncate: bool | None, direction: Direction) -> dict[str, Any]:
    """Return the engine's options for the truncation of long texts."""
    side = {} if direction.lower() == "right" else {"truncation_side": "left"}
    return {**side, **({"truncation": False} if truncate is False else {})}


def pipeline_answer(operation: str, *names: str) -> Callable[[HttpCall, Any], Awaitable[Response]]:
    """Return a function that processes request bodies for a pipeline.

    Args:
        operation: Name of the pipeline.
        names: Fields of the body that are options of the pipeline.
    """

    async def answer(call: HttpCall, body: Any) -> Response:
        if isinstance(body.inputs, list):
            call.check_batch(len(body.inputs))
        options = {name: value for name in names if (value := getattr(body, name)) is not None}
        return JsonReply(await call.ask(body.inputs, operation=operation, model=body.model, **options))

    return answer


class TokenizeBody(TextsBody):
    """Request body of `/tokenize`."""

    add_special_tokens: bool = True
    prompt_name: str | None = None


async def _tokenize(call: HttpCall, body: TokenizeBody) -> Response:
    texts = [body.inputs] if isinstance(body.inputs, str) else body.inputs
    call.check_batch(len(texts))
    tokens = await call.ask(
        texts, operation="tokenize", model=body.model, add_special_tokens=body.add_special_tokens,
        prompt_name=body.prompt_name,
    )  # fmt: skip
    return JsonReply(tokens)


ENDPOINTS = (
    Endpoint(
        path="/tokenize", answer=_tokenize, body=TokenizeBody, summary="Tokenize texts", tag="tasks",
        error=text_error, operation="tokenize", example={"inputs": "I lost my card"},
    ),
)  # fmt: skip
