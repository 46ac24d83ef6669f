"""A shadow gets copies of requests, and callers get the answers of the served model."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from starlette.testclient import TestClient
from typer.testing import CliRunner

import accel
from accel.artifact import Artifact
from accel.cli import app
from accel.errors import ConfigError
from accel.serving.http.app import create_app
from accel.serving.shadow import Shadow, ShadowComparison, ShadowSettings, agree
from tests.planted_faults import change_weight, plant
from tests.serving.conftest import post

TEXTS = [f"where is my {word} card" for word in ("new", "old", "lost", "good", "bad", "paid")]


def until(holds: Callable[[], bool], seconds: float = 120.0) -> None:
    """Wait until a condition holds. A shadow runs only while the model is idle, and with the lowest priority."""
    end = time.monotonic() + seconds
    while not holds():
        assert time.monotonic() < end
        time.sleep(0.01)


@pytest.fixture
def negated(tiny_artifact: Callable[..., Artifact], tmp_path: Path) -> Artifact:
    """Return a classifier with other answers."""
    return plant(tiny_artifact().path, tmp_path / "negated", change_weight("classifier", lambda w: -w), probes=False)


def test_the_answers_are_those_of_the_model_and_are_compared(
    tiny_artifact: Callable[..., Artifact], negated: Artifact
) -> None:
    with accel.Engine({"labels": tiny_artifact()}) as engine:
        expected = engine.run(TEXTS)
    for source, agrees in ((tiny_artifact(), True), (negated, False)):
        shadow = Shadow(source, ShadowSettings(share=1.0))
        with TestClient(create_app(accel.Engine({"labels": tiny_artifact()}, shadow=shadow))) as client:
            for text, answer in zip(TEXTS, expected, strict=True):
                assert post(client, "/classify", inputs=text)[0]["label"] == answer["label"]
            until(lambda shadow=shadow: shadow.comparison.compared == len(TEXTS))
            state = client.get("/shadow").json()
            metrics = client.get("/metrics").text
        assert (shadow.comparison.agreed == len(TEXTS)) is agrees
        assert state["agreement"]["low"] < 1.0
        assert state["latency_ratio"]["low"] <= state["latency_ratio"]["value"] <= state["latency_ratio"]["high"]
        assert 'accel_shadow_requests{model="labels",outcome="compared"} 6.0' in metrics
        assert 'accel_shadow_agreement{bound="low",model="labels"}' in metrics


def test_the_shadow_is_switched_by_hand(tiny_artifact: Callable[..., Artifact], negated: Artifact) -> None:
    shadow = Shadow(negated, ShadowSettings(share=1.0))
    with TestClient(create_app(accel.Engine({"labels": tiny_artifact()}, shadow=shadow))) as client:
        before = post(client, "/classify", inputs=TEXTS[0])
        assert client.post("/shadow/switch").json()["switched"] is True
        after = post(client, "/classify", inputs=TEXTS[0])
        again = client.post("/shadow/switch")
    assert before[0]["label"] != after[0]["label"]
    assert again.status_code == 409
    assert shadow.comparison.compared <= 1  # requests after the switch are not copied


def test_the_shadow_is_switched_when_both_bounds_hold(tiny_artifact: Callable[..., Artifact]) -> None:
    # The shadow has the lowest priority, so its times are long on a busy machine.
    settings = ShadowSettings(share=1.0, min_agreement=0.9, max_latency_ratio=1e9)
    shadow = Shadow(tiny_artifact(), settings)
    with accel.Engine({"labels": tiny_artifact()}, shadow=shadow) as engine:
        for _ in range(20):
            for text in TEXTS:
                engine.run(text)
            until(lambda: not shadow._copies.qsize())
        until(lambda: shadow.switched)
        assert engine.run(TEXTS[0])[0]["label"]
    strict = Shadow(tiny_artifact(), ShadowSettings(share=1.0, min_agreement=0.999999, max_latency_ratio=100.0))
    strict.comparison = shadow.comparison
    assert not strict.bounds_hold
    fast = Shadow(tiny_artifact(), ShadowSettings(share=1.0, min_agreement=0.9, max_latency_ratio=1e-9))
    fast.comparison = shadow.comparison
    assert not fast.bounds_hold


def test_a_failing_shadow_changes_no_answer(tiny_artifact: Callable[..., Artifact]) -> None:
    shadow = Shadow(tiny_artifact(task="token-classification"), ShadowSettings(share=1.0))
    with accel.Engine({"labels": tiny_artifact()}, shadow=shadow) as engine:
        assert engine.run(TEXTS[0])[0]["label"]
        until(lambda: shadow.comparison.failed == 1)
        with pytest.raises(ConfigError, match="does not support the operations"):
            shadow.switch(engine)
        assert engine.run(TEXTS[0])[0]["label"]


def test_copies_are_dropped_if_too_many_wait() -> None:
    from concurrent.futures import Future
    from types import SimpleNamespace

    shadow = Shadow("model", ShadowSettings(share=1.0), model="m")
    for _ in range(100):
        future: Future[Any] = Future()
        job: Any = SimpleNamespace(future=future)
        start = time.perf_counter()
        shadow.copy("m", job)
        future.set_result([])
        assert time.perf_counter() - start < 0.05
    assert shadow.comparison.dropped == 36


def test_the_share_of_requests_is_copied() -> None:
    from types import SimpleNamespace

    shadow = Shadow("model", ShadowSettings(share=0.05), model="m")
    calls: list[int] = []
    job: Any = SimpleNamespace(future=SimpleNamespace(add_done_callback=lambda _: calls.append(1)))
    for _ in range(2000):
        shadow.copy("m", job)
        shadow.copy("other", job)
    assert 60 < len(calls) < 140


@pytest.mark.parametrize(
    ("a", "b", "same"),
    [
        ([{"label": "x", "score": 0.9}], [{"label": "x", "score": 0.5}], True),
        ([{"label": "x", "score": 0.9}], [{"label": "y", "score": 0.9}], False),
        ([0.6, 0.8], [0.61, 0.79], True),
        ([0.6, 0.8], [0.8, -0.6], False),
        (torch.ones(2, 3).numpy(), torch.ones(2, 3).numpy() * 2, True),
        ([1.0, 2.0], [1.0, 2.0, 3.0], False),
        (0.5, 0.52, True),
        (0.5, 0.9, False),
        ("text", "text", True),
        ({"answer": "a", "score": 1.0}, {"answer": "b", "score": 1.0}, False),
        ([{"entity": "A", "word": "x"}, {"entity": "A", "word": "y"}], [{"entity": "A", "word": "x"}], False),
    ],
)
def test_answers_agree(a: Any, b: Any, same: bool) -> None:
    assert agree(a, b) is same


def test_intervals() -> None:
    comparison = ShadowComparison()
    for number in range(200):
        comparison.add(number % 100 != 0, 0.010, 0.005 * (1.1 if number % 2 else 1 / 1.1))
    part, low, high = comparison.agreement
    assert part == pytest.approx(0.99)
    assert (low, high) == (pytest.approx(0.9643, abs=1e-3), pytest.approx(0.9973, abs=1e-3))
    ratio, low, high = comparison.latency_ratio
    assert ratio == pytest.approx(0.5)
    assert 0.49 < low < 0.5 < high < 0.51


def test_wrong_settings(tmp_path: Path) -> None:
    for values in ({"share": 0.0}, {"share": 2.0}, {"min_agreement": 0.9}):
        with pytest.raises(ConfigError):
            ShadowSettings(**values)
    result = CliRunner().invoke(app, ["serve", str(tmp_path), "--switch-agreement", "0.9"])
    assert result.exit_code != 0
