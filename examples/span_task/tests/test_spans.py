"""Test the example task in all steps from the export to the server, and compare the results with PyTorch."""

from __future__ import annotations

import asyncio
import importlib
import json
import sys
import types
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from accel_spans.model import SpanExtractor
from accel_spans.task import ORTModelForSpanExtraction, SpanExtractionPipeline

import accel
from accel.testing.models import VOCABULARY, rescale, tiny_tokenizer

TASK = "span-extraction"
LABELS = ["bank", "phone", "city"]
TEXTS = ["i lost my card in london", "the bank in paris is open", "my new phone is slow, please help", "pay"]


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder of a model with random weights."""
    config = transformers.BertConfig(
        vocab_size=VOCABULARY, hidden_size=32, num_hidden_layers=2, num_attention_heads=4, intermediate_size=48,
        max_position_embeddings=96, span_size=8,
    )  # fmt: skip
    folder = tmp_path_factory.mktemp("spans")
    rescale(SpanExtractor(config)).save_pretrained(folder)
    tiny_tokenizer().save_pretrained(folder)
    return folder


@pytest.fixture(scope="session")
def original(folder: Path) -> Any:
    config = transformers.AutoConfig.from_pretrained(folder)
    return SpanExtractor.from_pretrained(folder, config=config).eval()


@pytest.fixture(scope="session")
def artifact(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> accel.Artifact:
    # The exporter infers the task from the name of the model class, and compares the graph with PyTorch.
    return accel.export(folder, tmp_path_factory.mktemp("exported") / "artifact")


@pytest.fixture(scope="session")
def rows(expected: Any) -> list[dict[str, Any]]:
    """Return rows with the predictions of the PyTorch model as reference spans."""
    answers = [expected(text, labels=LABELS) for text in TEXTS]
    assert any(answers)
    return [
        {"text": text, "labels": LABELS, "spans": [{k: span[k] for k in ("label", "start", "end")} for span in answer]}
        for text, answer in zip(TEXTS, answers, strict=True)
    ]


@pytest.fixture(scope="session")
def expected(original: Any, folder: Path) -> Any:
    """Return the pipeline with the PyTorch model."""
    return SpanExtractionPipeline(model=original, tokenizer=transformers.AutoTokenizer.from_pretrained(folder))


def same(actual: list[dict[str, Any]], expected: list[dict[str, Any]]) -> bool:
    return [{**span, "score": 0} for span in actual] == [{**span, "score": 0} for span in expected] and [
        span["score"] for span in actual
    ] == pytest.approx([span["score"] for span in expected], abs=1e-3)


def test_export_and_model(artifact: accel.Artifact, original: Any) -> None:
    assert artifact.task == TASK
    with ORTModelForSpanExtraction(artifact) as model:
        ids, mask = torch.tensor([[2, 8, 9, 3, 20, 21, 3], [2, 8, 9, 3, 22, 3, 0]]), torch.ones(2, 7, dtype=torch.int64)
        mask[1, 6] = 0
        inputs = {"input_ids": ids, "attention_mask": mask, "label_positions": torch.tensor([[1, 2]] * 2)}
        with torch.inference_mode():
            expected = original(**inputs)
        outputs = model(**inputs)
        for name, values in expected.items():
            assert outputs[name].shape == (2, 2, 7)
            assert torch.allclose(outputs[name], values, atol=1e-4)


def test_pipeline(artifact: accel.Artifact, expected: Any) -> None:
    pipe = accel.pipeline(TASK, model=artifact.path)
    for text in TEXTS:
        assert same(pipe(text, labels=LABELS), expected(text, labels=LABELS))
    assert len(pipe(TEXTS[0], labels=LABELS, threshold=0.99)) <= len(pipe(TEXTS[0], labels=LABELS, threshold=0.1))


def test_evaluate(artifact: accel.Artifact, rows: list[dict[str, Any]]) -> None:
    evaluation = accel.evaluate(artifact, rows, against=True)
    assert (evaluation.metric, evaluation.value) == ("span_f1", 1.0)
    assert evaluation.comparison is not None


def test_quantize(artifact: accel.Artifact, rows: list[dict[str, Any]], tmp_path: Path) -> None:
    quantized = accel.quantize(artifact, tmp_path / "int8", scheme="static-int8", calibration=rows)
    assert 0 <= accel.evaluate(quantized, rows).value <= 1


def test_tune(folder: Path, rows: list[dict[str, Any]], tmp_path: Path) -> None:
    tuned = accel.tune(folder, tmp_path / "tuned", data=rows, backends=["pytorch"], sequence=[16], max_drop=20)
    assert tuned.artifact.task == TASK
    assert tuned.reference == 1.0


def test_engine(artifact: accel.Artifact, expected: Any) -> None:
    async def answers() -> list[Any]:
        async with accel.Engine({"spans": artifact}) as engine:
            # The engine computes the requests of several callers in one call of the model.
            requests = (engine(text, operation=TASK, labels=LABELS) for text in TEXTS)
            return list(await asyncio.gather(*requests))

    for spans, text in zip(asyncio.run(answers()), TEXTS, strict=True):
        assert same(spans, expected(text, labels=LABELS))


def test_server(artifact: accel.Artifact, expected: Any) -> None:
    testclient = pytest.importorskip("starlette.testclient", reason="the extra serve is not installed")
    from accel.serving.http.app import create_app

    with testclient.TestClient(create_app(accel.Engine({"spans": artifact}))) as client:
        answer = client.post("/spans", json={"inputs": TEXTS[0], "labels": LABELS})
        assert same(answer.json(), expected(TEXTS[0], labels=LABELS))
        assert client.post("/spans", json={"inputs": TEXTS[0]}).status_code == 422
        assert "/spans" in client.get("/openapi.json").json()["paths"]


def test_batch(artifact: accel.Artifact, expected: Any, tmp_path: Path) -> None:
    from pyarrow import parquet

    from accel.serving.batch.batch_run import batch

    (tmp_path / "rows.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in TEXTS))
    batch(artifact.path, tmp_path / "rows.jsonl", tmp_path / "out", options={"labels": LABELS})
    predictions = parquet.read_table(tmp_path / "out").to_pydict()["spans"]
    for spans, text in zip(predictions, TEXTS, strict=True):
        assert same(spans, expected(text, labels=LABELS))


def test_triton(artifact: accel.Artifact, expected: Any, tmp_path: Path) -> None:
    pytest.importorskip("tritonclient.grpc", reason="the extra triton is not installed")
    from accel.deploying.triton import deploy

    deployed = deploy(artifact, tmp_path / "out", name="spans")
    # Run the front model in this process instead of inside Triton, with a session of `accel` instead of Triton's graph.
    folder = deployed.path / "spans" / "1"
    package = types.ModuleType("front")
    package.__path__ = [str(folder)]
    sys.modules["front"] = package
    batches = importlib.import_module("front.text_batches")
    front = batches.TextRequestHandler(folder)
    with ORTModelForSpanExtraction(artifact) as model:

        def call(feeds: Any) -> dict[str, Any]:
            outputs = model(**{name: torch.from_numpy(value) for name, value in feeds.items()})
            return {name: outputs[name].numpy() for name in front.settings["outputs"]}

        def texts(*values: str) -> Any:
            return np.array([[value.encode() for value in values]], dtype=object)

        requests = [batches.Request({"TEXT": texts(text), "LABELS": texts(*LABELS)}, {}) for text in TEXTS]
        for answer, text in zip(front.answer(requests, call), TEXTS, strict=True):
            assert same(json.loads(answer["SPANS"][0][0]), expected(text, labels=LABELS))
