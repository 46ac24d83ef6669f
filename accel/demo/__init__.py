"""`accel demo`: the main job on a real model, offline.

The model is a two-layer BERT distilled on BANKING77 by `examples/distill_demo_model.py`; the data is BANKING77's test set
(see `ATTRIBUTION.md`).
"""

from __future__ import annotations

import csv
import tempfile
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .. import progress
from ..artifact import Artifact

FOLDER = Path(__file__).parent
MODEL = FOLDER / "model"
TEST_SET = FOLDER / "banking77" / "test.csv"
_BATCH = 32
_SHAPE = (1, 16)


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
class DemoReport:
    """What the demo measured.

    Attributes:
        rows: One a variant; PyTorch first.
        max_abs_difference: Of the exported graph from PyTorch.
        queries: Rows of the test set; all are evaluated.
        shape: Batch and sequence of the latency measurement.
        threads: Of each variant.
        seconds: For everything.
    """

    rows: tuple[DemoRow, ...]
    max_abs_difference: float
    queries: int
    shape: tuple[int, int]
    threads: int
    seconds: float


def read_test_set() -> tuple[list[str], list[str]]:
    """The test queries and their intents."""
    with TEST_SET.open(newline="", encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    return [row["text"] for row in rows], [row["category"] for row in rows]


def run(out: Path | None = None) -> DemoReport:
    """Export the demo model, optimize and quantize it, evaluate each on the whole test set and time them against PyTorch.

    Args:
        out: Where to keep the float artifact; the optimized and the int8 one go beside it, with `-optimized` and `-int8`
            behind its name. A temporary folder when `None`.
    """
    from ..artifact import check_output
    from ..benchmarking import Variant, measure
    from ..capture import quiet
    from ..config import available_processors
    from ..exporting import export
    from ..modeling import ORTModelForSequenceClassification
    from ..search import quantize
    from ..steps import optimize

    started = time.perf_counter()
    with ExitStack() as stack:
        folder = out or Path(stack.enter_context(tempfile.TemporaryDirectory())) / "artifact"
        beside = [folder.with_name(f"{folder.name}-{word}") for word in ("optimized", "int8")]
        for path in beside:
            check_output(path)
        artifact = export(MODEL, folder)
        optimized = optimize(artifact, beside[0], level="O2")
        # Dynamic: its ranges are found at each call, so no calibration data is needed.
        artifacts = [artifact, optimized, quantize(optimized, beside[1], scheme="dynamic-int8")]
        texts, labels = read_test_set()
        with quiet():
            original = _pytorch()
            expected = _predict("PyTorch: evaluating", original, texts)
        predictions, dtypes = [expected], ["float32"]
        for made, word in zip(artifacts, ("float32", "optimized", "int8"), strict=True):
            model = ORTModelForSequenceClassification.from_pretrained(made.path)
            predictions.append(_predict(f"ONNX Runtime, {word}: evaluating", model, texts))
            dtypes.append(model.compute_dtype)
        variants = [
            Variant(name="PyTorch eager, float32", path=MODEL, task="text-classification", pytorch="float32"),
            *(
                Variant(name=f"ONNX Runtime ({model.backend}), {word}", path=made.path, task="text-classification")
                for made, word in zip(artifacts, ("float32", "optimized", "int8"), strict=True)
            ),
        ]
        timings = measure(variants, _feeds(model))
        # The shipped weights are float16, PyTorch holds them in float32.
        sizes = [_bytes(MODEL) * 2, *(made.bytes for made in artifacts)]
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
            max_abs_difference=_difference(artifact),
            queries=len(texts),
            shape=_SHAPE,
            threads=available_processors(),
            seconds=time.perf_counter() - started,
        )


def _difference(artifact: Artifact) -> float:
    return float(artifact.manifest.steps[0].validation["max_abs_difference"])


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
    return (
        f"{stream.getvalue()}"
        f"Exported graph differs from PyTorch by {report.max_abs_difference:.2g} at most.\n"
        f"Latency: batch {batch} x {sequence} tokens, {report.threads} threads, one process per variant taking turns.\n"
        f"Done in {report.seconds:.0f} s."
    )
