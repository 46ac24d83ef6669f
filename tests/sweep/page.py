"""`docs/models.md`, made from the cells alone."""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from accel.stages.graph_comparison import DEPENDS_ON_ROWS

from .cells import FAILED, GENERATE, HALF, NONE, NOT_BUILT, OK, REFUSED, ROWS, ROWS_INT8, STAGES, WRONG, Cell

TITLES = {"cpu": "ONNX Runtime", "openvino": "OpenVINO", "cuda": "GPU"}
_MOST_OF_A_REASON = 220
_CLASS = re.compile(r"\b[A-Z]\w*?(?:For[A-Z]\w+|LMHeadModel|MTModel|Model)\b")

_HEAD = """# Models

Written by `make sweep`, which builds a small model with random weights of every architecture that transformers has for each
task, takes it through each stage of each backend, and compares every answer with that of PyTorch in float32.

A number is the largest difference at positions that are no padding, relative to the largest value that PyTorch answers, over
several shapes: one row, several rows with padding on the right, for decoders on the left. Up to 1e-4 is accepted in float32,
or three times of what PyTorch's own float32 is off from float64 (1e-2 at most), and 0.35 for eight bits, or a quarter more
than what rounding alone does to the same model in PyTorch where that is more: the error of eight bits in models of random
weights says little about trained ones, see [Accuracy budget](guides/accuracy-budget.md). `same` means that `generate` made
the tokens that transformers makes, with a cache and without. `rows` are six rows of a batch that differ in length, padding
and special tokens: each is computed alone, and compared with PyTorch's answer to this row alone and with the same row in the
batch. `rows-int8` compares a dynamic int8 graph in this way with the float32 graph that it was made from. `1.2x` is the error
of a float16 graph on a GPU over that of PyTorch in float16, both against float32, with every padding and up to 16 rows of 256
tokens; 3 is accepted. A number in brackets leads to the [reason](#reasons) why there is no answer, and a dash says that the
backend has no such stage. What transformers captures is what its own exporter makes a graph of that answers like PyTorch at
other sizes than those of the trace.
"""


def page(cells: Iterable[Cell], about: Mapping[str, Any]) -> str:
    """The page as Markdown."""
    cells = list(cells)
    reasons = _Reasons()
    tried = [cell for cell in cells if cell.status != NOT_BUILT]
    order = [*TITLES, *sorted({cell.backend for cell in tried} - set(TITLES))]
    backends = [name for name in order if any(cell.backend == name for cell in tried)]
    by_task: dict[str, list[Cell]] = defaultdict(list)
    for cell in tried:
        by_task[cell.task].append(cell)
    parts = [_HEAD, _made_with(about), _counts(cells, backends), _wrong(tried)]
    parts += [_task(task, by_task[task], backends, reasons) for task in sorted(by_task)]
    parts += [reasons.listed(), _not_built(cells)]
    return "\n".join(part for part in parts if part)


def counts(cells: Iterable[Cell]) -> Counter[str]:
    """How many cells there are of each status."""
    return Counter(cell.status for cell in cells)


def capturable(cells: Iterable[Cell]) -> list[Cell]:
    """The cells of models that transformers' own exporters capture, as far as was tried: not of those that answer nothing in PyTorch."""
    cells = list(cells)
    green = {(cell.architecture, cell.task) for cell in cells if cell.status == OK}
    beyond = {(cell.architecture, cell.task) for cell in cells if cell.status == NOT_BUILT} - green
    cells = [cell for cell in cells if cell.status not in (NOT_BUILT, NONE)]
    beyond |= {(cell.architecture, cell.task) for cell in cells if cell.upstream is False}
    return [cell for cell in cells if (cell.architecture, cell.task) not in beyond]


def rows_of(cells: Iterable[Cell]) -> list[str]:
    """Lines about rows alone and in a batch: counts of each backend, and the pairs that are refused for that reason."""
    cells = list(cells)
    lines = []
    for stage in (ROWS, ROWS_INT8):
        for backend in sorted({cell.backend for cell in cells if cell.stage == stage}):
            some = [cell for cell in cells if cell.stage == stage and cell.backend == backend]
            found = counts(some)
            numbers = ", ".join(f"{found[status]} {status}" for status in (OK, REFUSED, FAILED, WRONG, NONE))
            largest = max((cell.in_batch for cell in some if cell.in_batch is not None), default=0.0)
            lines.append(f"{stage} on {backend}: {numbers}; alone and in a batch at most {number(largest)} apart")
    refused = sorted({f"{cell.architecture}/{cell.task}" for cell in cells if DEPENDS_ON_ROWS in cell.reason})
    return [*lines, f"pairs refused because rows depend on each other: {len(refused)} {' '.join(refused)}".rstrip()]


def share(cells: Sequence[Cell]) -> float:
    """How many of the cells are green, of 1."""
    return sum(cell.status == OK for cell in cells) / len(cells) if cells else 1.0


def _made_with(about: Mapping[str, Any]) -> str:
    versions = ", ".join(f"{name} {version}" for name, version in about.get("versions", {}).items())
    return f"Made with {versions}; {about.get('processor', 'an unknown processor')}.\n"


def _counts(cells: Sequence[Cell], backends: Sequence[str]) -> str:
    lines = [
        "| backend | green | refused | failed | wrong | green of what transformers captures |",
        "| --- | ---: | ---: | ---: | ---: | ---: |",
    ]
    for backend in backends:
        some = [cell for cell in cells if cell.backend == backend]
        found = counts(some)
        able = capturable(some)
        numbers = " | ".join(str(found[status]) for status in (OK, REFUSED, FAILED, WRONG))
        lines.append(f"| {TITLES.get(backend, backend)} | {numbers} | {share(able):.1%} of {len(able)} |")
    missing = sum(cell.status == NOT_BUILT for cell in cells)
    seen = len({(cell.architecture, cell.task) for cell in cells})
    unmade = f"; of {missing} no small model could be made: see [below](#not-built)" if missing else ""
    return (
        "\n".join(lines)
        + f"\n\nPairs of an architecture and a task on this page: {seen}{unmade}. Others were not run.\n"
    )


def _wrong(cells: Sequence[Cell]) -> str:
    found = sorted(cell.key for cell in cells if cell.status == WRONG)
    if not found:
        return "No call that succeeded gave a wrong answer.\n"
    reasons = {cell.key: cell.reason for cell in cells}
    lines = [f"- `{key}`: {reasons[key]}" for key in found]
    return "## Wrong\n\nThese calls succeeded with a wrong answer.\n\n" + "\n".join(lines) + "\n"


def _task(task: str, cells: Sequence[Cell], backends: Sequence[str], reasons: _Reasons) -> str:
    columns = [(b, s) for b in backends for s in STAGES if any(c.backend == b and c.stage == s for c in cells)]
    known = {(cell.architecture, cell.backend, cell.stage): cell for cell in cells}
    short = {"cpu": "ORT", "openvino": "OV", "cuda": "GPU"}
    head = " | ".join(f"{short.get(backend, backend)} {stage}" for backend, stage in columns)
    lines = [f"## {task}\n", f"| architecture | {head} |", "| --- |" + " ---: |" * len(columns)]
    for architecture in sorted({cell.architecture for cell in cells}):
        row = [_shown(known.get((architecture, *column)), reasons) for column in columns]
        lines.append(f"| {architecture} | {' | '.join(row)} |")
    return "\n".join(lines) + "\n"


def _shown(cell: Cell | None, reasons: _Reasons) -> str:
    if cell is None:
        return ""
    if cell.status == NONE:
        return "–"
    if cell.status == OK:
        if cell.stage == HALF:
            return f"{cell.difference:.1f}x"
        return "same" if cell.stage == GENERATE else number(cell.difference)
    if cell.status == WRONG:
        return f"**wrong** {number(cell.difference)}"
    return f"[[{reasons.number(cell)}]](#reasons)"


def number(value: float | None) -> str:
    """Two digits at most, without the exponent's zeros: `2e-7`."""
    if value is None:
        return ""
    return re.sub(r"e([+-])0*", r"e\1", f"{value:.1g}" if value < 0.01 else f"{value:.2g}").replace("e+", "e")


class _Reasons:
    """Reasons by number; what differs in the model's name alone is one reason."""

    def __init__(self) -> None:
        self._numbers: dict[str, int] = {}
        self._counts: Counter[str] = Counter()

    def number(self, cell: Cell) -> int:
        """The number of a cell's reason."""
        text = _CLASS.sub("the model", cell.reason)
        text = re.sub(r"\b(a|an|A|An) the model", "the model", text)
        text = re.sub(r"\bid:\d+", "id:…", text)  # of a node, which differs from model to model
        text = text if len(text) <= _MOST_OF_A_REASON else text[:_MOST_OF_A_REASON].rstrip() + " …"
        if cell.upstream is False:
            text = f"(transformers' own exporters cannot capture it either) {text}"
        if cell.status == FAILED:
            text = f"(no refusal: it failed) {text}"
        self._counts[text] += 1
        return self._numbers.setdefault(text, len(self._numbers) + 1)

    def listed(self) -> str:
        """All of them, in the order of their numbers."""
        if not self._numbers:
            return ""
        lines = [f"{n}. {_literal(text)}" for text, n in self._numbers.items()]
        return "## Reasons\n\n" + "\n".join(lines) + "\n"


def _literal(text: str) -> str:
    """Text in which nothing is Markdown."""
    return "`" + text.replace("`", "'") + "`"


def _not_built(cells: Sequence[Cell]) -> str:
    by_reason: dict[str, list[str]] = defaultdict(list)
    for cell in cells:
        if cell.status == NOT_BUILT:
            text = _CLASS.sub("the model", cell.reason)[:_MOST_OF_A_REASON]
            by_reason[text].append(f"{cell.architecture} ({cell.task})")
    if not by_reason:
        return "## Not built\n\nEvery pair on this page has a small model.\n"
    lines = [f"- {_literal(reason)}: {', '.join(sorted(names))}" for reason, names in sorted(by_reason.items())]
    return (
        "## Not built\n\nThese say nothing about the library: a package is missing, the sizes of the config depend on each "
        "other in a way that the sweep does not know, or the model wants other inputs.\n\n" + "\n".join(lines) + "\n"
    )
