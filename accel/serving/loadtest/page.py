"""A load test for people: a table for the terminal, and one self-contained page."""

from __future__ import annotations

import html
import math
from collections.abc import Mapping, Sequence
from io import StringIO

from ...measuring.report import document
from .results import QUANTILES, LoadTest, RateRun

_WIDTH, _HEIGHT, _LEFT = 900, 260, 60


def text(found: LoadTest) -> str:
    """The table."""
    from rich.console import Console
    from rich.table import Table

    objective = found.settings["objective_ms"]
    table = Table(title=f"{found.url}, {found.settings['arrivals']} arrivals, {found.settings['seconds']:g} s a rate")
    for head in _heads(objective):
        table.add_column(head, justify="right", no_wrap=True)
    for run in found.runs:
        table.add_row(*_cells(run, objective))
    stream = StringIO()
    Console(file=stream, width=160, markup=False).print(table)
    return "\n".join([stream.getvalue().rstrip(), *notes(found)])


def notes(found: LoadTest) -> list[str]:
    """What has to be known to read the numbers."""
    made = []
    for run in found.runs:
        if run.errors:
            told = ", ".join(f"{count} x {what}" for what, count in sorted(run.errors.items()))
            made.append(f"Errors at {run.rate:g} a second: {told}.")
        if run.client_behind:
            made.append(
                f"At {run.rate:g} a second the client itself was late ({run.client_late_ms:.0f} ms, 99th percentile): "
                "the latencies hold its own, too. Run it on another machine."
            )
        if run.server is not None and dict(run.server.requests) != _statuses(run):
            made.append(
                f"At {run.rate:g} a second the server counted {dict(run.server.requests)}, the client {_statuses(run)}: "
                "somebody else asks it, too, it was asked again after a closed connection, or it has several replicas."
            )
    if found.settings["find"]:
        what = f"{found.settings['share']:.0%} of requests within {found.settings['objective_ms']:g} ms"
        made.append(
            f"The highest rate with {what}: {found.best_rate:g} requests a second."
            if found.best_rate is not None
            else f"No rate that was tried had {what}."
        )
    return made


def _statuses(run: RateRun) -> dict[str, int]:
    """What the server should have counted."""
    return {status: count for status, count in run.sent.items() if status.isdecimal()}


def _heads(objective: float | None) -> list[str]:
    made = ["rate", "requests", "answered", "429", "errors", "p50 ms", "p95 ms", "p99 ms", "max ms", "answers/s"]
    if objective is not None:
        made += [f"within {objective:g} ms", "goodput/s", "met"]
    return [*made, "rows a call"]


def _cells(run: RateRun, objective: float | None) -> list[str]:
    latency = run.latency
    made = [f"{run.rate:g}", str(run.requests), str(run.answered), str(run.refused), str(sum(run.errors.values()))]
    made += [f"{ms:.1f}" for ms in (latency.median, latency.p95, latency.p99, latency.max)] if latency else [""] * 4
    made.append(f"{run.throughput:.1f}")
    if objective is not None:
        made += [f"{run.within:.1%}", f"{run.goodput:.1f}", "yes" if run.met else "no"]
    return [*made, f"{run.server.rows / run.server.calls:.1f}" if run.server and run.server.calls else ""]


def page(found: LoadTest, *, title: str = "accel loadtest") -> str:
    """The page."""
    runs = sorted(found.runs, key=lambda run: run.rate)
    shown = [run for run in runs if run.latency is not None]
    objective = found.settings["objective_ms"]
    heads = "".join(f"<th>{_safe(head)}</th>" for head in _heads(objective))
    rows = "".join("<tr>" + "".join(f"<td>{_safe(c)}</td>" for c in _cells(run, objective)) + "</tr>" for run in runs)
    told = "; ".join(f"{name} {value}" for name, value in found.settings.items() if value is not None)
    characters = ", ".join(f"{name} {value}" for name, value in found.texts["characters"].items())
    parts = [
        f"<h1>{_safe(title)}</h1><p class=note>{_safe(found.url)}<br>{_safe(told)}<br>{found.texts['rows']} texts; characters: "
        f"{_safe(characters)}<br>Client: {_safe(found.machine['platform'])}, {found.machine['processors']} processors</p>",
        f"<div class=scroll><table><tr>{heads}</tr>{rows}</table></div>",
        "<p class=note>Latencies are counted from when a request was to arrive; those of refused requests and errors are not in them.</p>",
        "".join(f"<p>{_safe(note)}</p>" for note in notes(found)),
    ]
    if len(shown) > 1:
        lines = {name: [(run.rate, getattr(run.latency, name)) for run in shown] for name in ("median", "p95", "p99")}
        parts += ["<h2>Latency by rate</h2>", _plot(lines, "requests a second", "ms", objective, log=True)]
    if shown:
        # Each latency at the share of requests that were slower: the tail is what is looked at.
        tails = {
            f"{run.rate:g} a second": [
                (-math.log10(1 - q), ms) for q, ms in zip(QUANTILES, run.quantiles, strict=True) if q < 1
            ]
            for run in shown
        }
        ticks = {-math.log10(1 - q): f"{q:.1%}" for q in (0.0, 0.5, 0.9, 0.99, 0.999)}
        parts += [
            "<h2>Distribution</h2>",
            _plot(tails, "of answers are quicker", "ms", objective, log=True, ticks=ticks),
        ]
    for run in shown:
        seconds = {
            name: [(i + 0.5, value) for i, one in enumerate(run.timeline) if (value := getattr(one, name)) is not None]
            for name in ("median", "max")
        }
        parts += [
            f"<h2>{run.rate:g} a second, second by second</h2>",
            _plot(seconds, "seconds", "ms", objective, log=True),
        ]
    return document(title, "".join(parts))


_COLORS = ("#2f6fb3", "#c2571a", "#2e8b57", "#8a4fbf", "#b03060", "#777", "#b8860b", "#008b8b")


def _plot(
    lines: Mapping[str, Sequence[tuple[float, float]]],
    across: str,
    up: str,
    mark: float | None,
    *,
    log: bool,
    ticks: Mapping[float, str] | None = None,
) -> str:
    """Lines through points, with an axis of logarithms for what is measured."""
    points = [point for line in lines.values() for point in line]
    right = max(x for x, _ in points) or 1.0
    left = 0.0
    ys = [y for _, y in points] + ([mark] if mark is not None else [])
    low, high = min(ys) / 1.2, max(ys) * 1.2

    def place(x: float, y: float) -> tuple[float, float]:
        part = (math.log(y / low) / math.log(high / low)) if log else (y - low) / (high - low)
        return _LEFT + (_WIDTH - _LEFT) * (x - left) / (right - left), _HEIGHT * (1 - part)

    # Names stand above the picture, seven in a line.
    head = 18 * math.ceil(len(lines) / 7) + 4
    made = [
        f"<svg viewBox='0 {-head} {_WIDTH} {_HEIGHT + 40 + head}' role=img aria-label='{_safe(up)} by {_safe(across)}'>"
    ]
    made.append(
        f"<line class=axis x1={_LEFT} x2={_WIDTH} y1={_HEIGHT} y2={_HEIGHT}></line>"
        f"<line class=axis x1={_LEFT} x2={_LEFT} y1=0 y2={_HEIGHT}></line>"
    )
    for i in range(5):
        y = low * (high / low) ** (i / 4) if log else low + (high - low) * i / 4
        made.append(f"<text class=soft x={_LEFT - 6} y={place(0, y)[1] + 4:.0f} text-anchor=end>{y:.3g}</text>")
    for x, label in (ticks or {right * i / 4: f"{right * i / 4:.3g}" for i in range(5)}).items():
        if x <= right:
            made.append(
                f"<text class=soft x={place(x, high)[0]:.0f} y={_HEIGHT + 16} text-anchor=middle>{label}</text>"
            )
    made.append(
        f"<text class=soft x={_WIDTH / 2} y={_HEIGHT + 34} text-anchor=middle>{_safe(across)} ({_safe(up)} upwards, logarithmic)</text>"
    )
    if mark is not None:
        y = place(0, mark)[1]
        made.append(f"<line class=whisker stroke-dasharray='4 4' x1={_LEFT} x2={_WIDTH} y1={y:.1f} y2={y:.1f}></line>")
    for number, (name, line) in enumerate(lines.items()):
        color = _COLORS[number % len(_COLORS)]
        places = " ".join(f"{px:.1f},{py:.1f}" for px, py in (place(x, y) for x, y in line))
        made.append(f"<polyline points='{places}' fill=none stroke='{color}' stroke-width=2></polyline>")
        for x, y in line:
            px, py = place(x, y)
            told = f"{_safe(name)}: {y:.3g}"
            made.append(f"<circle cx={px:.1f} cy={py:.1f} r=3 fill='{color}'><title>{told}</title></circle>")
        made.append(
            f"<text x={_LEFT + 118 * (number % 7)} y={14 - head + 18 * (number // 7)} style='fill:{color}'>{_safe(name)}</text>"
        )
    return "".join([*made, "</svg>"])


def _safe(value: object) -> str:
    return html.escape(str(value))
