"""Refuse requests before their bodies are read, when the event loop is late.

Requests that wait for the event loop are in no queue, so their number is unknown. The delay of the loop is measured instead.
"""

from __future__ import annotations

import asyncio

from ...errors import QueueFullError
from ..engine import Engine
from ..server_metrics import Metrics

_BEAT_S = 0.01
_MOST_LATE_S = 1.0
"""Greatest accepted delay of the event loop in seconds, if `max_wait_s` is not set.

With a longer delay, callers wait for HTTP and not for a model.
"""


class Admission:
    """Refuse requests before their bodies are read, which is cheaper than processing them.

    Args:
        engine: The engine.
        metrics: Counts refused requests. If the engine has several models, they are counted without a model name, because the name is in
            the body.
    """

    def __init__(self, engine: Engine, metrics: Metrics) -> None:
        self._engine, self._metrics = engine, metrics
        self._loop: asyncio.AbstractEventLoop | None = None
        self._beat = self._last_late_s = 0.0

    async def watch(self) -> None:
        """Measure the delay of the event loop repeatedly, until cancelled."""
        self._loop = asyncio.get_running_loop()
        self._beat = self._loop.time()
        while True:
            await asyncio.sleep(_BEAT_S)
            self._last_late_s, self._beat = self._since_beat(self._loop), self._loop.time()

    def _since_beat(self, loop: asyncio.AbstractEventLoop) -> float:
        return max(loop.time() - self._beat - _BEAT_S, 0.0)

    @property
    def late_s(self) -> float:
        """Delay of the event loop in seconds: a request that is handled now may have arrived this long ago."""
        # Include the delay of the last measurement, because a request that is handled after the measurement may have
        # arrived before it.
        return max(self._since_beat(self._loop), self._last_late_s) if self._loop is not None else 0.0

    def check(self, others: int) -> None:
        """Raise if a new request would have to wait too long.

        Args:
            others: Number of other requests in progress. If it is 0, the new request is accepted.

        Raises:
            QueueFullError: The expected wait is too long.
        """
        if not others:
            return
        engine, limits = self._engine, self._engine.limits
        # Count the delay twice: the request waited for the event loop, and its response will wait for it again.
        late, queued = 2 * self.late_s, engine.wait_s
        most = limits.max_wait_s
        if late > _MOST_LATE_S if most is None else late + queued > most:
            names = list(engine.models)
            self._metrics.refused(names[0] if len(names) == 1 else "")
            error = QueueFullError(
                f"The server is overloaded: {others} requests are in progress, about {late + queued:.2g} s of work.",
                fix="try again later, or send fewer inputs at once.",
            )
            error.retry_after_s = late + queued
            raise error
