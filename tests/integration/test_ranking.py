"""Tests of cross-encoders: scores equal PyTorch's, documents are ranked by score, and the quality of rankings is
measured.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
import transformers

import accel
from accel.artifact import Artifact
from accel.errors import InputError, TaskError
from accel.interfaces.task_registry import infer_task
from accel.stages.export import export
from accel.testing.models import tiny_model, tiny_tokenizer

QUERY = "where is my card"
DOCUMENTS = ["the bank", "i lost my card in paris and can not pay", "help", "your new phone is here", "top up"]


@pytest.fixture(scope="module")
def source(shared: Callable[..., Path]) -> Path:
    def make(folder: Path) -> None:
        model = tiny_model("bert", num_hidden_layers=1, num_labels=1, id2label={0: "score"}, label2id={"score": 0})
        model.config.sentence_transformers = {"activation_fn": "torch.nn.modules.linear.Identity", "version": "5.0.0"}
        model.save_pretrained(folder)
        tiny_tokenizer().save_pretrained(folder)

    return shared("cross-encoder", make)


@pytest.fixture(scope="module")
def artifact(source: Path, shared: Callable[..., Path]) -> Artifact:
    return Artifact.load(shared("cross-encoder-onnx", lambda folder: export(source, folder)))


def logits(source: Path, pairs: list[tuple[str, str]]) -> np.ndarray:
    """Return PyTorch's logits for (query, document) pairs, computed for each pair alone."""
    tokenizer = transformers.AutoTokenizer.from_pretrained(source)
    model = transformers.AutoModelForSequenceClassification.from_pretrained(source).eval()
    with torch.inference_mode():
        return np.array([float(model(**tokenizer(*pair, return_tensors="pt")).logits) for pair in pairs])


def test_task_is_read_from_sentence_transformers_config(source: Path, artifact: Artifact) -> None:
    assert artifact.task == "text-ranking"
    assert infer_task({"architectures": ["BertForSequenceClassification"]}) == "text-classification"
    assert accel.pipeline(model=artifact.path).task == "text-classification"


def test_scores_and_order_equal_pytorch(source: Path, artifact: Artifact) -> None:
    model = accel.ORTModelForSequenceClassification.from_pretrained(artifact.path)
    pairs = [(QUERY, text) for text in DOCUMENTS]
    expected = logits(source, pairs)
    np.testing.assert_allclose(model.predict(pairs, batch_size=2), expected, atol=1e-5)
    assert model.predict(pairs[0]) == pytest.approx(expected[0], abs=1e-5)
    scores = model.predict(pairs, activation_fn=torch.sigmoid)
    np.testing.assert_allclose(scores, 1 / (1 + np.exp(-expected)), atol=1e-5)
    ranked = model.rank(QUERY, DOCUMENTS, top_k=3, return_documents=True)
    assert [entry["corpus_id"] for entry in ranked] == np.argsort(-expected)[:3].tolist()
    assert [entry["text"] for entry in ranked] == [DOCUMENTS[entry["corpus_id"]] for entry in ranked]
    np.testing.assert_allclose([entry["score"] for entry in ranked], np.sort(expected)[::-1][:3], atol=1e-5)


def test_ranking_metrics(source: Path, artifact: Artifact) -> None:
    """Measure a ranking whose relevant document is the one with the highest score, and a ranking whose relevant
    document is the one with the lowest score.
    """
    order = np.argsort(-logits(source, [(QUERY, text) for text in DOCUMENTS])).tolist()
    best, worst = DOCUMENTS[order[0]], DOCUMENTS[order[-1]]
    for right, expected in ((best, 1.0), (worst, 1 / len(DOCUMENTS))):
        rows = [
            {"query": QUERY, "positive": right, "negative": [document for document in DOCUMENTS if document != right]}
        ]
        report = accel.evaluate(artifact, rows, metric="mrr@10", against=source)
        assert report.value == pytest.approx(expected)
        assert report.comparison is not None
        assert report.comparison.agreement == 1.0


def test_invalid_rankings_are_refused(artifact: Artifact, tiny_artifact: Callable[..., Artifact]) -> None:
    with pytest.raises(TaskError, match="exactly one label"):
        accel.ORTModelForSequenceClassification(tiny_artifact()).rank(QUERY, DOCUMENTS)
    model = accel.ORTModelForSequenceClassification(artifact)
    with pytest.raises(InputError, match="needs a list of strings"):
        model.rank(QUERY, "the bank")
    with pytest.raises(InputError, match="list of text pairs"):
        model.predict([QUERY, "one", "two"])
    with pytest.raises(InputError, match="irrelevant documents"):
        accel.evaluate(
            artifact,
            [
                {"query": QUERY, "positive": ["the bank"], "negative": []},
                {"query": "a", "positive": ["b"], "negative": ["c"]},
            ],
        )
