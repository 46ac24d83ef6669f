"""`accel demo`: the main job on a real model, offline.

The model is a two-layer BERT distilled on BANKING77 by `examples/distill_demo_model.py`; the data is BANKING77's test set, and
128 training queries for calibration (see `ATTRIBUTION.md`). OpenVINO's rows are there where OpenVINO is.
"""

from __future__ import annotations

import csv
import tempfile
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from .. import progress, registry
from ..artifact import Artifact
from ..config import SessionOptions

FOLDER = Path(__file__).parent
MODEL = FOLDER / "model"
TEST_SET = FOLDER / "banking77" / "test.csv"
CALIBRATION_SET = FOLDER / "banking77" / "calibration.csv"
_BATCH = 32
_SHAPE = (1, 16)
_MAX_DROP = 0.3
_SEARCH_S = 100.0


@dataclass(frozen=True, slots=True, kw_only=True)
class DemoRow:
    """One line of the table."""

    name: str
    accuracy: float
    agreement: float
    median_ms: float
    p5_ms: float
    p95_ms: float
    speedup: float
    megabytes: float
    compute_dtype: str


@dataclass(frozen=True, slots=True, kw_only=True)
class DemoSearch:
    """What `accel tune` found for the same model and data.

    Attributes:
        winner: What it keeps.
        speed: Times PyTorch float32.
        drop: Points lost on the whole test set.
        max_drop: Points that might be lost.
        candidates: How many it tried or rejected.
        seconds: For the search.
    """

    winner: str
    speed: float
    drop: float
    max_drop: float
    candidates: int
    seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class DemoReport:
    """What the demo measured.

    Attributes:
        rows: One a variant; PyTorch first.
        max_abs_difference: Of the exported graphs from PyTorch.
        queries: Rows of the test set; all are evaluated.
        shape: Batch and sequence of the latency measurement.
        threads: Of each variant.
        seconds: For everything.
        absent: Rows that this machine or environment cannot have, with the reason.
        tuned: What a search found; `None` where none was made.
    """

    rows: tuple[DemoRow, ...]
    max_abs_difference: float
    queries: int
    shape: tuple[int, int]
    threads: int
    seconds: float
    absent: Mapping[str, str] = field(default_factory=dict)
    tuned: DemoSearch | None = None


def read_test_set() -> tuple[list[str], list[str]]:
    """The test queries and their intents."""
    with TEST_SET.open(newline="", encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    return [row["text"] for row in rows], [row["category"] for row in rows]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Case:
    """An artifact and how it is run."""

    name: str
    artifact: Artifact
    options: SessionOptions = field(default_factory=SessionOptions)


def run(out: Path | None = None) -> DemoReport:
    """Export the demo model, optimize and quantize it, evaluate each on the whole test set and time them against PyTorch;
    then let `accel.tune` find the fastest one by itself.

    Args:
        out: Where to keep the float artifact; the others go beside it, with `-optimized`, `-int8`, `-openvino`,
            `-openvino-int8` and `-tuned` behind its name. A temporary folder when `None`.
    """
    from ..artifact import check_output
    from ..benchmarking import Variant, measure
    from ..capture import quiet
    from ..config import available_processors
    from ..modeling import ORTModelForSequenceClassification

    started = time.perf_counter()
    with ExitStack() as stack:
        folder = out or Path(stack.enter_context(tempfile.TemporaryDirectory())) / "artifact"
        for word in ("optimized", "int8", "openvino", "openvino-int8", "tuned"):
            check_output(_beside(folder, word))
        cases = _onnxruntime(folder)
        found, absent = _openvino(folder)
        cases += found
        texts, labels = read_test_set()
        with quiet():
            original = _pytorch()
            expected = _predict("PyTorch: evaluating", original, texts)
        predictions, dtypes = [expected], ["float32"]
        for case in cases:
            model = ORTModelForSequenceClassification.from_pretrained(case.artifact.path, session_options=case.options)
            predictions.append(_predict(f"{case.name}: evaluating", model, texts))
            dtypes.append(model.compute_dtype)
        task = "text-classification"
        variants = [
            Variant(name="PyTorch eager, float32", path=MODEL, task=task, pytorch="float32"),
            *(Variant(name=c.name, path=c.artifact.path, task=task, options=c.options) for c in cases),
        ]
        timings = measure(variants, _feeds(model))
        # The shipped weights are float16, PyTorch holds them in float32.
        sizes = [_bytes(MODEL) * 2, *(case.artifact.bytes for case in cases)]
        rows = [
            DemoRow(
                name=timing.name,
                accuracy=_share(predicted, labels),
                agreement=_share(predicted, expected),
                median_ms=timing.median,
                p5_ms=timing.spread[0],
                p95_ms=timing.spread[1],
                speedup=timings[0].median / timing.median,
                megabytes=size / 1e6,
                compute_dtype=dtype,
            )
            for timing, predicted, size, dtype in zip(timings, predictions, sizes, dtypes, strict=True)
        ]
        return DemoReport(
            rows=tuple(rows),
            absent=absent,
            tuned=_search(_beside(folder, "tuned")),
            max_abs_difference=max(_differences(cases)),
            queries=len(texts),
            shape=_SHAPE,
            threads=available_processors(),
            seconds=time.perf_counter() - started,
        )


def _beside(folder: Path, word: str) -> Path:
    return folder.with_name(f"{folder.name}-{word}")


def _onnxruntime(folder: Path) -> list[_Case]:
    """The ONNX artifacts."""
    from ..exporting import export
    from ..search import quantize
    from ..steps import optimize

    artifact = export(MODEL, folder)
    optimized = optimize(artifact, _beside(folder, "optimized"), level="O2")
    # Dynamic: its ranges are found at each call, so no calibration data is needed.
    int8 = quantize(optimized, _beside(folder, "int8"), scheme="dynamic-int8")
    made = {"float32": artifact, "optimized": optimized, "int8": int8}
    return [_Case(name=f"ONNX Runtime (cpu), {word}", artifact=artifact) for word, artifact in made.items()]


def _openvino(folder: Path) -> tuple[list[_Case], dict[str, str]]:
    """OpenVINO's artifacts, and the rows that cannot be had here with the reason."""
    from ..exporting import export
    from ..search import quantize

    names = {word: f"OpenVINO, {word}" for word in ("float32", "bfloat16", "int8")}
    found = registry.probe(registry.describe("openvino"))
    if not found.available:
        return [], dict.fromkeys(names.values(), "; ".join(str(reason) for reason in found.reasons))
    absent = {}
    artifact = export(MODEL, _beside(folder, "openvino"), backend="openvino")
    cases = [_Case(name=names["float32"], artifact=artifact)]
    if "bf16" in found.devices[0].arch.split("+"):
        cases.append(_Case(name=names["bfloat16"], artifact=artifact, options=SessionOptions(compute_dtype="bfloat16")))
    else:
        absent[names["bfloat16"]] = "this CPU does not compute in bfloat16"
    int8 = quantize(artifact, _beside(folder, "openvino-int8"), scheme="static-int8", calibration=str(CALIBRATION_SET))
    cases.append(_Case(name=names["int8"], artifact=int8))
    return cases, absent


def _search(out: Path) -> DemoSearch:
    """The search over every backend and recipe here."""
    from ..tuning import tune

    found = tune(
        MODEL,
        out,
        data=TEST_SET,
        calibration=CALIBRATION_SET,
        max_drop=_MAX_DROP,
        sequence=[_SHAPE[1]],
        time_limit_s=_SEARCH_S,
    )
    return DemoSearch(
        winner=found.winner.name,
        speed=found.winner.speed or 0.0,
        drop=found.winner.drop or 0.0,
        max_drop=_MAX_DROP,
        candidates=len(found.trials),
        seconds=found.seconds,
    )


def _differences(cases: Sequence[_Case]) -> list[float]:
    """Of the exported graphs from PyTorch, as their exports measured them."""
    return [float(case.artifact.manifest.steps[0].validation["max_abs_difference"]) for case in cases]


def _pytorch() -> Any:
    import torch
    import transformers

    return transformers.AutoModelForSequenceClassification.from_pretrained(
        MODEL, dtype=torch.float32, local_files_only=True
    ).eval()


def _predict(what: str, model: Any, texts: list[str]) -> list[str]:
    """The predicted intent of every text."""
    import transformers

    from ..pipelines import pipeline

    tokenizer = transformers.AutoTokenizer.from_pretrained(MODEL, local_files_only=True)
    classify = pipeline("text-classification", model=model, tokenizer=tokenizer)
    results = classify((text for text in texts), batch_size=_BATCH)
    return [result["label"] for result in progress.track(results, what, total=len(texts))]


def _feeds(model: Any) -> dict[str, Any]:
    import torch

    ids = torch.randint(5, model.config.vocab_size, _SHAPE, generator=torch.Generator().manual_seed(0))
    values = {"input_ids": ids, "attention_mask": torch.ones_like(ids), "token_type_ids": torch.zeros_like(ids)}
    return {spec.name: values[spec.name] for spec in model.sessions["model"].inputs}


def _share(found: Sequence[str], wanted: Sequence[str]) -> float:
    return sum(a == b for a, b in zip(found, wanted, strict=True)) / len(wanted)


def _bytes(folder: Path) -> int:
    return (folder / "model.safetensors").stat().st_size


def render(report: DemoReport) -> str:
    """The table."""
    from io import StringIO

    from rich.console import Console
    from rich.table import Table

    table = Table(title=f"BANKING77 intents, {report.queries} test queries")
    for column in ("variant", "accuracy", "agrees", "median", "p5 - p95", "speed", "size"):
        table.add_column(column, justify="left" if column == "variant" else "right")
    for row in report.rows:
        table.add_row(
            row.name,
            f"{100 * row.accuracy:.2f} %",
            f"{100 * row.agreement:.2f} %",
            f"{row.median_ms:.2f} ms",
            f"{row.p5_ms:.2f} - {row.p95_ms:.2f}",
            f"{row.speedup:.2f} x",
            f"{row.megabytes:.1f} MB",
        )
    stream = StringIO()
    Console(file=stream, width=110).print(table)
    batch, sequence = report.shape
    missing = "".join(
        f"No row for {'; '.join(name for name in report.absent if report.absent[name] == why)}: {why}.\n"
        for why in dict.fromkeys(report.absent.values())
    )
    tuned = report.tuned
    search = (
        f"accel tune looked at {tuned.candidates} candidates in {tuned.seconds:.0f} s; of those that lose at most "
        f"{tuned.max_drop:g} points it keeps\n  {tuned.winner}: {tuned.speed:.2f} times PyTorch, {tuned.drop:.2f} points lost.\n"
        if tuned is not None
        else ""
    )
    return (
        f"{stream.getvalue()}{missing}{search}"
        f"Exported graphs differ from PyTorch by {report.max_abs_difference:.2g} at most.\n"
        f"Latency: batch {batch} x {sequence} tokens, {report.threads} threads, one process per variant taking turns.\n"
        f"Done in {report.seconds:.0f} s."
    )
