"""Tests of the engine: it returns the same results as the pipeline to every caller, with few model calls."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
import torch
import transformers

import accel
from accel.errors import (
    AccelError,
    ConfigError,
    EngineClosedError,
    InputError,
    QueueFullError,
    RequestTimeoutError,
    SessionError,
    TaskError,
)
from accel.serving.batch.batch_run import batch
from accel.serving.operations import Operation
from accel.testing.models import POSITIONS
from tests.serving.conftest import Gate, close
from tests.triton.small_artifacts import graph

Served = Callable[[str], accel.ORTModel]
Gated = tuple[accel.ORTModel, Gate]

TEXTS = [
    "where is my card",
    "help",
    "i lost my card in paris and i can not pay with my phone app please help me now",
    "the bank",
    "why is the transfer so slow",
]
QUESTIONS = [{"question": "where is my card", "context": f"the card is in {text} and not in london"} for text in TEXTS]


CASES = [
    ("text-classification", TEXTS, {}),
    ("text-classification", TEXTS, {"top_k": 2}),
    ("text-classification", [{"text": text, "text_pair": "help"} for text in TEXTS], {"top_k": None}),
    ("token-classification", TEXTS, {}),
    ("token-classification", TEXTS, {"aggregation_strategy": "simple"}),
    ("fill-mask", [f"[MASK] {text}" for text in TEXTS], {"top_k": 3}),
    ("feature-extraction", TEXTS, {}),
    ("question-answering", QUESTIONS, {"top_k": 2}),
    ("zero-shot-classification", TEXTS, {"candidate_labels": ["bank", "phone"], "multi_label": True}),
]


@pytest.mark.parametrize(("task", "inputs", "options"), CASES)
def test_results_equal_the_pipelines(task: str, inputs: list[Any], options: dict[str, Any], served: Served) -> None:
    model = served(task)
    pipe = accel.pipeline(task, model=model)
    expected_alone = [pipe(single, **options) for single in inputs]
    expected_list = pipe(inputs, **options)

    async def ask(engine: accel.Engine) -> tuple[list[Any], Any, Any]:
        alone = await asyncio.gather(*(engine(item, operation=task, **options) for item in inputs))
        return (
            alone,
            await engine(inputs, operation=task, **options),
            await engine(inputs[:1], operation=task, **options),
        )

    with accel.Engine(model) as engine:
        alone, together, list_of_one = asyncio.run(ask(engine))
    assert close(alone, expected_alone)
    assert close(together, expected_list)
    assert close(list_of_one, pipe(inputs[:1], **options))


@pytest.mark.parametrize("task", ["feature-extraction", "sentence-similarity"])
def test_embeddings_equal_encode(task: str, served: Served) -> None:
    model: Any = served(task)
    with accel.Engine(model) as engine:
        embeddings = engine.run(TEXTS, operation="embed", normalize_embeddings=True)
        single = engine.run(TEXTS[0], operation="embed")
    assert np.allclose(embeddings, model.encode(TEXTS, normalize_embeddings=True), atol=1e-5)
    assert single.shape == model.encode(TEXTS[0]).shape


def test_ranking_equals_rank(served: Served) -> None:
    model: Any = served("rank")
    with accel.Engine(model) as engine:
        ranking = engine.run(("where is my card", TEXTS), operation="rank", top_k=3, return_documents=True)
        for wrong in (3, ("help", "me")):
            with pytest.raises(InputError, match="a query and a list of documents"):
                engine.run(wrong, operation="rank")
    assert close(ranking, model.rank("where is my card", TEXTS, top_k=3, return_documents=True))


def test_tensors_of_different_lengths_share_a_call(served: Served) -> None:
    model = served("token-classification")
    calls = [{"input_ids": torch.full((rows, length), 9), "attention_mask": torch.ones(rows, length, dtype=torch.int64)}
             for rows, length in ((1, 4), (3, 7), (2, 4))]  # fmt: skip

    async def ask(engine: accel.Engine) -> list[Any]:
        return await asyncio.gather(*(engine(feeds, operation="tensors") for feeds in calls))

    with accel.Engine(model) as engine:
        answers = asyncio.run(ask(engine))
    for call, answer in zip(calls, answers, strict=True):
        assert torch.allclose(answer["logits"], model(**call).logits, atol=1e-4)


def test_empty_list_gives_an_empty_result(served: Served) -> None:
    with accel.Engine(served("text-classification")) as engine:
        assert engine.run([]) == []


def test_waiting_requests_share_the_next_call(gated: Gated) -> None:
    model, gate = gated
    with accel.Engine(model) as engine:
        first = engine.submit("help")
        assert gate.waiting.wait(30)
        others = [engine.submit("where is my card") for _ in range(8)]
        gate.open()
        assert len({str(job.future.result(30)) for job in others}) == 1
        first.future.result(30)
    assert [shape[0] for shape in gate.calls] == [1, 8]
    assert others[0].timing.batch == 8
    assert others[0].timing.tokens == 6


def test_cancelled_requests_are_not_computed(gated: Gated) -> None:
    model, gate = gated
    with accel.Engine(model) as engine:
        engine.submit("help")
        assert gate.waiting.wait(30)
        cancelled = [engine.submit("where is my card") for _ in range(4)]
        stays = engine.submit("the bank")
        for job in cancelled:
            assert job.future.cancel()
        assert engine.pending() == 2
        gate.open()
        stays.future.result(30)
    assert [shape[0] for shape in gate.calls] == [1, 1]


def test_cancelled_task_frees_its_queue_place(gated: Gated) -> None:
    model, gate = gated

    async def give_up(engine: accel.Engine) -> None:
        task = asyncio.ensure_future(engine("help"))
        await asyncio.to_thread(gate.waiting.wait, 30)
        late = asyncio.ensure_future(engine("the bank"))
        await asyncio.sleep(0)
        late.cancel()
        await asyncio.gather(late, return_exceptions=True)
        assert engine.pending() == 1
        gate.open()
        await task

    with accel.Engine(model) as engine:
        asyncio.run(give_up(engine))
    assert len(gate.calls) == 1


@pytest.mark.parametrize("blocking", [True, False])
def test_timeout_raises_and_frees_the_queue_place(blocking: bool, gated: Gated) -> None:
    model, gate = gated
    with accel.Engine(model, timeout_s=0.05) as engine:
        engine.submit("help")
        assert gate.waiting.wait(30)
        with pytest.raises(RequestTimeoutError, match=r"within 0\.05 s"):
            engine.run("the bank") if blocking else asyncio.run(engine("the bank"))
        assert engine.pending() == 1
        gate.open()


def test_full_queue_refuses_with_a_retry_time(gated: Gated) -> None:
    model, gate = gated
    with accel.Engine(model, max_queue=3) as engine:
        jobs = [engine.submit("help") for _ in range(3)]
        with pytest.raises(QueueFullError, match="3 inputs wait") as raised:
            engine.submit("help")
        assert raised.value.retry_after_s > 0
        gate.open()
        for job in jobs:
            job.future.result(30)
        engine.run("help")


def test_request_with_too_long_wait_is_refused(gated: Gated) -> None:
    model, gate = gated
    gate.open()
    with accel.Engine(model, max_wait_s=1e-9) as engine:
        for _ in range(3):
            engine.run("help")
        jobs = []
        with pytest.raises(QueueFullError):
            for _ in range(1000):
                jobs.append(engine.submit("help"))  # noqa: PERF401
        for job in jobs:
            job.future.result(30)


def test_invalid_request_does_not_fail_its_batch(gated: Gated) -> None:
    """A batch contains one invalid token id. Only the session detects the id, when it runs the whole batch, and only
    the request with this id fails.
    """
    model, gate = gated
    ids = {"input_ids": torch.tensor([[2, 9, 3]]), "attention_mask": torch.ones(1, 3, dtype=torch.int64)}
    bad = {**ids, "input_ids": torch.tensor([[2, 100_000, 3]])}
    with accel.Engine(model) as engine:
        engine.submit("help")
        assert gate.waiting.wait(30)
        jobs = [engine.submit(feeds, operation="tensors") for feeds in (ids, bad, ids)]
        gate.open()
        assert jobs[0].future.result(30)["logits"].shape == (1, 3)
        assert jobs[2].future.result(30)["logits"].shape == (1, 3)
        with pytest.raises((InputError, SessionError)):
            jobs[1].future.result(30)


@pytest.mark.parametrize(
    ("inputs", "options", "error", "match"),
    [
        (["help", 3], {}, InputError, "text-classification' does not accept the inputs"),
        ("help", {"operation": "fill-mask"}, TaskError, "does not support the operation 'fill-mask'"),
        ("help", {"operation": "embde"}, TaskError, "does not support"),
        ("help", {"model": "other"}, ConfigError, "no model 'other'"),
        ("card " * 200, {}, InputError, "202 tokens, but the model accepts at most 96"),
        ("help", {"tpo_k": 2}, InputError, "no option 'tpo_k'. Did you mean 'top_k'"),
    ],
)  # fmt: skip
def test_invalid_requests_are_refused(
    inputs: Any, options: dict[str, Any], error: type[Exception], match: str, served: Served
) -> None:
    with accel.Engine(served("text-classification")) as engine, pytest.raises(error, match=match):
        engine.run(inputs, **options)


def test_tokenizer_panic_fails_one_request(served: Served) -> None:
    """A worker thread continues after a panic of the tokenizer. A stride that leaves no room in a window causes the
    panic.
    """
    with accel.Engine(served("token-classification"), workers=1) as engine:
        stride = POSITIONS - 2 - 2
        with pytest.raises(InputError, match="stride"):
            engine.submit("pay " * 100, aggregation_strategy="first", stride=stride).future.result(30)
        assert engine.submit("pay").future.result(30)


@pytest.mark.parametrize(
    ("task", "pipelines"),
    [
        ("text-classification", ("text-classification",)),
        ("zero-shot-classification", ("text-classification", "zero-shot-classification")),
        ("question-answering", ("question-answering",)),
    ],
)
def test_model_offers_its_pipelines_once(task: str, pipelines: tuple[str, ...], served: Served) -> None:
    """The engine lists the operations of a model. Zero-shot classification is listed only for models with entailment
    labels.
    """
    with accel.Engine(served(task)) as engine:
        assert engine.operations() == (*pipelines, "tensors", "tokenize")


def test_operations_with_their_own_work_are_offered(served: Served) -> None:
    class Own(Operation):
        def work(self, model: accel.ORTModel, tokenizer: Any) -> Any:
            raise NotImplementedError

    model = served("text-classification")
    offered = [
        operation.offered(model) for operation in (Own("own"), Operation("text-classification"), Operation("other"))
    ]
    assert offered == [True, True, False]


def test_graph_without_pipeline_accepts_tensors(tmp_path: Path) -> None:
    onnx.save(graph("text-classification"), str(tmp_path / "model.onnx"))
    transformers.BertConfig().save_pretrained(tmp_path)
    (tmp_path / "rows.csv").write_text("text\nhelp\n")
    model = accel.ORTModel.from_pretrained(tmp_path, task="custom", backend="cpu")
    with accel.Engine(model) as engine:
        ids = torch.ones((1, 3), dtype=torch.int64)
        inputs = {"input_ids": ids, "attention_mask": ids, "token_type_ids": ids - 1}
        assert engine.run(inputs)["logits"].shape == (1, 3)
    with pytest.raises(TaskError, match="'tensors' cannot run on the rows of a table"):
        batch(model, tmp_path / "rows.csv", tmp_path / "out")
    model.close()


def test_several_models_and_workers(served: Served) -> None:
    texts = TEXTS * 20
    models = {"labels": served("text-classification"), "tags": served("token-classification")}

    async def ask(engine: accel.Engine) -> list[Any]:
        return await asyncio.gather(*(engine(text, model=name) for text in texts for name in models))

    with accel.Engine(models, workers=2) as engine:
        results = asyncio.run(ask(engine))
        with pytest.raises(ConfigError, match=r"several models \(labels, tags\)"):
            engine.run("help")
    pipes = [accel.pipeline(model=model) for model in models.values()]
    assert close(results[: 2 * len(TEXTS)], [pipe(text) for text in TEXTS for pipe in pipes])


def test_closing_completes_accepted_requests(gated: Gated) -> None:
    model, gate = gated
    engine = accel.Engine(model).start()
    jobs = [engine.submit("help") for _ in range(20)]
    gate.open()
    engine.close()
    assert all(job.future.done() and not job.future.exception() for job in jobs)
    with pytest.raises(EngineClosedError):
        engine.submit("help")


def test_closing_without_draining_refuses_waiting_requests(gated: Gated) -> None:
    model, gate = gated
    engine = accel.Engine(model).start()
    running = engine.submit("help")
    assert gate.waiting.wait(30)
    waits = engine.submit("help")
    gate.open()
    engine.close(drain=False)
    assert running.future.result(30)
    with pytest.raises(EngineClosedError):
        waits.future.result(30)


def test_call_before_start_raises(served: Served) -> None:
    with pytest.raises(EngineClosedError, match="not started"):
        accel.Engine(served("text-classification")).run("help")


@pytest.mark.parametrize("setting", [{"workers": 0}, {"max_batch": 0}, {"max_queue": -1}, {"timeout_s": 0}])
def test_invalid_limits_are_refused(setting: dict[str, Any]) -> None:
    with pytest.raises(ConfigError):
        accel.Engine("model", **setting)


def test_step_times_add_up(served: Served) -> None:
    with accel.Engine(served("text-classification")) as engine:
        start = time.perf_counter()
        job = engine.submit(TEXTS)
        job.future.result(30)
        seconds = time.perf_counter() - start
    timing = job.timing
    assert 0 < timing.tokenization_s + timing.queue_s + timing.inference_s <= timing.total_s <= seconds


def test_workers_share_the_processors(tiny_folder: Callable[..., Path]) -> None:
    folder = tiny_folder("bert", "text-classification")
    with accel.Engine(folder, backend="pytorch", processors=4, workers=2) as engine:
        assert next(iter(engine.models.values())).session_options.threads == 2
    with accel.Engine(folder, backend="pytorch", processors=1) as engine:
        assert next(iter(engine.models.values())).session_options.threads == 1
    with pytest.raises(ConfigError, match="processors is 0"):
        accel.Engine(folder, processors=0)


def test_closed_engine_raises(served: Served) -> None:
    engine = accel.Engine(served("text-classification"))
    with engine:
        engine.run("help")
    for use in (engine.start, lambda: engine.run("help"), engine.generator):
        with pytest.raises(EngineClosedError):
            use()
    engine.close()


def test_model_that_cannot_open_closes_the_others(tiny_folder: Callable[..., Path], tmp_path: Path) -> None:
    engine = accel.Engine(
        {"labels": tiny_folder("bert", "text-classification"), "none": tmp_path / "none"}, backend="pytorch"
    )
    for _ in range(2):
        with pytest.raises(AccelError, match="none"):
            engine.start()
        assert not engine.models


@pytest.mark.filterwarnings("ignore:This process:DeprecationWarning")
@pytest.mark.skipif(not hasattr(os, "fork"), reason="this system does not support fork")
def test_forked_process_cannot_use_the_engine(served: Served) -> None:
    with accel.Engine(served("text-classification")) as engine:
        child = os.fork()
        if not child:
            try:
                engine.run("help", timeout_s=20)
            except EngineClosedError as error:
                os._exit("another process" not in str(error))
            os._exit(2)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
        engine.run("help")


def test_failing_observer_does_not_end_the_threads(served: Served) -> None:
    class Broken:
        def batch(self, *_: Any) -> None:
            raise ValueError("mine")

        def done(self, *_: Any) -> None:
            return

        refused = done

    with accel.Engine(served("text-classification"), observer=Broken()) as engine:
        for _ in range(2):
            with pytest.raises(SessionError, match="mine"):
                engine.run("help", timeout_s=20)


def test_event_loops_of_several_threads_share_an_engine(served: Served) -> None:
    async def ask(engine: accel.Engine) -> list[Any]:
        return await asyncio.gather(*(engine(text) for text in TEXTS))

    with accel.Engine(served("text-classification")) as engine, ThreadPoolExecutor(3) as pool:
        results_of_threads = list(pool.map(lambda _: asyncio.run(ask(engine)), range(3)))
        expected = [engine.run(text) for text in TEXTS]
    assert all(close(results, expected) for results in results_of_threads)
