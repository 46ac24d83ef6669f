"""Tests of OpenAI's own client with accel's server."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import accel
from accel.testing.generative_models import save_generator

openai = pytest.importorskip("openai", reason="the package openai is not installed")

MESSAGES = [{"role": "user", "content": "where is my card"}]
SETTINGS: dict[str, Any] = {"model": "tiny", "temperature": 0, "max_tokens": 12}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    import transformers

    saved = save_generator(tmp_path_factory.mktemp("openai") / "tiny", "llama")
    tokenizer = transformers.AutoTokenizer.from_pretrained(saved)
    tokenizer.chat_template = "{% for m in messages %}{{ m.content }} {% endfor %}"
    tokenizer.save_pretrained(saved)
    return saved


@pytest.fixture(scope="module")
def model(folder: Path) -> Any:
    return accel.ORTModelForCausalLM.from_pretrained(folder)


@pytest.fixture(scope="module")
def url(model: Any) -> Iterator[str]:
    from accel.serving.http.app import create_app
    from tests.auditing.servers import served

    with served(create_app(accel.Engine({"tiny": model}))) as address:
        yield f"{address}/v1"


def expected(model: Any) -> str:
    import transformers

    tokenizer = transformers.AutoTokenizer.from_pretrained(model.artifact.path)
    inputs = tokenizer.apply_chat_template(MESSAGES, add_generation_prompt=True, return_dict=True, return_tensors="pt")
    with torch.inference_mode():
        tokens = model.generate(**inputs, max_new_tokens=12, do_sample=False)[0, inputs["input_ids"].shape[1] :]
    return str(tokenizer.decode(tokens, skip_special_tokens=True))


def test_eight_simultaneous_chats(url: str, model: Any) -> None:
    async def ask(client: Any) -> tuple[str, int]:
        text, tokens = "", 0
        stream = await client.chat.completions.create(
            messages=MESSAGES, stream=True, stream_options={"include_usage": True}, **SETTINGS
        )
        async for chunk in stream:
            text += (chunk.choices[0].delta.content or "") if chunk.choices else ""
            tokens = chunk.usage.completion_tokens if chunk.usage else tokens
        return text, tokens

    async def all_of_them() -> list[tuple[str, int]]:
        async with openai.AsyncOpenAI(base_url=url, api_key="none", max_retries=0) as client:
            return await asyncio.gather(*(ask(client) for _ in range(8)))

    assert asyncio.run(all_of_them()) == [(expected(model), 12)] * 8


def test_completions(url: str) -> None:
    with openai.OpenAI(base_url=url, api_key="none", max_retries=0) as client:
        completion = client.completions.create(prompt=["where is my card", "help"], **SETTINGS)
        assert [choice.index for choice in completion.choices] == [0, 1]
        assert completion.usage.completion_tokens == 24
        with pytest.raises(openai.NotFoundError, match="no model"):
            client.chat.completions.create(messages=MESSAGES, **{**SETTINGS, "model": "other"})


# Answer formats, tools, log-probabilities, responses and transcriptions, with a byte-level tokenizer.


@pytest.fixture(scope="module")
def client(tmp_path_factory: pytest.TempPathFactory, tiny_folder: Callable[..., Path]) -> Iterator[Any]:
    from accel.serving.http.app import create_app
    from tests.auditing.servers import served
    from tests.serving.test_openai_chat import byte_level_tokenizer

    folder, tokenizer = tmp_path_factory.mktemp("byte-level"), byte_level_tokenizer()
    save_generator(
        folder, "qwen3", vocab_size=len(tokenizer), eos_token_id=tokenizer.eos_token_id, max_position_embeddings=2048
    )
    tokenizer.save_pretrained(folder)
    speech = tiny_folder("wav2vec2", "ctc")
    models = {
        "chat": accel.ORTModel.from_pretrained(folder, backend="pytorch", task="text-generation"),
        "speech": accel.ORTModel.from_pretrained(speech, backend="pytorch", task="ctc"),
    }
    with (
        served(create_app(accel.Engine(models))) as url,
        openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as opened,
    ):
        yield opened


def test_structured_answers_and_tools(client: Any) -> None:
    pytest.importorskip("llguidance", reason="the package llguidance is not installed")
    from typing import Annotated

    from pydantic import BaseModel, Field

    class Person(BaseModel):
        name: Annotated[str, Field(max_length=8)]
        age: Annotated[int, Field(ge=0, le=99)]

    chat = {"model": "chat", "messages": MESSAGES, "seed": 1}
    parsed = client.chat.completions.parse(response_format=Person, max_tokens=400, **chat)
    assert isinstance(parsed.choices[0].message.parsed, Person)
    with pytest.raises(openai.LengthFinishReasonError):
        client.chat.completions.parse(response_format=Person, max_tokens=2, **chat)
    response = client.responses.parse(model="chat", input="help", text_format=Person, max_output_tokens=400)
    assert isinstance(response.output_parsed, Person)
    tool = openai.pydantic_function_tool(Person, name="add")
    answer = client.chat.completions.parse(tools=[tool], tool_choice="required", max_tokens=400, **chat)
    (call,) = answer.choices[0].message.tool_calls
    assert isinstance(call.function.parsed_arguments, Person)
    with client.chat.completions.stream(tools=[tool], tool_choice="required", max_tokens=400, **chat) as stream:
        (streamed,) = stream.get_final_completion().choices[0].message.tool_calls
    assert streamed.function.arguments == call.function.arguments


def test_several_answers_with_log_probabilities(client: Any) -> None:
    answer = client.chat.completions.create(
        model="chat", messages=MESSAGES, n=2, logprobs=True, top_logprobs=3, max_tokens=4
    )
    assert len(answer.choices) == 2
    assert all(len(entry.top_logprobs) == 3 for choice in answer.choices for entry in choice.logprobs.content)
    with pytest.raises(openai.UnprocessableEntityError, match="prompt_logprobs"):
        client.chat.completions.create(model="chat", messages=MESSAGES, extra_body={"prompt_logprobs": 1})


def test_responses(client: Any) -> None:
    body = {"model": "chat", "input": "help", "max_output_tokens": 5, "temperature": 0}
    complete = client.responses.create(**body)
    with client.responses.stream(**body) as stream:
        events = list(stream)
    # Five tokens end with the limit, so the last event is not `response.completed`.
    assert events[-1].type == "response.incomplete"
    assert events[-1].response.output_text == complete.output_text
    assert "response.output_text.delta" in {event.type for event in events}
    with pytest.raises(openai.UnprocessableEntityError, match="previous_response_id"):
        client.responses.create(previous_response_id="resp_1", **body)


def test_transcriptions(client: Any) -> None:
    from tests.serving.test_openai_responses import recording

    sound = ("a.wav", recording())
    text = client.audio.transcriptions.create(model="speech", file=sound).text
    verbose = client.audio.transcriptions.create(model="speech", file=sound, response_format="verbose_json")
    assert (verbose.text, verbose.duration) == (text, 0.5)
    assert client.audio.transcriptions.create(model="speech", file=sound, response_format="text") == text + "\n"
