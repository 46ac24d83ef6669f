"""What a load test found."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from ...measuring.statistics import Summary
from .metrics import ServerCount

QUANTILES = (0.0, 0.01, 0.05, *(i / 20 for i in range(2, 19)), 0.95, 0.98, 0.99, 0.995, 0.999, 1.0)
"""Of latencies, for the picture of their distribution."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Second:
    """One second of a run, by when requests were to arrive.

    Attributes:
        answered: Requests.
        refused: Likewise.
        failed: Likewise.
        median, max: Latency of those answered, ms; `None` without any.
    """

    answered: int
    refused: int
    failed: int
    median: float | None
    max: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class RateRun:
    """What came of one rate.

    Attributes:
        rate: Requests a second that were to arrive.
        seconds: For how long they arrived, warm-up not counted.
        requests: That arrived.
        answered: With a status of 200 and something.
        refused: With 429.
        errors: Others, by status or by what happened.
        latency: Of those answered, ms from the planned arrival; `None` without any.
        quantiles: Of them, at `QUANTILES`.
        throughput: Answers a second, from the first arrival to the last answer.
        goodput: Answers within the objective, a second of arrivals.
        within: Share of all requests that were answered within the objective.
        met: Whether that is enough; `None` without an objective.
        queue_ms, inference_ms: Median of what the server says of its own time.
        inference_p95_ms: The 95th percentile of the latter.
        client_late_ms: 99th percentile of how much later than planned the client sent, for reasons of its own.
        timeline: Second by second.
        sent: Requests by status, warm-up included: what the server should have counted.
        server: What it did count meanwhile, where it says so.
    """

    rate: float
    seconds: float
    requests: int
    answered: int
    refused: int
    errors: Mapping[str, int]
    latency: Summary | None
    quantiles: tuple[float, ...]
    throughput: float
    goodput: float | None
    within: float | None
    met: bool | None
    queue_ms: float | None
    inference_ms: float | None
    inference_p95_ms: float | None
    client_late_ms: float
    timeline: tuple[Second, ...]
    sent: Mapping[str, int]
    server: ServerCount | None = None

    @property
    def client_behind(self) -> bool:
        """Whether the client itself was too slow for the numbers to be the server's."""
        return self.client_late_ms > max(5.0, 0.1 * (self.latency.median if self.latency is not None else 0.0))


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadTest:
    """A load test.

    Attributes:
        url: Of the endpoint.
        settings: How it was asked.
        texts: Rows, and characters of their texts: smallest, median, 95th percentile, largest.
        machine: Of the client.
        runs: One a rate, in the order in which they were made.
        best_rate: The highest rate that met the objective, where that was looked for.
    """

    url: str
    settings: Mapping[str, Any]
    texts: Mapping[str, Any]
    machine: Mapping[str, Any]
    runs: tuple[RateRun, ...] = field(default=())
    best_rate: float | None = None

    def to_dict(self) -> dict[str, Any]:
        """As JSON values."""
        return asdict(self)
