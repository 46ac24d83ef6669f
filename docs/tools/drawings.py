"""Write the drawings of the documentation: `python docs/tools/drawings.py`, into docs/assets/*.svg.

A drawing is boxes on a grid and arrows between them. Colors follow the reader's light or dark mode.
"""

from __future__ import annotations

import argparse
import sys
from dataclasses import dataclass, field
from html import escape
from pathlib import Path

ASSETS = Path(__file__).parents[1] / "assets"
COLUMN, ROW = 40, 22  # one unit of the grid in pixels
STYLE = """
  svg { font: 14px system-ui, sans-serif; }
  .box { fill: #eef2ff; stroke: #4f46e5; } .plain { fill: #f8fafc; stroke: #94a3b8; } .part { fill: #ecfdf5; stroke: #059669; }
  text { fill: #0f172a; } .small { font-size: 12px; fill: #475569; } .title { font-weight: 600; }
  .arrow { stroke: #475569; stroke-width: 1.5; fill: none; } .head { fill: #475569; }
  @media (prefers-color-scheme: dark) {
    .box { fill: #1e1b4b; stroke: #818cf8; } .plain { fill: #1e293b; stroke: #64748b; } .part { fill: #022c22; stroke: #34d399; }
    text { fill: #e2e8f0; } .small { fill: #94a3b8; } .arrow { stroke: #94a3b8; } .head { fill: #94a3b8; }
  }
"""


@dataclass(frozen=True)
class Box:
    """Box with a position and a size in grid units, a title, and smaller lines below the title."""

    x: float
    y: float
    width: float
    height: float
    title: str
    lines: tuple[str, ...] = ()
    kind: str = "box"

    def svg(self) -> str:
        left, top, width, height = self.x * COLUMN, self.y * ROW, self.width * COLUMN, self.height * ROW
        middle, center = left + width / 2, top + height / 2 + 5 - 8 * len(self.lines)
        parts = [f'<rect class="{self.kind}" x="{left:g}" y="{top:g}" width="{width:g}" height="{height:g}" rx="6"/>']
        parts.append(
            f'<text class="title" x="{middle:g}" y="{center:g}" text-anchor="middle">{escape(self.title)}</text>'
        )
        for number, line in enumerate(self.lines, start=1):
            y = center + 17 * number
            parts.append(f'<text class="small" x="{middle:g}" y="{y:g}" text-anchor="middle">{escape(line)}</text>')
        return "".join(parts)


@dataclass(frozen=True)
class Arrow:
    """Arrow along grid points, with a label at its middle."""

    points: tuple[tuple[float, float], ...]
    label: str = ""
    above: float = 6  # pixels between the label and the line

    def svg(self) -> str:
        path = "M" + " L".join(f"{x * COLUMN:g},{y * ROW:g}" for x, y in self.points)
        drawn = f'<path class="arrow" d="{path}" marker-end="url(#head)"/>'
        if self.label:
            (x0, y0), (x1, y1) = self.points[len(self.points) // 2 - 1], self.points[len(self.points) // 2]
            x, y = (x0 + x1) / 2 * COLUMN, (y0 + y1) / 2 * ROW - self.above
            drawn += f'<text class="small" x="{x:g}" y="{y:g}" text-anchor="middle">{escape(self.label)}</text>'
        return drawn


@dataclass(frozen=True)
class Drawing:
    """Drawing with a size in grid units, a description for screen readers, and its boxes and arrows."""

    width: float
    height: float
    description: str
    items: tuple[Box | Arrow, ...] = field(default=())

    def svg(self) -> str:
        width, height = self.width * COLUMN, self.height * ROW
        head = (
            '<marker id="head" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="7" markerHeight="7" orient="auto-start-reverse">'
            '<path class="head" d="M0,0 L8,4 L0,8 z"/></marker>'
        )
        body = "\n".join(item.svg() for item in self.items)
        return (
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width:g} {height:g}" width="{width:g}" role="img">\n'
            f"<title>{escape(self.description)}</title>\n<style>{STYLE}</style>\n<defs>{head}</defs>\n{body}\n</svg>\n"
        )


def data_flow() -> Drawing:
    """Draw the steps from a model to a pipeline."""
    return Drawing(21, 8.2, "accel exports a model to an artifact, a backend opens the artifact, and a pipeline runs it.", (
        Box(0.2, 0.5, 3.8, 3.5, "model", ("Hub id, folder,", "or a PyTorch object"), "plain"),
        Box(5.7, 0.5, 4.8, 3.5, "artifact", ("graph, weights, tokenizer,", "manifest with checksums")),
        Box(12.2, 0.5, 3.5, 3.5, "backend", ("cpu, cuda, openvino,", "pytorch, ..."), "part"),
        Box(17.3, 0.5, 3.6, 3.5, "pipeline", ("or forward, generate,", "server, Triton"), "plain"),
        Arrow(((4, 2.25), (5.7, 2.25)), "export"), Arrow(((10.5, 2.25), (12.2, 2.25)), "open"), Arrow(((15.7, 2.25), (17.3, 2.25)), "run"),
        Arrow(((9.1, 4), (9.1, 6), (7.1, 6), (7.1, 4)), "optimize, quantize: a new artifact", -18),
    ))  # fmt: skip


def architecture() -> Drawing:
    """Draw the packages of the core and the three kinds of plugins."""
    rooms = (
        ("cli, compat, demo, testing", "command line, class names of Optimum, conformance tests"),
        ("serving, deploying, tuning, measuring", "requests of many callers, Triton, searches, measurements"),
        ("models, decoding", "classes with the transformers interface, token selection"),
        ("stages, data, backends, capture", "export, optimize, quantize; data sets; backend selection"),
        ("interfaces, artifact, errors", "base classes of plugins, model folders, error classes"),
    )
    boxes = [Box(0.2, 1.8 + 3 * i, 12, 2.6, title, (line,), "plain") for i, (title, line) in enumerate(rooms)]
    parts = (
        ("backends", "runtime and devices", "accel_plugins/NAME: a folder"),
        ("tasks", "inputs and outputs", "accel/tasks/NAME.py: a module"),
        ("families", "export of an architecture", "accel/families/NAME.py: a module"),
    )
    boxes += [
        Box(14.2, 1.8 + 5.2 * i, 6.4, 4.2, name, (question, where), "part")
        for i, (name, question, where) in enumerate(parts)
    ]
    labels = (
        Box(0.2, 0.2, 12, 1.2, "core: packages import only packages below them"),
        Box(14.2, 0.2, 6.4, 1.2, "plugins: found by entry points"),
    )
    arrows = tuple(Arrow(((14.2, 3.9 + 5.2 * i), (12.2, 3.9 + 5.2 * i))) for i in range(3))
    return Drawing(
        20.8,
        17.2,
        "The packages of the core from top to bottom, and the three kinds of plugins.",
        (*labels, *boxes, *arrows),
    )


def call() -> Drawing:
    """Draw the steps of `from_pretrained` and of a call."""
    top = (
        ("resolve", "which folder?"),
        ("plan", "which backend, device?"),
        ("stages", "export if needed"),
        ("open", "verify, then load"),
    )
    bottom = (
        ("inputs", "names, types, shapes"),
        ("batch form", "bucket, padding"),
        ("session", "one run"),
        ("outputs", "transformers' class"),
    )
    items: list[Box | Arrow] = [
        Box(0.2, 0.2, 20.4, 1.2, "from_pretrained: once"), Box(0.2, 7.2, 20.4, 1.2, "forward: each call"),
    ]  # fmt: skip
    for y, row, kind in ((2.2, top, "plain"), (9.2, bottom, "box")):
        for i, (title, line) in enumerate(row):
            items.append(Box(0.2 + 5.4 * i, y, 4.2, 3, title, (line,), kind))
            if i:
                items.append(Arrow(((5.4 * i - 1, y + 1.5), (5.4 * i + 0.2, y + 1.5))))
    items.append(Arrow(((18.5, 5.2), (18.5, 6.2), (12.9, 6.2), (12.9, 7.2)), "a session"))
    return Drawing(
        20.8,
        12.6,
        "from_pretrained selects a backend, exports and opens the model; a call checks and pads the inputs and runs a session.",
        tuple(items),
    )


def serving() -> Drawing:
    """Draw the path of requests through the server."""
    return Drawing(21, 13, "The server tokenizes and queues the requests of many callers, and runs them together in one batch.", (
        Box(0.2, 1, 3.4, 2.6, "caller", ("HTTP",), "plain"), Box(0.2, 5, 3.4, 2.6, "caller", ("HTTP",), "plain"),
        Box(0.2, 9, 3.4, 2.6, "caller", ("accel.Engine",), "plain"),
        Box(5.6, 3.5, 4, 5.6, "endpoint", ("checks the body,", "limits and key,", "tokenizes")),
        Box(11.4, 1, 4, 4.6, "model queue", ("rows of similar", "length run together")),
        Box(11.4, 7, 4, 4.6, "continuous batch", ("rows join and leave", "between two steps")),
        Box(17.2, 3.5, 3.5, 5.6, "session", ("of any backend",), "part"),
        Arrow(((3.6, 2.3), (5.6, 5))), Arrow(((3.6, 6.3), (5.6, 6.3))), Arrow(((3.6, 10.3), (5.6, 7.6))),
        Arrow(((9.6, 5), (11.4, 3.3)), "scores", 22), Arrow(((9.6, 7.6), (11.4, 9.3)), "tokens", -26),
        Arrow(((15.4, 3.3), (17.2, 5))), Arrow(((15.4, 9.3), (17.2, 7.6))),
    ))  # fmt: skip


DRAWINGS = {"data-flow": data_flow, "architecture": architecture, "call": call, "serving": serving}


def main() -> int:
    """Write the files, or with --check report which files are out of date."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true", help="write nothing; 1 when a file is out of date")
    check = parser.parse_args().check
    stale = []
    for name, draw in DRAWINGS.items():
        path, text = ASSETS / f"{name}.svg", draw().svg()
        if check:
            stale += [path.name] * (not path.is_file() or path.read_text("utf-8") != text)
        else:
            path.write_text(text, encoding="utf-8")
    if stale:
        print(f"out of date: {', '.join(stale)}: python docs/tools/drawings.py", file=sys.stderr)
    return int(bool(stale))


if __name__ == "__main__":
    sys.exit(main())
