"""Whether a request is worth reading: when the event loop is late, it waits in no queue that could be counted."""

from __future__ import annotations

import asyncio
from typing import Any

from ...errors import QueueFullError
from ..engine import Engine
from ..server_metrics import Metrics

_BEAT_S = 0.01
_MOST_LATE_S = 1.0
"""Without a `max_wait_s`: of a loop that is later, callers wait for HTTP and not for a model."""


class Admission:
    """Refuses requests before they are read, at a fraction of what an answer costs.

    Args:
        engine: What answers.
        metrics: Where refusals are counted, without a model where there are several: nobody knows yet which one it is for.
    """

    def __init__(self, engine: Engine, metrics: Metrics) -> None:
        self._engine, self._metrics = engine, metrics
        self._loop: asyncio.AbstractEventLoop | None = None
        self._beat = self._last_late_s = 0.0

    async def watch(self) -> None:
        """See how late the event loop is, until cancelled."""
        self._loop = asyncio.get_running_loop()
        self._beat = self._loop.time()
        while True:
            await asyncio.sleep(_BEAT_S)
            self._last_late_s, self._beat = self._since_beat(self._loop), self._loop.time()

    def _since_beat(self, loop: asyncio.AbstractEventLoop) -> float:
        return max(loop.time() - self._beat - _BEAT_S, 0.0)

    @property
    def late_s(self) -> float:
        """How far the event loop is behind: a request that it handles now may have come so long ago."""
        # What was read behind the last beat may have come before it.
        return max(self._since_beat(self._loop), self._last_late_s) if self._loop is not None else 0.0

    def check(self, others: int) -> None:
        """Refuse a request that would wait too long whatever it asks for.

        Args:
            others: Requests that are being answered; alone, a request is never too late.

        Raises:
            QueueFullError: It would.
        """
        if not others:
            return
        engine, limits = self._engine, self._engine.limits
        # Its answer waits for the loop once more.
        late, queued = 2 * self.late_s, engine.wait_s
        most = limits.max_wait_s
        if late > _MOST_LATE_S if most is None else late + queued > most:
            names = list(engine.models)
            self._metrics.refused(names[0] if len(names) == 1 else "")
            error = QueueFullError(
                f"{others} requests are being answered, about {late + queued:.2g} s of work.",
                fix="try again later, or send less at once.",
            )
            error.retry_after_s = late + queued
            raise error


async def ended(task: asyncio.Task[Any]) -> None:
    """Cancel a task and wait for its end."""
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
