"""OpenAI's chat completions: messages, answer formats, tools and log-probabilities of tokens."""

from __future__ import annotations

import asyncio
import json
import secrets
import string
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field, field_validator
from starlette.responses import Response

from ...decoding.grammars import json_grammar
from ..continuous_batching.generation_engine import TextPiece
from ..continuous_batching.token_stream import Token
from .bodies import Body
from .endpoints import Endpoint, HttpCall
from .generation_endpoints import (
    IGNORED,
    OPERATION,
    Count,
    OpenAIBody,
    RequestGenerations,
    started,
    streamed,
    token_text,
)
from .replies import HttpError, JsonReply, openai_error
from .tool_calls import Call, ToolCallReader, ToolFormat, format_of

_Empty = Annotated[list[Any], Field(max_length=0)]
_Schema = dict[str, Any]


class TextPart(Body):
    """One text part of a message."""

    type: Literal["text"]
    text: str


class CalledFunction(Body):
    """The function of a tool call: its name, and its arguments as JSON."""

    name: str
    arguments: str

    @field_validator("arguments")
    @classmethod
    def _is_object(cls, text: str) -> str:
        if not isinstance(json.loads(text or "{}"), dict):
            raise ValueError("must be a JSON object")
        return text


class SentCall(Body):
    """A tool call in a message that a client sends back."""

    id: str
    type: Literal["function"] = "function"
    function: CalledFunction
    index: int | None = None


class Message(Body):
    """One message of a conversation."""

    role: str = Field(min_length=1, max_length=64)
    content: str | list[TextPart] | None = None
    name: str | None = None
    tool_calls: list[SentCall] | None = None
    tool_call_id: str | None = None
    # Clients send the assistant's message back as part of the conversation, with these fields set to null or empty.
    refusal: None = None
    annotations: _Empty | None = None
    audio: None = None
    function_call: None = None

    @field_validator("content")
    @classmethod
    def _is_present(cls, content: Any, info: Any) -> Any:
        if content is None and info.data.get("role") != "assistant":
            raise ValueError("must be a text or a list of text parts")
        return content

    def plain(self) -> dict[str, Any]:
        """Return the fields of the message that chat templates read."""
        content = self.content or ""
        text = content if isinstance(content, str) else "".join(part.text for part in content)
        message: dict[str, Any] = {"role": self.role, "content": text}
        if self.tool_calls:
            message["tool_calls"] = [
                {
                    "id": call.id, "type": "function",
                    "function": {"name": call.function.name, "arguments": json.loads(call.function.arguments or "{}")},
                }
                for call in self.tool_calls
            ]  # fmt: skip
        if self.tool_call_id is not None:
            message["tool_call_id"] = self.tool_call_id
        if self.name is not None and self.role == "tool":
            message["name"] = self.name
        return message


class NamedSchema(Body):
    """A JSON schema with its name. The schema is always followed exactly, whatever `strict` is."""

    name: str
    schema_: _Schema = Field(alias="schema", default_factory=lambda: {"type": "object"})
    description: str | None = None
    strict: bool | None = None


class AnswerFormat(Body):
    """The format of the answer: a text, a JSON object, or JSON that matches a schema."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: NamedSchema | None = None

    @field_validator("json_schema")
    @classmethod
    def _fits(cls, schema: NamedSchema | None, info: Any) -> NamedSchema | None:
        if schema is not None and info.data.get("type") != "json_schema":
            raise ValueError('must be omitted unless type is "json_schema"')
        return schema

    def grammar(self) -> str:
        """Return the grammar of the answer; empty for a text.

        Raises:
            HttpError: The schema is missing.
            InputError: The schema is invalid.
        """
        if self.type == "text":
            return ""
        if self.type == "json_object":
            return json_grammar({"type": "object"})
        if self.json_schema is None:
            raise HttpError(
                422, "`response_format.json_schema` is missing.", param="response_format",
                fix="send the schema in response_format.json_schema.schema.",
            )  # fmt: skip
        return json_grammar(self.json_schema.schema_)


class Function(Body):
    """A function that the model may call."""

    name: str = Field(pattern=r"^[a-zA-Z0-9_.-]{1,64}$")
    description: str | None = None
    parameters: _Schema | None = None
    strict: bool | None = None


class Tool(Body):
    """A tool that the model may call."""

    type: Literal["function"]
    function: Function


class FunctionName(Body):
    """The name of a function."""

    name: str


class ToolChoice(Body):
    """The tool that the model must call."""

    type: Literal["function"]
    function: FunctionName


_NO_FUNCTIONS = "use the fields tools and tool_choice."


class ChatBody(OpenAIBody):
    """Request body of `/v1/chat/completions`."""

    messages: list[Message] = Field(min_length=1)
    max_tokens: Count | None = None
    max_completion_tokens: Count | None = None
    response_format: AnswerFormat | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=20)] | None = None
    tools: list[Tool] | None = None
    tool_choice: Literal["none", "auto", "required"] | ToolChoice | None = None
    parallel_tool_calls: bool | None = None
    modalities: list[Literal["text"]] | None = None

    ignored: ClassVar[Mapping[str, str]] = IGNORED
    refused: ClassVar[Mapping[str, str]] = {
        **OpenAIBody.refused,
        "audio": "remove audio: this server returns only text.",
        "function_call": _NO_FUNCTIONS,
        "functions": _NO_FUNCTIONS,
        "moderation": "remove moderation, and check texts with a classification model at /classify.",
        "prediction": "remove prediction: the model generates every token of the answer.",
        "reasoning_effort": "remove reasoning_effort, and describe in the messages how long the model should reason.",
        "verbosity": "remove verbosity, and describe the length of the answer in the messages, or set max_tokens.",
        "web_search_options": "remove web_search_options, and put search results into the messages.",
    }
    remedies: ClassVar[Mapping[str, str]] = {
        **OpenAIBody.remedies,
        "tools": "send functions: this server calls no tools itself.",
        "tool_choice": 'use "none", "auto", "required", or {"type": "function", "function": {"name": ...}}.',
        "logprobs": "send true or false.",
        "top_logprobs": "send a number from 0 to 20.",
        "response_format": "use the type text, json_object or json_schema.",
        "modalities": 'use ["text"]: this server returns only text.',
        "messages": "send messages whose content is text.",
    }


class ToolUse:
    """How the answers to one request call tools.

    Args:
        body: The request.
        tokenizer: Tokenizer of the model.

    Attributes:
        tools: The tools that the model may call.
        grammar: Grammar of an answer that must be a call; empty if the model decides.

    Raises:
        HttpError: The request is inconsistent, or the chat template cannot describe tools.
    """

    def __init__(self, body: ChatBody, tokenizer: Any) -> None:
        choice = body.tool_choice
        self.tools = [] if choice == "none" else [tool.function for tool in body.tools or []]
        self.grammar = ""
        self._parallel = body.parallel_tool_calls is not False
        self._format: ToolFormat | None = None
        if choice not in (None, "none", "auto") and not body.tools:
            raise _refused("tool_choice", "`tool_choice` asks for a call, but the request has no tools.", "send tools.")
        if not self.tools:
            return
        self._format = format_of(str(getattr(tokenizer, "chat_template", None) or ""))
        if self._format is None:
            raise _refused(
                "tools", "The chat template of the model has no tools, or it has an unknown format of tool calls.",
                "use a model whose chat template has the tool calls of Hermes, Qwen, Llama 3, Mistral or Gemma.",
            )  # fmt: skip
        self._special = self._format.special_tokens(tokenizer)
        if choice in (None, "auto"):
            if any(tool.strict for tool in self.tools):
                raise _refused(
                    "tools", '`strict` needs a `tool_choice` that asks for a call, because a model with "auto" may also answer with text.',
                    'set tool_choice to "required" or to a function, or set strict to false.',
                )  # fmt: skip
            return
        named = choice.function.name if isinstance(choice, ToolChoice) else None
        callable_tools = {
            tool.name: tool.parameters or {"type": "object"} for tool in self.tools if named in (None, tool.name)
        }
        if not callable_tools:
            raise _refused("tool_choice", f"The request has no tool {named!r}.", "name one of the tools.")
        if not self._format.before:
            raise _refused(
                "tool_choice", f"A call cannot be enforced in the format of {self._format.name}, whose arguments are not JSON.",
                'use the tool_choice "auto".',
            )  # fmt: skip
        if body.response_format is not None and body.response_format.type != "text":
            raise _refused(
                "tool_choice", "An answer cannot be a tool call and have a response_format.", "remove one of them."
            )
        self.grammar = self._format.grammar(callable_tools, tokenizer)

    @property
    def template(self) -> dict[str, Any]:
        """Variables of the chat template."""
        functions = [
            tool.model_dump(include={"name", "description", "parameters"}, exclude_none=True) for tool in self.tools
        ]
        return {"tools": [{"type": "function", "function": each} for each in functions]} if functions else {}

    @property
    def settings(self) -> dict[str, Any]:
        """Fields of `GenerationOptions`."""
        return {"grammar": self.grammar, "visible_tokens": self._special} if self._format is not None else {}

    def reader(self) -> ToolCallReader | None:
        """Return a reader for the text of one answer, or `None` if the answer cannot call tools."""
        return ToolCallReader(self._format, [tool.name for tool in self.tools]) if self._format is not None else None

    def split(self, text: str) -> tuple[str, list[dict[str, Any]]]:
        """Return the content and the calls of a complete answer."""
        reader = self.reader()
        if reader is None:
            return text, []
        content = reader.push(text)
        rest, calls = reader.finish()
        return content + rest, self.described(calls)

    def described(self, calls: Sequence[Call]) -> list[dict[str, Any]]:
        """Return calls in OpenAI's format. Without parallel calls, only the first one."""
        return [
            {"id": _call_id(), "type": "function", "function": {"name": name, "arguments": json.dumps(values)}}
            for name, values in (calls if self._parallel else calls[:1])
        ]


def _call_id() -> str:
    """Return a random id of nine letters and digits, the only form that Mistral's chat templates accept."""
    return "".join(secrets.choice(string.ascii_letters + string.digits) for _ in range(9))


def _refused(param: str, message: str, fix: str) -> HttpError:
    return HttpError(422, message, param=param, fix=fix)


def _listed(tokenizer: Any, tokens: Sequence[Token]) -> dict[str, Any]:
    """Return log-probabilities in the format of OpenAI's chat completions."""

    def entry(token: int, value: float) -> dict[str, Any]:
        text, content = token_text(tokenizer, token)
        return {"token": text, "logprob": value, "bytes": content}

    content = [
        {**entry(token.id, token.probability.value), "top_logprobs": [entry(*pair) for pair in token.probability.top]}
        for token in tokens
        if token.probability is not None
    ]
    return {"content": content, "refusal": None}


async def started_chat(call: HttpCall, body: ChatBody) -> tuple[RequestGenerations, ToolUse]:
    """Start the answers to a conversation, and return them with the use of tools.

    Raises:
        HttpError: The fields of the request are inconsistent, or the model's chat template cannot describe tools.
    """
    name = call.server.model_for(body.model, OPERATION)
    engine = await asyncio.to_thread(call.engine.generator, name)
    use = ToolUse(body, engine.tokenizer)
    settings = use.settings
    if body.top_logprobs and not body.logprobs:
        raise _refused("top_logprobs", "`top_logprobs` needs `logprobs`.", "set logprobs to true.")
    if body.logprobs:
        settings["top_logprobs"] = body.top_logprobs or 0
    if not use.grammar and body.response_format is not None:
        settings["grammar"] = await asyncio.to_thread(body.response_format.grammar)
    answers = await started(
        call, body, [[message.plain() for message in body.messages]], body.max_completion_tokens or body.max_tokens,
        draw=True, times=body.n or 1, settings=settings, template=use.template,
    )  # fmt: skip
    return answers, use


async def _chat(call: HttpCall, body: ChatBody) -> Response:
    answers, use = await started_chat(call, body)
    head = {"id": f"chatcmpl-{call.id}", "created": answers.created, "model": answers.name}
    head["object"] = "chat.completion.chunk" if body.stream else "chat.completion"

    def listed(tokens: Sequence[Token]) -> dict[str, Any] | None:
        return _listed(answers.engine.tokenizer, tokens) if body.logprobs else None

    if not body.stream:
        choices = []
        for number, answer in enumerate(await answers.complete_texts()):
            content, calls = use.split(answer.text)
            message: dict[str, Any] = {"role": "assistant", "content": content, "refusal": None}
            if calls:
                message |= {"content": content or None, "tool_calls": calls}
            end = "tool_calls" if calls and answer.end == "stop" else answer.end
            choices.append(
                {"index": number, "message": message, "logprobs": listed(answer.tokens), "finish_reason": end}
            )
        return JsonReply({**head, "choices": choices, "usage": answers.usage})

    readers = {i: reader for i in range(body.n or 1) if (reader := use.reader()) is not None}

    def chunk(
        number: int, delta: dict[str, Any], end: str | None = None, tokens: Sequence[Token] = ()
    ) -> dict[str, Any]:
        choice = {"index": number, "delta": delta, "logprobs": listed(tokens) if tokens else None, "finish_reason": end}
        return {**head, "choices": [choice]}

    def event(number: int, piece: TextPiece) -> list[dict[str, Any]]:
        text, end, reader = piece.text, piece.finish, readers.get(number)
        tokens = [piece.token] if body.logprobs and piece.token is not None else []
        calls: list[dict[str, Any]] = []
        if reader is not None:
            text = reader.push(text)
            if end:
                rest, parsed = reader.finish()
                text, calls = text + rest, use.described(parsed)
        chunks = [chunk(number, {"content": text}, tokens=tokens)] if text or tokens else []
        chunks += [chunk(number, {"tool_calls": [{"index": i, **each}]}) for i, each in enumerate(calls)]
        return [*chunks, chunk(number, {}, "tool_calls" if calls and end == "stop" else end)] if end else chunks

    before = [chunk(number, {"role": "assistant", "content": ""}) for number in range(body.n or 1)]
    return streamed(call, answers, event, before=before, stream_options=body.stream_options, head=head)


ENDPOINTS = (
    Endpoint(
        path="/v1/chat/completions", answer=_chat, body=ChatBody, summary="Generate the next message of a conversation", tag="openai",
        error=openai_error, operation=OPERATION, example={"messages": [{"role": "user", "content": "Where is it?"}], "max_tokens": 64},
    ),
)  # fmt: skip
