"""Prometheus metrics of a server: counters, histograms and gauges."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from ..errors import NotFiniteError, QueueFullError
from .job import Job

if TYPE_CHECKING:
    from .engine import Engine

_SECONDS = (0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 30.0)
_ROWS = (1, 2, 4, 8, 16, 32, 64, 128, 256)
_TOKENS = (1, 4, 16, 64, 256, 1024, 4096, 16384, 65536)


_HISTOGRAMS = (
    ("accel_queue_seconds", "Time that a request waited.", _SECONDS),
    ("accel_tokenization_seconds", "Making a request's inputs.", _SECONDS),
    ("accel_inference_seconds", "Of one call of a model.", _SECONDS),
    ("accel_batch_rows", "Rows in one call of a model.", _ROWS),
    ("accel_batch_tokens", "Tokens in one call, padding counted.", _TOKENS),
    ("accel_first_token_seconds", "From a prompt's arrival to its first token.", _SECONDS),
)
_COUNTERS = (
    ("accel_tokens", "Tokens computed, padding not counted."),
    ("accel_padding_tokens", "Tokens of padding computed."),
    ("accel_refused", "Requests refused because too much was waiting."),
    ("accel_not_finite", "Requests for which a model computed NaN or infinity."),
    ("accel_generated_tokens", "Tokens generated in answers that were completed."),
    ("accel_prompt_tokens", "Tokens of the prompts of those answers."),
)


class Metrics:
    """Metrics of one server. The object is the `Observer` of the server's engine."""

    def __init__(self) -> None:
        self.registry = registry = CollectorRegistry()
        self.requests = Counter(
            "accel_requests", "Requests answered, by path and status.", ["path", "method", "status"], registry=registry
        )
        self.latency = Histogram(
            "accel_request_seconds", "From a request's first byte to its answer.", ["path"], buckets=_SECONDS,
            registry=registry,
        )  # fmt: skip
        self.in_flight = Gauge("accel_requests_in_flight", "Requests that are being answered.", registry=registry)
        text = "Inputs by how they ended: answered, failed, cancelled."
        self._collectors: dict[str, Any] = {
            "accel_inputs": Counter("accel_inputs", text, ["model", "outcome"], registry=registry),
            **{name: Counter(name, text, ["model"], registry=registry) for name, text in _COUNTERS},
            **{
                name: Histogram(name, text, ["model"], buckets=buckets, registry=registry)
                for name, text, buckets in _HISTOGRAMS
            },
        }
        self._labelled: dict[tuple[str, ...], Any] = {}

    def _of(self, name: str, *labels: str) -> Any:
        """Return the collector of a metric for the given labels. Collectors are cached: a look-up by labels is as slow as counting."""
        key = (name, *labels)
        if key not in self._labelled:
            self._labelled[key] = self._collectors[name].labels(*labels)
        return self._labelled[key]

    def generated(self, model: str, usage: Mapping[str, int], first_token_s: float) -> None:
        """Count the tokens of a complete generation, and record the seconds to its first token."""
        self._of("accel_prompt_tokens", model).inc(usage["prompt_tokens"])
        self._of("accel_generated_tokens", model).inc(usage["completion_tokens"])
        self._of("accel_first_token_seconds", model).observe(first_token_s)

    def turned_away(self, model: str, error: Exception) -> None:
        """Count a prompt that was refused because the queue is full."""
        if isinstance(error, QueueFullError):
            self.refused(model)

    def failed(self, model: str, error: BaseException | None) -> None:
        """Count a failed request if the model computed NaN or infinity."""
        if isinstance(error, NotFiniteError):
            self._of("accel_not_finite", model).inc()

    def watch(self, engine: Engine) -> None:
        """Report the number of inputs that wait or run, for each model of an engine."""
        gauge = Gauge("accel_pending_inputs", "Inputs that wait or are computed.", ["model"], registry=self.registry)
        for name in engine.models:
            gauge.labels(name).set_function(functools.partial(engine.pending, name))

    def batch(self, model: str, rows: int, tokens: int, padded: int, seconds: float) -> None:
        """Record the duration, rows and tokens of a model call."""
        self._of("accel_inference_seconds", model).observe(seconds)
        self._of("accel_batch_rows", model).observe(rows)
        self._of("accel_batch_tokens", model).observe(padded)
        self._of("accel_tokens", model).inc(tokens)
        self._of("accel_padding_tokens", model).inc(padded - tokens)

    def done(self, model: str, job: Job) -> None:
        """Count the inputs of a finished request by outcome, and record its waiting and tokenization times."""
        outcome = "answered"
        if job.future.cancelled():
            outcome = "cancelled"
        elif job.future.exception() is not None:
            outcome = "failed"
            self.failed(model, job.future.exception())
        else:
            self._of("accel_queue_seconds", model).observe(job.timing.queue_s)
            self._of("accel_tokenization_seconds", model).observe(job.timing.tokenization_s)
        self._of("accel_inputs", model, outcome).inc(job.size)

    def refused(self, model: str) -> None:
        """Count a request that was refused because the queue is full."""
        self._of("accel_refused", model).inc()

    def page(self) -> bytes:
        """Return all metrics in the text format of Prometheus."""
        return generate_latest(self.registry)
