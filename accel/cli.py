"""The command line. Imports of torch and transformers wait until a command needs them."""

from __future__ import annotations

import contextlib
import json
import logging
import sys
from collections.abc import Iterator
from dataclasses import asdict, is_dataclass
from pathlib import Path
from typing import Annotated, Any

import typer

from . import __version__
from .cli_options import (
    Artifact,
    Atol,
    Backend,
    Backends,
    Batches,
    BatchSize,
    Calibration,
    CalibrationSplit,
    Column,
    Device,
    Json,
    MaxLength,
    Metric,
    Model,
    Out,
    Png,
    Report,
    Revision,
    Sequences,
    Split,
    Task,
    Texts,
    Threads,
    Trust,
    Verbose,
)
from .errors import AccelError, ConfigError, UnknownBackendError

app = typer.Typer(
    name="accel",
    help="Run Hugging Face transformers fast: export, check, optimize, quantize, evaluate and run them on the hardware at hand.",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
cache_app = typer.Typer(
    help="List or clear what is kept: exports made on the fly, and searches.",
    no_args_is_help=True,
    rich_markup_mode=None,
)
app.add_typer(cache_app, name="cache")


def main() -> None:
    """Entry point of the `accel` command."""
    app()


def _print(text: str = "") -> None:
    sys.stdout.write(text + "\n")


def _plain(value: Any) -> Any:
    """Dataclasses, paths and tuples as JSON values."""
    if is_dataclass(value) and not isinstance(value, type):
        return _plain(asdict(value))
    if isinstance(value, dict):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    return str(value) if isinstance(value, Path) else value


def _emit(result: Any, as_json: bool, text: str) -> None:
    _print(json.dumps(_plain(result), indent=2) if as_json else text)


@contextlib.contextmanager
def _command(as_json: bool, verbose: bool) -> Iterator[None]:
    """Progress on stderr, log level, and errors as exit codes: 2 for a wrong option, 1 for the rest."""
    logging.basicConfig(format="%(message)s", stream=sys.stderr)
    logging.getLogger("accel").setLevel(logging.DEBUG if verbose else logging.WARNING)
    try:
        with _progress_bar():
            yield
    except AccelError as error:
        if as_json:
            _print(json.dumps({"error": error.message, "type": type(error).__name__, "fix": error.fix}, indent=2))
        else:
            sys.stderr.write(f"Error: {error}\n")
        if verbose:
            raise
        code = 2 if isinstance(error, ConfigError | UnknownBackendError) else 1
        raise typer.Exit(code) from error
    except KeyboardInterrupt:
        sys.stderr.write("Interrupted; nothing was left half-written.\n")
        raise typer.Exit(1) from None


@contextlib.contextmanager
def _progress_bar() -> Iterator[None]:
    """Show what `accel.progress` reports, on stderr and only on a terminal."""
    if not sys.stderr.isatty():
        yield
        return
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

    from . import progress

    columns = (
        SpinnerColumn(),
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
    )
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task("starting", total=None)

        def listener(what: str, done: int, total: int | None) -> None:
            bar.update(task, description=what, completed=done, total=total)

        with progress.listening(listener):
            yield


@app.callback(invoke_without_command=True)
def _root(version: Annotated[bool, typer.Option("--version", help="Print the version.")] = False) -> None:
    if version:
        _print(__version__)
        raise typer.Exit


@app.command(epilog="Example: accel export distilbert/distilbert-base-uncased-finetuned-sst-2-english out/")
def export(
    model: Annotated[str, typer.Argument(metavar="MODEL", help="Hub id, transformers folder or PEFT adapter.")],
    out: Out,
    task: Task = None,
    backend: Backend = None,
    format: Annotated[str, typer.Option(help="Artifact format.")] = "onnx",
    dtype: Annotated[str, typer.Option(help="float32, float16 or bfloat16.")] = "float32",
    opset: Annotated[int | None, typer.Option(help="ONNX opset.")] = None,
    pooling: Annotated[str | None, typer.Option(help="Embeddings: mean, cls, max or last, inside the graph.")] = None,
    normalize: Annotated[
        bool | None, typer.Option("--normalize/--no-normalize", help="Embeddings: normalise inside the graph.")
    ] = None,
    atol: Atol = None,
    revision: Revision = None,
    trust_remote_code: Trust = False,
    as_json: Json = False,
    verbose: Verbose = False,
) -> None:
    """Export a model, compare it with PyTorch on five shapes, and write an artifact."""
    with _command(as_json, verbose):
        from .exporting import export as run

        artifact = run(
            model,
            out,
            task=task,
            backend=backend,
            format=format,
            dtype=dtype,
            opset=opset,
            pooling=pooling,
            normalize=normalize,
            atol=atol,
            revision=revision,
            trust_remote_code=trust_remote_code,
        )
        step = artifact.manifest.steps[-1]
        difference, limit = step.validation["max_abs_difference"], step.validation["tolerance"]
        _emit(
            _described(artifact),
            as_json,
            f"{artifact.path}: {artifact.format}, {artifact.task}, {artifact.dtype}, {artifact.bytes / 1e6:.1f} MB\n"
            f"differs from PyTorch by {difference:.2g} at most (accepted: {limit:.2g}, {len(step.validation['shapes'])} shapes)",
        )


@app.command(epilog="Example: accel validate out/ --against distilbert/distilbert-base-uncased-finetuned-sst-2-english")
def validate(
    artifact: Artifact,
    against: Annotated[str | None, typer.Option(help="PyTorch model; the recorded source when left out.")] = None,
    backend: Backend = None,
    device: Device = None,
    atol: Atol = None,
    trust_remote_code: Trust = False,
    as_json: Json = False,
    verbose: Verbose = False,
) -> None:
    """Check an artifact's files and compare it with the PyTorch model it was made from."""
    with _command(as_json, verbose):
        from .hub import HubOptions
        from .steps import validate as run

        hub = HubOptions(trust_remote_code=trust_remote_code)
        result = run(artifact, against=against, backend=backend, device=device, atol=atol, hub=hub)
        word = "passed" if result.passed else "FAILED"
        _emit(
            result,
            as_json,
            f"{word}: differs by {result.max_abs_difference:.3g} at most, accepted {result.tolerance:.3g}, "
            f"{len(result.shapes)} shapes, run by {result.backend}",
        )
        if not result.passed:
            raise typer.Exit(1)


@app.command(epilog="Example: accel optimize out/ out-o2/ --level O2")
def optimize(
    artifact: Artifact,
    out: Out,
    level: Annotated[str, typer.Option(help="O1, O2 (fusions), O3 (approximations) or O4 (float16).")] = "O2",
    disable: Annotated[list[str] | None, typer.Option(help="A fusion to leave out; repeat it for more.")] = None,
    enable: Annotated[list[str] | None, typer.Option(help="A fusion to add; repeat it for more.")] = None,
    atol: Annotated[float | None, typer.Option(help="Accepted absolute difference from ARTIFACT.")] = None,
    backend: Backend = None,
    as_json: Json = False,
    verbose: Verbose = False,
) -> None:
    """Rewrite a graph into a faster one and compare it with its parent."""
    with _command(as_json, verbose):
        from .steps import optimize as run

        made = run(
            artifact,
            out,
            backend=backend,
            level=level,
            disable=tuple(disable or ()),
            enable=tuple(enable or ()),
            atol=atol,
        )
        step = made.manifest.steps[-1]
        fused = {name: count for name, count in step.report.get("fused", {}).items() if count}
        _emit(
            _described(made),
            as_json,
            f"{made.path}: {level}, {made.bytes / 1e6:.1f} MB\n"
            f"fused: {', '.join(f'{name} {count}' for name, count in fused.items()) or 'nothing'}\n"
            f"differs from its parent by {step.validation['max_abs_difference']:.2g} at most "
            f"(accepted: {step.validation['tolerance']:.2g})",
        )


@app.command(epilog="Example: accel quantize out/ out-int8/ --max-drop 0.3 --metric accuracy --data test.csv")
def quantize(
    artifact: Artifact,
    out: Out,
    scheme: Annotated[
        str | None,
        typer.Option(
            help="dynamic-int8 (default), static-int8, weight-int8, weight-int4, ...; with a budget: only this."
        ),
    ] = None,
    preset: Annotated[str, typer.Option(help="Processor to quantize for; auto reads this one's flags.")] = "auto",
    calibration: Calibration = None,
    calibration_split: CalibrationSplit = None,
    samples: Annotated[int | None, typer.Option(help="Calibration rows at most (256).")] = None,
    method: Annotated[str | None, typer.Option(help="minmax, moving_average, entropy or percentile.")] = None,
    exclude: Annotated[
        list[str] | None, typer.Option(help="A layer to leave in float, or re:EXPRESSION; repeat it for more.")
    ] = None,
    operator: Annotated[
        list[str] | None, typer.Option(help="Quantize these operator types only; repeat it for more.")
    ] = None,
    per_channel: Annotated[
        bool | None, typer.Option("--per-channel/--per-tensor", help="Scales of weights; the preset's choice.")
    ] = None,
    symmetric: Annotated[
        bool | None, typer.Option("--symmetric/--asymmetric", help="Weights around zero; the preset's choice.")
    ] = None,
    graph: Annotated[str | None, typer.Option("--format", help="Of static-int8: qdq (default) or qoperator.")] = None,
    smooth_quant: Annotated[
        float | None, typer.Option(help="Of static-int8: move outliers into the weights, from 0 to 1.")
    ] = None,
    percentile: Annotated[float | None, typer.Option(help="Of --method percentile (99.99).")] = None,
    block_size: Annotated[
        int | None, typer.Option(help="Of weights in blocks: values that share a scale (32).")
    ] = None,
    algorithm: Annotated[str | None, typer.Option(help="Of weight-int4: rtn (default), hqq, awq or gptq.")] = None,
    ratio: Annotated[
        float | None, typer.Option(help="Of weight-int4: share of layers, the rest in 8 bits (1).")
    ] = None,
    scale_estimation: Annotated[
        bool | None,
        typer.Option("--scale-estimation", help="Of weight-int4 with OpenVINO: fit scales to --calibration."),
    ] = None,
    max_drop: Annotated[
        float | None, typer.Option(help="Budget: points of the metric that may be lost on --data.")
    ] = None,
    metric: Metric = None,
    data: Annotated[str | None, typer.Option(help="Labelled rows to measure on: a file or Hub data set.")] = None,
    split: Split = None,
    column: Column = None,
    rows: Annotated[int | None, typer.Option(help="Rows of --data at most.")] = None,
    max_length: MaxLength = None,
    batch_size: BatchSize = 32,
    backend: Backend = None,
    as_json: Json = False,
    verbose: Verbose = False,
) -> None:
    """Rewrite a graph into one with fewer bits; with a budget, search for the fastest that stays inside it."""
    with _command(as_json, verbose):
        from .search import quantize as run

        given: dict[str, Any] = {
            "scheme": scheme, "samples": samples, "operators": tuple(operator) if operator else None, "format": graph,
            "per_channel": per_channel, "symmetric": symmetric, "smooth_quant": smooth_quant, "percentile": percentile,
            "block_size": block_size, "algorithm": algorithm, "ratio": ratio, "scale_estimation": scale_estimation,
        }  # fmt: skip
        settings = {name: value for name, value in given.items() if value is not None}
        made = run(
            artifact,
            out,
            calibration=calibration,
            calibration_split=calibration_split,
            method=method,
            max_drop=max_drop,
            metric=metric,
            data=data,
            columns=_columns(column),
            split=split,
            rows=rows,
            batch_size=batch_size,
            max_length=max_length,
            backend=backend,
            preset=preset,
            exclude=tuple(exclude or ()),
            **settings,
        )
        _emit(_described(made), as_json, _quantized(made))


def _described(artifact: Any) -> dict[str, Any]:
    return {"path": artifact.path, "digest": artifact.digest, "bytes": artifact.bytes, **artifact.manifest.to_dict()}


def _quantized(artifact: Any) -> str:
    """What quantization did, what it cost, and what else was tried."""
    manifest = artifact.manifest
    step, quantization = manifest.steps[-1], manifest.quantization
    lines = [f"{artifact.path}: {quantization.scheme} ({quantization.preset}), {artifact.bytes / 1e6:.1f} MB"]
    accuracy = step.validation.get("accuracy")
    if accuracy is None:
        return f"{lines[0]}\naccuracy was not measured: pass --data FILE, or run `accel evaluate`"
    low, high = accuracy["drop_interval"]
    lines.append(
        f"{accuracy['metric']} {accuracy['value']:.4f}, {accuracy['float']:.4f} in float: loses {accuracy['drop']:.2f} points "
        f"(95 % interval {low:.2f} to {high:.2f}) on {accuracy['data']['n']} rows"
    )
    search = step.report.get("search")
    if search is not None:
        from .search import Trial

        lines += ["tried:", *(f"  {Trial(**trial)}" for trial in search["table"])]
        if search["float_ms"] is not None:
            lines.append(f"float: {search['float_ms']:.2f} ms; one row of median length")
    return "\n".join(lines)


@app.command(epilog="Example: accel evaluate out-int8/ --data test.csv --metric accuracy --compare")
def evaluate(
    model: Annotated[str, typer.Argument(metavar="MODEL", help="Artifact, transformers folder or Hub id.")],
    data: Annotated[str, typer.Option(help="Labelled rows: a CSV, JSON or Parquet file, a folder, or a Hub data set.")],
    metric: Metric = None,
    compare: Annotated[
        bool, typer.Option("--compare", help="Compare with the PyTorch model it was made from.")
    ] = False,
    against: Annotated[str | None, typer.Option(help="Compare with this model or artifact.")] = None,
    split: Split = None,
    column: Column = None,
    rows: Annotated[int | None, typer.Option(help="Rows at most.")] = None,
    seed: Annotated[int, typer.Option(help="Of the choice of rows.")] = 0,
    max_length: MaxLength = None,
    batch_size: BatchSize = 32,
    backend: Backend = None,
    device: Device = None,
    revision: Revision = None,
    trust_remote_code: Trust = False,
    as_json: Json = False,
    verbose: Verbose = False,
) -> None:
    """Measure a model on labelled data, and compare it with its original on the same rows."""
    with _command(as_json, verbose):
        from .evaluation import evaluate as run

        result = run(
            model,
            data,
            metric=metric,
            against=against if against is not None else compare,
            columns=_columns(column),
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
        _emit(result.to_dict(), as_json, _evaluated(result))


def _evaluated(result: Any) -> str:
    scores = ", ".join(f"{name} {value:.4f}" for name, value in result.scores.items())
    lines = [
        f"{result.metric}: {scores}",
        f"{result.rows} rows of {result.data['source']}, {result.backend} ({result.compute_dtype}), {result.seconds:.1f} s",
    ]
    other = result.comparison
    if other is not None:
        interval = other.interval
        lines.append(
            f"{other.against}: {other.value:.4f}; difference {other.difference:+.4f} "
            f"({100 * interval.confidence:g} % interval {interval.low:+.4f} to {interval.high:+.4f}, {interval.method})"
        )
        if other.agreement is not None:
            lines.append(f"agree on {100 * other.agreement:.2f} %")
    return "\n".join(lines)


def _columns(pairs: list[str] | None) -> dict[str, str] | None:
    """`USE=COLUMN` options as a mapping.

    Raises:
        ConfigError: One without an equals sign.
    """
    columns = {}
    for pair in pairs or ():
        use, separator, column = pair.partition("=")
        if not separator or not use or not column:
            raise ConfigError(f"--column {pair!r} is not USE=COLUMN.", fix="write, for example, --column text=query.")
        columns[use] = column
    return columns or None


@app.command(epilog="Example: accel doctor --json")
def doctor(as_json: Json = False, verbose: Verbose = False) -> None:
    """Show every backend, what it found here, and what is missing with its remedy."""
    with _command(as_json, verbose):
        from .doctor import conflicts, list_backends, machine

        facts, backends, problems = machine(), list_backends(), conflicts()
        if as_json:
            _emit({"machine": facts, "backends": backends, "conflicts": problems}, True, "")
        else:
            libraries = ", ".join(f"{name} {version}" for name, version in facts["libraries"].items())
            _print(f"accel {facts['accel']}, Python {facts['python']}, {facts['platform']}")
            _print(f"{facts['processors']} of {facts['processors_of_machine']} processors usable; {libraries}\n")
            width = max((len(status.name) for status in backends), default=0)
            for status in backends:
                mark = "ok " if status.available else "no "
                _print(f"{mark} {status.name:<{width}}  {status.summary}{'' if status.auto else ' (by name only)'}")
                for device in status.devices:
                    _print(f"    {device}: {device.name} {device.arch}".rstrip())
                for reason in status.reasons:
                    _print(f"    {reason.message}{f'. Fix: {reason.remedy}' if reason.remedy else ''}")
            for problem in problems:
                _print(f"\nConflict: {problem.message}. Fix: {problem.remedy}")
        if not any(status.available for status in backends) or problems:
            raise typer.Exit(1)


@app.command(epilog="Example: accel benchmark out-int8/ --backend cpu --sequence 32 --sequence 128 --report page.html")
def benchmark(
    models: Annotated[
        list[str], typer.Argument(metavar="MODEL...", help="Artifacts, transformers folders or Hub ids.")
    ],
    backend: Annotated[
        list[str] | None, typer.Option("--backend", help="Who runs artifacts; repeat for several.")
    ] = None,
    pytorch: Annotated[
        list[str] | None, typer.Option(help="PyTorch eager in this dtype; repeat. float32 always.")
    ] = None,
    compiled: Annotated[
        list[str] | None, typer.Option("--compile", help="torch.compile in this dtype; repeat.")
    ] = None,
    cuda_graph: Annotated[
        list[str] | None,
        typer.Option(help="PyTorch eager in this dtype from a CUDA graph; repeat. On a GPU, as --pytorch."),
    ] = None,
    batch: Batches = None,
    sequence: Sequences = None,
    texts: Texts = None,
    tokenizer: Annotated[bool, typer.Option("--tokenizer", help="Tokenize the texts inside the timed call.")] = False,
    max_length: MaxLength = None,
    threads: Threads = None,
    warmup: Annotated[int, typer.Option(help="Calls before the first round.")] = 10,
    rounds: Annotated[int, typer.Option(help="How often the variants take turns.")] = 12,
    calls: Annotated[
        int | None, typer.Option(help="Calls of a variant in each round: 20, or 1 with --new-tokens.")
    ] = None,
    processes: Annotated[int, typer.Option(help="How often each variant is loaded anew.")] = 4,
    new_tokens: Annotated[int, typer.Option(help="Time generating: until the first token, and this many.")] = 0,
    callers: Annotated[int, typer.Option(help="Threads that call at once (closed loop).")] = 1,
    rate: Annotated[float | None, typer.Option(help="Calls a second that arrive at random times (open loop).")] = None,
    task: Task = None,
    device: Device = None,
    atol: Atol = None,
    report: Report = None,
    png: Png = None,
    revision: Revision = None,
    trust_remote_code: Trust = False,
    as_json: Json = False,
    verbose: Verbose = False,
) -> None:
    """Measure variants of a model, one process each, taking turns; outputs are compared with PyTorch first."""
    with _command(as_json, verbose):
        from .benchmarking import benchmark as run
        from .reporting import check_pages, text_table, write_html, write_png

        check_pages(report, png)
        found = run(
            models, backends=backend, pytorch=pytorch or ("float32",), compiled=compiled or (),
            cuda_graph=cuda_graph or None, batch=batch or (1,), sequence=sequence or (128,), texts=texts,
            tokenize=tokenizer, max_length=max_length, threads=threads,
            warmup=1 if new_tokens else warmup, rounds=rounds, calls=calls or (1 if new_tokens else 20),
            processes=processes, new_tokens=new_tokens, callers=callers, rate=rate, task=task, device=device, atol=atol,
            revision=revision, trust_remote_code=trust_remote_code,
        )  # fmt: skip
        values = found.to_dict()
        if report is not None:
            write_html(values, report)
        if png is not None:
            write_png(values, png)
        _emit(values, as_json, "" if as_json else f"{found}\n\n{text_table(values)}")
        if any(variant.error for variant in found.variants):
            raise typer.Exit(1)


@app.command(epilog="Example: accel tune org/model tuned/ --data test.csv --calibration train.csv --max-drop 0.3")
def tune(
    model: Model,
    out: Out,
    data: Annotated[str, typer.Option(help="Labelled rows to measure accuracy on: a file or a Hub data set.")],
    metric: Metric = None,
    calibration: Calibration = None,
    objective: Annotated[str, typer.Option(help="latency, throughput, size or cost.")] = "latency",
    max_drop: Annotated[float | None, typer.Option(help="Points that may be lost against PyTorch float32.")] = None,
    min_accuracy: Annotated[float | None, typer.Option(help="Least value of the metric.")] = None,
    max_latency_ms: Annotated[float | None, typer.Option(help="Largest median on every workload.")] = None,
    max_memory_mb: Annotated[float | None, typer.Option(help="Largest peak memory of the process.")] = None,
    max_size_mb: Annotated[float | None, typer.Option(help="Largest size of the files.")] = None,
    batch: Batches = None,
    sequence: Sequences = None,
    texts: Texts = None,
    split: Split = None,
    column: Column = None,
    calibration_split: CalibrationSplit = None,
    samples: Annotated[int | None, typer.Option(help="Rows of --data at most; all when left out.")] = None,
    max_length: MaxLength = None,
    backend: Backends = None,
    device: Annotated[str | None, typer.Option(help="Device type to run on.")] = None,
    task: Task = None,
    threads: Threads = None,
    time_limit: Annotated[float | None, typer.Option(help="Seconds; what is not tried by then is listed.")] = None,
    fresh: Annotated[bool, typer.Option("--fresh", help="Measure again what earlier runs measured.")] = False,
    report: Report = None,
    png: Png = None,
    revision: Revision = None,
    trust_remote_code: Trust = False,
    as_json: Json = False,
    verbose: Verbose = False,
) -> None:
    """Try what every backend offers on this machine and data, and keep the best that fits the constraints."""
    with _command(as_json, verbose):
        from .reporting import check_pages, write_html, write_png
        from .tuning import tune as run
        from .tuning.report import render

        logging.getLogger("accel.tuning").setLevel(logging.DEBUG if verbose else logging.INFO)
        check_pages(report, png)
        found = run(
            model, out, data=data, metric=metric, calibration=calibration, objective=objective,  # type: ignore[arg-type]
            max_drop=max_drop, min_accuracy=min_accuracy, max_latency_ms=max_latency_ms, max_memory_mb=max_memory_mb,
            max_size_mb=max_size_mb, batch=batch or (1,), sequence=sequence or (128,), texts=texts, split=split,
            columns=_columns(column), calibration_split=calibration_split, samples=samples, max_length=max_length,
            backends=backend, device=device, task=task, threads=threads, time_limit_s=time_limit, fresh=fresh, revision=revision,
            trust_remote_code=trust_remote_code,
        )  # fmt: skip
        values = found.to_dict()
        if report is not None:
            write_html(values, report, title=f"accel tune {model}")
        if png is not None:
            write_png(values, png, title=f"accel tune {model}")
        _emit(values, as_json, "" if as_json else render(found))


@app.command(epilog="Example: accel convert org/model out/ -b 1 -s 16 -s 128 --quantize dynamic-int8")
def convert(
    model: Annotated[str | None, typer.Argument(metavar="MODEL", help="Hub id or transformers folder.")] = None,
    out: Annotated[Path | None, typer.Argument(metavar="OUT", help="Folder to make.")] = None,
    model_option: Annotated[str | None, typer.Option("--model", "-m", help="Instead of the argument MODEL.")] = None,
    out_option: Annotated[Path | None, typer.Option("--output", "-o", help="Instead of the argument OUT.")] = None,
    batch: Annotated[
        list[int] | None, typer.Option("--batch-size", "-b", help="Rows a call; repeat for a grid. [1]")
    ] = None,
    sequence: Annotated[
        list[int] | None, typer.Option("--seq-len", "-s", help="Tokens a row; repeat for a grid. [16, 128]")
    ] = None,
    backend: Backends = None,
    task: Task = None,
    optimize: Annotated[str, typer.Option(help="Optimization level, or none.")] = "O2",
    quantize: Annotated[str | None, typer.Option(help="Quantization scheme; none when left out.")] = None,
    calibration: Calibration = None,
    atol: Atol = None,
    nb_measures: Annotated[int, typer.Option(help="Timed calls of each variant and shape.")] = 240,
    warmup: Annotated[int, typer.Option(help="Calls before them.")] = 10,
    threads: Threads = None,
    revision: Revision = None,
    trust_remote_code: Trust = False,
    as_json: Json = False,
    verbose: Verbose = False,
) -> None:
    """Export, optimize and quantize for every backend, check the results, time all beside PyTorch, write a report."""
    with _command(as_json, verbose):
        from .converting import convert as run
        from .reporting import text_table

        if model is not None and out is None and model_option is not None:
            model, out = None, Path(str(model))  # `accel convert -m MODEL OUT`
        for name, given, other in (("MODEL", model, model_option), ("OUT", out, out_option)):
            if (given is None) == (other is None):
                many = "twice" if given is not None else "nowhere"
                raise ConfigError(f"{name} is given {many}.", fix="accel convert MODEL OUT")
        found = run(
            str(model or model_option), Path(out or out_option or ""), backends=backend, task=task,
            level=None if optimize == "none" else optimize, scheme=quantize, calibration=calibration,
            batch=batch or (1,), sequence=sequence or (16, 128), atol=atol, nb_measures=nb_measures, warmup=warmup,
            threads=threads, revision=revision, trust_remote_code=trust_remote_code,
        )  # fmt: skip
        values = found.benchmark.to_dict()
        failures = "".join(f"\n{name} could not be made: {why}" for name, why in found.failed.items())
        _emit(
            {"path": found.path, "artifacts": {n: a.path for n, a in found.artifacts.items()}, "failed": found.failed,
             "benchmark": values},
            as_json,
            "" if as_json else f"{found.benchmark}\n\n{text_table(values)}{failures}\n{found.path}: "
            f"{', '.join(found.artifacts)}, benchmark.json, report.html",
        )  # fmt: skip
        if found.failed or any(variant.error for variant in found.benchmark.variants):
            raise typer.Exit(1)


@app.command(epilog='Example: accel generate Qwen/Qwen3-0.6B --prompt "Why is the sky blue?" --max-new-tokens 200')
def generate(
    model: Annotated[str, typer.Argument(metavar="MODEL", help="Hub id, transformers folder or artifact.")],
    prompt: Annotated[str | None, typer.Option(help="What to answer; standard input when left out.")] = None,
    system: Annotated[str | None, typer.Option(help="System message, for chat models.")] = None,
    chat: Annotated[
        bool | None, typer.Option("--chat/--no-chat", help="Use the tokenizer's chat template; when it has one.")
    ] = None,
    image: Annotated[Path | None, typer.Option(help="Picture, for models that describe one.")] = None,
    audio: Annotated[Path | None, typer.Option(help="Recording, for speech models.")] = None,
    max_new_tokens: Annotated[int, typer.Option("--max-new-tokens", help="Tokens at most.")] = 256,
    sample: Annotated[bool, typer.Option("--sample", help="Draw tokens instead of taking the likeliest.")] = False,
    temperature: Annotated[float | None, typer.Option(min=1e-6, help="With --sample: above 1 is wilder.")] = None,
    top_k: Annotated[int | None, typer.Option(min=0, help="With --sample: among so many; 0 for all.")] = None,
    top_p: Annotated[
        float | None, typer.Option(min=0, max=1, help="With --sample: among this much probability.")
    ] = None,
    num_beams: Annotated[int, typer.Option(min=1, help="Beam search with so many beams.")] = 1,
    seed: Annotated[int | None, typer.Option(help="With --sample: the same answer again.")] = None,
    task: Task = None,
    backend: Backend = None,
    device: Device = None,
    revision: Revision = None,
    trust_remote_code: Trust = False,
    as_json: Json = False,
    verbose: Verbose = False,
) -> None:
    """Answer a prompt, printing the text while it is generated; speed goes to standard error."""
    with _command(as_json, verbose):
        text = sys.stdin.read() if prompt is None and image is None and audio is None else prompt or ""
        if not sample and (temperature is not None or top_k is not None or top_p is not None or seed is not None):
            raise ConfigError("temperature, top-k, top-p and seed need sampling.", fix="add --sample.")
        import transformers

        from .generating import answer, open_generator, prompt_inputs

        opened = open_generator(
            model, task=task, backend=backend, device=device, revision=revision, trust_remote_code=trust_remote_code
        )
        tokenizer = transformers.AutoTokenizer.from_pretrained(opened.artifact.path, local_files_only=True)
        inputs = prompt_inputs(opened, tokenizer, text, system=system, chat=chat, image=image, audio=audio)
        if seed is not None:
            transformers.set_seed(seed)
        choices = {"temperature": temperature, "top_k": top_k, "top_p": top_p} if sample else {}

        def show(piece: str) -> None:
            if not as_json:
                sys.stdout.write(piece)
                sys.stdout.flush()

        found = answer(
            opened,
            tokenizer,
            inputs,
            on_text=show,
            max_new_tokens=max_new_tokens,
            do_sample=sample,
            num_beams=num_beams,
            **{name: value for name, value in choices.items() if value is not None},
        )
        if as_json:
            _emit(found, as_json, "")
            return
        _print()
        first = f"{found.prompt_tokens} prompt tokens in {found.first_token_s * 1e3:.0f} ms, " if num_beams == 1 else ""
        sys.stderr.write(f"{first}{found.new_tokens} new tokens, {found.tokens_per_s:.1f} a second\n")


@app.command(epilog="Example: accel demo --out demo-out/")
def demo(
    out: Annotated[Path | None, typer.Option(help="Keep the artifact here, the others beside it.")] = None,
    as_json: Json = False,
    verbose: Verbose = False,
) -> None:
    """Do the main job on a real intent classifier, offline: export, optimize, quantize, evaluate, compare with PyTorch."""
    with _command(as_json, verbose):
        from .demo import render, run

        report = run(out)
        _emit(report, as_json, render(report))


@cache_app.command("list", epilog="Example: accel cache list")
def cache_list(as_json: Json = False) -> None:
    """List exports that `from_pretrained` made, and what `accel tune` built and measured, with sizes."""
    with _command(as_json, False):
        from .cache import entries

        kept = entries()
        lines = [f"{entry.bytes / 1e6:9.1f} MB  {entry.name}  ({entry.what})\n{'':14}{entry.path}" for entry in kept]
        _emit(kept, as_json, "\n".join(lines) or "The cache is empty.")


@cache_app.command("clear", epilog="Example: accel cache clear tune")
def cache_clear(
    name: Annotated[str | None, typer.Argument(help="Only entries whose name starts with this; see the list.")] = None,
    as_json: Json = False,
) -> None:
    """Remove exports that `from_pretrained` made, what `accel tune` keeps, and checksums remembered about them."""
    with _command(as_json, False):
        from .cache import clear

        removed = clear(name)
        freed = sum(entry.bytes for entry in removed)
        _emit(
            {"removed": removed, "bytes": freed},
            as_json,
            f"Removed {', '.join(entry.name for entry in removed) or 'nothing'}: {freed / 1e6:.1f} MB.",
        )


if __name__ == "__main__":
    main()
