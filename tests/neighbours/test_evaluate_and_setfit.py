"""Our models where `evaluate` and SetFit expect transformers' or sentence-transformers' ones."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import accel
from accel.testing.models import save_tiny

ROWS = {
    "text": ["where is my card", "the account is not open", "lost money", "how can you help me"],
    "label": [0, 1, 2, 0],
}


def test_evaluator(tmp_path: Path) -> None:
    evaluate = pytest.importorskip("evaluate", reason="needs evaluate")
    datasets = pytest.importorskip("datasets")
    import transformers

    source = save_tiny(tmp_path / "bert", "bert")
    data = datasets.Dataset.from_dict(ROWS)
    mapping = {"LABEL_0": 0, "LABEL_1": 1, "LABEL_2": 2}
    # Metrics by name are fetched from the Hub; one that is here works offline.
    metric = tmp_path / "share" / "share.py"
    metric.parent.mkdir()
    metric.write_text(_METRIC, encoding="utf-8")
    evaluator = evaluate.evaluator("text-classification")
    pipes = [
        accel.pipeline("text-classification", model=accel.ORTModelForSequenceClassification.from_pretrained(source)),
        transformers.pipeline("text-classification", model=str(source), device="cpu"),
    ]
    found = [
        evaluator.compute(
            model_or_pipeline=pipe,
            data=data,
            metric=evaluate.load(str(metric)),
            input_column="text",
            label_column="label",
            label_mapping=mapping,
        )["share"]
        for pipe in pipes
    ]
    assert found[0] == found[1]
    predicted = [mapping[one["label"]] for one in pipes[1](ROWS["text"])]
    assert found[0] == np.mean(np.array(predicted) == np.array(ROWS["label"]))


_METRIC = """
import datasets, evaluate

class Share(evaluate.Metric):
    def _info(self):
        features = datasets.Features({"predictions": datasets.Value("int32"), "references": datasets.Value("int32")})
        return evaluate.MetricInfo(description="share of equal labels", citation="", features=features)

    def _compute(self, predictions, references):
        return {"share": sum(p == r for p, r in zip(predictions, references)) / len(predictions)}
"""


def test_setfit(tmp_path: Path) -> None:
    pytest.importorskip("optimum.onnxruntime", reason="needs distributions/sentence-transformers", exc_type=ImportError)
    st = pytest.importorskip("sentence_transformers", reason="needs sentence-transformers")
    modules = pytest.importorskip("sentence_transformers.models")
    try:
        import setfit
    except ImportError as error:
        pytest.skip(f"setfit does not import beside this transformers: {error}")
    from sklearn.linear_model import LogisticRegression

    transformer = modules.Transformer(str(save_tiny(tmp_path / "bert", "bert", "feature-extraction")))
    pooling = modules.Pooling(transformer.get_embedding_dimension(), "mean")
    st.SentenceTransformer(modules=[transformer, pooling], device="cpu").save(str(tmp_path / "saved"))

    def classifier(**settings: Any) -> Any:
        body = st.SentenceTransformer(str(tmp_path / "saved"), device="cpu", **settings)
        head = LogisticRegression(max_iter=200)
        model = setfit.SetFitModel(model_body=body, model_head=head, labels=["a", "b", "c"])
        head.fit(body.encode(ROWS["text"]), ROWS["label"])
        return model

    plain, accelerated = classifier(), classifier(backend="onnx")
    np.testing.assert_allclose(
        np.asarray(accelerated.predict_proba(ROWS["text"])), np.asarray(plain.predict_proba(ROWS["text"])), atol=1e-4
    )
    assert list(accelerated.predict(ROWS["text"])) == list(plain.predict(ROWS["text"]))
    assert json.dumps(list(map(str, accelerated.predict(ROWS["text"]))))
