"""Tool calls in generated text: the formats of Hermes and Qwen, Llama 3, Mistral and Gemma.

The chat template of a model decides in which format the model writes tool calls. `format_of` recognizes the format in the template.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ...decoding.grammars import json_rule

Call = tuple[str, dict[str, Any]]
"""A tool call: the name of the function, and its arguments."""
_DECODER = json.JSONDecoder()
_MARKS = re.compile(r"(\[TOOL_CALLS\]|\[ARGS\]|</?tool_call>)")


@dataclass(frozen=True, slots=True)
class ToolFormat:
    """The format in which a model writes tool calls.

    Attributes:
        name: Name of the format.
        sign: Text in the chat template that shows that the model uses this format.
        mark: Text before the first call. It may be a special token.
        parse: Function that reads the calls from the text that starts with the mark. It raises `ValueError` if the text is incomplete.
        before: Text before the arguments of a call, with `NAME` for the name of the function. Empty if the arguments are not JSON.
        after: Text after the arguments of a call.
        bare: Whether a text that starts with `{` is a call without the mark.
    """

    name: str
    sign: str
    mark: str
    parse: Callable[[str], list[Call]]
    before: str = ""
    after: str = ""
    bare: bool = False

    def special_tokens(self, tokenizer: Any) -> tuple[int, ...]:
        """Return the special tokens of the format, which must stay in the text until the calls are read."""
        names = [self.mark, "[ARGS]", *_GEMMA_TOKENS]
        ids = [tokenizer.convert_tokens_to_ids(name) for name in names]
        return tuple(token for token in ids if token in tokenizer.all_special_ids and token != tokenizer.unk_token_id)

    def grammar(self, tools: Mapping[str, Mapping[str, Any]], tokenizer: Any) -> str:
        """Return a grammar for exactly one call of one of the tools.

        Args:
            tools: JSON schema of the arguments, by name of the function.
            tokenizer: Tokenizer of the model.
        """

        def literal(text: str) -> str:
            # llguidance matches a token that was added to the vocabulary by its id only.
            parts = [part for part in _MARKS.split(text) if part]
            ids = [tokenizer.convert_tokens_to_ids(part) for part in parts]
            added = tokenizer.added_tokens_decoder
            return " ".join(f"<[{n}]>" if n in added else json.dumps(part) for part, n in zip(parts, ids, strict=True))

        rules = [f"start: {' | '.join(f'call_{i}' for i in range(len(tools)))}"]
        for i, (name, schema) in enumerate(tools.items()):
            before = literal(self.before.replace("NAME", name))
            rules.append(f"call_{i}: {before} arguments_{i} {literal(self.after)}")
            rules.append(f"arguments_{i}: {json_rule(schema)}")
        return "\n".join(rules)


class ToolCallReader:
    """Separate the text of one answer into content and tool calls, while it is generated.

    Args:
        tool_format: The format of the model.
        tools: Names of the functions. A call of another name stays content.
    """

    def __init__(self, tool_format: ToolFormat, tools: Sequence[str]) -> None:
        self._format, self._tools = tool_format, frozenset(tools)
        self._text = ""
        self._calling = self._begun = False

    def push(self, text: str) -> str:
        """Add generated text, and return the content that cannot be a part of a call."""
        self._text += text
        if self._calling:
            return ""
        if self._format.bare and not self._begun:
            stripped = self._text.lstrip()
            if not stripped or stripped.startswith("{"):
                return ""
        place = self._text.find(self._format.mark)
        self._calling = place >= 0
        if place < 0:
            place = len(self._text) - _overlap(self._text, self._format.mark)
        content, self._text = self._text[:place], self._text[place:]
        self._begun = self._begun or bool(content.strip())
        return content

    def finish(self) -> tuple[str, list[Call]]:
        """Return the remaining content and the calls, after the last text. Text that cannot be read as calls is content."""
        text, self._text = self._text, ""
        if self._calling or (self._format.bare and text.lstrip().startswith("{")):
            try:
                calls = self._format.parse(text)
            except (ValueError, LookupError, TypeError, AttributeError, RecursionError):
                return text, []
            if calls and all(name in self._tools and isinstance(values, dict) for name, values in calls):
                return "", calls
        return text, []


def format_of(template: str) -> ToolFormat | None:
    """Return the tool call format of a chat template, or `None` if the template has no tools or an unknown format."""
    if "tools" not in template:
        return None
    return next((each for each in FORMATS if each.sign in template), None)


def _overlap(text: str, mark: str) -> int:
    return next((n for n in range(min(len(mark) - 1, len(text)), 0, -1) if text.endswith(mark[:n])), 0)


def _call(value: Mapping[str, Any]) -> Call:
    return value["name"], value["arguments"] if "arguments" in value else value["parameters"]


def _hermes(text: str) -> list[Call]:
    blocks = re.findall(r"<tool_call>\s*(.*?)\s*</tool_call>", text, re.DOTALL)
    if text.count("<tool_call>") != len(blocks):
        raise ValueError(text)
    return [_call(json.loads(block)) for block in blocks]


def _llama(text: str) -> list[Call]:
    text = text.strip().removeprefix("<|python_tag|>").strip()
    calls = []
    while text:
        value, end = _DECODER.raw_decode(text)
        calls.append(_call(value))
        text = text[end:].lstrip("; \n")
    return calls


def _mistral(text: str) -> list[Call]:
    calls: list[Call] = []
    for part in filter(None, (part.strip() for part in text.split("[TOOL_CALLS]"))):
        if part.startswith("["):
            calls += [_call(value) for value in json.loads(part)]
            continue
        start = part.index("{")
        value, end = _DECODER.raw_decode(part[start:])
        if part[start + end :].strip():
            raise ValueError(part)
        calls.append((part[:start].removesuffix("[ARGS]").strip(), value))
    return calls


_GEMMA_TOKENS = ("<start_function_call>", "<end_function_call>", "<escape>")
_GEMMA_CALL = re.compile(r"<start_function_call>call:([\w.-]+)(\{.*?\})<end_function_call>", re.DOTALL)
_GEMMA_PART = re.compile(r"<escape>(.*?)<escape>|([{}\[\],:])|([^{}\[\],:<]+)", re.DOTALL)


def _gemma(text: str) -> list[Call]:
    calls = [(name, _gemma_value(_GEMMA_PART.findall(body))) for name, body in _GEMMA_CALL.findall(text)]
    if len(calls) != text.count("<start_function_call>"):
        raise ValueError(text)
    return calls


def _gemma_value(parts: list[tuple[str, str, str]]) -> Any:
    """Remove a value from the start of `parts` and return it.

    A value is an object with unquoted names, a list, a text between `<escape>` tokens, or a number or constant of JSON.
    """
    text, sign, word = parts.pop(0)
    if sign == "{":
        values = {}
        while parts[0][1] != "}":
            name = parts.pop(0)[2].strip()
            parts.pop(0)  # the colon
            values[name] = _gemma_value(parts)
            if parts[0][1] == ",":
                parts.pop(0)
        parts.pop(0)
        return values
    if sign == "[":
        items = []
        while parts[0][1] != "]":
            items.append(_gemma_value(parts))
            if parts[0][1] == ",":
                parts.pop(0)
        parts.pop(0)
        return items
    return json.loads(word) if word else text


FORMATS = (
    ToolFormat("Gemma", "<start_function_call>", "<start_function_call>", _gemma),
    ToolFormat("Mistral", "[ARGS]", "[TOOL_CALLS]", _mistral, "[TOOL_CALLS]NAME[ARGS]"),
    ToolFormat(
        "Mistral", "[TOOL_CALLS]", "[TOOL_CALLS]", _mistral, '[TOOL_CALLS][{"name": "NAME", "arguments": ', "}]"
    ),
    ToolFormat(
        "Hermes",
        "<tool_call>",
        "<tool_call>",
        _hermes,
        '<tool_call>\n{"name": "NAME", "arguments": ',
        "}\n</tool_call>",
    ),
    ToolFormat("Llama 3", '"parameters"', "<|python_tag|>", _llama, '{"name": "NAME", "parameters": ', "}", bare=True),
)
"""The supported formats. The first format whose sign is in the chat template is used."""
