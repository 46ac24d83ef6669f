"""The request queue of one model, and the threads that process it.

A request has three steps. First, its inputs are converted to rows (tokenization). Second, rows of similar length run together. Third, the
outputs are converted to the result. Each worker thread has its own session. A free worker runs the waiting rows immediately; it does not
wait for more rows. An idle worker does all three steps of a new request, which is fastest for a single caller. While all workers run the
model, helper threads do the first and the third step.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any, Protocol

import numpy as np

from ..config import check_number
from ..errors import (
    AccelError,
    EngineClosedError,
    InputError,
    QueueFullError,
    SessionError,
    TaskError,
    did_you_mean,
)
from ..models.base import ORTModel
from ..models.processors import companion_of
from .batch_formation import CostModel, choose
from .job import Job, RequestHandler, Row
from .non_finite import check_answer, check_outputs, find_nan
from .operations import Operation, operations_of

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class QueueLimits:
    """Limits that apply to each model of an engine; the arguments of `Engine` with the same names describe them."""

    max_batch: int = 64
    max_batch_tokens: int = 16384
    max_queue: int = 512
    max_wait_s: float | None = None
    timeout_s: float | None = None
    max_new_tokens: int | None = None

    def __post_init__(self) -> None:
        for field in fields(self):
            check_number(field.name, getattr(self, field.name), above=0)


class Observer(Protocol):
    """Methods that an engine calls from its threads when a batch or a request ends."""

    def batch(self, model: str, rows: int, tokens: int, padded: int, seconds: float) -> None:
        """Called after a model call, with its number of rows, tokens without padding, tokens with padding, and duration in seconds."""

    def done(self, model: str, job: Job) -> None:
        """Called after a request succeeded, failed or was cancelled."""

    def refused(self, model: str) -> None:
        """Called when a request is refused because the queue is full."""


class _ThreadHandlers:
    """The `RequestHandler` objects (implementations of operations) of one model in one thread. They share one tokenizer."""

    def __init__(self, model: ORTModel, first: Operation) -> None:
        self._model = model
        self._tokenizer = None
        if "input_ids" in model.input_names and (model.artifact.path / "tokenizer_config.json").is_file():
            self._tokenizer = companion_of(model, "AutoTokenizer")
        self._works: dict[str, RequestHandler] = {}
        self.work(first)

    def work(self, operation: Operation) -> RequestHandler:
        """Return the `RequestHandler` object that implements an operation; it is created at the first call."""
        if operation.name not in self._works:
            self._works[operation.name] = operation.work(self._model, self._tokenizer)
        return self._works[operation.name]


class ModelQueue:
    """The request queue of one model, with its worker and helper threads.

    Args:
        name: Name of the model.
        models: The model, opened once for each worker.
        limits: Limits of the queue and of a batch.
        observer: Called for every model call and every request.

    Attributes:
        operations: Operations of the model by name; the model's own task comes first.
    """

    def __init__(
        self, name: str, models: Sequence[ORTModel], limits: QueueLimits, observer: Observer | None = None
    ) -> None:
        self.name = name
        self.model = models[0]
        self.operations = operations_of(self.model)
        self._limits = limits
        self.observer = observer
        self._cost = CostModel()
        self._lock = threading.Lock()
        self._for_workers = threading.Condition(self._lock)
        self._for_helpers = threading.Condition(self._lock)
        self._raw: deque[Job] = deque()
        self._ready: list[Row] = []
        self._computed: deque[Job] = deque()
        self._pending = 0
        self._idle = 0
        self._preparing = 0
        self._seconds_a_row = 0.0
        self._warm = False
        self._open = True
        self._stopping = False
        self._workers = len(models)
        self._process = os.getpid()
        first = next(iter(self.operations.values()))
        benches = [_ThreadHandlers(model, first) for model in models]
        self._threads = [
            threading.Thread(target=target, args=(bench,), name=f"accel-{name}-{kind}", daemon=True)
            for kind, target, its_benches in (
                ("worker", self._worker, benches),
                ("helper", self._helper, [_ThreadHandlers(self.model, first)]),
            )
            for bench in its_benches
        ]
        for thread in self._threads:
            thread.start()

    # The threads of callers call the methods below.

    @property
    def pending(self) -> int:
        """Number of inputs that wait or run."""
        return self._pending

    @property
    def wait_s(self) -> float:
        """Expected waiting time of a new request, in seconds."""
        return self._pending * self._seconds_a_row / self._workers

    def submit(self, operation: str | None, inputs: Any, options: Mapping[str, Any]) -> Job:
        """Put a request into the queue and return it.

        Args:
            operation: A name from `operations`; `None` means the model's own task.
            inputs: Inputs of the request.
            options: Options of the request.

        Raises:
            QueueFullError: The queue is full.
            TaskError: The model does not support the operation.
            EngineClosedError: The queue was closed.
        """
        if os.getpid() != self._process:
            raise EngineClosedError(
                "The engine was started in another process, and its threads do not exist in this process.",
                fix="start a new accel.Engine(...) in this process.",
            )
        name = operation or next(iter(self.operations))
        if name not in self.operations:
            raise TaskError(
                f"{self.model.artifact.path.name} is a model for {self.model.artifact.task} and does not support the operation "
                f"{name!r}."
                f"{did_you_mean(name, self.operations)}",
                fix=f"use one of {', '.join(self.operations)}.",
            )
        requested = self.operations[name]
        size = requested.count(inputs)
        job = Job(requested, inputs, options, time.perf_counter(), size)
        with self._lock:
            if not self._open:
                raise EngineClosedError(
                    f"The model {self.name!r} accepts no more requests, because the engine is closed.",
                    fix="start a new accel.Engine(...).",
                )
            wait, most = self.wait_s, self._limits.max_wait_s
            full = self._pending >= self._limits.max_queue or (most is not None and self._pending and wait > most)
            if not full:
                self._pending += size
                self._raw.append(job)
                (self._for_workers if self._idle else self._for_helpers).notify()
        if full:
            if self.observer is not None:
                self.observer.refused(self.name)
            raise self._full(wait)
        job.future.add_done_callback(lambda _: self._settled(job))
        return job

    def _full(self, wait: float) -> QueueFullError:
        error = QueueFullError(
            f"The model {self.name!r} has too many waiting requests: {self._pending} inputs wait, about {wait:.2g} s of work.",
            fix="try again later, send fewer inputs at once, or add workers (workers=..., --workers).",
        )
        error.retry_after_s = max(wait, 0.01)
        return error

    def _settled(self, job: Job) -> None:
        """Remove a finished or cancelled request from the queue and tell the observer."""
        with self._lock:
            self._pending -= job.size
            if job.future.cancelled() and job in self._raw:
                self._raw.remove(job)
            if job.left:
                self._ready = [row for row in self._ready if row.job is not job]
        if self.observer is not None:
            self.observer.done(self.name, job)

    def close(self, *, drain: bool = True) -> None:
        """Accept no more requests, finish the accepted ones (with `drain=False`: refuse them), and end the threads."""
        with self._lock:
            self._open = False
            dropped = [] if drain else [*self._raw, *dict.fromkeys(row.job for row in self._ready)]
            if not drain:
                self._raw.clear()
                self._ready.clear()
        for job in dropped:
            _fail(
                job,
                EngineClosedError(
                    "The engine was closed before this request was processed.", fix="start a new accel.Engine(...)."
                ),
            )
        with self._lock:
            self._stopping = True
            self._for_workers.notify_all()
            self._for_helpers.notify_all()
        for thread in self._threads:
            thread.join()

    # The methods below run in the worker and helper threads.

    def _worker(self, bench: _ThreadHandlers) -> None:
        while True:
            rows: list[Row] = []
            jobs: list[Job] = []
            with self._lock:
                self._idle += 1
                while not (self._ready or self._raw):
                    if self._stopping and not self._preparing:
                        self._for_workers.notify()
                        return
                    self._for_workers.wait()
                self._idle -= 1
                if self._ready:
                    rows = self._take_rows()
                    if self._ready and self._idle:
                        self._for_workers.notify()
                    elif self._raw:
                        self._for_helpers.notify()
                else:
                    jobs = self._take_jobs()
            if rows:
                try:
                    self._run(bench, rows)
                except Exception as error:  # noqa: BLE001  # for example an error of an observer: the thread must continue
                    for job in dict.fromkeys(row.job for row in rows):
                        _fail(job, error)
            else:
                self._prepare(bench, jobs)

    def _helper(self, bench: _ThreadHandlers) -> None:
        while True:
            computed: list[Job] = []
            jobs: list[Job] = []
            with self._lock:
                while not (self._computed or (self._raw and (self._stopping or not self._idle))):
                    if self._stopping:
                        return
                    self._for_helpers.wait()
                if self._computed:
                    computed = [*self._computed]
                    self._computed.clear()
                else:
                    jobs = self._take_jobs()
            for job in computed:
                self._finish(bench, job)
            if jobs:
                self._prepare(bench, jobs)

    def _take_jobs(self) -> list[Job]:
        """Take requests from the queue that are tokenized together: enough inputs for one batch."""
        jobs: list[Job] = []
        size = 0
        while self._raw and size < self._limits.max_batch:
            jobs.append(self._raw.popleft())
            size += jobs[-1].size
        self._preparing += 1
        return jobs

    def _take_rows(self) -> list[Row]:
        limits = self._limits
        chosen = choose(
            self._ready,
            max_rows=limits.max_batch,
            max_tokens=limits.max_batch_tokens,
            call_tokens=self._cost.call_tokens,
        )
        rows = [self._ready[i] for i in chosen]
        gone = set(chosen)
        self._ready = [row for i, row in enumerate(self._ready) if i not in gone]
        return rows

    def _prepare(self, bench: _ThreadHandlers, jobs: Sequence[Job]) -> None:
        """Convert requests to rows. If the inputs of a request are invalid, only that request fails."""
        prepared: list[Job] = []
        for job in jobs:
            if job.future.cancelled():
                continue
            start = time.perf_counter()
            try:
                job.take(bench.work(job.operation).prepare(job.inputs, job.options))
            except (KeyboardInterrupt, SystemExit):
                raise
            except BaseException as error:  # noqa: BLE001  # the request fails with it; Rust panics of tokenizers are not `Exception`s
                _fail(job, _unfit(job, error))
                continue
            job.timing.queue_s += start - job.arrived
            job.last_end = time.perf_counter()
            job.timing.tokenization_s = job.last_end - start
            if job.left:
                prepared.append(job)
            else:
                self._finish(bench, job)
        with self._lock:
            self._preparing -= 1
            for job in prepared:
                if not job.future.cancelled():
                    self._ready.extend(job.rows)
            if (self._ready and self._idle) or self._stopping:
                self._for_workers.notify()
            if self._raw and not self._idle:
                self._for_helpers.notify()

    def _run(self, bench: _ThreadHandlers, rows: Sequence[Row]) -> None:
        jobs = list(dict.fromkeys(row.job for row in rows))
        start = time.perf_counter()
        outputs: list[Any] = []
        failure: Exception | None = None
        try:
            outputs = bench.work(jobs[0].operation).run(rows)
        except Exception as error:  # noqa: BLE001  # each request gets its own error below
            failure = error
        if len(jobs) > 1 and (failure is not None or any(find_nan(output) is not None for output in outputs)):
            # An error in one request must not fail the other requests. Dynamic quantization computes its scales from all rows of the
            # batch, so NaN in one row makes all outputs NaN.
            logger.debug(
                "A batch of %d requests failed, or its outputs contain NaN; each request now runs alone.",
                len(jobs),
                exc_info=failure,
            )
            for job in jobs:
                self._run(bench, [row for row in rows if row.job is job])
            return
        if failure is not None:
            _fail(jobs[0], failure)
            return
        end = time.perf_counter()
        count = sum(row.count for row in rows)
        padded = max(row.length for row in rows) * count
        if self._warm:
            self._cost.add(padded, end - start)
        for row, output in zip(rows, outputs, strict=True):
            row.job.outputs[row.place] = output
        for job in jobs:
            timing = job.timing
            timing.queue_s += max(start - job.last_end, 0.0)
            timing.inference_s += end - max(start, job.last_end)
            timing.batch = max(timing.batch, count)
            job.last_end = end
        complete: list[Job] = []
        with self._lock:
            if self._warm:
                seconds = (end - start) / count
                self._seconds_a_row += (seconds - self._seconds_a_row) * (0.1 if self._seconds_a_row else 1.0)
            # The first call of a session is slower than later calls, so its duration is not measured.
            self._warm = True
            for row in rows:
                row.job.left -= 1
                if not row.job.left:
                    complete.append(row.job)
            # While the queue stops, the helper threads may have ended already, so this thread finishes the requests
            # itself.
            busy = bool(self._ready or self._raw) and not self._stopping
            if busy and complete:
                self._computed.extend(complete)
                self._for_helpers.notify()
                complete = []
        if self.observer is not None:
            tokens = sum(row.length * row.count for row in rows)
            self.observer.batch(self.name, count, tokens, padded, end - start)
        for job in complete:
            self._finish(bench, job)

    def _finish(self, bench: _ThreadHandlers, job: Job) -> None:
        if job.future.cancelled():
            return
        try:
            outputs = job.outputs_by_input()
            if job.operation.finite:
                check_outputs(job.operation.name, outputs)
            with np.errstate(invalid="ignore", over="ignore"):
                answer = bench.work(job.operation).finish(job.inputs, job.options, job.memo, outputs)
            if job.operation.finite:
                check_answer(job.operation.name, answer)
        except Exception as error:  # noqa: BLE001  # the request fails with this error
            _fail(job, _unfit(job, error))
            return
        job.timing.total_s = time.perf_counter() - job.arrived
        _settle(job, lambda: job.future.set_result(answer))


def _unfit(job: Job, error: BaseException) -> AccelError:
    """Return an error from a pipeline step as an error about the request's input."""
    if isinstance(error, AccelError):
        return error
    # Log at debug level: the tracebacks of invalid requests would fill the log.
    logger.debug("The operation %s rejected the inputs of a request.", job.operation.name, exc_info=error)
    refusal = InputError(
        f"The operation {job.operation.name!r} does not accept the inputs: {error}",
        fix="pass inputs in the format of the transformers pipeline for this task.",
    )
    refusal.__cause__ = error
    return refusal


def _fail(job: Job, error: Exception) -> None:
    if not isinstance(error, AccelError):
        logger.error("A model call for the operation %s failed.", job.operation.name, exc_info=error)
        failure_error = SessionError(
            f"The model call for the operation {job.operation.name!r} failed: {error}",
            fix="read the traceback in the log of the process.",
        )
        failure_error.__cause__ = error
        error = failure_error
    failure = error
    _settle(job, lambda: job.future.set_exception(failure))


def _settle(job: Job, set_it: Callable[[], None]) -> None:
    """Complete the future of a request, unless the request was cancelled."""
    if not job.future.done() and job.future.set_running_or_notify_cancel():
        set_it()
