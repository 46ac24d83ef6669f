"""What endpoints for texts share: fields of their bodies, answers by a pipeline's operation, and `/tokenize`."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Annotated, Any, Literal

from pydantic import Field
from starlette.responses import Response

from .bodies import Body
from .endpoints import Call, Endpoint
from .replies import Json, text_error

Direction = Literal["left", "right", "Left", "Right"]
"""The side at which a text is cut."""
TokenIds = Annotated[list[Annotated[int, Field(strict=True, ge=0)]], Field(min_length=1)]
"""A text as the model's own tokenizer makes tokens of it, special tokens included."""


class Texts(Body):
    """One text or several, for a model."""

    model: str | None = None
    inputs: str | list[str] = Field(min_length=1)


def listed(inputs: Any) -> list[Any]:
    """One text or several as a list of texts; a text may be token ids."""
    one = isinstance(inputs, str) or isinstance(inputs[0], int)
    return [inputs] if one else list(inputs)


def cut_options(truncate: bool | None, direction: Direction) -> dict[str, Any]:
    """How long texts are cut, as options of the engine."""
    side = {} if direction.lower() == "right" else {"truncation_side": "left"}
    return {**side, **({"truncation": False} if truncate is False else {})}


def pipeline_answer(operation: str, *names: str) -> Callable[[Call, Any], Awaitable[Response]]:
    """Answer bodies whose fields `names` are a pipeline's options."""

    async def answer(call: Call, body: Any) -> Response:
        if isinstance(body.inputs, list):
            call.check_batch(len(body.inputs))
        options = {name: value for name in names if (value := getattr(body, name)) is not None}
        return Json(await call.ask(body.inputs, operation=operation, model=body.model, **options))

    return answer


class TokenizeBody(Texts):
    """What `/tokenize` takes."""

    add_special_tokens: bool = True
    prompt_name: str | None = None


async def _tokenize(call: Call, body: TokenizeBody) -> Response:
    texts = [body.inputs] if isinstance(body.inputs, str) else body.inputs
    call.check_batch(len(texts))
    found = await call.ask(
        texts, operation="tokenize", model=body.model, add_special_tokens=body.add_special_tokens,
        prompt_name=body.prompt_name,
    )  # fmt: skip
    return Json(found)


ENDPOINTS = (
    Endpoint(
        path="/tokenize", answer=_tokenize, body=TokenizeBody, summary="The tokens of texts", tag="tasks",
        error=text_error, operation="tokenize", example={"inputs": "I lost my card"},
    ),
)  # fmt: skip
