"""Tests of accel's models in `evaluate` and SetFit, which expect models of transformers or sentence-transformers."""

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


@pytest.mark.thorough
def test_evaluator(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    evaluate = pytest.importorskip("evaluate", reason="the package evaluate is not installed")
    datasets = pytest.importorskip("datasets")
    import transformers

    # evaluate 0.4.6 checks for a class that transformers 5 removed, for every pipeline. The same check also fails for
    # transformers' own pipelines.
    monkeypatch.setattr(transformers, "TFPreTrainedModel", transformers.PreTrainedModel, raising=False)
    source = save_tiny(tmp_path / "bert", "bert")
    data = datasets.Dataset.from_dict(ROWS)
    mapping = {"LABEL_0": 0, "LABEL_1": 1, "LABEL_2": 2}
    # Use a local metric script, because `evaluate` downloads metrics that are given by name.
    metric = tmp_path / "share" / "share.py"
    metric.parent.mkdir()
    metric.write_text(_METRIC, encoding="utf-8")
    evaluator = evaluate.evaluator("text-classification")
    pipes = [
        accel.pipeline("text-classification", model=accel.ORTModelForSequenceClassification.from_pretrained(source)),
        transformers.pipeline("text-classification", model=str(source), device="cpu"),
    ]
    accuracies = [
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
    assert accuracies[0] == accuracies[1]
    predicted = [mapping[prediction["label"]] for prediction in pipes[1](ROWS["text"])]
    assert accuracies[0] == np.mean(np.array(predicted) == np.array(ROWS["label"]))


CLASSES = {"LABEL_0": 0, "LABEL_1": 1, "LABEL_2": 2}


@pytest.fixture(scope="module")
def share(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Load a local metric script, because `evaluate` downloads metrics that are given by name."""
    evaluate = pytest.importorskip("evaluate", reason="the package evaluate is not installed")
    metric = tmp_path_factory.mktemp("share") / "share.py"
    metric.write_text(_METRIC, encoding="utf-8")
    return evaluate.load(str(metric))


@pytest.mark.parametrize(
    "subject",
    ["model", *(pytest.param(name, marks=pytest.mark.thorough) for name in ("folder", "pipeline", "PyTorch"))],
)
def test_text_evaluator(subject: str, share: Any, tmp_path: Path) -> None:
    import datasets
    import transformers

    from accel.compat.evaluate import evaluator

    source = save_tiny(tmp_path / "bert", "bert")
    tokenizer = transformers.AutoTokenizer.from_pretrained(source)
    original = transformers.AutoModelForSequenceClassification.from_pretrained(source)
    settings: dict[str, Any] = {
        "model": lambda: {"model_or_pipeline": accel.ORTModelForSequenceClassification.from_pretrained(source)},
        "folder": lambda: {"model_or_pipeline": str(source)},
        "pipeline": lambda: {"model_or_pipeline": accel.pipeline("text-classification", model=str(source))},
        "PyTorch": lambda: {"model_or_pipeline": original, "tokenizer": tokenizer},
    }[subject]()
    results = evaluator("text-classification").compute(
        data=datasets.Dataset.from_dict(ROWS), metric=share, label_mapping=CLASSES, **settings
    )
    predicted = original(**tokenizer(ROWS["text"], padding=True, return_tensors="pt")).logits.argmax(-1)
    assert results["share"] == np.mean(predicted.numpy() == np.array(ROWS["label"]))
    assert results["samples_per_second"] > 0


@pytest.mark.thorough
def test_image_evaluator(share: Any, tmp_path: Path) -> None:
    import datasets
    from PIL import Image

    from accel.compat.evaluate import evaluator

    source = save_tiny(tmp_path / "vit", "vit", "image-classification")
    draw = np.random.default_rng(0)
    pictures = [Image.fromarray(draw.integers(0, 255, (32, 32, 3), np.uint8)) for _ in range(3)]
    data = datasets.Dataset.from_dict({"image": pictures, "label": [0, 1, 2]}).cast_column("image", datasets.Image())
    results = evaluator("image-classification").compute(
        accel.ORTModelForImageClassification.from_pretrained(source), data=data, metric=share, label_mapping=CLASSES
    )
    pipe = accel.pipeline("image-classification", model=str(source))
    predicted = [CLASSES[pipe(picture, top_k=1)[0]["label"]] for picture in pictures]
    assert results["share"] == np.mean(np.array(predicted) == np.arange(3))


@pytest.mark.thorough
def test_evaluator_refuses_a_pipeline_of_another_task(share: Any, tmp_path: Path) -> None:
    import datasets

    from accel.compat.evaluate import evaluator
    from accel.errors import ConfigError

    pipe = accel.pipeline("fill-mask", model=str(save_tiny(tmp_path / "bert", "bert", "fill-mask")))
    with pytest.raises(ConfigError, match="with the task 'fill-mask'"):
        evaluator("text-classification").compute(pipe, data=datasets.Dataset.from_dict(ROWS), metric=share)


_METRIC = """
import datasets
import evaluate

class Share(evaluate.Metric):
    def _info(self):
        features = datasets.Features({"predictions": datasets.Value("int32"), "references": datasets.Value("int32")})
        return evaluate.MetricInfo(description="share of equal labels", citation="", features=features)

    def _compute(self, predictions, references):
        return {"share": sum(p == r for p, r in zip(predictions, references)) / len(predictions)}
"""


def test_setfit(tmp_path: Path) -> None:
    pytest.importorskip(
        "optimum.onnxruntime",
        reason="the package of distributions/sentence-transformers is not installed",
        exc_type=ImportError,
    )
    st = pytest.importorskip("sentence_transformers", reason="the package sentence-transformers is not installed")
    modules = pytest.importorskip("sentence_transformers.models")
    try:
        import setfit
    except ImportError as error:
        pytest.skip(f"setfit cannot be imported with the installed version of transformers: {error}")
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
