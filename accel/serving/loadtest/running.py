"""`accel loadtest`: one rate after another, and the highest one that a server bears."""

from __future__ import annotations

import asyncio
import gc
import os
import platform
import statistics
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from ... import progress
from ...config import available_processors
from ...errors import ConfigError, SessionError
from ...measuring.statistics import summarize
from .arriving import Arrivals, Request, plan, send_all
from .client import Client, Lost
from .metrics import read_metrics
from .results import QUANTILES, LoadTest, RateRun, Second
from .targets import Traffic, prepare

_MOST_RATE = 1e5
_STEPS = 40


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadSettings:
    """How a load test is made.

    Attributes:
        rates: Requests a second; with `find`, the first one that is tried.
        find: Look for the highest rate that meets the objective.
        precision: Of that rate, relative.
        objective_ms: A request is good when it is answered within this.
        share: Of requests that must be good for a rate to meet the objective.
        seconds: For how long requests of one rate arrive.
        warmup_s: Before that, at the same rate, not counted.
        arrivals: `poisson`, at random times as those of independent callers, or `uniform`.
        timeout_s: Until a request is given up.
        connections: At once, at most.
        seed: Of arrivals and texts.
    """

    rates: tuple[float, ...] = (10.0,)
    find: bool = False
    precision: float = 0.05
    objective_ms: float | None = None
    share: float = 0.99
    seconds: float = 10.0
    warmup_s: float = 2.0
    arrivals: Arrivals = "poisson"
    timeout_s: float = 30.0
    connections: int = 1024
    seed: int = 0

    def __post_init__(self) -> None:
        positive = ("precision", "seconds", "timeout_s", "connections", "objective_ms")
        wrong = [name for name in positive if (value := getattr(self, name)) is not None and value <= 0]
        if wrong or not self.rates or not all(0 < rate <= _MOST_RATE for rate in self.rates) or self.warmup_s < 0:
            raise ConfigError(
                f"A load test cannot be made of {', '.join(wrong) or 'these rates'}.", fix="use numbers above 0."
            )
        if not 0 < self.share <= 1 or self.arrivals not in ("poisson", "uniform"):
            raise ConfigError(
                f"share is {self.share}, arrivals {self.arrivals!r}.", fix="a share up to 1; poisson or uniform."
            )
        if self.find and self.objective_ms is None:
            raise ConfigError("There is no objective to be met.", fix="say which: --objective-ms 100.")


def loadtest(
    url: str,
    data: str | os.PathLike[str] | Sequence[str | os.PathLike[str]],
    settings: LoadSettings | None = None,
    *,
    model: str | None = None,
    columns: Mapping[str, str] | None = None,
    options: Mapping[str, Any] | None = None,
    tokenizer: str | None = None,
    key: str | None = None,
    insecure: bool = False,
) -> LoadTest:
    """Send requests to a server at given rates and measure how long each waits.

    Requests arrive when they were planned to, whatever became of those before (open loop), and their latency counts from there:
    a server that stalls is not asked more slowly, and what piles up meanwhile counts.

    Args:
        url: Of an endpoint; or of a server, which is then asked what it serves.
        data: Texts to send: CSV, TSV, JSON lines or Parquet. Requests draw from them, so that lengths are as they are there.
        settings: Rates, objective, duration.
        model: Which one, of several.
        columns: Column by use, such as `{"text": "query"}`.
        options: More fields of each request's body.
        tokenizer: Folder of a tokenizer, for an Open Inference server that takes tokens.
        key: API key.
        insecure: Do not check the certificate.

    Raises:
        ConfigError: Settings or a URL that cannot work.
        InputError: Data that has no inputs for the endpoint.
        SessionError: The server cannot be reached, or refuses the first request.
    """
    return asyncio.run(
        _test(
            url, data, settings or LoadSettings(), key, insecure,
            model=model, columns=columns, options=options, tokenizer=tokenizer,
        )
    )  # fmt: skip


async def _test(url: str, data: Any, settings: LoadSettings, key: str | None, insecure: bool, **what: Any) -> LoadTest:
    client = Client(url, key=key, connections=settings.connections, insecure=insecure)
    # A collection would make the client late.
    collecting = gc.isenabled()
    try:
        traffic = await _reached(client, url, data, what)
        gc.disable()
        runs: list[RateRun] = []
        if settings.find:
            best = await _find(client, traffic, settings, runs)
        else:
            best = None
            for rate in settings.rates:
                runs.append(await _run(client, traffic, settings, rate))
                gc.collect()
    finally:
        if collecting:
            gc.enable()
        client.close()
    texts = dict(zip(("min", "median", "p95", "max"), traffic.lengths, strict=True))
    return LoadTest(
        url=url.rstrip("/") if url.rstrip("/").endswith(traffic.path) else url.rstrip("/") + traffic.path,
        settings=asdict(settings),
        texts={"rows": len(traffic.bodies), "skipped": traffic.skipped, "characters": texts},
        machine={"platform": platform.platform(), "processors": available_processors()},
        runs=tuple(runs),
        best_rate=best,
    )


async def _reached(client: Client, url: str, data: Any, what: Mapping[str, Any]) -> Traffic:
    """What is to be sent, after one request that has to be answered."""
    try:
        traffic = await prepare(client, url, data, **what)
        reply = await client.request("POST", traffic.path, traffic.bodies[0])
    except (OSError, Lost) as error:
        raise SessionError(f"{url} cannot be reached: {error}", fix="check the URL, and whether it runs.") from error
    if not 200 <= reply.status < 300 and reply.status != 429:
        told = reply.body[:300].decode(errors="replace")
        raise SessionError(f"{traffic.path} answers {reply.status}: {told}", fix="see what the server wants of it.")
    return traffic


async def _find(client: Client, traffic: Traffic, settings: LoadSettings, runs: list[RateRun]) -> float | None:
    """The highest rate that meets the objective: doubled until one does not, then halved in between; `None`: none does."""
    low, high, rate = 0.0, None, settings.rates[0]
    for _ in range(_STEPS):
        run = await _run(client, traffic, settings, rate)
        runs.append(run)
        gc.collect()
        low, high = (rate, high) if run.met else (low, rate)
        if high is None:
            rate *= 2
            if rate > _MOST_RATE:
                break
        elif low == 0.0 and rate > 0.05 * settings.rates[0]:
            rate /= 2
        elif low == 0.0 or (high - low) / high <= settings.precision:
            break
        else:
            rate = (low + high) / 2
    return low or None


async def _run(client: Client, traffic: Traffic, settings: LoadSettings, rate: float) -> RateRun:
    whole = settings.warmup_s + settings.seconds
    what = f"{rate:g} requests a second"
    progress.report(what, 0, round(whole))
    before = await read_metrics(client, traffic.path)
    requests, spent = await send_all(
        client,
        traffic,
        plan(rate, whole, settings.arrivals, settings.seed),
        timeout_s=settings.timeout_s,
        seed=settings.seed,
        told=lambda seconds: progress.report(what, round(seconds), round(whole)),
    )
    after = await read_metrics(client, traffic.path)
    server = after.since(before) if before is not None and after is not None else None
    counted = [one for one in requests if one.planned >= settings.warmup_s]
    if not counted:
        raise ConfigError(
            f"No request arrived within {settings.seconds:g} s at {rate:g} a second.", fix="measure longer: --seconds."
        )
    answered = [one for one in counted if one.outcome.startswith("2")]
    milliseconds = [one.latency_s * 1e3 for one in answered]
    errors = Counter(one.outcome for one in counted if not one.outcome.startswith("2") and one.outcome != "429")
    goodput = within = met = None
    if settings.objective_ms is not None:
        good = sum(ms <= settings.objective_ms for ms in milliseconds)
        goodput, within = good / settings.seconds, good / len(counted)
        met = within >= settings.share
    return RateRun(
        rate=rate,
        seconds=settings.seconds,
        requests=len(counted),
        answered=len(answered),
        refused=sum(one.outcome == "429" for one in counted),
        errors=dict(errors),
        latency=summarize(milliseconds) if answered else None,
        quantiles=tuple(float(ms) for ms in np.quantile(milliseconds, QUANTILES)) if answered else (),
        throughput=len(answered) / max(spent - settings.warmup_s, settings.seconds),
        goodput=goodput,
        within=within,
        met=met,
        queue_ms=_quantile([one.queue_ms for one in answered], 0.5),
        inference_ms=_quantile([one.inference_ms for one in answered], 0.5),
        inference_p95_ms=_quantile([one.inference_ms for one in answered], 0.95),
        client_late_ms=float(np.quantile([one.late_s * 1e3 for one in counted], 0.99)),
        timeline=_timeline(counted, settings),
        sent=dict(Counter(one.outcome for one in requests)),
        server=server,
    )


def _quantile(values: Sequence[float | None], q: float) -> float | None:
    known = [one for one in values if one is not None]
    return float(np.quantile(known, q)) if known else None


def _timeline(requests: Sequence[Request], settings: LoadSettings) -> tuple[Second, ...]:
    seconds: list[list[Request]] = [[] for _ in range(int(np.ceil(settings.seconds)))]
    for one in requests:
        seconds[min(int(one.planned - settings.warmup_s), len(seconds) - 1)].append(one)
    made = []
    for group in seconds:
        taken = [one.latency_s * 1e3 for one in group if one.outcome.startswith("2")]
        refused = sum(one.outcome == "429" for one in group)
        made.append(
            Second(
                answered=len(taken),
                refused=refused,
                failed=len(group) - len(taken) - refused,
                median=statistics.median(taken) if taken else None,
                max=max(taken, default=None),
            )
        )
    return tuple(made)
