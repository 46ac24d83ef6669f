"""What a server counts, for Prometheus."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from ..errors import NotFiniteError, QueueFullError
from .job import Job

if TYPE_CHECKING:
    from .engine import Engine

_SECONDS = (0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 30.0)
_ROWS = (1, 2, 4, 8, 16, 32, 64, 128, 256)
_TOKENS = (1, 4, 16, 64, 256, 1024, 4096, 16384, 65536)


@dataclass(frozen=True, slots=True, kw_only=True)
class _OfModel:
    """Of one model, what is counted often."""

    inference: Histogram
    batch_rows: Histogram
    batch_tokens: Histogram
    tokens: Counter
    padding: Counter
    queue: Histogram
    tokenization: Histogram
    answered: Counter


class Metrics:
    """Counters and histograms of one server; an `Observer` of its engine."""

    def __init__(self) -> None:
        self._models: dict[str, _OfModel] = {}
        self.registry = registry = CollectorRegistry()
        of_model = ["model"]
        self.requests = Counter(
            "accel_requests", "Requests answered, by path and status.", ["path", "method", "status"], registry=registry
        )
        self.latency = Histogram(
            "accel_request_seconds", "From a request's first byte to its answer.", ["path"], buckets=_SECONDS,
            registry=registry,
        )  # fmt: skip
        self.in_flight = Gauge("accel_requests_in_flight", "Requests that are being answered.", registry=registry)
        self.queue = Histogram(
            "accel_queue_seconds", "Time that a request waited.", of_model, buckets=_SECONDS, registry=registry
        )
        self.tokenization = Histogram(
            "accel_tokenization_seconds", "Making a request's inputs.", of_model, buckets=_SECONDS, registry=registry
        )
        self.inference = Histogram(
            "accel_inference_seconds", "Of one call of a model.", of_model, buckets=_SECONDS, registry=registry
        )
        self.batch_rows = Histogram(
            "accel_batch_rows", "Rows in one call of a model.", of_model, buckets=_ROWS, registry=registry
        )
        self.batch_tokens = Histogram(
            "accel_batch_tokens", "Tokens in one call, padding counted.", of_model, buckets=_TOKENS, registry=registry
        )
        self.tokens = Counter("accel_tokens", "Tokens computed, padding not counted.", of_model, registry=registry)
        self.padding = Counter("accel_padding_tokens", "Tokens of padding computed.", of_model, registry=registry)
        self.inputs = Counter(
            "accel_inputs",
            "Inputs by how they ended: answered, failed, cancelled.",
            ["model", "outcome"],
            registry=registry,
        )
        self.refusals = Counter(
            "accel_refused", "Requests refused because too much was waiting.", of_model, registry=registry
        )
        self.not_finite = Counter(
            "accel_not_finite", "Requests for which a model computed NaN or infinity.", of_model, registry=registry
        )
        self.first_token = Histogram(
            "accel_first_token_seconds", "From a prompt's arrival to its first token.", of_model, buckets=_SECONDS,
            registry=registry,
        )  # fmt: skip
        self.generated_tokens = Counter(
            "accel_generated_tokens", "Tokens generated in answers that were completed.", of_model, registry=registry
        )
        self.prompt_tokens = Counter(
            "accel_prompt_tokens", "Tokens of the prompts of those answers.", of_model, registry=registry
        )

    def generated(self, model: str, usage: Mapping[str, int], first_token_s: float) -> None:
        """An answer was completed: how many tokens were read and made for it, and when the first of them was there."""
        self.prompt_tokens.labels(model).inc(usage["prompt_tokens"])
        self.generated_tokens.labels(model).inc(usage["completion_tokens"])
        self.first_token.labels(model).observe(first_token_s)

    def turned_away(self, model: str, error: Exception) -> None:
        """A prompt was not taken."""
        if isinstance(error, QueueFullError):
            self.refused(model)

    def failed(self, model: str, error: BaseException | None) -> None:
        """A request got no answer: count it where the model's numbers are the reason."""
        if isinstance(error, NotFiniteError):
            self.not_finite.labels(model).inc()

    def watch(self, engine: Engine) -> None:
        """Report how much waits for each model of an engine."""
        gauge = Gauge("accel_pending_inputs", "Inputs that wait or are computed.", ["model"], registry=self.registry)
        for name in engine.models:
            gauge.labels(name).set_function(functools.partial(engine.pending, name))

    def batch(self, model: str, rows: int, tokens: int, padded: int, seconds: float) -> None:
        """See `Observer`."""
        of = self._of(model)
        of.inference.observe(seconds)
        of.batch_rows.observe(rows)
        of.batch_tokens.observe(padded)
        of.tokens.inc(tokens)
        of.padding.inc(padded - tokens)

    def done(self, model: str, job: Job) -> None:
        """See `Observer`."""
        if job.future.cancelled():
            outcome = "cancelled"
        elif job.future.exception() is not None:
            outcome = "failed"
            self.failed(model, job.future.exception())
        else:
            of = self._of(model)
            of.queue.observe(job.timing.queue_s)
            of.tokenization.observe(job.timing.tokenization_s)
            of.answered.inc(job.size)
            return
        self.inputs.labels(model, outcome).inc(job.size)

    def _of(self, model: str) -> _OfModel:
        """What is counted at every call and answer of a model: finding it by its labels takes as long as counting."""
        found = self._models.get(model)
        if found is None:
            found = self._models[model] = _OfModel(
                inference=self.inference.labels(model),
                batch_rows=self.batch_rows.labels(model),
                batch_tokens=self.batch_tokens.labels(model),
                tokens=self.tokens.labels(model),
                padding=self.padding.labels(model),
                queue=self.queue.labels(model),
                tokenization=self.tokenization.labels(model),
                answered=self.inputs.labels(model, "answered"),
            )
        return found

    def refused(self, model: str) -> None:
        """See `Observer`."""
        self.refusals.labels(model).inc()

    def page(self) -> bytes:
        """All of it, as Prometheus reads it."""
        return generate_latest(self.registry)
