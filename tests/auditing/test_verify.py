"""`accel verify` detects faults of servers, and passes servers without faults."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route
from typer.testing import CliRunner

import accel
from accel.auditing.audit import AuditReport, verify
from accel.cli import app
from accel.errors import ConfigError, ServingError
from accel.serving.http.app import create_app
from tests.auditing.servers import Embeddings, served
from tests.serving.conftest import save_chat, save_ranker

FAULTS = {
    "wrong pooling": ("values", "it looks as if pooling is cls"),
    "no prompt": ("values", "the prompt is left out"),
    "prompt twice": ("values", "the prompt is added twice"),
    "truncation by characters": ("lengths", "truncated to 48 characters"),
    "not normalized": ("normalization", "lengths"),
    "rows swapped under load": ("concurrency", "gets the answer of"),
    "float16 sums": ("lengths", "half precision"),
    "stale model": ("values", "another model, revision or tokenizer"),
    "wrong tokenizer": ("values", "another model, revision or tokenizer"),
    "dropped rows": ("rows", "33 texts in one request get 32 answers"),
}


def failed(report: AuditReport) -> dict[str, str]:
    return {check.name: check.detail for check in report.checks if check.passed is False}


def test_the_right_server_passes(embedder: Path, stale: Path, tmp_path: Path) -> None:
    with served(Embeddings(embedder, stale).app()) as url:
        page = tmp_path / "page.html"
        result = CliRunner().invoke(app, ["verify", url, "--against", str(embedder), "--report", str(page)])
    assert result.exit_code == 0, result.output
    assert "passed" in result.output.splitlines()[-1]
    assert "The server passed" in page.read_text(encoding="utf-8")


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_is_detected(fault: str, embedder: Path, stale: Path) -> None:
    check, cause = FAULTS[fault]
    with served(Embeddings(embedder, stale, fault).app()) as url:
        report = verify(url, against=embedder)
    assert check in failed(report), str(report)
    assert cause in failed(report)[check]
    assert str(report).splitlines()[-1].startswith("FAILED: ")


def test_the_exit_code_and_the_json_tell_a_failure(embedder: Path, stale: Path) -> None:
    with served(Embeddings(embedder, stale, "not normalized").app()) as url:
        result = CliRunner().invoke(app, ["verify", f"{url}/v1/embeddings", "--against", str(embedder), "--json"])
    assert result.exit_code == 1
    values = json.loads(result.stdout)
    assert not values["passed"]
    assert [check["name"] for check in values["checks"] if check["passed"] is False] == ["normalization"]


@pytest.mark.parametrize("path", ["", "/embed", "/v2/models/m.text"])
def test_accel_serves_the_embeddings_of_the_model(path: str, embedder: Path) -> None:
    model = accel.ORTModelForFeatureExtraction.from_pretrained(embedder)
    with served(create_app(accel.Engine({"m": model}))) as url:
        report = verify(url + path, against=embedder)
    assert report.passed, str(report)
    assert {check.name for check in report.checks if check.passed is None} <= {"prompts", "dimensions", "base64"}


def test_accel_serves_classes(tiny_folder: Callable[..., Path], tiny_artifact: Callable[..., Any]) -> None:
    model = accel.ORTModelForSequenceClassification.from_pretrained(tiny_artifact().path)
    with served(create_app(accel.Engine({"m": model}))) as url:
        report = verify(url, against=tiny_folder())
        wrong = verify(url, against=tiny_folder("distilbert"))
    assert report.passed, str(report)
    assert "values" in failed(wrong)


def test_accel_serves_rankings(tmp_path: Path) -> None:
    save_ranker(tmp_path / "ranker")
    model = accel.ORTModelForSequenceClassification.from_pretrained(tmp_path / "ranker")
    with served(create_app(accel.Engine({"m": model}))) as url:
        report = verify(url, against=tmp_path / "ranker", subject="rerank")
    assert report.passed, str(report)


def test_accel_serves_chats(tmp_path: Path) -> None:
    save_chat(tmp_path / "chat")
    model = accel.ORTModelForCausalLM.from_pretrained(tmp_path / "chat")
    with served(create_app(accel.Engine({"m": model}))) as url:
        report = verify(url, against=tmp_path / "chat")
    assert report.passed, str(report)
    assert {check.name: check.passed for check in report.checks}["prompt"]


async def _crash(request: Request) -> Response:
    body = await request.json()
    vectors = [[float(len(text)), 1.0] for text in body["input"]]
    return JSONResponse({"data": [{"index": i, "embedding": row} for i, row in enumerate(vectors)]})


def test_a_server_error_for_bad_input_is_a_failure(embedder: Path) -> None:
    with served(Starlette(routes=[Route("/v1/embeddings", _crash, methods=["POST"])])) as url:
        report = verify(url, against=embedder)
    assert "no field: status 500" in failed(report)["bad input"]
    assert "the vectors have [2] values, and PyTorch's have 32" in failed(report)["values"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"dtype": "int3"}, "dtype is 'int3'"),
        ({"concurrency": 0}, "concurrency is 0"),
        ({"subject": "x"}, "subject is 'x'"),
    ],
)
def test_bad_arguments_are_errors(arguments: dict[str, Any], message: str, embedder: Path) -> None:
    with pytest.raises(ConfigError, match=message):
        verify("http://127.0.0.1:9", against=embedder, **arguments)


def test_bad_urls_are_errors(embedder: Path) -> None:
    with pytest.raises(ConfigError, match="is not a URL"):
        verify("localhost:8000", against=embedder)
    with pytest.raises(ServingError, match="does not answer"):
        verify("http://127.0.0.1:9", against=embedder)
    with (
        served(Starlette()) as url,
        pytest.raises(ServingError, match="has no endpoint that answers: /v1/embeddings: 404"),
    ):
        verify(url, against=embedder)
