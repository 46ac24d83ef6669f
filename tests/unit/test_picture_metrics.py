"""Tests of image metrics. The expected values are computed by hand or by reference implementations."""

from __future__ import annotations

import numpy as np
import pytest

from accel.measuring.accuracy.comparison import ScoredRows, compare
from accel.measuring.accuracy.predictors import metric_for
from accel.tasks.depth_estimation import DepthErrorPredictor
from accel.tasks.image_segmentation import SegmentationPredictor
from accel.tasks.image_to_image import PsnrPredictor
from accel.tasks.object_detection import DetectionPredictor

METRICS = {
    name: metric
    for kind in (DetectionPredictor, SegmentationPredictor, DepthErrorPredictor, PsnrPredictor)
    for name, metric in kind.metrics(2).items()
}

SQUARE = (10.0, 10.0, 50.0, 50.0)


def at(score: float, *corners: float, label: int = 0) -> tuple[float, ...]:
    return (label, score, *corners)


def object_at(*corners: float, label: int = 0, crowd: int = 0) -> tuple[float, ...]:
    return (label, *corners, crowd)


def precision(predictions: list[list[tuple[float, ...]]], references: list[list[tuple[float, ...]]]) -> float:
    return METRICS["map_50"].compute(predictions, references)["map_50"]


class TestBoxes:
    def test_map_of_perfect_detections_is_1(self) -> None:
        scores = METRICS["map"].compute([[at(0.9, *SQUARE)]], [[object_at(*SQUARE)]])
        assert scores == pytest.approx({"map": 1.0, "map_50": 1.0, "map_75": 1.0})

    def test_overlap_decides_which_thresholds_count(self) -> None:
        # The predicted box of 40 x 30 is inside the true box of 40 x 40. The IoU is 0.75, which reaches 6 of the 10
        # thresholds.
        scores = METRICS["map"].compute([[at(0.9, 10, 10, 50, 40)]], [[object_at(*SQUARE)]])
        assert scores == pytest.approx({"map": 0.6, "map_50": 1.0, "map_75": 1.0})

    def test_wrong_box_with_higher_score_halves_precision(self) -> None:
        predicted = [[at(0.9, 60, 60, 90, 90), at(0.8, *SQUARE)]]
        assert precision(predicted, [[object_at(*SQUARE)]]) == pytest.approx(0.5)

    def test_an_object_is_matched_once(self) -> None:
        predicted = [[at(0.9, *SQUARE), at(0.8, *SQUARE)], [at(0.7, *SQUARE)]]
        # The three predictions for two objects are correct, wrong and correct. The precision is 1 up to a recall of
        # 1/2, and then 2/3.
        expected = (51 * 1 + 50 * 2 / 3) / 101
        assert precision(predicted, [[object_at(*SQUARE)]] * 2) == pytest.approx(expected)

    def test_wrong_label_gives_zero_precision(self) -> None:
        assert precision([[at(0.9, *SQUARE, label=1)]], [[object_at(*SQUARE)]]) == 0.0

    def test_classes_have_equal_weight(self) -> None:
        true = [[object_at(*SQUARE), object_at(60, 60, 90, 90, label=1)]]
        assert precision([[at(0.9, *SQUARE)]], true) == pytest.approx(0.5)

    def test_boxes_on_a_crowd_are_ignored(self) -> None:
        true = [[object_at(*SQUARE), object_at(60, 60, 90, 90, crowd=1)]]
        predicted = [[at(0.9, 60, 60, 75, 75), at(0.8, 70, 70, 90, 90), at(0.7, *SQUARE)]]
        assert precision(predicted, true) == pytest.approx(1.0)

    def test_matches_pycocotools(self) -> None:
        """The mAP equals the mAP of pycocotools on 40 images with four classes: pycocotools 2.0.11 computes 0.10818997,
        0.27711247 and 0.06834247.
        """
        draw = np.random.default_rng(0)
        references, predictions = [], []
        for _ in range(40):
            true, predicted = [], []
            for _ in range(draw.integers(0, 7)):
                label = int(draw.integers(4))
                (x, y), (w, h) = draw.uniform(0, 60, 2), draw.uniform(5, 40, 2)
                true.append((label, x, y, x + w, y + h, int(draw.random() < 0.12)))
                for _ in range(draw.integers(0, 3)):
                    n = draw.normal(0, 2.5, 4)
                    predicted_label = label if draw.random() < 0.85 else int(draw.integers(4))
                    score = float(np.round(draw.random(), 2))
                    predicted.append((predicted_label, score, x + n[0], y + n[1], x + w + abs(n[2]), y + h + abs(n[3])))
            for _ in range(draw.integers(0, 4)):
                label = int(draw.integers(4))
                (x, y), (w, h) = draw.uniform(0, 60, 2), draw.uniform(5, 40, 2)
                predicted.append((label, float(draw.random()), x, y, x + w, y + h))
            references.append(true)
            predictions.append(predicted)
        scores = METRICS["map"].compute(predictions, references)
        assert scores == pytest.approx({"map": 0.10818997, "map_50": 0.27711247, "map_75": 0.06834247}, abs=1e-8)

    def test_row_weights_equal_repeated_rows(self) -> None:
        predictions = [[at(0.9, *SQUARE)], [at(0.8, 60, 60, 90, 90)], [at(0.7, *SQUARE)]]
        references = [[object_at(*SQUARE)]] * 3
        value = METRICS["map"].resampled
        assert value is not None
        (weighted,) = value(predictions, references)(np.array([[2.0, 1.0, 0.0]]))
        drawn = [predictions[i] for i in (0, 0, 1)]
        assert weighted == pytest.approx(METRICS["map"].compute(drawn, references)["map"])

    def test_two_detectors_are_compared(self) -> None:
        good, bad = [[at(0.9, *SQUARE)]] * 20, [[at(0.9, *SQUARE)], [at(0.9, 60, 60, 90, 90)]] * 10
        references = [[object_at(*SQUARE)]] * 20
        metric = METRICS["map"]
        scored = [
            ScoredRows(
                value=metric.compute(predictions, references)["map"],
                scores={},
                predictions=tuple(predictions),
                seconds=1.0,
            )
            for predictions in (good, bad)
        ]
        comparison = compare(metric, *scored, references, against="good", agreement=None)
        low, high = comparison.drop_interval
        assert low <= comparison.drop <= high
        assert low > 0


class TestAreas:
    # Each entry is (class, intersection, predicted area, true area). The IoUs are 2/4, 6/8 and 0/1.
    ROWS = ([(0, 2, 3, 3), (1, 6, 7, 7)], [(2, 0, 1, 0)])

    def test_mean_iou(self) -> None:
        scores = METRICS["mean_iou"].compute(self.ROWS, [None, None])
        assert scores["mean_iou"] == pytest.approx((2 / 4 + 6 / 8 + 0) / 3)
        assert scores["pixel_accuracy"] == pytest.approx(8 / 10)
        assert scores["mean_accuracy"] == pytest.approx((2 / 3 + 6 / 7) / 2)

    def test_row_sums_give_the_metric(self) -> None:
        for name in SegmentationPredictor.metrics(2):
            metric = METRICS[name]
            assert metric.sums is not None
            assert metric.finish is not None
            value = metric.finish(metric.sums(self.ROWS, [None, None]).sum(0))
            assert value == pytest.approx(metric.compute(self.ROWS, [None, None])[name])


def test_depth_metrics() -> None:
    rows = [(0.1, 0.9, 4.0), (0.3, 0.5, 0.0)]
    scores = METRICS["abs_rel"].compute(rows, [None, None])
    assert scores == pytest.approx({"abs_rel": 0.2, "delta1": 0.7, "rmse": 2.0**0.5})
    assert METRICS["abs_rel"].drop(0.1, 0.2) == pytest.approx(10)
    assert METRICS["delta1"].drop(0.9, 0.8) == pytest.approx(10)


def test_psnr_is_the_mean_of_rows() -> None:
    assert METRICS["psnr"].compute([20.0, 30.0], [None, None]) == {"psnr": 25.0}
    assert METRICS["psnr"].drop(30.0, 29.5) == pytest.approx(0.5)


def test_metrics_are_found_by_name() -> None:
    assert metric_for(None, SegmentationPredictor).name == "mean_iou"
    for name, metric in METRICS.items():
        assert metric.name == name
