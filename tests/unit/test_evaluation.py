"""Tests of metrics, of confidence intervals, and of the evaluation of models on labeled rows."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from scipy import optimize, stats
from sklearn import metrics as sklearn_metrics

import accel
from accel.artifact import Artifact
from accel.errors import ArtifactNotFoundError, ConfigError, InputError, PluginError, TaskError
from accel.measuring.accuracy.comparison import bootstrap, difference_interval, mcnemar, paired_proportions
from accel.measuring.accuracy.metrics import LanguageModelPrediction, metric_of_sums, ratio
from accel.measuring.accuracy.predictors import ClassPredictor, metric_for, predictor_for
from accel.tasks.feature_extraction import SimilarityPredictor
from accel.tasks.question_answering import AnswerPredictor
from accel.tasks.text_classification import RegressionPredictor
from accel.tasks.text_generation import NextTokenPredictor
from accel.tasks.token_classification import TagPredictor, entities
from accel.testing.models import tiny_model, tiny_tokenizer

WORDS = "my card is not here where lost new old money bank pay top up app phone pin code help please".split()


def texts(count: int, seed: int = 0) -> list[str]:
    generator = np.random.default_rng(seed)
    return [" ".join(generator.choice(WORDS, size=generator.integers(2, 12))) for _ in range(count)]


def test_numeric_predictions_have_no_agreement() -> None:
    predictor = object.__new__(ClassPredictor)
    assert predictor.agreement([1, 2], [1, 3]) == 0.5
    assert predictor.agreement([0.25, 0.5], [0.25, 0.5]) is None
    assert predictor.agreement([np.float32(0.5)], [np.float32(0.5)]) is None


def labelled_by(model: Any, sentences: list[str]) -> list[str]:
    """Return the model's own predictions as labels, so that the accuracy is known."""
    tokenizer, labels = tiny_tokenizer(), []
    for text in sentences:
        with torch.inference_mode():
            logits = model(**tokenizer(text, return_tensors="pt")).logits
        labels.append(model.config.id2label[int(logits.argmax())])
    return labels


class TestMetrics:
    truth = (0, 1, 2, 2, 1, 0, 2, 1, 0, 0)
    predicted = (0, 1, 2, 1, 1, 0, 0, 1, 2, 0)

    @pytest.mark.parametrize("classes", [2, 3])
    @pytest.mark.parametrize("name", list(ClassPredictor.metrics(3)))
    def test_class_metrics_equal_scikit_learns(self, name: str, classes: int) -> None:
        predictions, truth = ([min(number, classes - 1) for number in some] for some in (self.predicted, self.truth))
        metric = metric_for(name, ClassPredictor, classes=classes)
        measure, _, average = name.partition("_")
        if measure in ("accuracy", "matthews"):
            reference = {"accuracy": sklearn_metrics.accuracy_score, "matthews": sklearn_metrics.matthews_corrcoef}[
                measure
            ]
            expected = reference(truth, predictions)
        else:
            usual = "binary" if classes == 2 else "macro"
            expected = getattr(sklearn_metrics, f"{measure}_score")(truth, predictions, average=average or usual)
        assert metric.compute(predictions, truth) == {metric.key: pytest.approx(expected, abs=1e-12)}

    def test_correlations(self) -> None:
        scores, predictions = [0.0, 1.0, 2.0, 3.0, 4.0], [0.1, 0.4, 0.2, 0.8, 0.9]
        pearson = metric_for("pearson", SimilarityPredictor)
        expected = stats.pearsonr(predictions, scores)[0]
        assert pearson.compute(predictions, scores)["pearsonr"] == pytest.approx(expected)
        assert metric_for(None, SimilarityPredictor).compute(predictions, scores)["spearmanr"] == pytest.approx(0.9)

    @pytest.mark.parametrize(
        ("tags", "spans"),
        [
            ("O B-PER I-PER O", {("PER", 1, 2)}),
            ("B-PER B-PER", {("PER", 0, 0), ("PER", 1, 1)}),
            ("I-PER I-LOC", {("PER", 0, 0), ("LOC", 1, 1)}),
            ("B-PER I-LOC", {("PER", 0, 0), ("LOC", 1, 1)}),
            ("S-PER I-PER E-PER", {("PER", 0, 0), ("PER", 1, 2)}),
            ("PER PER O LOC", {("PER", 0, 1), ("LOC", 3, 3)}),
            ("O O", set()),
        ],
    )
    def test_entities_from_tags(self, tags: str, spans: set[tuple[str, int, int]]) -> None:
        assert entities(tags.split()) == spans

    def test_seqeval_counts_whole_entities(self) -> None:
        metric = metric_for(None, TagPredictor)
        scores = metric.compute([["B-PER", "O", "B-LOC"]], [["B-PER", "I-PER", "B-LOC"]])
        assert scores == {
            "overall_precision": 0.5,
            "overall_recall": 0.5,
            "overall_f1": 0.5,
            "overall_accuracy": pytest.approx(2 / 3),
        }

    def test_squad_ignores_articles_and_punctuation(self) -> None:
        metric = metric_for(None, AnswerPredictor)
        scores = metric.compute(["The bank!", "", "old money"], [["bank"], [], ["money", "old cash"]])
        assert scores["exact_match"] == pytest.approx(200 / 3)
        assert scores["f1"] == pytest.approx(100 * (1 + 1 + 2 / 3) / 3)

    def test_drop_is_in_points(self) -> None:
        assert metric_for("accuracy", ClassPredictor).drop(0.93, 0.9) == pytest.approx(3)
        assert metric_for("squad", AnswerPredictor).drop(93, 90) == pytest.approx(3)
        assert metric_for("mse", RegressionPredictor).drop(1.0, 1.5) == pytest.approx(0.5)

    def test_misspelled_metric_gets_a_suggestion(self, monkeypatch: pytest.MonkeyPatch) -> None:
        with pytest.raises(ConfigError, match="Did you mean 'accuracy'"):
            metric_for("acuracy", ClassPredictor)

    def test_metric_of_another_task_is_refused(self) -> None:
        with pytest.raises(ConfigError, match="metric 'squad' does not fit"):
            metric_for("squad", ClassPredictor)

    def test_perplexity(self) -> None:
        metric = metric_for(None, NextTokenPredictor)
        rows = [
            LanguageModelPrediction(6.0, 4, (0,) * 4),
            LanguageModelPrediction(2.0, 1, (0,)),
            LanguageModelPrediction(0.0, 0, ()),
        ]
        scores = metric.compute(rows, [None] * 3)
        assert scores["perplexity"] == pytest.approx(np.exp(8 / 5))
        assert metric.sums is not None
        assert metric.finish is not None
        assert metric.finish(metric.sums(rows, [None] * 3).sum(0)) == pytest.approx(scores["perplexity"])
        assert metric.drop(reference=10.0, value=10.5) == pytest.approx(0.5), "lower is better"
        with pytest.raises(ConfigError, match="metric 'perplexity' does not fit"):
            metric_for("perplexity", ClassPredictor)

    def test_hub_metric_scripts_require_trust_remote_code(self) -> None:
        with pytest.raises(ConfigError, match="trust_remote_code=True"):
            metric_for("somebody/metric", ClassPredictor)

    def test_metric_script_through_evaluate(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        evaluate = pytest.importorskip("evaluate")
        monkeypatch.setattr(evaluate.config, "HF_METRICS_CACHE", tmp_path / "cache")
        script = tmp_path / "off_by.py"
        script.write_text(
            "import datasets\n"
            "import evaluate\n"
            "class OffBy(evaluate.Metric):\n"
            "    def _info(self):\n"
            "        features = datasets.Features({n: datasets.Value('int64') for n in ('predictions', 'references')})\n"
            "        return evaluate.MetricInfo(description='', citation='', features=features)\n"
            "    def _compute(self, predictions, references):\n"
            "        return {'off_by': sum(abs(a - b) for a, b in zip(predictions, references)) / len(references)}\n",
            encoding="utf-8",
        )
        metric = metric_for(str(script), ClassPredictor)
        assert metric.compute([1, 2, 3], [1, 2, 5])[metric.key] == pytest.approx(2 / 3)


class TestIntervals:
    @pytest.mark.parametrize(("first_only", "second_only", "rows"), [(2, 12, 50), (5, 3, 40), (0, 4, 100)])
    def test_interval_ends_solve_the_score_equation(self, first_only: int, second_only: int, rows: int) -> None:
        def score(difference: float) -> float:
            """Return Tango's score statistic. Numeric maximization of the likelihood gives the nuisance parameter."""

            def loss(share: float) -> float:
                counts = (second_only, first_only, rows - first_only - second_only)
                shares = (share + difference, share, 1 - 2 * share - difference)
                return -sum(c * np.log(max(p, 1e-300)) for c, p in zip(counts, shares, strict=True))

            bounds = (max(0.0, -difference) + 1e-12, (1 - difference) / 2 - 1e-12)
            share = optimize.minimize_scalar(loss, bounds=bounds, method="bounded", options={"xatol": 1e-13}).x
            spread = np.sqrt(rows * (2 * share + difference * (1 - difference)))
            return float((second_only - first_only - rows * difference) / spread)

        interval = paired_proportions(first_only, second_only, rows)
        assert score(interval.low) == pytest.approx(1.959964, abs=1e-4)
        assert score(interval.high) == pytest.approx(-1.959964, abs=1e-4)

    def test_interval_without_discordant_rows_has_a_width(self) -> None:
        interval = paired_proportions(0, 0, 100)
        assert interval.low == pytest.approx(-interval.high)
        assert interval.high == pytest.approx(1.96**2 / (100 + 1.96**2), abs=1e-3)
        assert interval.p_value == 1.0

    def test_interval_coverage(self) -> None:
        generator = np.random.default_rng(0)
        rows, probabilities = 300, [0.95, 0.035, 0.015]
        inside = 0
        for _ in range(400):
            _, first_only, second_only = generator.multinomial(rows, probabilities)
            interval = paired_proportions(int(first_only), int(second_only), rows)
            inside += interval.low <= 0.015 - 0.035 <= interval.high
        # With 400 draws, the measured coverage of a 95 % interval is within three standard errors (0.033) of 0.95.
        assert inside / 400 == pytest.approx(0.95, abs=0.033)

    def test_mcnemar(self) -> None:
        assert mcnemar(1, 9) == pytest.approx(2 * (1 + 10) / 2**10)

    def test_bootstrap_agrees_with_the_score_interval(self) -> None:
        generator = np.random.default_rng(1)
        truth = generator.integers(0, 3, 2000)
        first = np.where(generator.random(2000) < 0.9, truth, (truth + 1) % 3)
        second = np.where(generator.random(2000) < 0.97, first, (first + 1) % 3)
        metric = metric_for("accuracy", ClassPredictor)
        exact = difference_interval(metric, list(first), list(second), list(truth))
        resampled = bootstrap(metric, list(first), list(second), list(truth))
        assert "Tango" in exact.method
        assert (resampled.low, resampled.high) == (
            pytest.approx(exact.low, abs=2e-3),
            pytest.approx(exact.high, abs=2e-3),
        )

    def test_bootstrap_is_paired(self) -> None:
        truth = [0, 1] * 50
        predictions = [0, 1, 1, 0] * 25
        metric = metric_for("f1", ClassPredictor, classes=2)
        same = difference_interval(metric, predictions, predictions, truth)
        assert (same.low, same.high) == (0.0, 0.0)

    def test_many_classes_need_little_memory(self) -> None:
        generator = np.random.default_rng(3)
        truth = generator.integers(0, 1000, 5000)
        metric = metric_for("f1", ClassPredictor, classes=1000)
        assert metric.sums is not None
        # A dense confusion matrix would need 120 MB.
        assert metric.sums(truth, truth).data.nbytes == 3 * 5000 * 8
        interval = bootstrap(metric, list(truth), list((truth + 1) % 1000), list(truth), resamples=50)
        assert (interval.low, interval.high) == (-1.0, -1.0)

    @pytest.mark.parametrize(
        "wrong", [lambda p, r: np.ones(len(r)), lambda p, r: np.ones((2, len(r))), lambda p, r: 3.0]
    )
    def test_sums_of_a_wrong_shape_are_refused(self, wrong: Any) -> None:
        metric = metric_of_sums("mine", wrong, {"mine": ratio})
        with pytest.raises(PluginError, match=r"'mine' must be an array of shape \(3, k\)"):
            metric.compute([1, 0, 1], [1, 0, 1])
        with pytest.raises(PluginError, match=r"shape \(6, k\)"):
            bootstrap(metric, [1, 0, 1], [1, 0, 1], [1, 0, 1])

    def test_bootstrap_of_a_metric_without_sums(self) -> None:
        generator = np.random.default_rng(2)
        truth = generator.normal(size=80)
        first, second = truth + 0.1 * generator.normal(size=80), truth + generator.normal(size=80)
        metric = metric_for("spearmanr", SimilarityPredictor)
        interval = bootstrap(metric, list(first), list(second), list(truth), resamples=200)
        assert -1 < interval.low < interval.high < 0


class TestEvaluate:
    @pytest.fixture(scope="class")
    @classmethod
    def rows(cls) -> list[dict[str, Any]]:
        sentences = texts(60)
        labels = labelled_by(tiny_model("bert"), sentences)
        # Every fifth label is wrong on purpose, so the expected accuracy is 0.8.
        other = {"LABEL_0": "LABEL_1", "LABEL_1": "LABEL_2", "LABEL_2": "LABEL_0"}
        return [
            {"text": text, "label": other[label] if i % 5 == 0 else label}
            for i, (text, label) in enumerate(zip(sentences, labels, strict=True))
        ]

    def test_known_accuracy(self, tiny_artifact: Callable[..., Artifact], rows: list[dict[str, Any]]) -> None:
        result = accel.evaluate(tiny_artifact(), rows)
        assert (result.metric, result.value, result.rows) == ("accuracy", 0.8, 60)
        assert len(result.predictions) == 60

    def test_order_and_batch_size_do_not_matter(
        self, tiny_artifact: Callable[..., Artifact], rows: list[dict[str, Any]]
    ) -> None:
        single, many = (accel.evaluate(tiny_artifact(), rows, batch_size=size).predictions for size in (1, 32))
        assert single == many

    def test_compares_with_the_original_on_the_same_rows(
        self, tiny_artifact: Callable[..., Artifact], rows: list[dict[str, Any]]
    ) -> None:
        comparison = accel.evaluate(tiny_artifact(), rows, against=True).comparison
        assert comparison is not None
        assert (comparison.value, comparison.difference, comparison.agreement) == (0.8, 0.0, 1.0)
        assert comparison.interval.low < 0 < comparison.interval.high

    def test_comparison_detects_another_model(
        self, tiny_artifact: Callable[..., Artifact], rows: list[dict[str, Any]]
    ) -> None:
        other = tiny_model("bert", seed=1)
        comparison = accel.evaluate(tiny_artifact(), rows, against=other).comparison
        assert comparison is not None
        assert comparison.difference == pytest.approx(0.8 - comparison.value)
        assert comparison.agreement is not None
        assert comparison.agreement < 0.8
        assert comparison.interval.p_value is not None
        assert comparison.interval.p_value < 0.05

    def test_pytorch_model_is_evaluated(self, rows: list[dict[str, Any]]) -> None:
        result = accel.evaluate(tiny_model("bert"), rows, processor=tiny_tokenizer())
        assert (result.value, result.backend) == (0.8, "pytorch")

    @pytest.mark.thorough
    def test_transformers_folder_is_evaluated(
        self, tiny_folder: Callable[..., Path], rows: list[dict[str, Any]]
    ) -> None:
        assert accel.evaluate(tiny_folder(), rows).value == 0.8

    def test_other_metrics(self, tiny_artifact: Callable[..., Artifact], rows: list[dict[str, Any]]) -> None:
        result = accel.evaluate(tiny_artifact(), rows, metric="f1", against=True)
        truth = [int(row["label"][-1]) for row in rows]
        assert result.value == pytest.approx(sklearn_metrics.f1_score(truth, result.predictions, average="macro"))
        assert result.comparison is not None
        assert result.comparison.interval.method.startswith("paired bootstrap")

    def test_comparison_has_the_fields_of_a_budget(
        self, tiny_artifact: Callable[..., Artifact], rows: list[dict[str, Any]]
    ) -> None:
        evaluation = accel.evaluate(tiny_artifact(), rows, against=True)
        compared = evaluation.comparison
        assert compared is not None
        assert (compared.own, compared.rows) == (evaluation.value, evaluation.rows)
        assert compared.excess(compared.drop - 0.25) == pytest.approx(0.25)
        assert compared.excess(compared.drop) == 0.0
        assert set(evaluation.to_dict()["comparison"]) == {
            "against", "value", "difference", "interval", "drop", "drop_interval", "agreement",
        }  # fmt: skip

    def test_result_is_json(self, tiny_artifact: Callable[..., Artifact], rows: list[dict[str, Any]]) -> None:
        result = accel.evaluate(tiny_artifact(), rows, against=True, samples=20, seed=3)
        values = json.loads(json.dumps(result.to_dict()))
        assert (values["data"]["n"], values["data"]["seed"], values["data"]["total"]) == (20, 3, 60)
        assert "predictions" not in values

    def test_rows_are_truncated_to_max_length(
        self, tiny_artifact: Callable[..., Artifact], rows: list[dict[str, Any]]
    ) -> None:
        short = accel.evaluate(tiny_artifact(), rows, max_length=3)
        assert short.max_length == 3
        assert short.value < 0.8

    def test_unknown_labels_raise(self, tiny_artifact: Callable[..., Artifact]) -> None:
        with pytest.raises(InputError, match="not in the label2id of the model's config: 'lost_card'"):
            accel.evaluate(tiny_artifact(), [{"text": "my card", "label": "lost_card"}])

    def test_missing_labels_raise(self, tiny_artifact: Callable[..., Artifact]) -> None:
        with pytest.raises(InputError, match="1 of 1 labels in rows are missing"):
            accel.evaluate(tiny_artifact(), [{"text": "my card", "label": -1}])

    def test_unknown_original_model_raises(self, tmp_path: Path, tiny_artifact: Callable[..., Artifact]) -> None:
        with pytest.raises(ArtifactNotFoundError, match="does not record the PyTorch model"):
            accel.evaluate(
                tiny_model("bert"), [{"text": "my card", "label": 1}], processor=tiny_tokenizer(), against=True
            )

    def test_invalid_confidence_raises(self, tiny_artifact: Callable[..., Artifact]) -> None:
        with pytest.raises(ConfigError, match="confidence is 95"):
            accel.evaluate(tiny_artifact(), [{"text": "my card", "label": 1}], confidence=95)


class TestOtherTasks:
    def test_token_classification(self, tiny_artifact: Callable[..., Artifact]) -> None:
        artifact = tiny_artifact("bert", "token-classification")
        model, tokenizer = tiny_model("bert", "token-classification"), tiny_tokenizer()
        rows = []
        for text in texts(12, seed=4):
            words = text.split()
            inputs = tokenizer(words, is_split_into_words=True, return_tensors="pt")
            with torch.inference_mode():
                best = model(**inputs).logits[0].argmax(-1)
            # Each word is one token. The tokens `[CLS]` and `[SEP]` are before and after the words.
            tags = [int(best[1 + i]) for i in range(len(words))]
            rows.append({"tokens": words, "ner_tags": tags})
        assert accel.evaluate(artifact, rows).value == 1.0
        rows[0]["ner_tags"] = [(tag + 1) % 3 for tag in rows[0]["ner_tags"]]
        changed = accel.evaluate(artifact, rows, metric="accuracy")
        total = sum(len(row["tokens"]) for row in rows)
        assert changed.value == pytest.approx(1 - len(rows[0]["tokens"]) / total)

    def test_wrong_number_of_tags_raises(self, tiny_artifact: Callable[..., Artifact]) -> None:
        rows = [{"tokens": ["my", "card"], "ner_tags": [1]}]
        with pytest.raises(InputError, match="2 words, but 1 tags"):
            accel.evaluate(tiny_artifact("bert", "token-classification"), rows)

    def test_question_answering(self, tiny_artifact: Callable[..., Artifact]) -> None:
        artifact = tiny_artifact("bert", "question-answering")
        contexts = texts(6, seed=5)
        questions = [{"question": "where is my card", "context": context} for context in contexts]
        answers = [prediction["answer"] for prediction in accel.pipeline(model=artifact.path)(questions)]
        rows = [{**row, "answers": {"text": [answer]}} for row, answer in zip(questions, answers, strict=True)]
        result = accel.evaluate(artifact, rows, against=True)
        assert result.scores == {"exact_match": 100.0, "f1": 100.0}
        assert result.comparison is not None
        assert result.comparison.agreement == 1.0
        rows[0]["answers"] = {"text": ["wolfgang"]}
        assert accel.evaluate(artifact, rows, metric="exact_match").value == pytest.approx(5 / 6)

    def test_embeddings(self, tiny_artifact: Callable[..., Artifact]) -> None:
        artifact = tiny_artifact("bert", "sentence-similarity")
        first, second = texts(12, seed=6), texts(12, seed=7)
        model = accel.ORTModelForFeatureExtraction.from_pretrained(artifact.path)
        a, b = (torch.from_numpy(model.encode(part)) for part in (first, second))
        cosine = torch.nn.functional.cosine_similarity(a, b).tolist()
        rows = [{"sentence1": x, "sentence2": y, "score": 5 * c} for x, y, c in zip(first, second, cosine, strict=True)]
        result = accel.evaluate(artifact, rows, against=True)
        assert result.value == pytest.approx(1.0)
        assert result.comparison is not None
        assert result.comparison.agreement is None
        assert accel.evaluate(artifact, rows, metric="pearson").value == pytest.approx(1.0)

    def test_image_classification(self, tiny_artifact: Callable[..., Artifact]) -> None:
        from PIL import Image

        artifact = tiny_artifact("vit", "image-classification")
        generator = np.random.default_rng(8)
        pictures = [Image.fromarray(generator.integers(0, 255, (32, 32, 3), dtype=np.uint8)) for _ in range(6)]
        processor = transformers.AutoImageProcessor.from_pretrained(artifact.path)
        with torch.inference_mode():
            logits = tiny_model("vit", "image-classification")(**processor(pictures, return_tensors="pt")).logits
        rows = [{"image": p, "label": int(i)} for p, i in zip(pictures, logits.argmax(-1), strict=True)]
        assert accel.evaluate(artifact, rows, batch_size=4).value == 1.0

    def test_correlation_of_equal_predictions_raises(self, tiny_artifact: Callable[..., Artifact]) -> None:
        rows = [{"sentence1": "my card", "sentence2": "my card", "score": 1.0}] * 3
        with pytest.raises(InputError, match="all references are equal"):
            accel.evaluate(tiny_artifact("bert", "sentence-similarity"), rows)

    @pytest.mark.thorough
    def test_masked_language_models_are_refused(self, tiny_artifact: Callable[..., Artifact]) -> None:
        with pytest.raises(ConfigError, match="cannot measure the accuracy of the task 'fill-mask'"):
            accel.evaluate(tiny_artifact("bert", "fill-mask"), [{"text": "my card"}])

    def test_multi_label_classification_is_refused(self) -> None:
        config = transformers.BertConfig(problem_type="multi_label_classification")
        with pytest.raises(TaskError, match="multi-label models"):
            predictor_for("text-classification", config)
