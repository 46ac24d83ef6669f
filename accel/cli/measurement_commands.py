"""Commands that measure: evaluate, benchmark, tune."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from . import options
from .application import CommandResult, app, columns_of, show_steps, subcommand


@subcommand(app, epilog="Example: accel evaluate out-int8/ --data test.csv --metric accuracy --compare")
def evaluate(
    model: Annotated[str, typer.Argument(metavar="MODEL", help="Artifact, transformers folder or Hub id.")],
    data: Annotated[str, typer.Option(help="Labelled rows: a CSV, JSON or Parquet file, a folder, or a Hub data set.")],
    metric: options.Metric = None,
    compare: Annotated[
        bool, typer.Option("--compare", help="Compare with the original PyTorch model of the artifact.")
    ] = False,
    against: Annotated[str | None, typer.Option(help="Compare with this model or artifact.")] = None,
    split: options.Split = None,
    column: options.Column = None,
    rows: Annotated[int | None, typer.Option(help="Maximum number of rows.")] = None,
    seed: Annotated[int, typer.Option(help="Random seed for the choice of rows.")] = 0,
    max_length: options.MaxLength = None,
    batch_size: Annotated[
        int | None,
        typer.Option(
            "--batch-size",
            help="Rows per call. Default: the recorded batch size of the artifact; without a record, 1 for dynamic quantization "
            "and 32 for other models.",
        ),
    ] = None,
    backend: options.Backend = None,
    device: options.Device = None,
    revision: options.Revision = None,
    trust_remote_code: options.Trust = False,
) -> CommandResult:
    """Measure the accuracy of a model on labelled data, and compare it with the original model on the same rows."""
    from ..measuring.accuracy.evaluation import evaluate as run

    result = run(
        model,
        data,
        metric=metric,
        against=against if against is not None else compare,
        columns=columns_of(column),
        split=split,
        samples=rows,
        seed=seed,
        batch_size=batch_size,
        max_length=max_length,
        backend=backend,
        device=device,
        revision=revision,
        trust_remote_code=trust_remote_code,
    )
    return CommandResult(result.to_dict(), _evaluated(result))


def _evaluated(result: Any) -> str:
    from ..measuring.accuracy.evaluation import rows_a_call

    scores = ", ".join(f"{name} {value:.4f}" for name, value in result.scores.items())
    lines = [
        f"{result.metric}: {scores}",
        f"{result.rows} rows of {result.data['source']}, {result.backend} ({result.compute_dtype}), "
        f"{rows_a_call([result.batch_size])}, {result.seconds:.1f} s",
    ]
    other = result.comparison
    if other is not None:
        interval = other.interval
        lines.append(
            f"{other.against}: {other.value:.4f}; difference {other.difference:+.4f} "
            f"({100 * interval.confidence:g} % interval {interval.low:+.4f} to {interval.high:+.4f}, {interval.method})"
        )
        if other.agreement is not None:
            lines.append(f"same predictions as {other.against}: {100 * other.agreement:.2f} % of the rows")
    return "\n".join(lines)


@subcommand(
    app, epilog="Example: accel benchmark out-int8/ --backend cpu --sequence 32 --sequence 128 --report page.html"
)
def benchmark(
    models: Annotated[
        list[str], typer.Argument(metavar="MODEL...", help="Artifacts, transformers folders or Hub ids.")
    ],
    backend: Annotated[
        list[str] | None,
        typer.Option("--backend", help="Backend that runs artifacts. Repeat the flag for several backends."),
    ] = None,
    pytorch: Annotated[
        list[str] | None,
        typer.Option(help="Also measure PyTorch eager in this dtype. Repeat the flag. float32 is always measured."),
    ] = None,
    compiled: Annotated[
        list[str] | None,
        typer.Option("--compile", help="Also measure torch.compile in this dtype. Repeat the flag for several."),
    ] = None,
    cuda_graph: Annotated[
        list[str] | None,
        typer.Option(
            help="Also measure PyTorch eager in this dtype with CUDA graphs. Repeat the flag. Default on a GPU: as --pytorch."
        ),
    ] = None,
    batch: options.Batches = None,
    sequence: options.Sequences = None,
    texts: options.Texts = None,
    tokenizer: Annotated[
        bool, typer.Option("--tokenizer", help="Include tokenization of the texts in the timed call.")
    ] = False,
    max_length: options.MaxLength = None,
    threads: options.Threads = None,
    warmup: Annotated[int, typer.Option(help="Number of calls before the first round.")] = 10,
    rounds: Annotated[
        int, typer.Option(help="Number of rounds. In each round, all variants run one after the other.")
    ] = 12,
    calls: Annotated[
        int | None, typer.Option(help="Calls of each variant per round. Default: 20, or 1 with --new-tokens.")
    ] = None,
    processes: Annotated[
        int, typer.Option(help="Number of processes that time each variant, one after the other.")
    ] = 4,
    new_tokens: Annotated[
        int, typer.Option(help="Measure text generation: time to the first token and to this number of tokens.")
    ] = 0,
    callers: Annotated[
        int, typer.Option(help="Number of threads that call the model at the same time (closed loop).")
    ] = 1,
    rate: Annotated[float | None, typer.Option(help="Calls per second at random times (open loop).")] = None,
    task: options.Task = None,
    device: options.Device = None,
    atol: options.Atol = None,
    report: options.Report = None,
    png: options.Png = None,
    revision: options.Revision = None,
    trust_remote_code: options.Trust = False,
) -> CommandResult:
    """Compare the outputs of a model's variants with PyTorch, and measure their latency. Each variant has its own process."""
    from ..measuring.latency.benchmark import benchmark as run
    from ..measuring.report import check_pages, text_table, write_html, write_png

    check_pages(report, png)
    measured = run(
        models, backends=backend, pytorch=pytorch or ("float32",), compiled=compiled or (),
        cuda_graph=cuda_graph or None, batch=batch or (1,), sequence=sequence or (128,), texts=texts,
        tokenize=tokenizer, max_length=max_length, threads=threads,
        warmup=1 if new_tokens else warmup, rounds=rounds, calls=calls or (1 if new_tokens else 20),
        processes=processes, new_tokens=new_tokens, callers=callers, rate=rate, task=task, device=device, atol=atol,
        revision=revision, trust_remote_code=trust_remote_code,
    )  # fmt: skip
    values = measured.to_dict()
    if report is not None:
        write_html(values, report)
    if png is not None:
        write_png(values, png)
    failed = any(variant.error for variant in measured.variants)
    return CommandResult(values, f"{measured}\n\n{text_table(values)}", failed=failed)


@subcommand(app, epilog="Example: accel tune org/model tuned/ --data test.csv --calibration train.csv --max-drop 0.3")
def tune(
    model: options.Model,
    out: options.Out,
    data: Annotated[str, typer.Option(help="Labelled rows to measure accuracy on: a file or a Hub data set.")],
    metric: options.Metric = None,
    calibration: options.Calibration = None,
    objective: Annotated[str, typer.Option(help="What to optimize: latency, throughput, size or cost.")] = "latency",
    max_drop: Annotated[
        float | None, typer.Option(help="Points that may be lost compared with PyTorch float32.")
    ] = None,
    min_accuracy: Annotated[float | None, typer.Option(help="Minimum value of the metric.")] = None,
    max_latency_ms: Annotated[
        float | None, typer.Option(help="Maximum median latency of every workload, in milliseconds.")
    ] = None,
    max_memory_mb: Annotated[
        float | None, typer.Option(help="Maximum peak memory of the process, in megabytes.")
    ] = None,
    max_size_mb: Annotated[float | None, typer.Option(help="Maximum size of the files, in megabytes.")] = None,
    batch: options.Batches = None,
    sequence: options.Sequences = None,
    texts: options.Texts = None,
    split: options.Split = None,
    column: options.Column = None,
    calibration_split: options.CalibrationSplit = None,
    samples: Annotated[int | None, typer.Option(help="Maximum number of rows of --data; all rows if omitted.")] = None,
    max_length: options.MaxLength = None,
    backend: options.Backends = None,
    device: Annotated[
        str | None, typer.Option(help="Device type: cpu, cuda, ...; all available types if omitted.")
    ] = None,
    task: options.Task = None,
    threads: options.Threads = None,
    time_limit: Annotated[
        float | None, typer.Option(help="Time limit in seconds. Untried candidates are listed.")
    ] = None,
    fresh: Annotated[
        bool, typer.Option("--fresh", help="Ignore the results of earlier runs, and measure again.")
    ] = False,
    report: options.Report = None,
    png: options.Png = None,
    revision: options.Revision = None,
    trust_remote_code: options.Trust = False,
) -> CommandResult:
    """Try the candidates of every backend on this machine and data, and keep the best one that meets the constraints."""
    from ..measuring.report import check_pages, write_html, write_png
    from ..tuning.trials import render
    from ..tuning.tune import tune as run

    show_steps("accel.tuning")
    check_pages(report, png)
    measured = run(
        model, out, data=data, metric=metric, calibration=calibration, objective=objective,  # type: ignore[arg-type]
        max_drop=max_drop, min_accuracy=min_accuracy, max_latency_ms=max_latency_ms, max_memory_mb=max_memory_mb,
        max_size_mb=max_size_mb, batch=batch or (1,), sequence=sequence or (128,), texts=texts, split=split,
        columns=columns_of(column), calibration_split=calibration_split, samples=samples, max_length=max_length,
        backends=backend, device=device, task=task, threads=threads, time_limit_s=time_limit, fresh=fresh, revision=revision,
        trust_remote_code=trust_remote_code,
    )  # fmt: skip
    values = measured.to_dict()
    if report is not None:
        write_html(values, report, title=f"accel tune {model}")
    if png is not None:
        write_png(values, png, title=f"accel tune {model}")
    return CommandResult(values, render(measured))


@subcommand(app, epilog="Example: accel verify http://localhost:8000 --against org/embedding-model --report page.html")
def verify(
    url: Annotated[str, typer.Argument(metavar="URL", help="URL of a server, or of an endpoint.")],
    against: Annotated[str, typer.Option(help="PyTorch model to compare with: a folder or a Hub id.")],
    task: Annotated[
        str | None,
        typer.Option(
            help="What the server computes: embed, classify, rerank or chat; inferred from the model if omitted."
        ),
    ] = None,
    name: Annotated[
        str | None, typer.Option(help="The server's name of the model; the first that it lists if omitted.")
    ] = None,
    dtype: Annotated[
        str,
        typer.Option(
            help="Data type in which the server computes, which decides the accepted rounding: float32, tf32, float16, bfloat16 or int8."
        ),
    ] = "float32",
    concurrency: Annotated[int, typer.Option(help="Number of requests at the same time.")] = 8,
    api_key: Annotated[
        str | None, typer.Option(envvar="ACCEL_VERIFY_KEY", help="Key of the server, for the header Authorization.")
    ] = None,
    report: options.Report = None,
    trust_remote_code: options.Trust = False,
) -> CommandResult:
    """Audit a server: compare its embeddings, classes, rankings or chats with PyTorch, also under load and for bad input."""
    from ..auditing.audit import verify as run

    subject: Any = task
    audit = run(
        url, against=against, subject=subject, name=name, dtype=dtype, concurrency=concurrency, api_key=api_key,
        trust_remote_code=trust_remote_code,
    )  # fmt: skip
    if report is not None:
        audit.write_html(report)
    return CommandResult(audit.to_dict(), str(audit), failed=not audit.passed)


@subcommand(app, epilog="Example: accel explain out-int8/ --texts texts.txt --report page.html")
def explain(
    artifact: options.Artifact,
    against: Annotated[
        str | None,
        typer.Argument(
            metavar="MODEL", help="PyTorch model or ONNX artifact to compare with; the recorded source if omitted."
        ),
    ] = None,
    texts: options.ExplainedTexts = None,
    no_remedies: Annotated[
        bool, typer.Option("--no-remedies", help="Do not measure remedies, which takes exports and quantizations.")
    ] = False,
    backend: options.Backend = None,
    device: options.Device = None,
    report: options.Report = None,
    revision: options.Revision = None,
    trust_remote_code: options.Trust = False,
) -> CommandResult:
    """Explain where an artifact parts from PyTorch: the first layer, the cause, the changed rows, and what each remedy gives back."""
    from ..artifact.hub import HubOptions
    from ..explaining.explanation import explain as run

    explanation = run(
        artifact, against, texts=texts, remedies=not no_remedies, backend=backend, device=device,
        hub=HubOptions(revision=revision, trust_remote_code=trust_remote_code),
    )  # fmt: skip
    if report is not None:
        explanation.write_html(report)
    return CommandResult(explanation.to_dict(), str(explanation))
