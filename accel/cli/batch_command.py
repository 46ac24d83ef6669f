"""The command `accel batch`, and errors with remedies for removed commands."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any

import typer

from ..errors import ConfigError
from . import options
from .application import CommandResult, app, columns_of, command, pairs_of, subcommand

Options = Annotated[
    list[str] | None,
    typer.Option("--option", metavar="NAME=JSON", help="Option of the operation. Repeat the flag for several options."),
]


def options_of(pairs: list[str] | None) -> dict[str, Any]:
    """Parse the values of `--option` as JSON, or as text if they are not JSON."""
    options_by_name: dict[str, Any] = {}
    for name, value in (pairs_of(pairs, "--option", "top_k=3") or {}).items():
        try:
            options_by_name[name] = json.loads(value)
        except ValueError:
            options_by_name[name] = value
    return options_by_name


_REPLACED = {
    "loadtest": "send requests with wrk, hey or guidellm; see docs/guides/load-test.md.",
    "sizing": "use the formula in docs/guides/load-test.md, section Compute the number of replicas.",
}
"""Removed commands, with their replacements."""


def _replaced(name: str) -> None:
    @app.command(
        name,
        hidden=True,
        add_help_option=False,
        context_settings={"allow_extra_args": True, "ignore_unknown_options": True},
    )
    def tell(context: typer.Context) -> None:
        with command("--json" in context.args, verbose=False):
            raise ConfigError(f"The command `accel {name}` was removed.", fix=_REPLACED[name])


for _name in _REPLACED:
    _replaced(_name)


@subcommand(
    app, epilog="Example: accel batch out-int8/ --data reviews.parquet --out answers/ --column text=review --keep id"
)
def batch(
    model: Annotated[str, typer.Argument(metavar="MODEL", help="Artifact, folder or Hub id.")],
    data: Annotated[
        list[str],
        typer.Option(
            help="CSV, JSON Lines or Parquet file, folder or file pattern. Repeat the flag for several files."
        ),
    ],
    out: Annotated[Path, typer.Option(help="Output folder. With the folder of an interrupted run, continue that run.")],
    operation: Annotated[
        str | None, typer.Option(help="embed, generate, the task of a pipeline, ...; chosen by the model if omitted.")
    ] = None,
    option: Options = None,
    column: options.Column = None,
    keep: Annotated[
        list[str] | None, typer.Option(help="Column to copy to the output. Repeat the flag for several columns.")
    ] = None,
    on_error: Annotated[
        str, typer.Option(help="If a row fails: `stop`, or `record` the error in the output.")
    ] = "stop",
    format: Annotated[str, typer.Option(help="Format of the output files: parquet or jsonl.")] = "parquet",
    rows_a_part: Annotated[int, typer.Option(help="Number of rows per output file.")] = 2048,
    workers: Annotated[int, typer.Option(min=1, help="Number of sessions. They share the processors.")] = 1,
    max_batch: Annotated[int, typer.Option(min=1, help="Maximum number of rows per model call.")] = 64,
    max_batch_tokens: Annotated[
        int, typer.Option(min=1, help="Maximum number of tokens per model call, including padding.")
    ] = 16384,
    ray: options.Ray = False,
    address: options.Address = None,
    replicas: options.ReplicaCount = options.REPLICAS,
    cpus: options.Cpus = options.CPUS,
    gpus: options.Gpus = options.GPUS,
    task: options.Task = None,
    backend: options.Backend = None,
    device: options.Device = None,
    threads: options.Threads = None,
    revision: options.Revision = None,
    trust_remote_code: options.Trust = False,
) -> CommandResult:
    """Run a model on every row of a table. An interrupted run continues if the same command is run again."""
    from ..config import SessionOptions

    arguments: dict[str, Any] = {
        "operation": operation, "options": options_of(option), "columns": columns_of(column), "keep": keep or (),
        "rows_a_part": rows_a_part, "format": format, "on_error": on_error,
        "workers": workers, "max_batch": max_batch, "max_batch_tokens": max_batch_tokens, "task": task,
        "backend": backend, "device": device, "revision": revision, "trust_remote_code": trust_remote_code,
        "session_options": SessionOptions(threads=threads) if threads is not None else None,
    }  # fmt: skip
    if options.wants_ray(ray, address, replicas, cpus, gpus):
        from ..serving.batch.ray_batch import batch_on_ray

        done = batch_on_ray(model, data, out, address=address, replicas=replicas, cpus=cpus, gpus=gpus, **arguments)
    else:
        from ..serving.batch.batch_run import batch as run

        done = run(model, data, out, **arguments)
    speed = f", {done.computed / done.seconds:.0f} rows a second" if done.computed and done.seconds else ""
    summary = (
        f"{done.folder}: {done.rows} rows, {done.operation}, {done.parts} files; {done.computed} computed now{speed}"
    )
    broken = f"\n{done.broken} rows failed: see the column `error` of these rows." if done.broken else ""
    return CommandResult(done, summary + broken)
