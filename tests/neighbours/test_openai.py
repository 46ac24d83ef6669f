"""Tests of OpenAI's own client with accel's server."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Iterator
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
    import uvicorn

    from accel.serving.http.app import create_app

    app = create_app(accel.Engine({"tiny": model}))
    server = uvicorn.Server(uvicorn.Config(app, port=0, log_config=None, lifespan="on"))
    thread = threading.Thread(target=server.run)
    thread.start()
    deadline = time.monotonic() + 60
    while not server.started and time.monotonic() < deadline:
        time.sleep(0.01)
    yield f"http://127.0.0.1:{server.servers[0].sockets[0].getsockname()[1]}/v1"
    server.should_exit = True
    thread.join(30)


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
        with pytest.raises(openai.UnprocessableEntityError, match="n: "):
            client.chat.completions.create(messages=MESSAGES, n=2, **SETTINGS)
        with pytest.raises(openai.NotFoundError, match="no model"):
            client.chat.completions.create(messages=MESSAGES, **{**SETTINGS, "model": "other"})
