"""Tests of quantization with data: recorded calibration, measured accuracy, and the search within an accuracy budget."""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from typer.testing import CliRunner

import accel
from accel.artifact import Artifact
from accel.backends import registry
from accel.cli import app
from accel.config import QuantizeConfig
from accel.errors import BudgetError, ConfigError, InputError, QuantizeError
from accel.measuring.accuracy.evaluation import EvaluationSet
from accel.measuring.latency.results import Cell, VariantResult
from accel.measuring.statistics import summarize
from accel.stages.export import export
from accel.testing.models import tiny_model, tiny_tokenizer
from accel.tuning.quantize_within_budget import Attempt
from accel.tuning.search_data import Measurement, TriedCandidate
from accel.tuning.timer import CandidateTimer

WORDS = "my card is not here where lost new old money bank pay top up app phone pin code help please".split()
SENSITIVE = "bert.encoder.layer.1.attention.output.dense"
OUTLIER = 1e5


def sensitive_model() -> Any:
    """Return a tiny BERT with unchanged outputs and one layer whose weights cannot be quantized to 8 bits.

    One input channel of this layer has weights that are 100,000 times larger and activations that are 100,000 times
    smaller. The scale of each output channel follows the large weight, so the other weights are rounded to zero.
    """
    model = tiny_model("bert")
    attention = model.bert.encoder.layer[1].attention
    with torch.no_grad():
        for parameter in (attention.self.value.weight, attention.self.value.bias):
            parameter[3] /= OUTLIER
        attention.output.dense.weight[:, 3] *= OUTLIER
        # Increase the effect of the layer on the outputs.
        attention.output.dense.weight *= 2
    return model


@pytest.fixture(scope="module")
def rows() -> list[dict[str, Any]]:
    """Return texts that are labeled with the sensitive model's own predictions, so that its accuracy is 1."""
    generator = np.random.default_rng(0)
    model, tokenizer, labelled = sensitive_model(), tiny_tokenizer(), []
    for _ in range(200):
        text = " ".join(generator.choice(WORDS, size=generator.integers(3, 12)))
        with torch.inference_mode():
            labelled.append({"text": text, "label": int(model(**tokenizer(text, return_tensors="pt")).logits.argmax())})
    assert len({row["label"] for row in labelled}) > 1
    return labelled


@pytest.fixture(scope="module")
def sensitive(tmp_path_factory: pytest.TempPathFactory) -> Artifact:
    return export(
        sensitive_model(), tmp_path_factory.mktemp("sensitive") / "float", atol=1e-3, processor=tiny_tokenizer()
    )


def _result(rounds: Sequence[float]) -> VariantResult:
    cell = Cell(
        workload="rows", batch=1, sequence=None, latency=summarize(rounds), throughput=1.0, processor_ms=1.0, ratio=None,
        milliseconds=tuple((ms,) for ms in rounds),
    )  # fmt: skip
    return VariantResult(name="", cells=(cell,))


def timed(monkeypatch: pytest.MonkeyPatch, anchor: Sequence[float], *others: Sequence[float]) -> list[int]:
    """Replace measured latencies by given latencies for each round: first of the float artifact, then of the candidates
    in order.

    The function returns a list, to which each measurement appends the number of rows in a call.
    """
    sizes: list[int] = []

    def finals(self: CandidateTimer, group: Sequence[TriedCandidate], **named: Any) -> None:
        sizes.append(len(self._load.call["input_ids"]))
        base = _result(anchor)
        for tried, rounds in zip(group, itertools.cycle(others)):
            tried.final = Measurement(result=_result(rounds), anchor=base)

    monkeypatch.setattr(CandidateTimer, "finals", finals)
    return sizes


@pytest.fixture
def no_timing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Replace measured latencies: the float artifact takes 3 ms, and the candidates take 2, 1, 2, 1, ... ms."""
    timed(monkeypatch, [3.0] * 6, [2.0] * 6, [1.0] * 6)


def only(monkeypatch: pytest.MonkeyPatch, *schemes: str) -> None:
    """Make the `cpu` backend declare only the given quantization schemes."""
    spec = registry.describe("cpu")
    changed = replace(
        spec,
        capabilities=tuple(replace(c, schemes=schemes) if c.stage == "quantize" else c for c in spec.capabilities),
    )
    monkeypatch.setattr(registry, "describe_all", lambda: ((changed,), {}))
    monkeypatch.setattr(registry, "describe", lambda name: changed)


class TestBudget:
    @pytest.fixture(scope="class")
    @classmethod
    def quantized_artifact(
        cls, sensitive: Artifact, rows: list[dict[str, Any]], tmp_path_factory: pytest.TempPathFactory
    ) -> Artifact:
        """Return the result of the search for the sensitive model."""
        out = tmp_path_factory.mktemp("found") / "out"
        return accel.quantize(sensitive, out, scheme="dynamic-int8", max_drop=4, data=rows, measure_speed=False)

    @pytest.mark.thorough
    def test_only_the_sensitive_layer_stays_in_float(
        self, quantized_artifact: Artifact, rows: list[dict[str, Any]]
    ) -> None:
        table = [Attempt(**trial) for trial in quantized_artifact.manifest.steps[-1].report["search"]["table"]]
        assert table[0].float_layers == ()
        assert table[0].drop is not None
        assert table[0].drop > 4, "the planted layer does no harm: the test shows nothing"
        chosen = next(trial for trial in table if trial.chosen)
        assert list(chosen.float_layers) == [SENSITIVE]
        assert chosen.inside
        assert chosen.drop is not None
        assert chosen.drop <= 4
        assert accel.evaluate(quantized_artifact.path, rows).value == pytest.approx(1 - chosen.drop / 100)

    @pytest.mark.thorough
    def test_ranking_names_the_sensitive_layer_first(self, quantized_artifact: Artifact) -> None:
        harm = quantized_artifact.manifest.steps[-1].report["search"]["sensitivity"]["dynamic-int8"]
        first, second = list(harm.values())[:2]
        assert next(iter(harm)) == SENSITIVE
        assert first > 5 * second

    def test_impossible_budget_lists_attempts_and_writes_nothing(
        self,
        sensitive: Artifact,
        rows: list[dict[str, Any]],
        tmp_path: Path,
        monkeypatch: pytest.MonkeyPatch,
    ) -> None:
        only(monkeypatch, "dynamic-int8", "static-int8")
        # Report for each quantized graph that it loses more accuracy than the budget allows.
        real = EvaluationSet.measure

        def measure(self: Any, model: Any, purpose: str = "") -> Any:
            report = real(self, model, purpose)
            return report if "float artifact" in purpose else replace(report, value=report.value - 0.5)

        monkeypatch.setattr(EvaluationSet, "measure", measure)
        with pytest.raises(BudgetError, match="The best attempt is dynamic-int8") as error:
            accel.quantize(sensitive, tmp_path / "out", max_drop=0.3, data=rows)
        text = str(error.value)
        assert "loses more than 0.3 points of accuracy" in text
        assert "7 layers in float" in text, "at most half of the 14 layers go back to float"
        assert "static-int8: not tried: it needs calibration data" in text
        assert list(tmp_path.iterdir()) == []

    def test_fastest_candidate_within_budget_is_kept(
        self,
        tiny_artifact: Callable[..., Artifact],
        rows: list[dict[str, Any]],
        tmp_path: Path,
        monkeypatch: pytest.MonkeyPatch,
        no_timing: None,
    ) -> None:
        only(monkeypatch, "dynamic-int8", "weight-int8")
        quantized = accel.quantize(tiny_artifact(), tmp_path / "out", max_drop=100, data=rows, columns={"text": "text"})
        table = [Attempt(**trial) for trial in quantized.manifest.steps[-1].report["search"]["table"]]
        assert [(trial.scheme, trial.median_ms, trial.chosen) for trial in table] == [
            ("dynamic-int8", 2.0, False),
            ("weight-int8", 1.0, True),
        ]
        assert quantized.manifest.quantization is not None
        assert quantized.manifest.quantization.scheme == "weight-int8"
        assert quantized.manifest.steps[-1].report["search"]["float_ms"] == 3.0

    def test_only_the_selected_artifact_is_left(
        self,
        tiny_artifact: Callable[..., Artifact],
        rows: list[dict[str, Any]],
        tmp_path: Path,
        no_timing: None,
    ) -> None:
        quantized = accel.quantize(tiny_artifact(), tmp_path / "out", scheme="dynamic-int8", max_drop=100, data=rows)
        assert quantized.path == tmp_path / "out"
        assert [path.name for path in tmp_path.iterdir()] == ["out"]
        assert not any(path.is_dir() for path in quantized.path.iterdir())
        assert Artifact.load(quantized.path).digest == quantized.digest

    @pytest.mark.thorough
    def test_measured_latencies_are_recorded(
        self, tiny_artifact: Callable[..., Artifact], rows: list[dict[str, Any]], tmp_path: Path
    ) -> None:
        quantized = accel.quantize(tiny_artifact(), tmp_path / "out", scheme="dynamic-int8", max_drop=100, data=rows)
        search = quantized.manifest.steps[-1].report["search"]
        assert search["float_ms"] > 0
        assert search["table"][0]["median_ms"] > 0


class TestMeasuredAsRun:
    """Dynamic quantization computes activation ranges in each call, so the number of rows in a call changes the
    outputs.
    """

    def test_accuracy_and_speed_are_measured_with_one_row_per_call(
        self,
        tiny_artifact: Callable[..., Artifact],
        rows: list[dict[str, Any]],
        tmp_path: Path,
        monkeypatch: pytest.MonkeyPatch,
    ) -> None:
        sizes = timed(monkeypatch, [1.0] * 6, [1.0] * 6)
        how: dict[str, Any] = {"scheme": "dynamic-int8", "max_drop": 100, "data": rows}
        for size, batch_options in ((1, {}), (8, {"batch_size": 8})):
            quantized = accel.quantize(tiny_artifact(), tmp_path / f"out-{size}", **how, **batch_options)
            step = quantized.manifest.steps[-1]
            assert step.validation["accuracy"]["batch_size"] == step.report["search"]["batch_size"] == size
            report = accel.evaluate(quantized, rows)
            assert (report.batch_size, report.value) == (size, step.validation["accuracy"]["value"])
        assert sizes == [1, 8]

    def test_dynamic_quantization_is_evaluated_with_one_row_per_call(
        self, tiny_artifact: Callable[..., Artifact], rows: list[dict[str, Any]], tmp_path: Path
    ) -> None:
        dynamic = accel.quantize(tiny_artifact(), tmp_path / "out", scheme="dynamic-int8")
        weights = accel.quantize(tiny_artifact(), tmp_path / "weights", scheme="weight-int8")
        batch_sizes = [accel.evaluate(variant, rows[:8]).batch_size for variant in (dynamic, weights, tiny_artifact())]
        assert batch_sizes == [1, 32, 32]
        assert accel.evaluate(dynamic, rows[:8], batch_size=4).batch_size == 4

    def test_simpler_recipe_is_kept_if_latencies_are_equal(
        self,
        tiny_artifact: Callable[..., Artifact],
        rows: list[dict[str, Any]],
        tmp_path: Path,
        monkeypatch: pytest.MonkeyPatch,
        caplog: pytest.LogCaptureFixture,
    ) -> None:
        only(monkeypatch, "dynamic-int8", "weight-int8")
        timed(monkeypatch, [1.0] * 6, [1.0] * 6, [1.0, 0.97, 1.02, 0.96, 1.01, 0.98])
        quantized = accel.quantize(tiny_artifact(), tmp_path / "out", max_drop=100, data=rows)
        assert quantized.manifest.quantization is not None
        assert quantized.manifest.quantization.scheme == "dynamic-int8", "it is declared first, and no slower"
        assert "not faster than the float model" in caplog.text
        table = [Attempt(**trial) for trial in quantized.manifest.steps[-1].report["search"]["table"]]
        assert "times float 1.00 (1.00 to 1.00) <- kept" in str(table[0])


class TestBadBudgets:
    def test_budget_without_data_raises(self, tiny_artifact: Callable[..., Artifact], tmp_path: Path) -> None:
        with pytest.raises(ConfigError, match="An accuracy budget needs labelled rows"):
            accel.quantize(tiny_artifact(), tmp_path / "out", max_drop=1)

    @pytest.mark.parametrize("budget", [-1.0, float("nan"), float("inf")])
    def test_budget_must_be_a_finite_number(
        self, tiny_artifact: Callable[..., Artifact], tmp_path: Path, rows: list[dict[str, Any]], budget: float
    ) -> None:
        with pytest.raises(ConfigError, match="max_drop"):
            accel.quantize(tiny_artifact(), tmp_path / "out", max_drop=budget, data=rows)

    def test_unlabelled_data_writes_nothing(self, tiny_artifact: Callable[..., Artifact], tmp_path: Path) -> None:
        with pytest.raises(InputError, match="is the 'label' column"):
            accel.quantize(tiny_artifact(), tmp_path / "out", max_drop=1, data=[{"text": "my card"}])
        assert list(tmp_path.iterdir()) == []

    def test_quantized_artifacts_are_refused(
        self, tiny_artifact: Callable[..., Artifact], tmp_path: Path, rows: list[dict[str, Any]]
    ) -> None:
        quantized = accel.quantize(tiny_artifact(), tmp_path / "out")
        with pytest.raises(QuantizeError, match="already quantized"):
            accel.quantize(quantized, tmp_path / "again", max_drop=1, data=rows)


class TestRecords:
    def test_quantizer_errors_are_raised_without_a_budget(
        self, tiny_artifact: Callable[..., Artifact], tmp_path: Path, rows: list[dict[str, Any]]
    ) -> None:
        with pytest.raises(QuantizeError, match="needs calibration data") as error:
            accel.quantize(tiny_artifact(), tmp_path / "out", scheme="static-int8", data=rows)
        assert not isinstance(error.value, BudgetError)
        assert list(tmp_path.iterdir()) == []

    def test_accuracy_is_recorded_without_a_budget(
        self, tiny_artifact: Callable[..., Artifact], tmp_path: Path, rows: list[dict[str, Any]]
    ) -> None:
        quantized = accel.quantize(tiny_artifact(), tmp_path / "out", data=rows, measure_speed=False)
        accuracy = quantized.manifest.steps[-1].validation["accuracy"]
        assert accuracy["drop"] == pytest.approx(100 * (accuracy["float"] - accuracy["value"]))
        assert accuracy["drop_interval"][0] <= accuracy["drop"] <= accuracy["drop_interval"][1]
        assert accuracy["data"]["n"] == 200
        assert "search" not in quantized.manifest.steps[-1].report

    @pytest.fixture
    def reading(self, monkeypatch: pytest.MonkeyPatch) -> list[int]:
        """Make the quantizer read its calibration batches for all schemes. Return a list, to which the quantizer
        appends the batch sizes.
        """
        batch_sizes: list[int] = []
        quantizer = type(registry.load(registry.describe("cpu")).quantizer())
        real = quantizer.quantize

        def quantize(self: Any, artifact: Artifact, *, calibration: Any, **kwargs: Any) -> Artifact:
            feeds: Iterable[Mapping[str, torch.Tensor]] = calibration or ()
            batch_sizes.extend(len(batch["input_ids"]) for batch in feeds)
            return real(self, artifact, calibration=calibration, **kwargs)

        monkeypatch.setattr(quantizer, "quantize", quantize)
        return batch_sizes

    def test_calibration_sample_is_recorded_if_it_was_read(
        self,
        tiny_artifact: Callable[..., Artifact],
        tmp_path: Path,
        rows: list[dict[str, Any]],
        reading: list[int],
    ) -> None:
        file = tmp_path / "rows.json"
        file.write_text(json.dumps(rows), encoding="utf-8")
        config = QuantizeConfig(samples=20, seed=4)
        quantized = accel.quantize(tiny_artifact(), tmp_path / "out", calibration=file, config=config)
        assert sum(reading) == 20
        assert quantized.manifest.quantization is not None
        record = quantized.manifest.quantization.calibration
        assert record is not None
        assert {"source": "rows.json", "n": 20, "total": 200, "seed": 4}.items() <= record.items()
        assert Artifact.load(quantized.path).manifest.quantization == quantized.manifest.quantization

    def test_unread_calibration_data_is_not_recorded(
        self, tiny_artifact: Callable[..., Artifact], tmp_path: Path, rows: list[dict[str, Any]]
    ) -> None:
        quantized = accel.quantize(tiny_artifact(), tmp_path / "out", calibration=rows, scheme="dynamic-int8")
        assert quantized.manifest.quantization is not None
        assert quantized.manifest.quantization.calibration is None


class TestCommands:
    @pytest.fixture
    def data(self, tmp_path: Path, rows: list[dict[str, Any]]) -> Path:
        file = tmp_path / "rows.csv"
        lines = [f"{row['text']},{row['label']}" for row in rows]
        file.write_text("\n".join(["phrase,outcome", *lines]), encoding="utf-8")
        return file

    def run(self, *arguments: Any) -> Any:
        return CliRunner().invoke(app, [str(argument) for argument in arguments])

    def test_evaluate(self, sensitive: Artifact, data: Path) -> None:
        columns = ("--column", "text=phrase", "--column", "label=outcome")
        result = self.run("evaluate", sensitive.path, "--data", data, *columns, "--against", sensitive.path, "--json")
        assert result.exit_code == 0
        values = json.loads(result.stdout)
        assert (values["value"], values["comparison"]["agreement"]) == (1.0, 1.0)
        text = self.run("evaluate", sensitive.path, "--data", data, *columns).stdout
        assert text.startswith("accuracy: accuracy 1.0000\n200 rows of rows.csv, cpu (float32), 32 rows a call")

    def test_evaluate_refuses_unknown_columns(self, sensitive: Artifact, data: Path) -> None:
        result = self.run("evaluate", sensitive.path, "--data", data, "--column", "text")
        assert result.exit_code == 2
        assert "does not have the form NAME=VALUE" in result.stderr
        result = self.run("evaluate", sensitive.path, "--data", data, "--metric", "accurracy", "--json")
        assert result.exit_code == 2
        assert "Did you mean 'accuracy'" in json.loads(result.stdout)["error"]

    def test_quantize_within_a_budget(self, sensitive: Artifact, data: Path, tmp_path: Path, no_timing: None) -> None:
        result = self.run(
            "quantize", sensitive.path, tmp_path / "out", "--scheme", "dynamic-int8", "--max-drop", 4, "--data", data,
            "--column", "text=phrase", "--column", "label=outcome",
        )  # fmt: skip
        assert result.exit_code == 0, result.output
        assert f"1 layers in float ({SENSITIVE})" in result.stdout
        assert "<- kept" in result.stdout

    def test_quantize_reports_unmeasured_accuracy(self, sensitive: Artifact, tmp_path: Path) -> None:
        result = self.run("quantize", sensitive.path, tmp_path / "out")
        assert result.exit_code == 0
        assert "accuracy was not measured" in result.stdout

    def test_quantize_without_result_in_budget_exits_1(self, sensitive: Artifact, data: Path, tmp_path: Path) -> None:
        result = self.run(
            "quantize", sensitive.path, tmp_path / "out", "--scheme", "static-int8", "--max-drop", 0, "--data", data,
            "--column", "text=phrase", "--column", "label=outcome", "--json",
        )  # fmt: skip
        assert result.exit_code == 1
        assert json.loads(result.stdout)["type"] == "BudgetError"
        assert not (tmp_path / "out").exists()

    def test_optimize(self, sensitive: Artifact, tmp_path: Path) -> None:
        result = self.run("optimize", sensitive.path, tmp_path / "out", "--level", "O2", "--json")
        assert result.exit_code == 0, result.output
        assert json.loads(result.stdout)["steps"][-1]["stage"] == "optimize"
        assert self.run("optimize", sensitive.path, sensitive.path).exit_code == 1
        assert self.run("optimize", sensitive.path, tmp_path / "other", "--level", "O9").exit_code == 2
