"""Write the documentation pages about models from the results: `docs/models.md`, one page per modality, and the table's JSON."""

from __future__ import annotations

import json
import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from accel.errors import TaskError
from accel.interfaces.task_registry import task_spec
from accel.stages.graph_comparison import DEPENDS_ON_ROWS

from .cells import FAILED, GENERATE, HALF, NONE, NOT_BUILT, OK, REFUSED, ROWS, ROWS_INT8, STAGES, WRONG, Cell

TITLES = {"cpu": "ONNX Runtime", "openvino": "OpenVINO", "cuda": "GPU"}
_MOST_OF_A_REASON = 220
_CLASS = re.compile(r"\b[A-Z]\w*?(?:For[A-Z]\w+|LMHeadModel|MTModel|Model)\b")

SHORT = {"cpu": "ORT", "openvino": "OV", "cuda": "GPU"}
MODALITIES = {"text": "Text", "image": "Images and videos", "audio": "Sounds"}
"""Titles of the pages, by the first modality of a task; video tasks are on the page of images."""

_HEAD = """# Tested models

`make sweep` builds a small model with random weights of every architecture that transformers has for each task, takes it through
each stage of each backend, and compares every answer with PyTorch in float32. The table below holds the results.
A page for each modality says in words what runs: {pages}.
"""
_LEGEND = """## How to read it

- A number is the largest difference from PyTorch in float32, relative to PyTorch's largest value, over several shapes: one row, several
  rows with padding on the right, for decoders on the left. Padding positions are not compared.
- Accepted in float32: 1e-4, or three times the difference of PyTorch's own float32 from float64 (at most 1e-2). Accepted for int8: 0.35,
  or 1.25 times what rounding alone does to the same model in PyTorch. Random weights exaggerate the error of int8: see
  [Accuracy budget](guides/accuracy-budget.md) for trained models.
- `same`: `generate` makes the tokens that transformers makes, with a cache and without.
- `rows`: six rows of a batch that differ in length, padding and special tokens. Each row is computed alone, compared with PyTorch's answer
  to this row, and with the same row in the batch. `rows-int8`: a dynamic int8 graph against the float32 graph that it was made from.
- `1.2x`: the error of a float16 graph on a GPU over the error of PyTorch in float16, both against float32, with every kind of padding and
  up to 16 rows of 256 tokens. Accepted: 3.
- `[n]`: the number of the reason why there is no answer; point at it, or see the list below the table. A dash: the backend lacks the
  stage.
"""
_TABLE = """<div id="models" data-source="assets/models.json"><p>This table needs JavaScript.</p></div>
<script src="../assets/models.js"></script>
"""


def site(cells: Iterable[Cell], about: Mapping[str, Any]) -> dict[str, str]:
    """Return the text of each documentation file, with its path below `docs` as the key."""
    cells = list(cells)
    tried = [cell for cell in cells if cell.status != NOT_BUILT]
    order = [*TITLES, *sorted({cell.backend for cell in tried} - set(TITLES))]
    backends = [name for name in order if any(cell.backend == name for cell in tried)]
    modalities = [name for name in MODALITIES if any(modality(cell.task) == name for cell in tried)]
    links = ", ".join(f"[{MODALITIES[name]}](models/{name}.md)" for name in modalities)
    head = _HEAD.format(pages=links)
    main = [head, _counts(cells, backends), _wrong(tried), _TABLE, _LEGEND, _made_with(about), _not_built(cells)]
    files = {"models.md": "\n".join(part for part in main if part), "assets/models.json": _rows(tried, backends)}
    for name in modalities:
        some = [cell for cell in tried if modality(cell.task) == name]
        files[f"models/{name}.md"] = _modality_page(name, some, backends)
    return files


def modality(task: str) -> str:
    """Return the modality on whose page a task is shown."""
    try:
        first = (*task_spec(task).modalities, "text")[0]
    except TaskError:  # the results may contain a task that has been removed
        first = "text"
    return first if first in MODALITIES else "image"


def _rows(cells: Sequence[Cell], backends: Sequence[str]) -> str:
    """Return the table as JSON: columns, reasons, and one row for each pair."""
    reasons = _Reasons()
    columns = [(b, s) for b in backends for s in STAGES if any(c.backend == b and c.stage == s for c in cells)]
    by_pair: dict[tuple[str, str], dict[tuple[str, str], Cell]] = defaultdict(dict)
    for cell in cells:
        by_pair[cell.architecture, cell.task][cell.backend, cell.stage] = cell
    rows = [
        [architecture, task, modality(task), *(_shown(known.get(column), reasons) for column in columns)]
        for (architecture, task), known in sorted(by_pair.items())
    ]
    document = {
        "columns": [f"{SHORT.get(backend, backend)} {stage}" for backend, stage in columns],
        "modalities": MODALITIES,
        "reasons": reasons.texts(),
    }
    lines = ",\n".join(json.dumps(row, ensure_ascii=False, separators=(",", ":")) for row in rows)
    return json.dumps(document, ensure_ascii=False)[:-1] + ', "rows": [\n' + lines + "\n]}\n"


def _modality_page(name: str, cells: Sequence[Cell], backends: Sequence[str]) -> str:
    """Return the page of one modality: a table for each task, and the reasons of the stages that do not work."""
    reasons = _Reasons()
    by_task: dict[str, list[Cell]] = defaultdict(list)
    for cell in cells:
        by_task[cell.task].append(cell)
    parts = [
        f"# Tested models: {MODALITIES[name]}\n\n`all` means that every stage gives right answers. A number in brackets is a "
        "[reason](#reasons). [The table](../models.md) has the measured differences and says how they were measured.\n"
    ]
    for task, some in sorted(by_task.items()):
        known = {(cell.architecture, cell.backend, cell.stage): cell for cell in some}
        parts.append(f"## {task}\n")
        parts.append("| architecture | " + " | ".join(TITLES.get(backend, backend) for backend in backends) + " |")
        parts.append("| --- |" + " --- |" * len(backends))
        for architecture in sorted({cell.architecture for cell in some}):
            row = [_in_words([known.get((architecture, b, s)) for s in STAGES], reasons) for b in backends]
            parts.append(f"| {architecture} | {' | '.join(row)} |")
        parts.append("")
    listed = [f"{number}. {_literal(text)}" for number, text in enumerate(reasons.texts(), start=1)]
    return "\n".join([*parts, *(["## Reasons\n", *listed, ""] if listed else [])])


def _in_words(cells: Sequence[Cell | None], reasons: _Reasons) -> str:
    """Describe the results of one pair (architecture and task) on one backend. The text is `all`, or lists the stages
    without correct outputs with the numbers of their reasons.
    """
    tried = [cell for cell in cells if cell is not None and cell.status != NONE]
    if not tried:
        return ""
    without: dict[int, list[str]] = defaultdict(list)
    for cell in tried:
        if cell.status != OK:
            without[reasons.number(cell)].append("**wrong** " + cell.stage if cell.status == WRONG else cell.stage)
    if not without:
        return "all"
    if sum(map(len, without.values())) == len(tried):
        return "no " + ", ".join(f"[{number}]" for number in without)
    return "all but " + ", ".join(f"{', '.join(stages)} [{number}]" for number, stages in without.items())


def counts(cells: Iterable[Cell]) -> Counter[str]:
    """Return the number of results with each status."""
    return Counter(cell.status for cell in cells)


def capturable(cells: Iterable[Cell]) -> list[Cell]:
    """Return the results of built models, without models that transformers' own exporters are known not to capture."""
    cells = list(cells)
    green = {(cell.architecture, cell.task) for cell in cells if cell.status == OK}
    beyond = {(cell.architecture, cell.task) for cell in cells if cell.status == NOT_BUILT} - green
    cells = [cell for cell in cells if cell.status not in (NOT_BUILT, NONE)]
    beyond |= {(cell.architecture, cell.task) for cell in cells if cell.upstream is False}
    return [cell for cell in cells if (cell.architecture, cell.task) not in beyond]


def rows_of(cells: Iterable[Cell]) -> list[str]:
    """Return lines about the stages `rows` and `rows-int8`: the counts for each backend, and the models that are
    refused because rows depend on each other.
    """
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
    """Return the fraction of results with the status `ok`, or 1 if there are no results."""
    return sum(cell.status == OK for cell in cells) / len(cells) if cells else 1.0


def _made_with(about: Mapping[str, Any]) -> str:
    versions = ", ".join(f"{name} {version}" for name, version in about.get("versions", {}).items())
    return f"Made with {versions}; {about.get('processor', 'an unknown processor')}.\n"


def _counts(cells: Sequence[Cell], backends: Sequence[str]) -> str:
    lines = [
        "| backend | right | refused | failed | wrong | right, where transformers' exporters capture the model |",
        "| --- | ---: | ---: | ---: | ---: | ---: |",
    ]
    for backend in backends:
        some = [cell for cell in cells if cell.backend == backend]
        found = counts(some)
        able = capturable(some)
        numbers = " | ".join(str(found[status]) for status in (OK, REFUSED, FAILED, WRONG))
        lines.append(f"| {TITLES.get(backend, backend)} | {numbers} | {share(able):.1%} of {len(able)} |")
    missing = sum(cell.status == NOT_BUILT for cell in cells)
    ran = len({(cell.architecture, cell.task) for cell in cells}) - missing
    unmade = f" For {missing} more, no small model could be made: see [below](#not-built)." if missing else ""
    return "\n".join(lines) + f"\n\n{ran} pairs of an architecture and a task were run.{unmade}\n"


def _wrong(cells: Sequence[Cell]) -> str:
    found = sorted(cell.key for cell in cells if cell.status == WRONG)
    if not found:
        return "No call that succeeded gave a wrong answer.\n"
    reasons = {cell.key: cell.reason for cell in cells}
    lines = [f"- `{key}`: {reasons[key]}" for key in found]
    return "## Wrong\n\nThese calls succeeded with a wrong answer.\n\n" + "\n".join(lines) + "\n"


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
    return f"[{reasons.number(cell)}]"


def number(value: float | None) -> str:
    """Return a number with at most two digits, without zeros in the exponent, such as `2e-7`."""
    if value is None:
        return ""
    return re.sub(r"e([+-])0*", r"e\1", f"{value:.1g}" if value < 0.01 else f"{value:.2g}").replace("e+", "e")


class _Reasons:
    """Numbered reasons. Reasons that differ only in the name of the model class have the same number."""

    def __init__(self) -> None:
        self._numbers: dict[str, int] = {}
        self._counts: Counter[str] = Counter()

    def number(self, cell: Cell) -> int:
        """Return the number of a result's reason."""
        text = _CLASS.sub("the model", cell.reason)
        text = re.sub(r"\b(a|an|A|An) the model", "the model", text)
        text = re.sub(r"\bid:\d+", "id:…", text)  # ids of nodes differ from model to model
        text = text if len(text) <= _MOST_OF_A_REASON else text[:_MOST_OF_A_REASON].rstrip() + " …"
        if cell.upstream is False:
            text = f"(transformers' own exporters cannot capture it either) {text}"
        if cell.status == FAILED:
            text = f"(no refusal: it failed) {text}"
        self._counts[text] += 1
        return self._numbers.setdefault(text, len(self._numbers) + 1)

    def texts(self) -> list[str]:
        """Return all reasons, ordered by their numbers."""
        return list(self._numbers)


def _literal(text: str) -> str:
    """Return text as Markdown code, in which no character has a special meaning."""
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
