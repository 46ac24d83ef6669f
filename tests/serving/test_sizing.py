"""The model of a replica's queue: against what is known of queues, and back from what it made itself."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from accel.cli import app
from accel.errors import ConfigError, InputError
from accel.serving.sizing import Sizing, calibrate, check

REPLICA = Sizing(call_s=0.004, request_s=0.0006, http_s=0.0004, around_s=0.002, spread=0.1, max_batch=32)


def run_of(model: Sizing, rate: float) -> dict[str, Any]:
    """A rate of a load test, as a replica of the model would have answered it."""
    found = model.predict(min(rate, 0.999 * model.capacity), seed=7)
    answered = min(rate, model.capacity)
    size = found.batch if rate < model.capacity else model.max_batch
    call_s = (model.call_s + model.request_s * size) / (1 - answered * model.http_s)
    calls = round(10 * answered / size)
    inference = call_s * 1e3
    return {
        "rate": rate, "seconds": 10.0, "requests": round(10 * rate), "answered": round(10 * answered), "throughput": answered,
        "latency": {"median": found.median, "p99": found.p99},
        "queue_ms": max(found.median - inference - model.around_s * 1e3, 0.0),
        "inference_ms": inference, "inference_p95_ms": inference * math.exp(1.645 * model.spread),
        "server": {"calls": calls, "rows": round(calls * size), "inference_s": calls * call_s, "tokens": 0, "requests": {}},
    }  # fmt: skip


RATES = (20.0, 100.0, 300.0, 500.0, 700.0, 2000.0)


@pytest.fixture(scope="module")
def load() -> dict[str, Any]:
    return {"runs": [run_of(REPLICA, rate) for rate in RATES]}


def test_a_queue_of_single_requests_is_the_textbooks() -> None:
    """M/D/1: the mean wait is rho / (2 mu (1 - rho)) (Pollaczek and Khinchine); half a request more in its median's place."""
    alone = Sizing(call_s=0.01, request_s=0.0, max_batch=1)
    assert alone.capacity == pytest.approx(100.0)
    found = alone.predict(50.0)
    assert found.busy == pytest.approx(0.5, rel=0.03)
    # Of M/D/1 at half load, 50 % do not wait at all, and the mean wait is half a service time.
    assert found.median == pytest.approx(10.0, rel=0.1)
    assert found.batch == 1


def test_batches_grow_with_the_load_and_bear_more() -> None:
    idle, busy = REPLICA.predict(10.0), REPLICA.predict(0.9 * REPLICA.capacity)
    assert idle.median == pytest.approx(6.6, rel=0.05)
    assert idle.batch < 1.1 < 10 < busy.batch <= 32
    assert busy.p99 > busy.median > idle.median
    # One by one it would bear 200 a second.
    assert REPLICA.capacity > 800
    assert REPLICA.predict(REPLICA.capacity * 1.01).p99 == math.inf


def test_calibration_finds_the_replica_that_was_measured(load: dict[str, Any]) -> None:
    found = calibrate(load, max_batch=32)
    assert found.call_s == pytest.approx(REPLICA.call_s, rel=0.1)
    assert found.request_s == pytest.approx(REPLICA.request_s, rel=0.15)
    # Without it the server would seem to bear 1,380 a second.
    assert found.http_s == pytest.approx(REPLICA.http_s, rel=0.1)
    assert found.spread == pytest.approx(REPLICA.spread, rel=0.1)
    assert found.capacity == pytest.approx(REPLICA.capacity, rel=0.1)
    for one in check(load, max_batch=32):
        assert max(map(abs, one.errors)) < 0.2


def test_the_fewest_replicas_that_meet_the_objective() -> None:
    count, each = REPLICA.replicas(5000.0, 50.0)
    assert each.good <= 50.0 < REPLICA.predict(5000.0 / (count - 1)).good
    assert REPLICA.replicas(5.0, 50.0)[0] == 1
    with pytest.raises(ConfigError, match="meets nobody"):
        REPLICA.replicas(5.0, 3.0)


@pytest.mark.parametrize(
    ("rate", "objective", "share"),
    [(0.0, 50.0, 0.9), (math.nan, 50.0, 0.9), (math.inf, 50.0, 0.9), (5.0, math.nan, 0.9), (5.0, math.inf, 0.9),
     (5.0, -1.0, 0.9), (5.0, 50.0, 0.0), (5.0, 50.0, 1.0), (5.0, 50.0, math.nan)],
)  # fmt: skip
def test_numbers_that_mean_nothing_are_refused(rate: float, objective: float, share: float) -> None:
    with pytest.raises(ConfigError):
        REPLICA.replicas(rate, objective, share=share)


@pytest.mark.parametrize("found", [[], {"runs": 3}, {"runs": [3]}, 3])
def test_a_file_that_is_no_load_test_is_refused(found: Any) -> None:
    with pytest.raises(InputError, match="nothing of the server's calls"):
        calibrate(found)


def test_a_server_takes_a_row_at_least(load: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match="max_batch"):
        calibrate(load, max_batch=0)


def test_a_test_that_does_not_tell_is_refused(load: dict[str, Any]) -> None:
    with pytest.raises(InputError, match="one size only"):
        calibrate({"runs": load["runs"][:1] * 3})
    with pytest.raises(InputError, match="nothing of the server's calls"):
        calibrate({"runs": [{**load["runs"][0], "server": None}]})


def test_the_command(load: dict[str, Any], tmp_path: Path) -> None:
    (tmp_path / "load.json").write_text(json.dumps(load))
    arguments = ["sizing", str(tmp_path / "load.json"), "--rate", "3000", "--objective-ms", "60", "--max-batch", "32"]
    done = CliRunner().invoke(app, [*arguments, "--json"])
    assert done.exit_code == 0, done.output
    values = json.loads(done.stdout)
    assert values["replicas"] == REPLICA.replicas(3000.0, 60.0)[0]
    assert [one["rate"] for one in values["checks"]] == list(RATES[1:-1])
    assert "replicas for 3000" in CliRunner().invoke(app, arguments).stdout
