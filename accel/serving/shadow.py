"""Send a part of a server's requests also to a second model, and compare its answers and computing times with those of the first.

The callers get the answers of the first model only. A request is copied after its answer is complete. The copies wait in a bounded queue,
run while the first model has nothing to do, and on Linux with the lowest priority of the processor. If the queue is full, a copy is
dropped and counted.
"""

from __future__ import annotations

import logging
import math
import os
import queue
import random
import sys
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from ..config import check_number
from ..errors import AccelError, ConfigError
from .worker_models import Source, name_of

if TYPE_CHECKING:
    from .engine import Engine
    from .job import Job

logger = logging.getLogger(__name__)

_WAITING = 64  # copies that wait
_FEWEST = 100  # compared requests before an automatic switch
_Z = 1.96  # quantile of the normal distribution for intervals of 95 %
_COSINE = 0.99
_CLOSE = 0.05  # accepted difference of scores and other numbers
_POLL_S = 0.002
_LONGEST_WAIT_S = 5.0


@dataclass(frozen=True, slots=True, kw_only=True)
class ShadowSettings:
    """Settings of a shadow.

    Attributes:
        share: Part of the requests that the shadow gets, 0 to 1.
        min_agreement: Switch to the shadow when the lower end of the interval of the agreement is at least this value, and
            `max_latency_ratio` holds. `None`: switch only by hand.
        max_latency_ratio: The upper end of the interval of the shadow's computing time relative to the model's must be at most this
            value.
    """

    share: float = 0.05
    min_agreement: float | None = None
    max_latency_ratio: float | None = None

    def __post_init__(self) -> None:
        check_number("ShadowSettings.share", self.share, most=1, above=0)
        check_number("ShadowSettings.min_agreement", self.min_agreement, most=1, above=0)
        check_number("ShadowSettings.max_latency_ratio", self.max_latency_ratio, above=0)
        if (self.min_agreement is None) != (self.max_latency_ratio is None):
            raise ConfigError(
                "A shadow that switches by itself needs a bound for the agreement and a bound for the latency.",
                fix="pass both min_agreement and max_latency_ratio (--switch-agreement, --switch-latency), or neither.",
            )


@dataclass(slots=True)
class ShadowComparison:
    """Counts of compared requests.

    Attributes:
        compared: Requests that both models answered.
        agreed: Compared requests with the same answer.
        failed: Requests that only the shadow did not answer.
        dropped: Copies that were not computed, because too many waited.
        logs: Sum of the logarithms of the ratios of the computing times, shadow to model.
        squares: Sum of their squares.
        milliseconds: Sums of the computing times of the model and of the shadow.
    """

    compared: int = 0
    agreed: int = 0
    failed: int = 0
    dropped: int = 0
    logs: float = 0.0
    squares: float = 0.0
    milliseconds: list[float] = field(default_factory=lambda: [0.0, 0.0])

    def add(self, same: bool, model_s: float, shadow_s: float) -> None:
        """Count a compared request."""
        self.compared += 1
        self.agreed += same
        ratio = math.log(max(shadow_s, 1e-6) / max(model_s, 1e-6))
        self.logs += ratio
        self.squares += ratio * ratio
        self.milliseconds[0] += model_s * 1e3
        self.milliseconds[1] += shadow_s * 1e3

    @property
    def agreement(self) -> tuple[float, float, float]:
        """Part of the requests with the same answer, with its interval of 95 % (Wilson). Failed requests do not agree."""
        count = self.compared + self.failed
        if not count:
            return math.nan, 0.0, 1.0
        part, z = self.agreed / count, _Z * _Z
        middle = (part + z / (2 * count)) / (1 + z / count)
        half = _Z * math.sqrt(part * (1 - part) / count + z / (4 * count * count)) / (1 + z / count)
        return part, middle - half, middle + half

    @property
    def latency_ratio(self) -> tuple[float, float, float]:
        """Geometric mean of the shadow's computing time relative to the model's, with its interval of 95 %."""
        if self.compared < 2:
            return math.nan, 0.0, math.inf
        mean = self.logs / self.compared
        variance = max(self.squares - self.compared * mean * mean, 0.0) / (self.compared - 1)
        half = _Z * math.sqrt(variance / self.compared)
        return math.exp(mean), math.exp(mean - half), math.exp(mean + half)

    def to_dict(self) -> dict[str, Any]:
        """Return the counts and intervals as JSON values; `None` for values that are not known yet."""
        names = ("value", "low", "high")

        def interval(values: tuple[float, float, float]) -> dict[str, float | None]:
            return {name: v if math.isfinite(v) else None for name, v in zip(names, values, strict=True)}

        means = [total / self.compared if self.compared else None for total in self.milliseconds]
        return {
            "compared": self.compared, "agreed": self.agreed, "failed": self.failed, "dropped": self.dropped,
            "agreement": interval(self.agreement), "latency_ratio": interval(self.latency_ratio),
            "mean_ms": {"model": means[0], "shadow": means[1]},
        }  # fmt: skip


class Shadow:
    """A second model that gets copies of the requests of a model.

    Args:
        source: The model or artifact.
        settings: Share and bounds.
        model: Name of the engine's model; its only model when `None`.
        **arguments: Arguments of `accel.Engine`, such as `backend`.

    Raises:
        ConfigError: A setting is invalid.
    """

    def __init__(
        self, source: Source, settings: ShadowSettings | None = None, *, model: str | None = None, **arguments: Any
    ) -> None:
        self.source, self.settings, self.model = source, settings or ShadowSettings(), model
        self.comparison = ShadowComparison()
        self.switched = False
        self._arguments = arguments
        self._random = random.Random(0)
        self._copies: queue.Queue[Job | None] = queue.Queue(_WAITING)
        self._thread: threading.Thread | None = None
        self._opened = threading.Event()
        self._failure: BaseException | None = None
        self._switching = threading.Lock()
        self._stopping = False

    def start(self, engine: Engine) -> None:
        """Open the shadow's model and wait until it is open.

        Raises:
            ConfigError: The engine has several models, and none is named.
            TaskError: The shadow does not support the operations of the model.
        """
        names = list(engine.models)
        if self.model is None and len(names) > 1:
            raise ConfigError(
                f"The server has several models ({', '.join(names)}), and the shadow names none of them.",
                fix="pass the name of the model: --shadow NAME=MODEL.",
            )
        self.model = self.model or names[0]
        engine.operations(self.model)
        self._thread = threading.Thread(target=self._run, args=(engine,), name="accel-shadow", daemon=True)
        self._thread.start()
        self._opened.wait()
        if self._failure is not None:
            self._thread.join()
            raise self._failure

    def copy(self, name: str, job: Job) -> None:
        """Copy a request when its answer is complete, if it belongs to the share. Takes microseconds."""
        if name == self.model and not self.switched and self._random.random() < self.settings.share:
            job.future.add_done_callback(lambda _: self._offer(job))

    def _offer(self, job: Job) -> None:
        if job.future.cancelled() or job.future.exception() is not None:
            return
        try:
            self._copies.put_nowait(job)
        except queue.Full:
            self.comparison.dropped += 1

    def switch(self, engine: Engine) -> None:
        """Let the shadow's model answer all requests from now on. It is opened again, with the usual priority. Takes seconds.

        Raises:
            ConfigError: The model was switched before.
        """
        with self._switching:
            if self.switched:
                raise ConfigError(
                    "The server already uses the shadow's model.", fix="start the server with another shadow."
                )
            assert self.model is not None
            engine.replace(self.model, self.source, **self._arguments)
            self.switched = True
            self._stop()
        logger.warning("the model %r is now %s", self.model, name_of(self.source))

    @property
    def bounds_hold(self) -> bool:
        """Whether both intervals are inside the bounds, after at least 100 requests."""
        settings = self.settings
        if settings.min_agreement is None or settings.max_latency_ratio is None or self.comparison.compared < _FEWEST:
            return False
        return (
            self.comparison.agreement[1] >= settings.min_agreement
            and self.comparison.latency_ratio[2] <= settings.max_latency_ratio
        )

    def close(self) -> None:
        """Drop the waiting copies and close the shadow's model."""
        if self._thread is not None:
            self._stop()
            self._thread.join()
            self._thread = None

    def _stop(self) -> None:
        """Let the thread end after its current copy."""
        self._stopping = True
        try:
            self._copies.put_nowait(None)
        except queue.Full:
            logger.debug("the queue of copies is full, so the thread does not wait")

    def to_dict(self) -> dict[str, Any]:
        """Return the state as JSON values."""
        return {
            "model": self.model, "shadow": name_of(self.source), "share": self.settings.share, "switched": self.switched,
            "bounds": {"agreement": self.settings.min_agreement, "latency_ratio": self.settings.max_latency_ratio},
            **self.comparison.to_dict(),
        }  # fmt: skip

    def _run(self, engine: Engine) -> None:
        if sys.platform == "linux":
            # Threads get the priority of the thread that creates them, also those of runtimes.
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), 19)
        try:
            assert self.model is not None
            other = type(engine)({self.model: self.source}, **self._arguments).start()
        except BaseException as error:  # noqa: BLE001  # raised again in `start`
            self._failure = error
            self._opened.set()
            return
        self._opened.set()
        with other:
            attempted = False
            while (job := self._copies.get()) is not None and not self._stopping:
                self._wait_for_idle(engine)
                self._compare(other, job)
                if self.bounds_hold and not attempted:
                    attempted = True
                    threading.Thread(target=self._switch_alone, args=(engine,), daemon=True).start()

    def _wait_for_idle(self, engine: Engine) -> None:
        """Wait until the model has no requests, at most some seconds: a busy server would otherwise compare nothing."""
        end = time.monotonic() + _LONGEST_WAIT_S
        while engine.pending(self.model) and not self._stopping and time.monotonic() < end:
            time.sleep(_POLL_S)

    def _switch_alone(self, engine: Engine) -> None:
        try:
            self.switch(engine)
        except AccelError as error:
            logger.warning("the server does not switch to %s: %s", name_of(self.source), error.message)

    def _compare(self, other: Engine, job: Job) -> None:
        copy = None
        try:
            copy = other.submit(job.inputs, operation=job.operation.name, **job.options)
            answer = copy.future.result()
        except Exception as error:  # noqa: BLE001  # the shadow must not affect the server
            logger.debug("the shadow did not answer a request: %s", error)
            self.comparison.failed += 1
            return
        seconds = [timing.tokenization_s + timing.inference_s for timing in (job.timing, copy.timing)]
        self.comparison.add(agree(job.future.result(), answer), *seconds)


def agree(expected: Any, actual: Any) -> bool:
    """Return whether two answers are the same for their reader: the same best class, text or order, or vectors in the same direction."""
    if isinstance(expected, Mapping) and isinstance(actual, Mapping):
        names = [
            name
            for name in ("label", "answer", "generated_text", "word", "token_str", "index", "text")
            if name in expected
        ]
        if names:
            return all(expected[name] == actual.get(name) for name in names)
        return expected.keys() == actual.keys() and all(agree(value, actual[name]) for name, value in expected.items())
    if isinstance(expected, str) or expected is None or isinstance(expected, bool):
        return bool(expected == actual)
    if isinstance(expected, list | tuple) and expected and isinstance(expected[0], Mapping):
        return len(expected) == len(actual) and agree_ranked(expected, actual)
    try:
        a, b = np.asarray(expected, dtype=np.float64), np.asarray(actual, dtype=np.float64)
    except (TypeError, ValueError):
        if isinstance(expected, list | tuple) and isinstance(actual, list | tuple):
            return len(expected) == len(actual) and all(agree(x, y) for x, y in zip(expected, actual, strict=True))
        return bool(expected == actual)
    if a.shape != b.shape:
        return False
    if a.size < 2:
        return bool(np.all(np.abs(a - b) <= _CLOSE * np.maximum(1.0, np.abs(a))))
    size = float(np.linalg.norm(a) * np.linalg.norm(b))
    return float(a.ravel() @ b.ravel()) >= _COSINE * size if size else bool(np.array_equal(a, b))


def agree_ranked(expected: Any, actual: Any) -> bool:
    """Return whether two lists of scored answers agree: the first entry of sorted classes, and otherwise all entries."""
    scores = [entry.get("score") for entry in expected]
    ranked = all(isinstance(score, float) for score in scores) and scores == sorted(scores, reverse=True)
    if ranked and "label" in expected[0] and "word" not in expected[0]:
        return agree(expected[0], actual[0])
    return all(agree(x, y) for x, y in zip(expected, actual, strict=True))
