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

from .cells import ENGINE, FAILED, GENERATE, HALF, NONE, NOT_BUILT, OK, REFUSED, ROWS, ROWS_INT8, STAGES, WRONG, Cell

TITLES = {"cpu": "ONNX Runtime", "openvino": "OpenVINO", "cuda": "GPU", "tensorrt-rtx": "TensorRT for RTX"}
_MOST_OF_A_REASON = 220
_COLOR = re.compile(r"\x1b?\[\d+m")
"""Escape sequence of a terminal color."""
_CLASS = re.compile(r"\b[A-Z]\w*?(?:For[A-Z]\w+|LMHeadModel|MTModel|Model)\b")

SHORT = {"cpu": "ORT", "openvino": "OV", "cuda": "GPU", "tensorrt-rtx": "RTX"}
MODALITIES = {"text": "Text", "image": "Images and videos", "audio": "Sounds"}
"""Titles of the pages, by the first modality of a task; video tasks are on the page of images."""

_HEAD = """# Tested models

This page shows which architectures of transformers work with each backend. A program builds a small model with random weights for every
architecture and every task. It runs the model through all stages of each backend (for example export, optimize and quantize), and compares
the outputs with PyTorch in float32.

The next table counts the results, and the table below it contains every single result. The pages {pages} list the supported stages of each
architecture in words. To repeat the measurement, run `make sweep`.
"""
_STATUS_MEANING = """The columns mean:

- right: the outputs are correct. For TensorRT for RTX: an engine was built; engines were not run, because this needs an RTX GPU.
- refused: `accel` raised an error that explains why it does not support the model.
- failed: the stage ended with an unexpected error, a crash or a timeout.
- wrong: the stage ran without an error, but the outputs are wrong.
- The last column contains the share of correct results for the models that transformers' own exporters can export.
"""
_LEGEND = """## How to read the table

| cell | meaning |
| --- | --- |
| a number, for example `2e-7` | the largest difference from PyTorch in float32, divided by the largest output of PyTorch |
| `same` | `generate` returns the same tokens as transformers, with and without a KV cache |
| `1.2x` | the error of a float16 graph on a GPU, divided by the error of PyTorch in float16. Both errors are differences from float32 |
| `built` | TensorRT for RTX parsed the float16 graph and built an engine for it, on a machine without a GPU. The engine was not run |
| `[3]` | the stage raised an error; its message is item 3 of the list of reasons below the table |
| a dash | the backend does not have this stage |

The columns are the stages. `rows` and `rows-int8` test the rows of a batch:

- `rows`: six rows that differ in length, padding and special tokens. The output of each row alone is compared with PyTorch, and with the
  output of the same row in a batch.
- `rows-int8`: the same six rows. A dynamic int8 graph is compared with the float32 graph from which it was quantized.

A result is correct if the difference is at most:

| stages | largest allowed difference |
| --- | --- |
| float32 | 1e-4, or three times the difference between float32 and float64 in PyTorch (at most 1e-2) |
| int8 | 0.35, or 1.25 times the difference that rounding to int8 causes in PyTorch |
| float16 on a GPU | three times the error of PyTorch in float16 (`3.0x`) |

The inputs have several shapes: one row, and several rows with padding on the right (for decoders also on the left). The float16 test uses
up to 16 rows of 256 tokens. The outputs at padding positions are not compared.

The int8 error of models with random weights is larger than the error of trained models. To measure the error of a trained model, see
[Accuracy budget](guides/accuracy-budget.md).
"""
_REASONS = """## Reasons

This list contains the reasons why stages do not work. A reason begins with the error class, followed by the error message of `accel`.
The text "the model" replaces the name of the model class. Long messages end with "…".
"""
_NOT_SPLIT = (
    "accel cannot export the model for the task '{task}'. This task needs the model split into several graphs, and accel has no code "
    "that splits this architecture."
)
_PLAIN_WORDS = (
    (
        r"After optimizing at (\w+): The result differs from the original by",
        r"Optimization at level \1 changed the outputs of the graph. The result differs from the original by",
    ),
    (
        r"The result differs from the original by (\S+) in ('\w+') at (\{.*?\}); accepted is ([\w.+-]*\w)\.?",
        r"The output \2 of the new graph differs from the original by \1 for inputs of the sizes \3. At most \4 is accepted.",
    ),
    (
        r"the model computes with the number that the axis ('\w+') of ('\w+') has in the trace \((\d+)\): the graph would serve "
        r"this size alone\.",
        r"The code of the model turns the size of the axis \1 of the input \2 into the constant \3, so the graph would accept only this "
        r"size.",
    ),
    (
        r"(\w+(?: model)?) keeps ('\w+') between tokens, which is none of transformers' caches\.",
        r"\1 cannot be exported for text generation. It keeps its state between tokens in the argument \2, and accel supports only "
        r"transformers' Cache classes.",
    ),
    (
        r"(\w+(?: model)?) keeps a (\w+) between tokens, which cannot be put into a graph\.",
        r"\1 cannot be exported for text generation, because accel cannot make graph inputs and outputs of its KV cache (\2).",
    ),
    (
        r"the model takes a cache and returns none\.",
        "The model has an argument for the KV cache, but it returned no KV cache for use_cache=True.",
    ),
    (r"the model is no VITS, of whose parts graphs are made\.", _NOT_SPLIT.format(task="text-to-audio")),
    (
        r"the model has other parts than SAM and SAM-HQ, of which graphs are made\.",
        _NOT_SPLIT.format(task="mask-generation"),
    ),
    (
        r"the model decides by the values of its tensors what to compute \((.*?)\); a graph computes the same for all values\.",
        r"The model cannot be exported, because its code takes different branches for different tensor values (\1). A graph has only "
        r"one branch.",
    ),
    (
        r"Nothing is left to quantize: the graph has no product with a constant\.",
        "No layer is left to quantize: the graph has no matrix product with constant weights (MatMul, Gemm).",
    ),
    (
        r"The mask leaves out tokens between others; this model's sliding window counts them\.",
        "The attention mask masks tokens between other tokens of a row. This model has a sliding window, which would then cover the "
        "wrong tokens.",
    ),
    (
        r"The inputs have (\d+) along the axis ('\w+'); the model has positions for (\d+)\.?",
        r"The inputs are too long: the axis \2 has the size \1, and the model has positions for only \3.",
    ),
    (
        r"('\w+') has (\d+) tokens; the graph reads (\d+): the model computes longer texts in blocks, which would be another graph\.",
        r"\1 has \2 tokens per row, but the graph supports at most \3. The model computes longer texts in blocks, which the exported "
        r"graph does not contain.",
    ),
    (
        r"A sound of (\d+) frames came; the model has positions for (\d+)\.?",
        r"input_features has \1 spectrogram frames, but the model supports at most \2 frames per recording.",
    ),
    (
        r"the model is an encoder and a decoder; a model for ([\w-]+) is a decoder alone\.",
        r"The model cannot be exported for the task '\1'. The task requires a decoder without an encoder. The model has an encoder and a "
        r"decoder.",
    ),
    (
        r"The images in the prompts of the model attend in both directions, where its token_type_ids say so; a graph attends in "
        r"causal order\.",
        "The model cannot be exported for the task 'image-text-to-text'. It computes bidirectional attention between the image tokens of "
        "a prompt (input token_type_ids), and accel's decoder graphs compute causal attention only.",
    ),
    (
        r"No inputs can be made for the model: it generates from ('\w+'), and generating models are exported that read (.*), or "
        r"sounds as Whisper.*",
        r"The model cannot be exported for generation, because its main input is \1. accel exports generating models with the main input "
        r"'input_ids', 'pixel_values' or 'flattened_patches', and the audio models Whisper, Moonshine and Speech2Text.",
    ),
    (
        r"The graph in (\S+) returns (\[.*?\]) and no logits; a model for ([\w-]+) returns logits with (\d+)( axes)?\.?",
        r"The graph in \1 does not fit the task '\3': it returns \2 and no output 'logits', but a model for the task '\3' returns "
        r"'logits' with \4 axes.",
    ),
    (
        r"The graph in (\S+) returns logits with (\d+) axes; a model for ([\w-]+) returns logits with (\d+)( axes)?\.?",
        r"The graph in \1 does not fit the task '\3': it returns 'logits' with \2 axes, but a model for the task '\3' returns 'logits' "
        r"with \4 axes.",
    ),
    (
        r"the model itself fails on (\d+) rows of (\d+) tokens",
        r"The PyTorch model failed on an input of \1 rows and \2 tokens",
    ),
    (r"\bONNX Runtime failed( on the GPU)? on inputs \{", r"ONNX Runtime\1 failed on inputs of the shapes {"),
    (r"the model cannot be traced", "torch.export or transformers failed to trace the model"),
    (
        r"^the small model has (\d+) million weights",
        r"the smallest model that the program can build is too large: it has \1 million weights",
    ),
    (r"^takes images in another form than pixel_values alone", "needs image inputs in addition to pixel_values"),
    (r"^says no image token", "the config contains no image token"),
    (r"^reads (\w+), which the sweep makes no inputs of", r"the program cannot create the input '\1'"),
    (
        r"^reads sounds within a prompt, in a form of its own",
        "reads audio inputs inside the prompt, in a special format",
    ),
    (
        r"^logits is not finite in PyTorch with these weights",
        "the logits of PyTorch contain NaN or infinity with these random weights",
    ),
    (r"^does not answer on (.*?) in PyTorch", r"PyTorch raises an error for the inputs \1"),
    (r"\bNotShrinkable: (\w+):", r"the program cannot create a small \1:"),
)
"""Patterns of error messages that older versions recorded, each with the message that the current version raises."""
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
        [architecture, task, modality(task), *(_shown(cells_by_column.get(column), reasons) for column in columns)]
        for (architecture, task), cells_by_column in sorted(by_pair.items())
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
        f"# Tested models: {MODALITIES[name]}\n\nThis page shows the stages of each backend that work with each architecture. The table of "
        "[all results](../models.md) contains the measured differences, and explains how they were measured.\n\n"
        "| cell | meaning |\n| --- | --- |\n"
        "| all | all stages of the backend give correct outputs |\n"
        "| all but O2 [1] | all stages except `O2` give correct outputs. Item 1 of the list "
        "[Reasons](#reasons) explains why `O2` does not work |\n"
        "| no [1] | no stage works |\n"
        "| an empty cell | the model was not tested with this backend |\n"
    ]
    for task, some in sorted(by_task.items()):
        cells_by_key = {(cell.architecture, cell.backend, cell.stage): cell for cell in some}
        parts.append(f"## {task}\n")
        parts.append("| architecture | " + " | ".join(TITLES.get(backend, backend) for backend in backends) + " |")
        parts.append("| --- |" + " --- |" * len(backends))
        for architecture in sorted({cell.architecture for cell in some}):
            row = [_in_words([cells_by_key.get((architecture, b, s)) for s in STAGES], reasons) for b in backends]
            parts.append(f"| {architecture} | {' | '.join(row)} |")
        parts.append("")
    listed = [f"{number}. {_literal(text)}" for number, text in enumerate(reasons.texts(), start=1)]
    return "\n".join([*parts, *([_REASONS, *listed, ""] if listed else [])])


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
            totals = counts(some)
            numbers = ", ".join(f"{totals[status]} {status}" for status in (OK, REFUSED, FAILED, WRONG, NONE))
            largest = max((cell.in_batch for cell in some if cell.in_batch is not None), default=0.0)
            lines.append(f"{stage} on {backend}: {numbers}; alone and in a batch at most {number(largest)} apart")
    refused = sorted({f"{cell.architecture}/{cell.task}" for cell in cells if DEPENDS_ON_ROWS in cell.reason})
    return [*lines, f"pairs refused because rows depend on each other: {len(refused)} {' '.join(refused)}".rstrip()]


def share(cells: Sequence[Cell]) -> float:
    """Return the fraction of results with the status `ok`, or 1 if there are no results."""
    return sum(cell.status == OK for cell in cells) / len(cells) if cells else 1.0


def _made_with(about: Mapping[str, Any]) -> str:
    versions = ", ".join(f"{name} {version}" for name, version in about.get("versions", {}).items())
    return (
        f"The models were tested with these library versions: {versions}. The processors were: "
        f"{about.get('processor', 'an unknown processor')}.\n"
    )


def _counts(cells: Sequence[Cell], backends: Sequence[str]) -> str:
    lines = [
        "| backend | right | refused | failed | wrong | right, where transformers' exporters capture the model |",
        "| --- | ---: | ---: | ---: | ---: | ---: |",
    ]
    for backend in backends:
        some = [cell for cell in cells if cell.backend == backend]
        totals = counts(some)
        captured = capturable(some)
        numbers = " | ".join(str(totals[status]) for status in (OK, REFUSED, FAILED, WRONG))
        lines.append(f"| {TITLES.get(backend, backend)} | {numbers} | {share(captured):.1%} of {len(captured)} |")
    missing = sum(cell.status == NOT_BUILT for cell in cells)
    ran = len({(cell.architecture, cell.task) for cell in cells}) - missing
    unmade = (
        f" For {missing} further pairs, the program could not build a small model: see [Models that were not "
        f"tested](#models-that-were-not-tested)."
        if missing
        else ""
    )
    tested = f"{ran} pairs of an architecture and a task were tested.{unmade}\n"
    return "\n".join(lines) + f"\n\n{_STATUS_MEANING}\n{tested}"


def _wrong(cells: Sequence[Cell]) -> str:
    wrong_keys = sorted(cell.key for cell in cells if cell.status == WRONG)
    if not wrong_keys:
        return "No stage that ran without an error gave wrong outputs.\n"
    reasons = {cell.key: cell.reason for cell in cells}
    lines = [f"- `{key}`: {reasons[key]}" for key in wrong_keys]
    return "## Wrong\n\nThese stages ran without an error, but their outputs are wrong:\n\n" + "\n".join(lines) + "\n"


def _shown(cell: Cell | None, reasons: _Reasons) -> str:
    if cell is None:
        return ""
    if cell.status == NONE:
        return "–"
    if cell.status == OK:
        if cell.stage == HALF:
            return f"{cell.difference:.1f}x"
        if cell.stage == ENGINE:
            return "built"
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
        text = _CLASS.sub("the model", _COLOR.sub("", cell.reason))
        text = re.sub(r"\b(a|an|A|An) the model", "the model", text)
        text = re.sub(r"\bid:\d+", "id:…", text)  # ids of nodes differ from model to model
        text = text if len(text) <= _MOST_OF_A_REASON else text[:_MOST_OF_A_REASON].rstrip() + " …"
        text = in_plain_words(text)
        if cell.upstream is False:
            text = f"(the exporters of transformers also fail) {text}"
        if cell.status == FAILED:
            text = f"(unexpected error) {text}"
        self._counts[text] += 1
        return self._numbers.setdefault(text, len(self._numbers) + 1)

    def texts(self) -> list[str]:
        """Return all reasons, ordered by their numbers."""
        return list(self._numbers)


def in_plain_words(reason: str) -> str:
    """Return a recorded error message with its sentences replaced by sentences that readers of the pages understand."""
    for pattern, replacement in _PLAIN_WORDS:
        reason = re.sub(pattern, replacement, reason)
    return reason


def _literal(text: str) -> str:
    """Return text as Markdown code, in which no character has a special meaning."""
    return "`" + text.replace("`", "'") + "`"


def _not_built(cells: Sequence[Cell]) -> str:
    by_reason: dict[str, list[str]] = defaultdict(list)
    for cell in cells:
        if cell.status == NOT_BUILT:
            text = in_plain_words(_CLASS.sub("the model", cell.reason)[:_MOST_OF_A_REASON])
            by_reason[text].append(f"{cell.architecture} ({cell.task})")
    if not by_reason:
        return "## Models that were not tested\n\nA small model was built for every pair on this page.\n"
    lines = [f"- {_literal(reason)}: {', '.join(sorted(names))}" for reason, names in sorted(by_reason.items())]
    return (
        "## Models that were not tested\n\nThe test program could not build a small model for these architectures, so it is unknown "
        "whether `accel` supports "
        "them. Each item of the list begins with the error message of the test program. The causes are: a package is not installed, "
        "the sizes in "
        "the config depend on each other in a special way, or the model needs special inputs.\n\n"
        + "\n".join(lines)
        + "\n"
    )
