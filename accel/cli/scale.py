"""Commands around a server that is in use: how much it bears, how many of it are needed, and work that no one waits for."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from ..errors import AccelError
from .application import app, columns_of, command, emit, pairs_of
from .exit_codes import FAILED
from .options import (
    CPUS,
    GPUS,
    REPLICAS,
    Address,
    Backend,
    Column,
    Cpus,
    Device,
    Gpus,
    Json,
    Ray,
    ReplicaCount,
    Report,
    Revision,
    Task,
    Threads,
    Trust,
    Verbose,
    wants_ray,
)

_KEY = "ACCEL_API_KEY"
Options = Annotated[
    list[str] | None, typer.Option("--option", metavar="NAME=JSON", help="An option of the operation; repeat.")
]


def options_of(pairs: list[str] | None) -> dict[str, Any]:
    """What `--option` says: JSON, or a text as it is."""
    made: dict[str, Any] = {}
    for name, value in (pairs_of(pairs, "--option", "top_k=3") or {}).items():
        try:
            made[name] = json.loads(value)
        except ValueError:
            made[name] = value
    return made


@app.command(
    epilog="Example: accel loadtest http://127.0.0.1:8000 --rate 50 --rate 100 --objective-ms 100 --report load.html"
)
def loadtest(
    url: Annotated[str, typer.Argument(metavar="URL", help="Of a server, or of one of its endpoints.")],
    rate: Annotated[
        list[float] | None, typer.Option("--rate", "-r", help="Requests a second; repeat. [default: 10]")
    ] = None,
    objective_ms: Annotated[
        float | None, typer.Option(help="A request is good when it is answered within this.")
    ] = None,
    share: Annotated[float, typer.Option(help="Of requests that must be good.")] = 0.99,
    find: Annotated[
        bool, typer.Option("--find", help="Look for the highest rate that meets the objective, from --rate on.")
    ] = False,
    precision: Annotated[float, typer.Option(help="Of that rate, relative.")] = 0.05,
    seconds: Annotated[float, typer.Option(help="For how long requests of one rate arrive.")] = 10.0,
    warmup: Annotated[float, typer.Option(help="Seconds before that, at the same rate, that do not count.")] = 2.0,
    arrivals: Annotated[str, typer.Option(help="poisson (independent callers) or uniform.")] = "poisson",
    data: Annotated[
        str | None, typer.Option(help="Texts: CSV, JSON lines, Parquet. Left out: 77 intents of a bank's customers.")
    ] = None,
    column: Column = None,
    model: Annotated[str | None, typer.Option(help="Which one, of several.")] = None,
    option: Options = None,
    tokenizer: Annotated[
        str | None, typer.Option(help="Folder of a tokenizer, for /v2 servers that take tokens.")
    ] = None,
    timeout: Annotated[float, typer.Option(help="Seconds until a request is given up.")] = 30.0,
    connections: Annotated[int, typer.Option(help="At once, at most.")] = 1024,
    seed: Annotated[int, typer.Option(help="Of arrivals and texts.")] = 0,
    insecure: Annotated[bool, typer.Option("--insecure", help="Do not check the server's certificate.")] = False,
    report: Report = None,
    as_json: Json = False,
    verbose: Verbose = False,
) -> None:
    """Send requests to a server at given rates, whatever it answers, and measure how long each waits. Key: ACCEL_API_KEY."""
    with command(as_json, verbose):
        from ..demo import TEST_SET
        from ..measuring.report import check_pages
        from ..serving.loadtest.page import page, text
        from ..serving.loadtest.running import LoadSettings
        from ..serving.loadtest.running import loadtest as run

        check_pages(report, None)
        settings = LoadSettings(
            rates=tuple(rate or (10.0,)), find=find, precision=precision, objective_ms=objective_ms, share=share,
            seconds=seconds, warmup_s=warmup, arrivals=arrivals, timeout_s=timeout,  # type: ignore[arg-type]
            connections=connections, seed=seed,
        )  # fmt: skip
        found = run(
            url, data or TEST_SET, settings, model=model, columns=columns_of(column), options=options_of(option),
            tokenizer=tokenizer, key=os.environ.get(_KEY), insecure=insecure,
        )  # fmt: skip
        if report is not None:
            report.write_text(page(found, title=f"accel loadtest {url}"), encoding="utf-8")
        emit(found.to_dict(), as_json, "" if as_json else text(found))
        unanswered = [f"{run.rate:g}" for run in found.runs if not run.answered and not run.refused]
        if unanswered:
            what = f"Nothing was answered at {', '.join(unanswered)} requests a second."
            sys.stderr.write(f"Error: {AccelError(what, fix='see the errors above, and whether the server runs.')}\n")
        if unanswered or (found.settings["find"] and found.best_rate is None):
            raise typer.Exit(FAILED)


@app.command(epilog="Example: accel sizing load.json --rate 2000 --objective-ms 50")
def sizing(
    test: Annotated[Path, typer.Argument(metavar="FILE", help="Written by `accel loadtest --json`, of one replica.")],
    rate: Annotated[float, typer.Option("--rate", "-r", help="Requests a second, of all replicas.")],
    objective_ms: Annotated[float, typer.Option(help="Latency that requests should not exceed.")],
    share: Annotated[float, typer.Option(help="Of requests that should not.")] = 0.99,
    max_batch: Annotated[int, typer.Option(help="As the server was started.")] = 64,
    as_json: Json = False,
    verbose: Verbose = False,
) -> None:
    """Say how many replicas a rate needs, by a model of the queue that a load test calibrates, and how well that model fits."""
    with command(as_json, verbose):
        from ..errors import InputError
        from ..serving.sizing import calibrate, check

        try:
            values = json.loads(test.read_text(encoding="utf-8"))
        except ValueError as error:
            raise InputError(f"{test} is no JSON: {error}", fix="write it with accel loadtest ... --json.") from error
        model = calibrate(values, max_batch=max_batch)
        count, each = model.replicas(rate, objective_ms, share=share)
        checks = check(values, max_batch=max_batch)
        lines = [
            f"{count} replicas for {rate:g} requests a second, {share:.0%} within {objective_ms:g} ms",
            f"each: {each.rate:.1f} of {model.capacity:.1f} requests a second that it bears, {each.busy:.0%} busy, "
            f"{each.batch:.1f} a call; p50 {each.median:.1f} ms, p95 {each.p95:.1f}, p99 {each.p99:.1f}",
            f"a call takes {model.call_s * 1e3:.2f} ms and {model.request_s * 1e3:.2f} for each request in it; HTTP and tokenization take "
            f"{model.http_s * 1e3:.2f} ms of the processors a request",
        ]
        lines += [
            f"check at {one.rate:g} a second, predicted from the other rates: p50 {one.predicted[0]:.1f} ms, measured "
            f"{one.measured[0]:.1f} ({one.errors[0]:+.0%}); p99 {one.predicted[1]:.1f}, measured {one.measured[1]:.1f} "
            f"({one.errors[1]:+.0%})"
            for one in checks
        ]
        result = {
            "replicas": count,
            "each": each,
            "model": model,
            "capacity": model.capacity,
            "checks": [
                {"rate": one.rate, "measured": one.measured, "predicted": one.predicted, "errors": one.errors}
                for one in checks
            ],
        }
        emit(result, as_json, "\n".join(lines))


@app.command(
    epilog="Example: accel batch out-int8/ --data reviews.parquet --out answers/ --column text=review --keep id"
)
def batch(
    model: Annotated[str, typer.Argument(metavar="MODEL", help="Artifact, folder or Hub id.")],
    data: Annotated[list[str], typer.Option(help="CSV, JSON lines or Parquet: a file, folder or pattern; repeat.")],
    out: Annotated[Path, typer.Option(help="Folder for the answers; the one of a killed run goes on.")],
    operation: Annotated[
        str | None, typer.Option(help="embed, generate, a pipeline's task, ...; the model's own.")
    ] = None,
    option: Options = None,
    column: Column = None,
    keep: Annotated[list[str] | None, typer.Option(help="Column that is copied to the answers; repeat.")] = None,
    on_error: Annotated[str, typer.Option(help="At a row without an answer: stop, or record what was wrong.")] = "stop",
    format: Annotated[str, typer.Option(help="parquet or jsonl.")] = "parquet",
    rows_a_part: Annotated[int, typer.Option(help="Rows of a file of answers.")] = 2048,
    workers: Annotated[int, typer.Option(min=1, help="Sessions; they share the processors.")] = 1,
    max_batch: Annotated[int, typer.Option(min=1, help="Rows in one call of the model.")] = 64,
    max_batch_tokens: Annotated[int, typer.Option(min=1, help="Tokens in one call, padding counted.")] = 16384,
    ray: Ray = False,
    address: Address = None,
    replicas: ReplicaCount = REPLICAS,
    cpus: Cpus = CPUS,
    gpus: Gpus = GPUS,
    task: Task = None,
    backend: Backend = None,
    device: Device = None,
    threads: Threads = None,
    revision: Revision = None,
    trust_remote_code: Trust = False,
    as_json: Json = False,
    verbose: Verbose = False,
) -> None:
    """Answer every row of a table, each exactly once: killed and called again, it goes on where it was."""
    with command(as_json, verbose):
        from ..config import SessionOptions

        arguments: dict[str, Any] = {
            "operation": operation, "options": options_of(option), "columns": columns_of(column), "keep": keep or (),
            "rows_a_part": rows_a_part, "format": format, "on_error": on_error,
            "workers": workers, "max_batch": max_batch, "max_batch_tokens": max_batch_tokens, "task": task,
            "backend": backend, "device": device, "revision": revision, "trust_remote_code": trust_remote_code,
            "session_options": SessionOptions(threads=threads) if threads is not None else None,
        }  # fmt: skip
        if wants_ray(ray, address, replicas, cpus, gpus):
            from ..serving.batch.on_ray import batch_on_ray

            done = batch_on_ray(model, data, out, address=address, replicas=replicas, cpus=cpus, gpus=gpus, **arguments)
        else:
            from ..serving.batch.running import batch as run

            done = run(model, data, out, **arguments)
        speed = f", {done.computed / done.seconds:.0f} rows a second" if done.computed and done.seconds else ""
        told = f"{done.folder}: {done.rows} rows, {done.operation}, {done.parts} files; {done.computed} computed now{speed}"
        broken = f"\n{done.broken} rows have no answer: see their column `error`." if done.broken else ""
        emit(done, as_json, told + broken)
