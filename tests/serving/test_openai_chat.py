"""Tests of answer formats, tools and log-probabilities in OpenAI's format.

The request bodies are those that OpenAI's Python client sends. `tests/neighbours/test_openai.py` sends them with the client itself.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from starlette.testclient import TestClient

import accel
from accel.serving.http.app import create_app
from accel.serving.http.tool_calls import ToolCallReader, format_of
from accel.testing.generative_models import save_generator
from tests.serving.conftest import post

TEMPLATE = (
    "{% for t in tools or [] %}{{ t.function.name }} {% endfor %}{# <tool_call> #}"
    "{% for m in messages %}{{ m.role }}: {{ m.content }}{{ m.tool_calls or '' }}\n{% endfor %}"
)
MESSAGES = [{"role": "user", "content": "where is my card"}]
PATH = "/v1/chat/completions"


def byte_level_tokenizer() -> Any:
    """Return a tokenizer of 600 byte-level tokens, learned from this file, with a tool call token as Qwen has it."""
    import transformers
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=600, special_tokens=["<pad>", "<end>"], initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator([Path(__file__).read_text(encoding="utf-8")], trainer)
    tokenizer.add_tokens([AddedToken("<tool_call>", special=False), AddedToken("</tool_call>", special=False)])
    fast = transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<end>", pad_token="<pad>")
    fast.chat_template = TEMPLATE
    return fast


@pytest.fixture(scope="module")
def client(tmp_path_factory: pytest.TempPathFactory) -> Iterator[TestClient]:
    folder = tmp_path_factory.mktemp("chat")
    tokenizer = byte_level_tokenizer()
    save_generator(
        folder, "qwen3", vocab_size=len(tokenizer), eos_token_id=tokenizer.eos_token_id, max_position_embeddings=2048
    )
    tokenizer.save_pretrained(folder)
    model = accel.ORTModel.from_pretrained(folder, backend="pytorch", task="text-generation")
    with TestClient(create_app(accel.Engine({"tiny": model}))) as test_client:
        yield test_client


def stream(client: TestClient, **body: Any) -> list[Any]:
    text = client.post(PATH, json={"messages": MESSAGES, "stream": True, **body}).text
    return [json.loads(line[6:]) for line in text.splitlines() if line.startswith("data: {")]


SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 8},
        "tags": {"type": "array", "items": {"enum": ["a", "b"]}, "maxItems": 2},
        "next": {"anyOf": [{"$ref": "#/$defs/point"}, {"type": "null"}]},
    },
    "required": ["name", "tags", "next"],
    "additionalProperties": False,
    "$defs": {
        "point": {
            "type": "object",
            "properties": {"x": {"type": "integer", "minimum": 0, "maximum": 99}},
            "required": ["x"],
            "additionalProperties": False,
        }
    },
}


def check(value: Any) -> None:
    """Check a value of `SCHEMA` without a schema library."""
    assert list(value) == ["name", "tags", "next"]
    assert len(value["name"]) <= 8
    assert len(value["tags"]) <= 2
    assert set(value["tags"]) <= {"a", "b"}
    assert value["next"] is None or (list(value["next"]) == ["x"] and 0 <= value["next"]["x"] <= 99)


def schema_format(schema: Any) -> dict[str, Any]:
    return {"type": "json_schema", "json_schema": {"name": "answer", "strict": True, "schema": schema}}


@pytest.fixture
def grammars() -> None:
    pytest.importorskip("llguidance", reason="the package llguidance is not installed")


@pytest.mark.usefixtures("grammars")
def test_answers_match_the_schema(client: TestClient) -> None:
    body = {"messages": MESSAGES, "response_format": schema_format(SCHEMA), "max_tokens": 400}
    answers = [
        post(client, PATH, seed=seed, temperature=temperature, **body)["choices"][0]
        for seed, temperature in ((1, 0), (2, 1), (3, 2))
    ]
    for answer in answers:
        assert answer["finish_reason"] == "stop"
        check(json.loads(answer["message"]["content"]))


@pytest.mark.usefixtures("grammars")
def test_schema_with_few_tokens_ends_with_length(client: TestClient) -> None:
    answer = post(client, PATH, messages=MESSAGES, response_format=schema_format(SCHEMA), max_tokens=4)
    assert answer["choices"][0]["finish_reason"] == "length"
    with pytest.raises(ValueError, match="."):
        json.loads(answer["choices"][0]["message"]["content"])


@pytest.mark.usefixtures("grammars")
def test_top_k_selects_from_allowed_tokens(client: TestClient) -> None:
    body = {"response_format": schema_format(SCHEMA), "max_tokens": 400, "top_k": 1, "temperature": 1}
    check(json.loads(post(client, PATH, messages=MESSAGES, **body)["choices"][0]["message"]["content"]))


@pytest.mark.usefixtures("grammars")
def test_json_object_and_refused_schemas(client: TestClient) -> None:
    body = {"messages": MESSAGES, "max_tokens": 60, "temperature": 0}
    content = post(client, PATH, response_format={"type": "json_object"}, **body)["choices"][0]["message"]["content"]
    assert content.lstrip().startswith("{")
    for schema in ({"type": "nothing"}, {"type": "object", "propertyNames": {"pattern": "a"}}):
        answer = client.post(PATH, json={"response_format": schema_format(schema), **body})
        assert answer.status_code == 422
        assert "schema is invalid" in answer.json()["error"]["message"]
    answer = client.post(PATH, json={"response_format": {"type": "json_schema"}, **body})
    assert "`response_format.json_schema` is missing" in answer.json()["error"]["message"]


def test_missing_package_is_reported(client: TestClient, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "llguidance", None)
    answer = client.post(PATH, json={"messages": MESSAGES, "response_format": {"type": "json_object"}})
    assert answer.status_code == 422
    assert 'pip install "accel-transformers[grammar]"' in answer.json()["error"]["message"]


def test_log_probabilities(client: TestClient) -> None:
    body = {
        "messages": MESSAGES,
        "max_tokens": 5,
        "temperature": 0,
        "logprobs": True,
        "top_logprobs": 3,
        "ignore_eos": True,
    }
    answer = post(client, PATH, **body)
    entries = answer["choices"][0]["logprobs"]["content"]
    assert len(entries) == 5
    for entry in entries:
        values = [each["logprob"] for each in entry["top_logprobs"]]
        # Greedy decoding chooses the likeliest token.
        assert (len(values), values, entry["logprob"]) == (3, sorted(values, reverse=True), values[0])
        assert 0 < sum(map(math.exp, values)) <= 1
    text = b"".join(bytes(entry["bytes"]) for entry in entries).decode("utf-8", "replace")
    assert text == answer["choices"][0]["message"]["content"]
    chunks = stream(client, **{name: value for name, value in body.items() if name != "messages"})
    streamed = [each for chunk in chunks for each in (chunk["choices"][0]["logprobs"] or {}).get("content", [])]
    assert streamed == entries


def test_log_probabilities_of_completions(client: TestClient) -> None:
    body = {"prompt": "where", "max_tokens": 4, "temperature": 0, "logprobs": 2, "ignore_eos": True}
    choice = post(client, "/v1/completions", **body)["choices"][0]
    listed = choice["logprobs"]
    assert [len(values) for values in listed.values()] == [4] * 4
    assert listed["text_offset"][0] == 0
    assert all(len(top) <= 2 and max(top.values()) == value
               for top, value in zip(listed["top_logprobs"], listed["token_logprobs"], strict=True))  # fmt: skip


def test_several_answers_count_up_the_seed(client: TestClient) -> None:
    body = {"messages": MESSAGES, "max_tokens": 6, "temperature": 1}
    answer = post(client, PATH, n=3, seed=5, **body)
    texts = [choice["message"]["content"] for choice in answer["choices"]]
    alone = [post(client, PATH, seed=seed, **body) for seed in (5, 6, 7)]
    assert texts == [each["choices"][0]["message"]["content"] for each in alone]
    assert [choice["index"] for choice in answer["choices"]] == [0, 1, 2]
    assert answer["usage"]["prompt_tokens"] == alone[0]["usage"]["prompt_tokens"]
    chunks = stream(client, n=3, seed=5, **{k: v for k, v in body.items() if k != "messages"})
    streamed = ["", "", ""]
    for chunk in chunks:
        streamed[chunk["choices"][0]["index"]] += chunk["choices"][0]["delta"].get("content", "")
    assert streamed == texts


def test_usage_is_null_until_the_last_event(client: TestClient) -> None:
    chunks = stream(client, max_tokens=3, stream_options={"include_usage": True})
    assert all(chunk["usage"] is None for chunk in chunks[:-1])
    assert chunks[-1]["usage"]["completion_tokens"] <= 3


def test_prompt_logprobs_are_refused(client: TestClient) -> None:
    answer = client.post(PATH, json={"messages": MESSAGES, "prompt_logprobs": 1})
    assert answer.json()["error"]["message"].startswith("`prompt_logprobs` is not supported.")


# Tools.

PAY = {
    "type": "function",
    "function": {
        "name": "pay",
        "description": "Pay money",
        "parameters": {
            "type": "object",
            "properties": {
                "to": {"type": "string", "maxLength": 5},
                "sum": {"type": "integer", "minimum": 1, "maximum": 9},
            },
            "required": ["to", "sum"],
            "additionalProperties": False,
        },
    },
}
CALL = {"name": "pay", "arguments": {"to": "Bo", "sum": 3, "tags": ["a", "b"]}}
FORMATS = {
    "Hermes": ("{{ tools }}<tool_call>", f"<tool_call>\n{json.dumps(CALL)}\n</tool_call>"),
    "Llama 3": (
        '{{ tools }}{"name": n, "parameters": d}',
        json.dumps({"name": "pay", "parameters": CALL["arguments"]}),
    ),
    "Mistral": ("{{ tools }}[TOOL_CALLS]", f"[TOOL_CALLS][{json.dumps(CALL)}]"),
    "Mistral 11": ("{{ tools }}[TOOL_CALLS][ARGS]", f"[TOOL_CALLS]pay[ARGS]{json.dumps(CALL['arguments'])}"),
    "Gemma": (
        "{{ tools }}<start_function_call>",
        "<start_function_call>call:pay{to:<escape>Bo<escape>,sum:3,tags:[<escape>a<escape>,<escape>b<escape>]}<end_function_call>",
    ),
}


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("size", [1, 3, 1000])
def test_calls_are_read_in_pieces_of_any_size(name: str, size: int) -> None:
    template, text = FORMATS[name]
    tool_format = format_of(template)
    assert tool_format is not None
    reader = ToolCallReader(tool_format, ["pay"])
    content = "".join(reader.push(text[i : i + size]) for i in range(0, len(text), size))
    rest, calls = reader.finish()
    assert (content + rest, calls) == ("", [("pay", CALL["arguments"])])


@pytest.mark.parametrize("name", FORMATS)
def test_text_that_is_no_call_stays_content(name: str) -> None:
    template, text = FORMATS[name]
    tool_format = format_of(template)
    assert tool_format is not None
    for broken in (text[:-3], text.replace("pay", "buy"), "no call < [ at all"):
        reader = ToolCallReader(tool_format, ["pay"])
        content = "".join(reader.push(character) for character in broken)
        rest, calls = reader.finish()
        assert (content + rest, calls) == (broken, [])


def test_template_without_known_format_is_refused(client: TestClient) -> None:
    assert format_of("{% for m in messages %}{{ m.content }}<tool_call>{% endfor %}") is None
    assert format_of("{{ tools }}") is None


@pytest.mark.usefixtures("grammars")
@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "pay"}}])
def test_required_call(client: TestClient, choice: Any) -> None:
    body = {"messages": MESSAGES, "tools": [PAY], "tool_choice": choice, "max_tokens": 200, "seed": 4}
    (answer,) = post(client, PATH, **body)["choices"]
    assert answer["finish_reason"] == "tool_calls"
    assert answer["message"]["content"] is None
    (call,) = answer["message"]["tool_calls"]
    values = json.loads(call["function"]["arguments"])
    assert call["function"]["name"] == "pay"
    assert (list(values), len(values["to"]) <= 5, 1 <= values["sum"] <= 9) == (["to", "sum"], True, True)
    chunks = stream(client, **{name: value for name, value in body.items() if name != "messages"})
    streamed = [call for chunk in chunks for call in chunk["choices"][0]["delta"].get("tool_calls", [])]
    assert [each["function"] for each in streamed] == [call["function"]]
    assert chunks[-1]["choices"][0]["finish_reason"] == "tool_calls"
    # Clients send the call back with its result.
    history = [*MESSAGES, answer["message"], {"role": "tool", "tool_call_id": call["id"], "content": "paid"}]
    assert post(client, PATH, messages=history, tools=[PAY], max_tokens=3)["choices"]


def test_tools_are_a_part_of_the_prompt(client: TestClient) -> None:
    body = {"messages": MESSAGES, "max_tokens": 2}
    plain, described, none = (
        post(client, PATH, **body, **more)["usage"]["prompt_tokens"]
        for more in ({}, {"tools": [PAY]}, {"tools": [PAY], "tool_choice": "none"})
    )
    assert plain == none < described


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"tool_choice": "required"}, "has no tools"),
        ({"tools": [PAY], "tool_choice": {"type": "function", "function": {"name": "buy"}}}, "no tool 'buy'"),
        ({"tools": [{**PAY, "function": {**PAY["function"], "strict": True}}]}, "`strict` needs"),  # type: ignore[dict-item]
        (
            {"tools": [PAY], "tool_choice": "required", "response_format": {"type": "json_object"}},
            "cannot be a tool call and",
        ),
        ({"top_logprobs": 2}, "needs `logprobs`"),
        ({"messages": [{"role": "user", "content": None}]}, "must be a text"),
    ],
)
def test_inconsistent_fields_are_refused(client: TestClient, fields: Any, message: str) -> None:
    answer = client.post(PATH, json={"messages": MESSAGES, **fields})
    assert answer.status_code == 422
    assert message in answer.json()["error"]["message"]
