"""Tests that no endpoint returns NaN or infinity, and that requests with NaN or infinity are refused."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from starlette.testclient import TestClient

import accel
from accel.errors import InputError, NotFiniteError
from accel.serving.batch.batch_run import batch
from accel.serving.http.app import create_app
from accel.serving.non_finite import find_non_finite
from accel.testing.models import save_tiny, tiny_model, tiny_tokenizer
from tests.serving.conftest import save_chat, save_judge, save_ranker, send_binary

BAD, GOOD = "my card is lost", "where is the bank"
"""Texts with and without the word `lost`, whose embedding is NaN in the damaged models."""
TASKS = (
    "text-classification",
    "token-classification",
    "question-answering",
    "fill-mask",
    "feature-extraction",
    "rank",
    "judge",
)


def damage(folder: Path, token: str = "lost") -> None:
    """Set the embedding of one token to NaN in a saved model."""
    from safetensors.torch import load_file, save_file
    from transformers import AutoTokenizer

    weights = load_file(folder / "model.safetensors")
    number = AutoTokenizer.from_pretrained(folder).convert_tokens_to_ids(token)
    for name, values in weights.items():
        if values.ndim == 2 and ("word_embeddings" in name or "embed_tokens" in name):
            values[number] = torch.nan
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})


@pytest.fixture(scope="module")
def damaged(shared: Callable[..., Path]) -> Callable[[str], accel.ORTModel]:
    models: dict[str, accel.ORTModel] = {}

    def write(task: str, folder: Path) -> None:
        if task == "generate":
            save_chat(folder, tie_word_embeddings=False)
        elif task in ("rank", "judge"):
            (save_ranker if task == "rank" else save_judge)(folder)
        else:
            # Separate the output layer's weights from the word embeddings. With tied weights, every row would have a
            # NaN logit.
            save_tiny(folder, "bert", task, tie_word_embeddings=False)
        damage(folder)

    def get(task: str) -> accel.ORTModel:
        if task not in models:
            folder = shared(f"damaged-{task}", lambda folder: write(task, folder))
            named = None if task in ("rank", "judge", "generate") else task
            models[task] = accel.ORTModel.from_pretrained(folder, backend="pytorch", task=named)
        return models[task]

    return get


@pytest.fixture(scope="module")
def client(damaged: Callable[[str], accel.ORTModel]) -> Iterator[TestClient]:
    engine = accel.Engine({task: damaged(task) for task in (*TASKS, "generate")})
    with TestClient(create_app(engine)) as test_client:
        yield test_client


def tensors(text: str) -> dict[str, Any]:
    ids = tiny_tokenizer()(text)["input_ids"]
    values = {"input_ids": ids, "attention_mask": [1] * len(ids)}
    return {"inputs": [{"name": k, "datatype": "INT64", "shape": [1, len(ids)], "data": v} for k, v in values.items()]}


CALLS: dict[str, tuple[str, Callable[[str], dict[str, Any]]]] = {
    "classify": ("/classify", lambda text: {"model": "text-classification", "inputs": text}),
    "classify-all": ("/classify", lambda text: {"model": "text-classification", "inputs": text, "function_to_apply": "sigmoid"}),
    "ner": ("/ner", lambda text: {"inputs": text}),
    "qa": ("/qa", lambda text: {"question": "where is it", "context": text}),
    "fill-mask": ("/fill-mask", lambda text: {"inputs": f"{text} [MASK]"}),
    "zero-shot": ("/zero-shot", lambda text: {"inputs": text, "candidate_labels": ["bank", "card"]}),
    "embed": ("/embed", lambda text: {"inputs": text}),
    "embeddings": ("/v1/embeddings", lambda text: {"input": text}),
    "embeddings-base64": ("/v1/embeddings", lambda text: {"input": text, "encoding_format": "base64"}),
    "rerank": ("/rerank", lambda text: {"query": "help", "documents": [text]}),
    "rerank-texts": ("/rerank", lambda text: {"query": "help", "texts": [text], "raw_scores": True}),
    "invocations": ("/invocations", lambda text: {"inputs": text, "parameters": {"model": "text-classification"}}),
    "texts": (
        "/v2/models/text-classification.text/infer",
        lambda text: {"inputs": [{"name": "TEXT", "datatype": "BYTES", "shape": [1], "data": [text]}]},
    ),
    "tags": (
        "/v2/models/token-classification.text/infer",
        lambda text: {"inputs": [{"name": "TEXT", "datatype": "BYTES", "shape": [1], "data": [text]}]},
    ),
    "tensors": ("/v2/models/text-classification/infer", tensors),
    "generate": ("/generate", lambda text: {"inputs": text, "max_new_tokens": 3, "stream": False}),
    "completions": ("/v1/completions", lambda text: {"prompt": text, "max_tokens": 3, "temperature": 0}),
    "completions-drawn": ("/v1/completions", lambda text: {"prompt": text, "max_tokens": 3, "seed": 1}),
    "chat": ("/v1/chat/completions", lambda text: {"messages": [{"role": "user", "content": text}], "max_tokens": 3}),
}  # fmt: skip


def strict(content: bytes) -> Any:
    def refuse(literal: str) -> None:
        raise AssertionError(f"{literal} in {content!r}")

    return json.loads(content, parse_constant=refuse)


@pytest.mark.parametrize("name", CALLS)
def test_no_endpoint_returns_nan(name: str, client: TestClient) -> None:
    path, body = CALLS[name]
    assert client.post(path, json=body(GOOD)).status_code == 200
    answer = client.post(path, json=body(BAD))
    assert answer.status_code == 500, answer.text
    error = strict(answer.content)["error"]
    message = error if isinstance(error, str) else error["message"]
    assert "NaN or infinity" in message
    assert "NaN" in message or "nan" in message


def test_stream_ends_with_an_error(client: TestClient) -> None:
    answer = client.post("/generate", json={"inputs": BAD, "max_new_tokens": 3})
    assert answer.status_code == 200
    assert "NaN or infinity" in strict(answer.text.removeprefix("data: ").strip().encode())["error"]["message"]


def test_error_names_the_input_and_the_output(client: TestClient) -> None:
    answer = client.post("/classify", json={"model": "text-classification", "inputs": [GOOD, BAD]})
    assert "input 1" in answer.json()["error"]["message"]
    assert "logits" in answer.json()["error"]["message"]


def test_metric_counts_requests_with_nan(damaged: Callable[[str], accel.ORTModel]) -> None:
    engine = accel.Engine({"labels": damaged("text-classification"), "chat": damaged("generate")})
    with TestClient(create_app(engine)) as client:
        client.post("/classify", json={"inputs": BAD})
        client.post("/v2/models/labels/infer", json=tensors(BAD))
        client.post("/generate", json={"inputs": BAD, "stream": False})
        page = client.get("/metrics").text
    assert 'accel_not_finite_total{model="labels"} 2.0' in page
    assert 'accel_not_finite_total{model="chat"} 1.0' in page


@pytest.mark.parametrize("operation", ["text-classification", "embed"])
def test_nan_fails_only_its_request(operation: str, damaged: Callable[[str], accel.ORTModel]) -> None:
    with accel.Engine(damaged("feature-extraction" if operation == "embed" else operation)) as engine:
        jobs = [engine.submit(text, operation=operation) for text in (GOOD, BAD, GOOD, "help")]
        assert isinstance(jobs[1].future.exception(30), NotFiniteError)
        for job in (jobs[0], jobs[2], jobs[3]):
            assert find_non_finite(job.future.result(30)) is None


def test_nan_that_spreads_over_a_batch_fails_only_its_request(damaged: Callable[[str], accel.ORTModel]) -> None:
    """A NaN in one row makes all outputs of the batch NaN, as with dynamic int8 quantization. Only the request with
    this row fails.
    """
    model = damaged("text-classification")
    session = model._session

    class Spread:
        def __getattr__(self, name: str) -> Any:
            return getattr(session, name)

        def run(self, feeds: Any, **more: Any) -> Any:
            outputs = session.run(feeds, **more)
            return {
                name: value + value.isnan().any() * torch.nan if value.isnan().any() else value
                for name, value in outputs.items()
            }

    model._session = Spread()
    try:
        with accel.Engine(model) as engine:
            jobs = [engine.submit(text) for text in (GOOD, BAD, GOOD)]
            assert isinstance(jobs[1].future.exception(30), NotFiniteError)
            assert jobs[0].future.result(30) == jobs[2].future.result(30)
    finally:
        model._session = session


def test_float16_overflow_raises(shared: Callable[..., Path]) -> None:
    def write(folder: Path) -> None:
        model = tiny_model("bert")
        with torch.no_grad():
            model.classifier.weight.mul_(6e4 / model.classifier.weight.abs().max())
        model.save_pretrained(folder)
        tiny_tokenizer().save_pretrained(folder)

    folder = shared("overflowing", write)
    model = accel.ORTModel.from_pretrained(folder, backend="pytorch", dtype=torch.float16)
    with accel.Engine(model) as engine, TestClient(create_app(engine)) as client:
        answer = client.post("/classify", json={"inputs": "help", "top_k": None})
        assert answer.status_code == 500, answer.text
        assert "float16" in answer.json()["error"]["fix"]


@pytest.mark.parametrize("format", ["jsonl", "parquet"])
def test_offline_rows_with_nan_are_errors(
    format: Any, damaged: Callable[[str], accel.ORTModel], tmp_path: Path
) -> None:
    data = tmp_path / "data.csv"
    data.write_text(f"text\n{GOOD}\n{BAD}\n")
    model = damaged("feature-extraction")
    with pytest.raises(InputError, match=r"Row 1 of the data cannot be processed: .* NaN or infinity"):
        batch(model, data, tmp_path / "stopped", operation="embed", format=format)
    report = batch(model, data, tmp_path / "out", operation="embed", format=format, on_error="record")
    assert (report.rows, report.broken) == (2, 1)
    (file,) = (tmp_path / "out").glob(f"rows-*.{format}")
    if format == "jsonl":
        rows = [strict(line.encode()) for line in file.read_text().splitlines()]
    else:
        from pyarrow import parquet

        rows = parquet.read_table(file).to_pylist()
    assert "NaN or infinity" in rows[1]["error"]
    assert rows[1]["embedding"] is None
    assert np.isfinite(rows[0]["embedding"]).all()


@pytest.mark.parametrize(
    ("value", "place"),
    [
        ({"a": [1.0, {"b": math.inf}]}, "a[1].b is inf"),
        ([[0.0, math.nan]], "[0][1] is nan"),
        (np.array([[0.0, math.inf]], np.float32), "[0, 1] is inf"),
        (torch.tensor([1.0, math.nan], dtype=torch.bfloat16), "[1] is nan"),
        (np.float32("nan"), "the value is nan"),
        ([1e308, 1e308], None),
        (["NaN", 1, None, True, b"NaN"], None),
    ],
)
def test_positions_of_non_finite_numbers(value: Any, place: str | None) -> None:
    assert find_non_finite(value) == place


@pytest.mark.parametrize("literal", ["NaN", "Infinity", "-Infinity", "1e999"])
@pytest.mark.parametrize(
    ("path", "body", "place"),
    [
        ("/v1/completions", '{"prompt": "NaN", "temperature": %s}', "temperature"),
        ("/classify", '{"model": "text-classification", "inputs": ["NaN", %s]}', "inputs[1]"),
        ("/invocations", '{"inputs": "help", "parameters": {"x": [1, %s]}}', "parameters.x[1]"),
        ("/v2/models/rank/infer", '{"inputs": [{"name": "x", "datatype": "FP32", "shape": [2], "data": [1, %s]}]}', "inputs[0].data[1]"),
    ],
)  # fmt: skip
def test_requests_with_nan_are_refused(literal: str, path: str, body: str, place: str, client: TestClient) -> None:
    answer = client.post(path, content=body % literal)
    assert answer.status_code == 400, answer.text
    assert place in answer.text


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ("NaN", None),
        ("[NaN]", None),
        ('{"prompt": "x", "temperature": NaN}', "temperature"),
        ('{"prompt": "x", "logit_bias": {"5": NaN}}', "logit_bias"),
        ('{"the temperature": NaN}', "the temperature"),
    ],
)
def test_errors_about_nan_name_the_field(body: str, param: str | None, client: TestClient) -> None:
    error = client.post("/v1/completions", content=body).json()["error"]
    assert error["param"] == param
    assert error["fix"] == "send only finite numbers."


def test_errors_about_invalid_json_contain_a_fix(client: TestClient) -> None:
    answer = client.post("/v1/completions", content='{"prompt": ')
    assert answer.status_code == 400
    assert answer.json()["error"]["fix"] == "send a JSON object; see the accepted fields at /docs."


def test_binary_tensors_with_nan_are_refused(client: TestClient) -> None:
    part = np.array([1, math.nan], np.float32).tobytes()
    answer = send_binary(client, "/v2/models/text-classification/infer", ("x", "FP32", [1, 2], part))
    assert answer.status_code == 400
    assert "'x'" in answer.text
    assert "[0, 1]" in answer.text


def test_reports_write_null_for_nan(capsys: pytest.CaptureFixture[str]) -> None:
    from accel.artifact.json_writing import json_text
    from accel.cli.application import emit

    values = {"drop": math.nan, "interval": (1.5, math.inf), "rows": [{"x": 2}]}
    expected = {"drop": None, "interval": [1.5, None], "rows": [{"x": 2}]}
    assert strict(json_text(values, indent=1).encode()) == expected
    emit(values, True, "")
    assert strict(capsys.readouterr().out.encode()) == expected


def test_kept_columns_contain_null_for_nan(damaged: Callable[[str], accel.ORTModel], tmp_path: Path) -> None:
    import pyarrow as pa
    from pyarrow import parquet

    parquet.write_table(pa.table({"text": [GOOD], "price": pa.array([math.nan])}), tmp_path / "data.parquet")
    batch(damaged("text-classification"), tmp_path / "data.parquet", tmp_path / "out", keep=["price"], format="jsonl")
    (file,) = (tmp_path / "out").glob("rows-*.jsonl")
    assert strict(file.read_bytes())["price"] is None
