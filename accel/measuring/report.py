"""Reports of measurements: a self-contained HTML page, a PNG, and a table for the terminal.

All reports are created from the JSON form of a benchmark (`BenchmarkResult.to_dict()`) or a search (`TuningResult.to_dict()`), so that a
report can be created again from a file.
"""

from __future__ import annotations

import html
import json
import math
import os
from collections.abc import Mapping, Sequence
from io import StringIO
from pathlib import Path
from statistics import geometric_mean
from typing import TYPE_CHECKING, Any

from ..errors import ConfigError
from .latency.results import ratio_of

if TYPE_CHECKING:
    from rich.table import Table

_STYLE = """
:root{color-scheme:light dark;--ink:#1b1f24;--soft:#667;--line:#d5d9e0;--bar:#2f6fb3;--mark:#c2571a;--page:#fff}
@media(prefers-color-scheme:dark){:root{--ink:#e6e8ec;--soft:#9aa3b0;--line:#3a404a;--bar:#6aa5e0;--mark:#f09a5c;--page:#15181d}}
body{font:15px/1.45 system-ui,sans-serif;color:var(--ink);background:var(--page);max-width:min(96vw,110rem);margin:2rem auto;padding:0 1rem}
h1{font-size:1.5rem}h2{font-size:1.15rem;margin-top:2rem}table{border-collapse:collapse;width:100%;font-size:.86rem}
th,td{padding:.3rem .5rem;border-bottom:1px solid var(--line);text-align:right;vertical-align:top}
th:first-child,td:first-child,td.text{text-align:left}.scroll{overflow-x:auto}
svg{width:100%;max-width:70rem;height:auto;overflow:visible}
svg text{fill:var(--ink);font:12px system-ui,sans-serif}svg .soft{fill:var(--soft)}
svg .axis{stroke:var(--line)}svg .bar{fill:var(--bar)}svg .mark{fill:var(--mark);stroke:none}
svg .whisker{stroke:var(--mark);stroke-width:1.5}
.note{color:var(--soft)}
"""


def html_page(values: Mapping[str, Any], *, title: str = "accel benchmark") -> str:
    """Return the report as an HTML page that needs no other file.

    Args:
        values: JSON form of a benchmark or a search. If its variants have an `accuracy`, the page plots latency against accuracy.
        title: Heading of the page.
    """
    variants = [v for v in values["variants"] if not v.get("error")]
    failed = [v for v in values["variants"] if v.get("error")]
    names = [cell["workload"] for cell in variants[0]["cells"]] if variants else []
    parts = [f"<h1>{_text(title)}</h1>", _facts(values)]
    for name in names:
        rows = [(v, cell) for v in variants for cell in v["cells"] if cell["workload"] == name]
        parts += [f"<h2>{_text(name)}</h2>", _bars(rows), _table(rows), _distributions(rows)]
    if any(v.get("accuracy") is not None for v in variants):
        parts += ["<h2>Latency against accuracy</h2>", _scatter(variants)]
    if failed:
        items = "".join(f"<li>{_text(v['name'])}: {_text(v['error'])}</li>" for v in failed)
        parts.append(f"<h2>Not measured</h2><ul>{items}</ul>")
    rejected = values.get("rejected") or []
    if rejected:
        items = "".join(
            f"<tr><td>{_text(r['name'])}</td><td class=text>{_text(r['reason'])}</td></tr>" for r in rejected
        )
        parts.append(f"<h2>Rejected candidates</h2><div class=scroll><table>{items}</table></div>")
    return page(parts, title=title)


def page(parts: Sequence[str], *, title: str) -> str:
    """Return a complete HTML page that needs no other file, with the style of the reports.

    Args:
        parts: HTML of the body.
        title: Title of the page.
    """
    return (
        "<!doctype html><html lang=en><head><meta charset=utf-8><meta name=viewport content='width=device-width'>"
        f"<title>{_text(title)}</title><style>{_STYLE}</style></head><body>{''.join(parts)}</body></html>\n"
    )


def write_html(values: Mapping[str, Any], path: str | os.PathLike[str], *, title: str = "accel benchmark") -> None:
    """Write the HTML report to a file."""
    Path(path).write_text(html_page(values, title=title), encoding="utf-8")


def write_png(values: Mapping[str, Any], path: str | os.PathLike[str], *, title: str = "accel benchmark") -> None:
    """Write a PNG with the median and the 95th percentile of the latency of every variant and workload.

    Raises:
        ConfigError: matplotlib is not installed.
    """
    figure_class = _figure()
    variants = [v for v in values["variants"] if v["cells"]]
    names = [cell["workload"] for cell in variants[0]["cells"]] if variants else []
    figure = figure_class(figsize=(9, 1.2 + max(1, len(names)) * (0.6 + 0.35 * len(variants))), layout="constrained")
    axes = figure.subplots(max(1, len(names)), 1, squeeze=False)[:, 0]
    for axis, name in zip(axes, names, strict=False):
        rows = [(v["name"], cell["latency"]) for v in variants for cell in v["cells"] if cell["workload"] == name]
        rows.reverse()
        axis.barh([label for label, _ in rows], [latency["median"] for _, latency in rows])
        axis.plot([latency["p95"] for _, latency in rows], range(len(rows)), "|", markersize=12)
        axis.set_title(name)
        axis.set_xlabel("ms; bar: median, mark: 95th percentile")
    figure.suptitle("\n".join([title, *disturbed(values)]), wrap=True)
    figure.savefig(path, dpi=150, format="png")


def check_pages(report: Path | None, png: Path | None) -> None:
    """Raise if a report cannot be written. Callers check this before the measurement, which takes minutes.

    Raises:
        ConfigError: The report's folder does not exist, or a PNG was requested and matplotlib is not installed.
    """
    for path in (report, png):
        if path is not None and not path.absolute().parent.is_dir():
            raise ConfigError(
                f"The report {path.name} cannot be written, because the folder {path.parent} does not exist.",
                fix=f"create the folder with `mkdir -p {path.parent}`, or pass another path.",
            )
    if png is not None:
        _figure()


def _figure() -> Any:
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ConfigError(
            "matplotlib is not installed, and accel needs it to write a PNG.",
            fix='install it with `pip install "accel-transformers[report]"`, or write the report as HTML.',
        ) from error
    return Figure


def text_table(values: Mapping[str, Any]) -> str:
    """Return the table of a benchmark for the terminal.

    Args:
        values: JSON form of the benchmark.
    """
    from rich.table import Table

    settings = values["settings"]
    table = Table(title=f"{values['task']}, {_traffic(settings)}, baseline: {values['baseline']}")
    heads = ("variant", "call", "median ms", "p95", "rows/s", "times baseline (95 %)", "computes in", "memory", "files")
    for head in heads:
        table.add_column(head, justify="left" if head in ("variant", "call") else "right", no_wrap="(95 %)" in head)
    notes = []
    for variant in values["variants"]:
        for cell in variant["cells"]:
            latency, ratio = cell["latency"], cell["ratio"]
            memory, size = variant["peak_memory_bytes"], variant["bytes"]
            table.add_row(
                variant["name"], cell["workload"], f"{latency['median']:.2f}", f"{latency['p95']:.2f}",
                f"{cell['throughput']:.1f}",
                str(ratio_of(ratio)) if ratio else "",
                variant["compute_dtype"], f"{memory / 1e6:.0f} MB" if memory else "", f"{size / 1e6:.1f} MB" if size else "",
            )  # fmt: skip
            if saturated(cell, settings):
                notes.append(
                    f"{variant['name']} finished only {cell['throughput'] / cell['batch']:.0f} of {settings['rate']:g} calls per second "
                    f"(workload {cell['workload']}). It is too slow for this rate, so its latency grows with the length of the measurement."
                )
    return "\n".join([printed(table, 140).rstrip(), *notes, *disturbed(values)])


def printed(table: Table, width: int) -> str:
    """Return a rich table as text."""
    from rich.console import Console

    stream = StringIO()  # a stream that is not a terminal, so that rich writes no color codes
    Console(file=stream, width=width, markup=False).print(
        table
    )  # variant names may contain brackets, which are not markup
    return stream.getvalue()


def disturbed(values: Mapping[str, Any]) -> list[str]:
    """Return a warning line if other programs used the machine during a benchmark or a search; an empty list on a quiet machine.

    Args:
        values: JSON form of the benchmark or search.
    """
    signs = (values.get("disturbance") or {}).get("signs") or ()
    return [f"Other programs disturbed these measurements: {'; '.join(signs)}."] if signs else []


def saturated(cell: Mapping[str, Any], settings: Mapping[str, Any]) -> bool:
    """Return whether a variant was too slow for the rate of arriving calls: it finished fewer than 75 % of the calls per second.

    The limit is below 100 %, because calls arrive at random times.
    """
    rate = settings.get("rate")
    return rate is not None and float(cell["throughput"]) / float(cell["batch"]) < 0.75 * float(rate)


def _traffic(settings: Mapping[str, Any]) -> str:
    """Describe the number of threads and callers, or the arrival rate."""
    callers, rate = settings.get("callers", 1), settings.get("rate")
    parts = [f"{settings['threads']} threads"]
    if rate is not None:
        parts.append(f"{rate:g} calls a second at random times, {callers} at once at most")
    elif callers > 1:
        parts.append(f"{callers} callers at once")
    return ", ".join(parts)


def _text(value: object) -> str:
    return html.escape(str(value))


def _facts(values: Mapping[str, Any]) -> str:
    machine, settings = values.get("machine", {}), values.get("settings", {})
    libraries = ", ".join(f"{k} {v}" for k, v in machine.get("libraries", {}).items())
    shown = {k: v for k, v in settings.items() if v is not None and v not in ({}, [], "")}
    words = "; ".join(f"{k} {v if isinstance(v, str | int | float) else json.dumps(v)}" for k, v in shown.items())
    return (
        f"<p class=note>{_text(machine.get('platform', ''))}; {_text(machine.get('processors', '?'))} processors; "
        f"{_text(libraries)}<br>Task {_text(values.get('task', ''))}. Baseline: {_text(values.get('baseline', ''))}.<br>"
        f"{_text(words)}</p>" + "".join(f"<p><b>{_text(line)}</b></p>" for line in disturbed(values))
    )


_ROW = 44  # height in pixels of a variant's name and the bar or histogram below it
_Rows = Sequence[tuple[Mapping[str, Any], Mapping[str, Any]]]


def _bars(rows: _Rows) -> str:
    """Return an SVG with the median latency of each variant as a bar, and the 95th percentile as a mark."""
    limit = max(cell["latency"]["p95"] for _, cell in rows)
    height = _ROW * len(rows) + 8
    lines = [f"<svg viewBox='0 0 900 {height}' role=img aria-label='Median latency of each variant'>"]
    for i, (variant, cell) in enumerate(rows):
        # Draw the name above its bar, because names may be long.
        y, latency = _ROW * i + 20, cell["latency"]
        width, mark = 700 * latency["median"] / limit, 700 * latency["p95"] / limit
        lines.append(
            f"<text x=0 y={y - 4}>{_text(variant['name'])}</text>"
            f"<rect class=bar x=0 y={y + 2} width={width:.1f} height=16 rx=2></rect>"
            f"<line class=whisker x1={mark:.1f} x2={mark:.1f} y1={y} y2={y + 20}></line>"
            f"<text x={mark + 6:.1f} y={y + 14}>{latency['median']:.2f} ms, 95 % below {latency['p95']:.2f}</text>"
        )
    return "".join([*lines, "</svg><p class=note>Bar: median. Mark: 95th percentile.</p>"])


def _table(rows: _Rows) -> str:
    head = ("variant", "mean", "sd", "min", "median", "p95", "p99", "max", "rows/s", "ratio to baseline", "computes in",
            "threads", "peak memory", "load", "files", "difference", "accuracy")  # fmt: skip
    lines = []
    for variant, cell in rows:
        latency, ratio = cell["latency"], cell.get("ratio")
        accuracy = variant.get("accuracy")
        lines.append(
            [
                variant["name"] + (f" ({'; '.join(variant['notes'])})" if variant.get("notes") else ""),
                *(f"{latency[k]:.2f}" for k in ("mean", "sd", "min", "median", "p95", "p99", "max")),
                f"{cell['throughput']:.1f}",
                str(ratio_of(ratio)) if ratio else "",
                variant["compute_dtype"],
                variant["threads"],
                _megabytes(variant.get("peak_memory_bytes")),
                f"{variant['load_s']:.2f} s" if variant.get("load_s") is not None else "",
                _megabytes(variant.get("bytes")),
                f"{variant['max_abs_difference']:.2g}" if variant.get("max_abs_difference") is not None else "",
                f"{accuracy:.4f}" if accuracy is not None else "",
            ]
        )
    body = "".join("<tr>" + "".join(f"<td>{_text(c)}</td>" for c in line) + "</tr>" for line in lines)
    return (
        f"<div class=scroll><table><tr>{''.join(f'<th>{h}</th>' for h in head)}</tr>{body}</table></div>"
        "<p class=note>Latencies in milliseconds. The ratio of a round is the baseline's median latency divided by the variant's median "
        "latency. The table shows the median ratio of all rounds, with its 95 % bootstrap interval.</p>"
    )


def _megabytes(value: int | None) -> str:
    return f"{value / 1e6:.0f} MB" if value is not None else ""


def _distributions(rows: _Rows) -> str:
    """Return an SVG with a latency histogram of all calls of each variant, on a logarithmic axis."""
    samples = [[t for block in cell["milliseconds"] for t in block] for _, cell in rows]
    if not all(samples):
        return ""
    low, high = min(map(min, samples)), max(map(max, samples))
    span = math.log(high / low) or 1.0
    height = _ROW * len(rows) + 24
    elements = [f"<svg viewBox='0 0 900 {height}' role=img aria-label='Every call of each variant'>"]
    for i, ((variant, _), times) in enumerate(zip(rows, samples, strict=True)):
        y = _ROW * i + 20
        elements.append(f"<text x=0 y={y - 4}>{_text(variant['name'])}</text>")
        bins = [0] * 150
        for t in times:
            bins[min(149, int(150 * math.log(t / low) / span))] += 1
        top = max(bins)
        elements += [
            f"<rect class=bar x={6 * j} y={y + 20 - 18 * n / top:.1f} width=5 height={18 * n / top:.1f}></rect>"
            for j, n in enumerate(bins)
            if n
        ]
    elements.append(
        f"<text class=soft x=0 y={height - 4}>{low:.2f} ms</text>"
        f"<text class=soft x=900 y={height - 4} text-anchor=end>{high:.2f} ms (logarithmic)</text></svg>"
    )
    return "".join(elements)


def _scatter(variants: Sequence[Mapping[str, Any]]) -> str:
    """Return an SVG with each variant's accuracy and latency (geometric mean of the workloads' medians)."""
    points = [
        (geometric_mean([c["latency"]["median"] for c in v["cells"]]), v["accuracy"], v)
        for v in variants
        if v.get("accuracy") is not None and v["cells"]
    ]
    right = max(x for x, _, _ in points) * 1.05
    low, high = min(y for _, y, _ in points), max(y for _, y, _ in points)
    pad = (high - low) * 0.15 or 0.01
    low, high = low - pad, high + pad
    elements = ["<svg viewBox='0 0 900 380' role=img aria-label='Latency against accuracy'>"]
    elements.append(
        "<line class=axis x1=60 x2=880 y1=340 y2=340></line><line class=axis x1=60 x2=60 y1=10 y2=340></line>"
    )
    for part in range(5):
        elements.append(f"<text class=soft x={60 + 205 * part} y=358 text-anchor=middle>{right * part / 4:.1f}</text>")
        height = 344 - 82 * part
        elements.append(f"<text class=soft x=54 y={height} text-anchor=end>{low + (high - low) * part / 4:.4f}</text>")
    for number, (x, y, variant) in enumerate(points, start=1):
        px, py = 60 + 820 * x / right, 340 - 330 * (y - low) / (high - low)
        elements.append(
            f"<circle class=mark cx={px:.1f} cy={py:.1f} r=5><title>{_text(variant['name'])}</title></circle>"
            f"<text x={px + 7:.1f} y={py - 5:.1f}>{number}</text>"
        )
    elements.append("<text class=soft x=470 y=376 text-anchor=middle>milliseconds (median)</text></svg>")
    # Points lie close together, so the names are listed below the plot.
    names = "".join(f"<li>{_text(v['name'])}: {x:.2f} ms, {y:.4f}</li>" for x, y, v in points)
    return "".join([*elements, f"<ol>{names}</ol>"])
