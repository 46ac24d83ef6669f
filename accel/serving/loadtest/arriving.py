"""Requests that arrive at times which nobody's answers move, and what became of each."""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import numpy as np

from .client import Client, Lost
from .targets import Traffic

Arrivals = Literal["poisson", "uniform"]
_TICK_S = 0.001
"""What an event loop's clock knows. A request that is sent within a tick of its planned time arrives when it is sent."""


@dataclass(slots=True)
class Request:
    """One request.

    Attributes:
        planned: When it was to arrive, seconds since the beginning.
        arrived: The same on the clock's grid: what its latency is counted from.
        late_s: How much later than planned it was sent.
        outcome: Its status, or what happened instead.
        latency_s: From its arrival to its answer.
        queue_ms, inference_ms: Of the server's headers.
    """

    planned: float
    arrived: float = 0.0
    late_s: float = 0.0
    outcome: str = ""
    latency_s: float = 0.0
    queue_ms: float | None = None
    inference_ms: float | None = None


def plan(rate: float, seconds: float, arrivals: Arrivals, seed: int) -> list[float]:
    """When requests arrive."""
    if arrivals == "uniform":
        return [i / rate for i in range(math.ceil(rate * seconds))]
    # Enough for a count that is twelve standard deviations above its mean.
    mean = rate * seconds
    steps = np.random.default_rng(seed).exponential(1 / rate, int(mean + 12 * mean**0.5 + 12))
    times = np.cumsum(steps)
    return [float(one) for one in times[times < seconds]]


async def send_all(
    client: Client,
    traffic: Traffic,
    times: list[float],
    *,
    timeout_s: float,
    seed: int,
    told: Callable[[float], None],
) -> tuple[list[Request], float]:
    """Send a request at each time, whatever became of those before; and how long it took until all were answered.

    Args:
        client: Of the server.
        traffic: What is sent; bodies are drawn at random.
        times: Seconds from now on.
        timeout_s: Until a request is given up.
        seed: Of the drawing.
        told: Called now and then with the seconds that are over.
    """
    chosen = np.random.default_rng(seed + 1).integers(0, len(traffic.bodies), len(times))
    requests = [Request(planned) for planned in times]
    tasks: set[asyncio.Task[None]] = set()
    start = time.perf_counter()

    async def ask(one: Request, body: bytes) -> None:
        left = one.arrived + timeout_s - (time.perf_counter() - start)
        try:
            async with asyncio.timeout(max(left, 0)):
                reply = await client.request("POST", traffic.path, body)
        except TimeoutError:
            one.outcome = "timeout"
        except Lost as error:
            one.outcome = str(error)
        except OSError as error:
            one.outcome = error.strerror or type(error).__name__
        else:
            one.outcome = str(reply.status)
            one.queue_ms = _number(reply.headers.get("x-queue-ms"))
            one.inference_ms = _number(reply.headers.get("x-inference-ms"))
        one.latency_s = time.perf_counter() - start - one.arrived

    tick = 0.0
    for one, which in zip(requests, chosen, strict=True):
        now = time.perf_counter() - start
        if one.planned > now:
            await asyncio.sleep(one.planned - now)
            now = time.perf_counter() - start
        one.late_s = max(now - one.planned, 0.0)
        one.arrived = now if one.late_s < 2 * _TICK_S else one.planned
        task = asyncio.create_task(ask(one, traffic.bodies[which]))
        tasks.add(task)
        task.add_done_callback(tasks.discard)
        if now - tick > 0.2:
            tick = now
            told(now)
            await asyncio.sleep(0)
    while tasks:
        await asyncio.wait(tasks)
    return requests, time.perf_counter() - start


def _number(text: str | None) -> float | None:
    try:
        return None if text is None else float(text)
    except ValueError:
        return None
