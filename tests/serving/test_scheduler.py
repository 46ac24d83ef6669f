"""Tests of rows that join and leave the running batch, or are cancelled: each row gets the same tokens as if it ran
alone.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

import accel
from accel import GenerationLimits, GenerationOptions
from accel.artifact import Artifact
from accel.errors import EngineClosedError, InputError, QueueFullError, SessionError
from accel.serving.continuous_batching.generation_engine import GenerationEngine
from accel.serving.continuous_batching.running_rows import RunningRows
from accel.testing.models import tiny_tokenizer

Engines = Callable[..., GenerationEngine]

PROMPTS = [[40, 7, 99], [12], [5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15, 16], [33, 44, 55, 66, 77, 88], [21, 22]]
NEW = [24, 40, 3, 16, 1]
SAMPLED = {"temperature": 0.8, "top_p": 0.9, "top_k": 30}


@pytest.fixture(scope="module")
def model(generator: Callable[..., Artifact]) -> Any:
    return accel.ORTModelForCausalLM.from_pretrained(generator("llama").path)


@pytest.fixture
def engine(model: Any) -> Iterator[Engines]:
    """Return a function that starts generation engines. All engines are closed after the test."""
    engines: list[GenerationEngine] = []

    def get(opened: Any = None, **limits: Any) -> GenerationEngine:
        engines.append(GenerationEngine(opened or model, tiny_tokenizer(), limits=GenerationLimits(**limits)))
        return engines[-1]

    yield get
    for opened_engine in engines:
        opened_engine.close(drain=False)


class Turnstile:
    """Context that blocks the decoding steps of all batches, and releases a given number of steps."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self._free = threading.Semaphore(0)
        self.rows: list[int] = []
        step = RunningRows.step

        def gated(batch: RunningRows) -> None:
            self._free.acquire()
            self.rows.append(len(batch.rows))
            step(batch)

        monkeypatch.setattr(RunningRows, "step", gated)

    def open(self, steps: int = 10_000) -> None:
        self._free.release(steps)


@pytest.fixture
def turnstile(monkeypatch: pytest.MonkeyPatch) -> Turnstile:
    return Turnstile(monkeypatch)


def alone(model: Any, prompt: list[int], new: int, seed: int | None = None, **options: Any) -> list[int]:
    """Return the new tokens that the model's method `generate` returns for one prompt."""
    if seed is not None:
        torch.manual_seed(seed)
        options["do_sample"] = True
    ids = torch.tensor([prompt])
    tokens = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=new, **options)[0].tolist()
    return tokens[1:] if model.config.is_encoder_decoder else tokens[len(prompt) :]


def ids(generation: Any) -> list[int]:
    return [token.id for token in generation]


# The tests below check generated tokens.


@pytest.mark.parametrize("rows", [1, 3, 8])
def test_each_generation_equals_a_single_call(engine: Engines, model: Any, rows: int) -> None:
    """Greedy and sampled generations run in one batch. If there are more prompts than rows, some rows join while other
    rows run.
    """
    served = engine(rows=rows)
    options = [
        GenerationOptions(max_new_tokens=new, **({"seed": i, **SAMPLED} if i % 2 else {})) for i, new in enumerate(NEW)
    ]
    generated = [ids(tokens) for tokens in [served.submit(p, o) for p, o in zip(PROMPTS, options, strict=True)]]
    for i, (prompt, new) in enumerate(zip(PROMPTS, NEW, strict=True)):
        assert generated[i] == (alone(model, prompt, new, seed=i, **SAMPLED) if i % 2 else alone(model, prompt, new))


def test_rows_run_in_one_batch(engine: Engines, turnstile: Turnstile) -> None:
    served = engine(rows=3)
    answers = [served.submit(prompt, GenerationOptions(max_new_tokens=6)) for prompt in PROMPTS]
    turnstile.open()
    for answer in answers:
        ids(answer)
    assert max(turnstile.rows) == 3
    assert len(turnstile.rows) < len(PROMPTS) * 5


def test_logits_of_joined_rows_equal_single_rows_exactly(model: Any) -> None:
    """The logits must be exactly equal, because int8 products with 4-bit weights amplify a difference in the last bit."""

    def read(prompt: list[int]) -> Any:
        cache = model.new_cache()
        model(input_ids=torch.tensor([prompt]), past_key_values=cache)
        return cache

    joined = read(PROMPTS[0])
    for prompt in PROMPTS[1:4]:
        joined.join(read(prompt))
    lengths = torch.tensor([len(prompt) for prompt in PROMPTS[:4]])
    for _ in range(2):
        total = joined.get_seq_length() + 1
        logits = model(
            input_ids=torch.full((4, 1), 9),
            attention_mask=(torch.arange(total) >= (total - 1 - lengths).unsqueeze(1)).long(),
            position_ids=lengths.unsqueeze(1),
            past_key_values=joined,
        ).logits
        lengths = lengths + 1
    for row, prompt in enumerate(PROMPTS[:4]):
        cache = read(prompt)
        for _ in range(2):
            expected = model(input_ids=torch.tensor([[9]]), past_key_values=cache).logits
        assert torch.equal(logits[row], expected[0])


def test_unused_cache_columns_are_dropped(engine: Engines, model: Any) -> None:
    """When a long row ends, its cache columns are removed. The tokens of the short row stay correct."""
    served = engine(rows=2)
    long = list(range(10, 115)) * 1
    first = served.submit(long, GenerationOptions(max_new_tokens=2))
    second = served.submit([12], GenerationOptions(max_new_tokens=60))
    assert ids(first) == alone(model, long, 2)
    assert ids(second) == alone(model, [12], 60)


@pytest.mark.parametrize("prefill", [1, 4, 5])
def test_prompt_is_read_in_chunks(engine: Engines, model: Any, prefill: int) -> None:
    served = engine(prefill_tokens=prefill)
    assert ids(served.submit(PROMPTS[2], GenerationOptions(max_new_tokens=8))) == alone(model, PROMPTS[2], 8)


def test_end_token_ends_the_generation(engine: Engines, model: Any) -> None:
    tokens = alone(model, PROMPTS[0], 12)
    end = tokens[5]
    model.generation_config.eos_token_id, model.generation_config.pad_token_id = end, 0
    try:
        generated = list(engine().submit(PROMPTS[0], GenerationOptions(max_new_tokens=12)))
        beyond = ids(engine().submit(PROMPTS[0], GenerationOptions(max_new_tokens=12, ignore_eos=True)))
    finally:
        model.generation_config.eos_token_id = None
    assert [token.id for token in generated] == tokens[: tokens.index(end) + 1]
    assert generated[-1].finish == "stop"
    assert beyond == tokens


@pytest.mark.parametrize(
    ("options", "theirs"),
    [
        ({"repetition_penalty": 1.7}, {"repetition_penalty": 1.7}),
        ({"logit_bias": {55: 9.0}}, {"sequence_bias": {(55,): 9.0}}),
        ({"temperature": 0.0}, {}),
        ({"temperature": 1e-9, "seed": 1}, {}),
    ],
)
def test_options_equal_transformers(
    engine: Engines, model: Any, options: dict[str, Any], theirs: dict[str, Any]
) -> None:
    generated = ids(engine().submit(PROMPTS[3], GenerationOptions(max_new_tokens=10, **options)))
    assert generated == alone(model, PROMPTS[3], 10, **theirs)


def test_openai_penalties(engine: Engines, model: Any) -> None:
    """With a very large presence penalty, no token occurs twice."""
    plain = alone(model, PROMPTS[1], 40)
    generated = ids(engine().submit(PROMPTS[1], GenerationOptions(max_new_tokens=40, presence_penalty=500.0)))
    assert len(set(plain)) < 40
    assert len(set(generated)) == 40
    first = next(i for i in range(1, 40) if plain[i] in plain[:i])
    assert generated[:first] == plain[:first]


def test_invalid_sampling_fails_only_its_row(engine: Engines, model: Any) -> None:
    served = engine(rows=2)
    fine = served.submit(PROMPTS[0], GenerationOptions(max_new_tokens=12))
    wrong = served.submit(PROMPTS[1], GenerationOptions(temperature=1.0, logit_bias={5: float("inf"), 6: float("inf")}))
    with pytest.raises(InputError, match="No token can be sampled"):
        ids(wrong)
    assert ids(fine) == alone(model, PROMPTS[0], 12)


# The tests below check rows that join, leave or are cancelled.


def test_cancelling_frees_the_row(engine: Engines, turnstile: Turnstile, model: Any) -> None:
    served = engine(rows=1)
    first = served.submit(PROMPTS[0], GenerationOptions(max_new_tokens=60))
    second = served.submit(PROMPTS[1], GenerationOptions(max_new_tokens=5))
    turnstile.open(2)
    tokens = iter(first)
    received = [next(tokens).id for _ in range(2)]
    first.cancel()
    turnstile.open()
    assert received == alone(model, PROMPTS[0], 2)
    assert ids(second) == alone(model, PROMPTS[1], 5)
    assert sum(turnstile.rows) < 20


def test_waiting_prompt_can_be_cancelled(engine: Engines, turnstile: Turnstile) -> None:
    served = engine(rows=1)
    first = served.submit(PROMPTS[0], GenerationOptions(max_new_tokens=3))
    second = served.submit(PROMPTS[1], GenerationOptions(max_new_tokens=3))
    second.cancel()
    turnstile.open()
    assert ids(second) == []
    assert len(ids(first)) == 3


async def _first_tokens(served: GenerationEngine, count: int) -> list[int]:
    first_ids = []
    async for token in served.generate(PROMPTS[0], GenerationOptions(max_new_tokens=60)):
        first_ids.append(token.id)
        if len(first_ids) == count:
            break
    return first_ids


def test_task_that_stops_iterating_frees_its_row(engine: Engines, turnstile: Turnstile, model: Any) -> None:
    served = engine(rows=1)
    turnstile.open(3)
    assert asyncio.run(_first_tokens(served, 2)) == alone(model, PROMPTS[0], 2)
    turnstile.open()
    assert ids(served.submit(PROMPTS[1], GenerationOptions(max_new_tokens=4))) == alone(model, PROMPTS[1], 4)
    assert len(turnstile.rows) < 20


def test_event_loop_with_many_tasks(engine: Engines, model: Any) -> None:
    served = engine(rows=4)

    async def ask(i: int) -> list[int]:
        options = GenerationOptions(max_new_tokens=NEW[i])
        return [token.id async for token in served.generate(PROMPTS[i], options)]

    async def all_of_them() -> list[list[int]]:
        return await asyncio.gather(*(ask(i % 5) for i in range(15)))

    results = asyncio.run(all_of_them())
    expected = [alone(model, prompt, new) for prompt, new in zip(PROMPTS, NEW, strict=True)]
    assert results == expected * 3


def test_full_queue_raises(engine: Engines, turnstile: Turnstile) -> None:
    served = engine(rows=1, queue=2)
    options = GenerationOptions(max_new_tokens=4)
    running = served.submit(PROMPTS[0], options)
    reading = iter(running)  # keep a reference, because deleting the iterator cancels the generation
    next(reading)
    waiting = [served.submit(prompt, options) for prompt in PROMPTS[1:3]]
    with pytest.raises(QueueFullError):
        served.submit(PROMPTS[3], options)
    turnstile.open()
    assert [len(ids(tokens)) for tokens in waiting] == [4, 4]


def test_rows_wait_for_room_in_the_cache(engine: Engines, turnstile: Turnstile) -> None:
    """The number of cache tokens is limited: two rows of 20 tokens (with padding) fit into 45 tokens, and three rows do
    not.
    """
    served = engine(rows=8, cache_tokens=45)
    answers = [served.submit([7] * 10, GenerationOptions(max_new_tokens=10)) for _ in range(4)]
    turnstile.open()
    assert [len(ids(tokens)) for tokens in answers] == [10] * 4
    assert max(turnstile.rows) == 2


@pytest.mark.parametrize(
    ("prompt", "options", "words"),
    [
        ([], {}, "no tokens"),
        ([120], {}, "token id 120"),
        ([-1], {}, "token id -1"),
        ([5] * 193, {}, "at most 193 tokens"),
        ([5], {"max_new_tokens": 193}, "at most 193 tokens"),
        ([5], {"logit_bias": {120: 1.0}}, "token id 120"),
    ],
)
def test_invalid_requests_are_refused(engine: Engines, prompt: list[int], options: dict[str, Any], words: str) -> None:
    with pytest.raises(InputError, match=words):
        engine().submit(prompt, GenerationOptions(**options))


def test_new_tokens_are_limited_by_the_server(engine: Engines) -> None:
    served = engine(max_new_tokens=4)
    with pytest.raises(InputError, match="at most 4") as refused:
        served.submit(PROMPTS[0], GenerationOptions(max_new_tokens=5))
    assert "--max-new-tokens" in str(refused.value)
    assert len(ids(served.submit(PROMPTS[0], GenerationOptions(max_new_tokens=4)))) == 4
    assert len(ids(served.submit(PROMPTS[0], GenerationOptions(ignore_eos=True)))) == 4


def test_failing_step_ends_only_its_rows(engine: Engines, model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    served = engine(rows=2)
    step, failed = RunningRows.step, []

    def failing(batch: RunningRows) -> None:
        if not failed:
            failed.append(True)
            raise RuntimeError("out of memory")
        step(batch)

    monkeypatch.setattr(RunningRows, "step", failing)
    with pytest.raises(SessionError, match="RuntimeError"):
        ids(served.submit(PROMPTS[0], GenerationOptions(max_new_tokens=5)))
    assert ids(served.submit(PROMPTS[1], GenerationOptions(max_new_tokens=5))) == alone(model, PROMPTS[1], 5)


def test_closing_completes_accepted_prompts(engine: Engines, model: Any) -> None:
    served = engine(rows=1)
    answers = [served.submit(prompt, GenerationOptions(max_new_tokens=8)) for prompt in PROMPTS]
    served.close()
    assert [ids(tokens) for tokens in answers] == [alone(model, prompt, 8) for prompt in PROMPTS]
    with pytest.raises(EngineClosedError):
        served.submit(PROMPTS[0], GenerationOptions())


def test_closing_without_draining_cancels(engine: Engines, turnstile: Turnstile) -> None:
    served = engine(rows=1)
    answers = [served.submit(prompt, GenerationOptions(max_new_tokens=90)) for prompt in PROMPTS[:2]]
    turnstile.open(1)
    reading = iter(answers[0])  # keep a reference, because deleting the iterator cancels the generation
    next(reading)
    closing = threading.Thread(target=served.close, kwargs={"drain": False})
    closing.start()
    while not served.scheduler._closing:
        time.sleep(0.001)
    turnstile.open()
    closing.join(20)
    assert not closing.is_alive()
    assert ids(answers[1]) == []


# The test below checks model families and backends.


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("family", "backend"),
    [
        ("gpt2", "cpu"), ("mistral", "cpu"), ("gemma3", "cpu"), ("opt", "cpu"), ("mamba", "cpu"), ("lfm2", "cpu"),
        ("openai-gpt", "cpu"), ("t5", "cpu"), ("bart", "cpu"), ("llama", "openvino"), ("lfm2", "openvino"),
        ("t5", "openvino"), ("qwen3", "pytorch"), ("mamba", "pytorch"),
    ],
)  # fmt: skip
def test_families_and_backends(engine: Engines, generator: Callable[..., Artifact], family: str, backend: str) -> None:
    """The models have KV caches with and without in-place updates, recurrent states of fixed size, no cache, or an
    encoder.
    """
    artifact = generator(family, backend)
    kind = accel.ORTModelForSeq2SeqLM if family in ("t5", "bart") else accel.ORTModelForCausalLM
    opened: Any = kind.from_pretrained(artifact.path, backend=backend)
    served = engine(opened, rows=3)
    generated = [
        ids(tokens)
        for tokens in [served.submit(p, GenerationOptions(max_new_tokens=n)) for p, n in zip(PROMPTS, NEW, strict=True)]
    ]
    assert generated == [alone(opened, prompt, new) for prompt, new in zip(PROMPTS, NEW, strict=True)]


def test_encoder_decoder_error_counts_only_new_tokens(engine: Engines, generator: Callable[..., Artifact]) -> None:
    served = engine(accel.ORTModelForSeq2SeqLM.from_pretrained(generator("bart").path))
    with pytest.raises(InputError, match="asks for 100000 new tokens, but the decoder can generate at most") as refused:
        served.submit([5] * 3, GenerationOptions(max_new_tokens=100000))
    assert "prompt has" not in str(refused.value)
