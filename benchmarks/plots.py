"""Draw the plots of the documentation into docs/assets/plots, from the JSON of other benchmarks.

    python benchmarks/plots.py

`demo.svg`: latency and accuracy of the demo model's variants (`demo.json`, from `python docs/tools/demo_table.py`).
`classification.svg`: DistilBERT, compared with other libraries (`classification_peers.json`, from `make bench-peers`).
`generation.svg`: tokens per second of a decoder, compared with other libraries (`generation_peers.json`, from `make bench-peers`).
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import matplotlib as mpl

mpl.use("svg")
mpl.rcParams["svg.hashsalt"] = "accel"  # With a fixed salt, the same numbers always give the same SVG file.
mpl.rcParams["svg.fonttype"] = "none"
from matplotlib import pyplot as plt  # noqa: E402

HERE = Path(__file__).parent
OUT = HERE.parent / "docs" / "assets" / "plots"
OURS, OTHERS = "#4f46e5", "#94a3b8"
TEXT = "#64748b"  # This gray is readable on white and on dark pages.


def read(name: str) -> Any:
    """Return the JSON result of a benchmark, or None if the file does not exist."""
    path = HERE / name
    return json.loads(path.read_text(encoding="utf-8")) if path.is_file() else None


def save(figure: Any, name: str) -> None:
    """Write a figure with a transparent background."""
    OUT.mkdir(parents=True, exist_ok=True)
    figure.tight_layout()
    figure.savefig(OUT / name, transparent=True, metadata={"Date": None})
    plt.close(figure)


def axes(width: float, height: float) -> tuple[Any, Any]:
    """Return a figure and axes with gray lines and labels."""
    figure, plot = plt.subplots(figsize=(width, height))
    plot.tick_params(colors=TEXT)
    plot.xaxis.label.set_color(TEXT)
    plot.yaxis.label.set_color(TEXT)
    for side, spine in plot.spines.items():
        spine.set_visible(side in {"left", "bottom"})
        spine.set_color(TEXT)
    return figure, plot


def scatter() -> None:
    """Plot latency against accuracy for the demo model, if `demo.json` exists."""
    demo = read("demo.json")
    if demo is None:
        return
    rows = demo["report"]["rows"]
    figure, plot = axes(7, 3.6)
    for number, row in enumerate(rows):
        color = OTHERS if row["name"].startswith("PyTorch") else OURS
        plot.scatter(row["median_ms"], 100 * row["accuracy"], s=40, color=color)
        plot.annotate(
            row["name"], (row["median_ms"], 100 * row["accuracy"]), xytext=(6, 8 - 16 * (number % 2)),
            textcoords="offset points", fontsize=8, color=TEXT,
        )  # fmt: skip
    plot.set_xlabel("median latency of one query, ms (log)")
    plot.set_xscale("log")
    plot.set_ylabel("accuracy, %")
    plot.set_ylim(92, 93.2)
    save(figure, "demo.svg")


def bars(rows: dict[str, float], label: str, name: str) -> None:
    """Plot one bar for each row. The bars of accel are colored."""
    figure, plot = axes(7, 0.5 + 0.36 * len(rows))
    names = list(rows)[::-1]
    values = [rows[key] for key in names]
    plot.barh(names, values, color=[OURS if key.startswith("accel") else OTHERS for key in names])
    for position, value in enumerate(values):
        plot.annotate(
            f"{value:.3g}", (value, position), xytext=(4, -3), textcoords="offset points", fontsize=8, color=TEXT
        )
    plot.set_xlabel(label)
    save(figure, name)


def main() -> None:
    """Write every plot whose JSON file exists."""
    scatter()
    if peers := read("classification_peers.json"):
        bars(
            {name: row["median_ms"] for name, row in peers["rows"].items()}, "milliseconds a call", "classification.svg"
        )
    if peers := read("generation_peers.json"):
        rows = {name: row["128"]["tokens_per_s"] for name, row in peers["rows"].items()}
        bars(rows, "tokens per second after a prompt of 128 tokens", "generation.svg")


if __name__ == "__main__":
    main()
