"""How many replicas a rate of requests needs: a queue with batches, calibrated by a load test.

The engine takes what waits whenever the model is free, so a replica is a queue whose server takes up to `max_batch` requests at once, for a
time that grows with their number `n`: `(call_s + request_s * n) / (1 - rate * http_s)`, since HTTP and tokenization take their part of the
processors from the model. The three are fitted to what a load test saw (`accel loadtest --json`, at rates from idle to overload).
Latencies are simulated: their percentiles have no closed form.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from scipy import optimize

from ..errors import ConfigError, InputError

_REQUESTS = 20_000
"""That are simulated: the 99th percentile has 200 of them behind it."""
_SATURATED = 0.97
"""Where a server answers less than this part of what arrives, it is busy all the time."""
_ENOUGH = 50
"""Answers of a rate, for its percentiles to say something."""
_TAIL = 1.645
"""The normal distribution's 95th percentile."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Prediction:
    """Latencies of one replica at one rate, in milliseconds.

    Attributes:
        rate: Requests a second.
        median, p95, p99: Of latency; infinite where more arrives than is answered.
        good: The latency that the share of requests asked for does not exceed.
        busy: Part of the time in which the model runs.
        batch: Requests in a call, in the mean.
    """

    rate: float
    median: float
    p95: float
    p99: float
    good: float
    busy: float
    batch: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Sizing:
    """What a replica costs a request.

    Attributes:
        call_s: Of each call of the model.
        request_s: Of each request in it.
        http_s: Of the model's processors, that HTTP and tokenization of a request take.
        around_s: That a request takes besides queue and model, when nothing else is there.
        spread: Standard deviation of the logarithm of a call's time.
        max_batch: Requests in a call, at most.
    """

    call_s: float
    request_s: float
    http_s: float = 0.0
    around_s: float = 0.0
    spread: float = 0.0
    max_batch: int = 64

    def __post_init__(self) -> None:
        if self.max_batch < 1:
            raise ConfigError(f"max_batch is {self.max_batch}.", fix="use at least 1.")

    @property
    def capacity(self) -> float:
        """Requests a second that a replica answers at most."""
        return 1 / (self.call_s / self.max_batch + self.request_s + self.http_s)

    def predict(self, rate: float, *, share: float = 0.99, seed: int = 0) -> Prediction:
        """Latencies at a rate of requests that arrive at random.

        Args:
            rate: Of one replica.
            share: For `good`.
            seed: Of the simulation.
        """
        if not 0 < rate < math.inf:
            raise ConfigError(f"{rate:g} requests a second is no rate.", fix="use more than 0.")
        if not 0 < share < 1:
            raise ConfigError(f"share is {share:g}.", fix="use a number between 0 and 1, such as 0.99.")
        if rate >= self.capacity:
            worst = math.inf
            return Prediction(rate=rate, median=worst, p95=worst, p99=worst, good=worst, busy=1.0, batch=self.max_batch)
        generator = np.random.default_rng(seed)
        arrivals = np.cumsum(generator.exponential(1 / rate, _REQUESTS))
        # Spread around a mean of 1, stretched by what HTTP takes.
        factors = np.exp(generator.normal(-(self.spread**2) / 2, self.spread, _REQUESTS)) / (1 - rate * self.http_s)
        latencies = np.empty(_REQUESTS)
        free = busy = 0.0
        first = calls = 0
        while first < _REQUESTS:
            begin = max(free, arrivals[first])
            waiting = int(np.searchsorted(arrivals, begin, side="right")) - first
            size = min(max(waiting, 1), self.max_batch)
            took = (self.call_s + self.request_s * size) * factors[calls]
            free = begin + took
            busy += took
            latencies[first : first + size] = free - arrivals[first : first + size]
            first, calls = first + size, calls + 1
        latencies = (latencies + self.around_s) * 1e3
        median, p95, p99, good = np.quantile(latencies, [0.5, 0.95, 0.99, share])
        return Prediction(
            rate=rate, median=float(median), p95=float(p95), p99=float(p99), good=float(good),
            busy=float(busy / free), batch=_REQUESTS / calls,
        )  # fmt: skip

    def replicas(self, rate: float, objective_ms: float, *, share: float = 0.99) -> tuple[int, Prediction]:
        """The fewest replicas that meet an objective, and what each of them does then.

        Requests are taken to be spread at random, which is worse than what routers do that look for the shortest queue.

        Args:
            rate: Of all requests.
            objective_ms: Latency that `share` of them should not exceed.
            share: See there.

        Raises:
            ConfigError: No number of replicas meets it, or these are no numbers for it.
        """
        if not 0 < rate < math.inf:
            raise ConfigError(f"{rate:g} requests a second is no rate.", fix="use more than 0.")
        if not 0 < objective_ms < math.inf:
            raise ConfigError(f"{objective_ms:g} ms is no objective.", fix="use more than 0.")
        alone = self.predict(self.capacity * 1e-3, share=share)
        if alone.good > objective_ms:
            raise ConfigError(
                f"A request that meets nobody takes {alone.good:.1f} ms; the objective is {objective_ms:g} ms.",
                fix="use a faster model (accel tune), or a larger objective.",
            )
        low, high = 0, max(1, math.ceil(rate / self.capacity))
        while self.predict(rate / high, share=share).good > objective_ms:
            low, high = high, 2 * high
        while high - low > 1:
            middle = (low + high) // 2
            enough = self.predict(rate / middle, share=share).good <= objective_ms
            low, high = (low, middle) if enough else (middle, high)
        return high, self.predict(rate / high, share=share)


def calibrate(test: Mapping[str, Any], *, max_batch: int = 64, without: float | None = None) -> Sizing:
    """What a load test says of a replica.

    Args:
        test: JSON form of a load test of one replica of `accel serve`, which says how many rows its calls had.
        max_batch: As the server was started.
        without: A rate to leave out, to see whether it is predicted.

    Raises:
        InputError: The test says nothing of calls, or all of them were of one size.
    """
    runs = [run for run in _measured(test) if run["rate"] != without]
    sizes = np.array([run["server"]["rows"] / run["server"]["calls"] for run in runs])
    seconds = np.array([run["server"]["inference_s"] / run["server"]["calls"] for run in runs])
    if len(runs) < 3 or sizes.max() < 1.3 * sizes.min():
        raise InputError(
            "The load test has fewer than three rates, or calls of one size only, which does not tell what a call costs and a request.",
            fix="measure at several rates, from idle up to more than it answers: --rate 5 --rate 50 --rate 500.",
        )
    rates = np.array([run["throughput"] for run in runs])
    # seconds * (1 - rate * http) = call + request * size, divided by seconds: every rate counts alike.
    known = np.stack([1 / seconds, sizes / seconds, rates], axis=1)
    call_s, request_s, http_s = (float(one) for one in optimize.nnls(known, np.ones(len(runs)))[0])
    busy = [run for run in runs if run["throughput"] < _SATURATED * run["requests"] / run["seconds"]]
    # Where nothing waits. Of several such rates the least disturbed one tells what is always there, and the middle one what is usual.
    calm = [run for run in runs if run not in busy and run["answered"] >= _ENOUGH] or [min(runs, key=_rate)]
    around = min(run["latency"]["median"] - run["queue_ms"] - run["inference_ms"] for run in calm)
    ratios = [max(run["inference_p95_ms"] / run["inference_ms"], 1.0) for run in calm]
    spread = math.log(statistics.median(ratios)) / _TAIL
    return Sizing(
        call_s=call_s,
        request_s=request_s,
        http_s=http_s,
        around_s=max(around, 0.0) / 1e3,
        spread=spread,
        max_batch=max_batch,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Check:
    """A rate that was measured and, without that measurement, predicted.

    Attributes:
        rate: Requests a second.
        measured, predicted: Median and 99th percentile, ms.
    """

    rate: float
    measured: tuple[float, float]
    predicted: tuple[float, float]

    @property
    def errors(self) -> tuple[float, float]:
        """Of the prediction, relative to what was measured."""
        return (
            self.predicted[0] / self.measured[0] - 1,
            self.predicted[1] / self.measured[1] - 1,
        )


def check(test: Mapping[str, Any], *, max_batch: int = 64) -> list[Check]:
    """Each rate of a load test between the lowest and the highest, predicted from the others.

    Args:
        test: As in `calibrate`.
        max_batch: Likewise.
    """
    made = []
    for run in sorted(_measured(test), key=_rate)[1:-1]:
        found = calibrate(test, max_batch=max_batch, without=run["rate"]).predict(run["requests"] / run["seconds"])
        measured = (run["latency"]["median"], run["latency"]["p99"])
        made.append(Check(rate=run["rate"], measured=measured, predicted=(found.median, found.p99)))
    return made


def _rate(run: Mapping[str, Any]) -> float:
    return float(run["rate"])


def _measured(test: Mapping[str, Any]) -> Sequence[Mapping[str, Any]]:
    """Runs that say how many rows the server's calls had.

    Raises:
        InputError: There is none.
    """
    told = test.get("runs") if isinstance(test, Mapping) else None
    runs = [
        run
        for run in (told if isinstance(told, list | tuple) else ())
        if isinstance(run, Mapping)
        and (run.get("server") or {}).get("calls")
        and run.get("latency")
        and run.get("inference_ms")
    ]
    if not runs:
        raise InputError(
            "The load test says nothing of the server's calls.",
            fix="make it against one replica of `accel serve`, whose /metrics it can read: accel loadtest ... --json.",
        )
    return runs
