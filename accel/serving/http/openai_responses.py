"""OpenAI's Responses API for text: `/v1/responses`, complete or streamed. Responses are not stored."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator, Mapping
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field
from starlette.responses import Response

from .bodies import Body
from .endpoints import Endpoint, HttpCall
from .generation_endpoints import OPERATION, Count, EventStream, RequestGenerations
from .openai_chat import ChatBody, ToolUse, started_chat
from .replies import HttpError, JsonReply, http_error, openai_error, write_json

_NOT_STORED = "send the whole conversation in `input`: this server does not store responses."


class InputPart(Body):
    """One text part of an input message."""

    type: Literal["input_text", "output_text", "text"]
    text: str
    annotations: list[Any] | None = None
    logprobs: list[Any] | None = None


class InputItem(Body):
    """One item of the input: a message, a call of a function, or the result of a call."""

    type: Literal["message", "function_call", "function_call_output"] = "message"
    role: str | None = None
    content: str | list[InputPart] | None = None
    id: str | None = None
    status: str | None = None
    phase: str | None = None
    call_id: str | None = None
    name: str | None = None
    arguments: str | None = None
    output: str | None = None

    def message(self) -> dict[str, Any]:
        """Return the item as a message of a chat."""
        if self.type == "function_call":
            called = {"id": self.call_id, "function": {"name": self.name, "arguments": self.arguments}}
            return {"role": "assistant", "content": None, "tool_calls": [called]}
        if self.type == "function_call_output":
            return {"role": "tool", "tool_call_id": self.call_id, "content": self.output}
        content = self.content
        text = content if isinstance(content, str) or content is None else "".join(part.text for part in content)
        return {"role": self.role, "content": text}


class TextFormat(Body):
    """The format of the text; the fields of `json_schema` are next to the type."""

    type: Literal["text", "json_object", "json_schema"]
    name: str | None = None
    description: str | None = None
    strict: bool | None = None
    schema_: dict[str, Any] | None = Field(alias="schema", default=None)

    def answer_format(self) -> dict[str, Any]:
        """Return the format in the form of chat completions."""
        if self.type != "json_schema":
            return {"type": self.type}
        return {
            "type": self.type,
            "json_schema": {"name": self.name or "answer", "schema": self.schema_ or {"type": "object"}},
        }


class TextSettings(Body):
    """Settings of the text."""

    format: TextFormat | None = None


class FunctionTool(Body):
    """A function that the model may call."""

    type: Literal["function"]
    name: str
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class NamedFunction(Body):
    """The function that the model must call."""

    type: Literal["function"]
    name: str


class ResponsesBody(Body):
    """Request body of `/v1/responses`."""

    input: str | Annotated[list[InputItem], Field(min_length=1)]
    model: str | None = None
    instructions: str | None = None
    max_output_tokens: Count | None = None
    temperature: float | None = Field(default=None, ge=0, le=100)
    top_p: float | None = Field(default=None, gt=0, le=1)
    stream: bool | None = None
    text: TextSettings | None = None
    tools: list[FunctionTool] | None = None
    tool_choice: Literal["none", "auto", "required"] | NamedFunction | None = None
    parallel_tool_calls: bool | None = None
    store: bool | None = None
    metadata: dict[str, str] | None = None
    user: str | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None
    service_tier: Literal["auto", "default"] | None = None
    truncation: Literal["disabled"] | None = None

    ignored: ClassVar[Mapping[str, str]] = {
        "store": "This server does not store responses.",
        "user": "The field identifies the end user for OpenAI.",
        "safety_identifier": "The field identifies the end user for OpenAI.",
        "prompt_cache_key": "This server decides alone which prompts it caches.",
    }
    refused: ClassVar[Mapping[str, str]] = {
        "background": "remove background: the request waits for the response.",
        "conversation": _NOT_STORED,
        "include": "remove include: this server returns every field that it has.",
        "max_tool_calls": "remove max_tool_calls: this server calls no tools itself.",
        "previous_response_id": _NOT_STORED,
        "prompt": "send the prompt's text in `input`.",
        "reasoning": "remove reasoning, and describe in the instructions how long the model should reason.",
        "stream_options": "remove stream_options.",
        "top_logprobs": "use `/v1/chat/completions` with logprobs.",
    }

    def chat(self) -> ChatBody:
        """Return the request as a chat completion."""
        items = (
            [{"role": "user", "content": self.input}]
            if isinstance(self.input, str)
            else [i.message() for i in self.input]
        )
        if self.instructions:
            items.insert(0, {"role": "system", "content": self.instructions})
        choice = self.tool_choice
        fields = {
            "messages": items,
            "model": self.model,
            "max_tokens": self.max_output_tokens,
            "temperature": self.temperature,
            "top_p": self.top_p,
            "response_format": self.text.format.answer_format() if self.text and self.text.format else None,
            "tools": [
                {"type": "function", "function": tool.model_dump(exclude={"type"}, exclude_none=True)}
                for tool in self.tools or []
            ],
            "tool_choice": {"type": "function", "function": {"name": choice.name}}
            if isinstance(choice, NamedFunction)
            else choice,
            "parallel_tool_calls": self.parallel_tool_calls,
        }
        return ChatBody.model_validate(fields)

    def answer(self, call: HttpCall, answers: RequestGenerations, **fields: Any) -> dict[str, Any]:
        """Return a response object with the given fields."""
        return {
            "id": f"resp_{call.id}",
            "object": "response",
            "created_at": answers.created,
            "status": "in_progress",
            "error": None,
            "incomplete_details": None,
            "instructions": self.instructions,
            "max_output_tokens": self.max_output_tokens,
            "metadata": self.metadata or {},
            "model": answers.name,
            "output": [],
            "parallel_tool_calls": self.parallel_tool_calls is not False,
            "temperature": self.temperature,
            "text": self.text.model_dump(by_alias=True, exclude_none=True)
            if self.text
            else {"format": {"type": "text"}},
            "tool_choice": self.tool_choice.model_dump()
            if isinstance(self.tool_choice, NamedFunction)
            else self.tool_choice or "auto",
            "tools": [tool.model_dump() for tool in self.tools or []],
            "top_p": self.top_p,
            "truncation": "disabled",
            "usage": None,
            **fields,
        }


def _message(call: HttpCall, text: str, status: str) -> dict[str, Any]:
    content = (
        [{"type": "output_text", "text": text, "annotations": [], "logprobs": []}] if status != "in_progress" else []
    )
    return {"type": "message", "id": f"msg_{call.id}", "status": status, "role": "assistant", "content": content}


def _call(call: Mapping[str, Any]) -> dict[str, Any]:
    return {
        "type": "function_call",
        "id": f"fc_{call['id']}",
        "call_id": call["id"],
        "status": "completed",
        **call["function"],
    }


def _end(end: str, answers: RequestGenerations) -> dict[str, Any]:
    """Return the fields of a finished response."""
    usage = answers.usage
    cached = usage.get("prompt_tokens_details", {}).get("cached_tokens", 0)
    return {
        "status": "incomplete" if end == "length" else "completed",
        "incomplete_details": {"reason": "max_output_tokens"} if end == "length" else None,
        "usage": {
            "input_tokens": usage["prompt_tokens"],
            "input_tokens_details": {"cached_tokens": cached},
            "output_tokens": usage["completion_tokens"],
            "output_tokens_details": {"reasoning_tokens": 0},
            "total_tokens": usage["total_tokens"],
        },
    }


async def _responses(call: HttpCall, body: ResponsesBody) -> Response:
    try:
        chat = body.chat()
    except ValueError as error:
        raise HttpError(
            422, f"The request cannot be converted to a conversation: {str(error).splitlines()[-2].strip()}", param="input",
            fix="send messages with role and content, and calls with call_id, name, arguments and output.",
        ) from error  # fmt: skip
    answers, use = await started_chat(call, chat)
    if body.stream:
        return EventStream(answers, _events(call, body, answers, use))
    (answer,) = await answers.complete_texts()
    content, calls = use.split(answer.text)
    end = _end(answer.end, answers)
    output = [_message(call, content, end["status"])] if content or not calls else []
    return JsonReply(body.answer(call, answers, output=[*output, *map(_call, calls)], **end))


async def _events(
    call: HttpCall, body: ResponsesBody, answers: RequestGenerations, use: ToolUse
) -> AsyncIterator[bytes]:
    """Yield the events of a streamed response."""
    number = -1

    def line(kind: str, **fields: Any) -> bytes:
        nonlocal number
        number += 1
        return (
            f"event: {kind}\ndata: ".encode()
            + write_json({"type": kind, "sequence_number": number, **fields})
            + b"\n\n"
        )

    def opened() -> list[bytes]:
        part = {"type": "output_text", "text": "", "annotations": [], "logprobs": []}
        return [
            line("response.output_item.added", output_index=0, item=_message(call, "", "in_progress")),
            line("response.content_part.added", **place, part=part),
        ]

    place = {"item_id": f"msg_{call.id}", "output_index": 0, "content_index": 0}
    yield line("response.created", response=body.answer(call, answers))
    yield line("response.in_progress", response=body.answer(call, answers))
    reader, text, end, calls, is_open = use.reader(), "", "", list[dict[str, Any]](), False
    try:
        async with contextlib.aclosing(answers.pieces()) as pieces:
            async for _, piece in pieces:
                new, end = piece.text, piece.finish or ""
                if reader is not None:
                    new = reader.push(new)
                    if end:
                        rest, parsed = reader.finish()
                        new, calls = new + rest, use.described(parsed)
                if (new or (end and not calls)) and not is_open:
                    is_open = True
                    for started in opened():
                        yield started
                if new:
                    text += new
                    yield line("response.output_text.delta", **place, delta=new, logprobs=[])
    except Exception as error:  # noqa: BLE001  # the HTTP status has been sent, so the error is sent as an event
        shown = http_error(error, call.id)
        yield line("error", code=shown.kind, message=shown.message, param=shown.param)
        return
    finished = _end(end, answers)
    output: list[dict[str, Any]] = []
    if is_open:
        output.append(_message(call, text, finished["status"]))
        yield line("response.output_text.done", **place, text=text, logprobs=[])
        yield line("response.content_part.done", **place, part=output[0]["content"][0])
        yield line("response.output_item.done", output_index=0, item=output[0])
    for item in map(_call, calls):
        where = {"item_id": item["id"], "output_index": len(output)}
        begun = {**item, "arguments": "", "status": "in_progress"}
        yield line("response.output_item.added", output_index=len(output), item=begun)
        yield line("response.function_call_arguments.delta", **where, delta=item["arguments"])
        yield line("response.function_call_arguments.done", **where, name=item["name"], arguments=item["arguments"])
        yield line("response.output_item.done", output_index=len(output), item=item)
        output.append(item)
    response = body.answer(call, answers, output=output, **finished)
    yield line(f"response.{finished['status']}", response=response)


ENDPOINTS = (
    Endpoint(
        path="/v1/responses", answer=_responses, body=ResponsesBody, summary="Generate a response to a text or a conversation",
        tag="openai", error=openai_error, operation=OPERATION, example={"input": "Where is it?", "max_output_tokens": 64},
    ),
)  # fmt: skip
