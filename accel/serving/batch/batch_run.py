"""`accel batch`: run a model on all rows of a table on this machine."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ... import progress
from ..._version import __version__
from ...errors import ConfigError
from ..engine import Engine
from ..operations import operations_of, usual_operation
from ..worker_models import Source
from .ledger import CompletedPart, RunLedger
from .part_processing import Format, OnError, RowRequest, compute
from .row_inputs import find_columns
from .table_files import Part, Table, scan

ROWS_A_PART = 2048
UNLIMITED = 1 << 40
"""Value of the engine's `max_queue`: effectively no limit, because the size of the parts limits how many inputs wait."""
_AT_ONCE = 2
"""Number of parts that are processed at the same time: while one part is written, the next one keeps the model busy."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchReport:
    """Summary of a run.

    Attributes:
        folder: The output folder.
        operation: Name of the operation.
        rows: Number of rows of the data; all of them are written.
        computed: Number of rows that this run processed; earlier runs processed the others.
        broken: Number of failed rows, which are written with the reason.
        parts: Number of output files.
        seconds: Seconds from the start of this run's first part to the end of its last part.
    """

    folder: str
    operation: str
    rows: int
    computed: int
    broken: int
    parts: int
    seconds: float


Compute = Callable[[Sequence[Part]], Iterator[CompletedPart]]


def batch(
    model: Source,
    data: str | os.PathLike[str] | Sequence[str | os.PathLike[str]],
    out: str | os.PathLike[str],
    *,
    operation: str | None = None,
    options: Mapping[str, Any] | None = None,
    columns: Mapping[str, str] | None = None,
    keep: Sequence[str] = (),
    rows_a_part: int = ROWS_A_PART,
    format: Format = "parquet",
    on_error: OnError = "stop",
    **engine: Any,
) -> BatchReport:
    """Run a model on every row of a table exactly once.

    To continue a run that was killed, make the same call again: each part is either complete or missing. If the output folder contains
    a run with other data, another model or other options, an error is raised.

    Args:
        model: Hub id, folder, artifact or `ORTModelFor...`.
        data: CSV, TSV, JSON lines or Parquet: a file, a folder, a glob pattern, or several files of the same format.
        out: Output folder for the results, written as files with row numbers in their names.
        operation: Name of an operation from `Engine.operations`; `None` means the first operation of the task.
        options: Options of the operation.
        columns: Name of the table column for each input of the operation, such as `{"text": "review"}`.
        keep: Names of columns that are copied to the output.
        rows_a_part: Number of rows in an output file. If the process is killed, at most two files must be computed again.
        format: Format of the output files: `parquet` or `jsonl`.
        on_error: `stop` raises at the first failed row; `record` writes failed rows with the reason.
        **engine: Arguments of `Engine`.

    Raises:
        ConfigError: The options are invalid, or the output folder contains another run.
        InputError: A row fails and `on_error` is `stop`.
        OutputFolderError: The output folder contains other files, or another process writes to it.
        IntegrityError: An output file was changed after it was written.
    """
    table = scan(data, rows_a_part)
    with Engine(model, **{**engine, "max_queue": UNLIMITED}) as opened:
        request = plan(
            opened, table, operation=operation, options=options, columns=columns, keep=keep, format=format, on_error=on_error
        )  # fmt: skip
        folder = Path(out).expanduser().absolute()
        identity = identify(opened)
        return work(
            table, request, identity, folder, lambda parts: _in_this_process(opened, table, parts, request, folder)
        )


def plan(
    engine: Engine,
    table: Table,
    *,
    operation: str | None = None,
    options: Mapping[str, Any] | None = None,
    columns: Mapping[str, str] | None = None,
    keep: Sequence[str] = (),
    format: Format = "parquet",
    on_error: OnError = "stop",
) -> RowRequest:
    """Check the arguments of a run and return the request that is made for each row.

    Raises:
        ConfigError: The options are invalid.
        InputError: It is not clear which column to read.
    """
    model = next(iter(engine.models.values()))
    offered = operations_of(model)
    chosen = usual_operation(model, offered) if operation is None else offered.get(operation)
    if chosen is None:
        raise ConfigError(
            f"The model does not support the operation {operation!r}.", fix=f"use one of {', '.join(offered)}."
        )
    unknown = sorted(set(keep) - set(table.columns))
    if unknown:
        raise ConfigError(
            f"The columns to keep include {', '.join(map(repr, unknown))}, but the data has only the columns {', '.join(table.columns)}.",
            fix="pass only columns of the data in keep=[...] (--keep).",
        )
    request = RowRequest(
        operation=chosen, options=dict(options or {}), columns=find_columns(chosen, table.columns, columns),
        keep=tuple(keep), format=format, on_error=on_error,
    )  # fmt: skip
    request.check()
    return request


def identify(engine: Engine) -> dict[str, str]:
    """Return the properties of the model and its session that the results depend on.

    They are the artifact's digest, the backend, the device, the data type used for computation, and the version of accel.
    """
    model = next(iter(engine.models.values()))
    return {
        "digest": model.artifact.digest,
        "backend": model.backend,
        "device": str(model.device),
        "compute_dtype": model.compute_dtype,
        "accel": __version__,
    }


def work(
    table: Table,
    request: RowRequest,
    identity: Mapping[str, str],
    folder: Path,
    compute_parts: Compute,
) -> BatchReport:
    """Process the parts of a table that are not complete yet, and record each part when it is complete.

    Args:
        table: The data.
        request: The request that is made for each row.
        identity: Properties of the model and its session, from `identify`.
        folder: The output folder.
        compute_parts: Function that processes parts and yields each complete part, in any order.
    """
    run = {
        "data": [{"name": path.name, "sha256": digest} for path, digest in zip(table.files, table.sha256, strict=True)],
        "rows": table.rows,
        "rows_a_part": table.rows_a_part,
        "model": dict(identity),
        "operation": request.operation.name,
        "options": dict(request.options),
        "columns": dict(request.columns),
        "keep": list(request.keep),
        "format": request.format,
    }
    ledger = RunLedger(folder)
    with ledger.opened(run):
        for part in table.parts:
            done = ledger.done.get(part.number)
            if done is not None and (done.start, done.rows) != (part.start, part.rows):
                # Earlier versions of accel started a new part at each input file, so the parts differ from the parts of
                # this version.
                raise ConfigError(
                    f"The output folder {folder} contains the results of an earlier version of accel, which divided the rows "
                    "into parts differently.",
                    fix="choose another output folder, or delete this folder.",
                )
        missing = [part for part in table.parts if part.number not in ledger.done]
        computed, start = 0, time.perf_counter()
        progress.report("computing rows", table.rows - sum(part.rows for part in missing), table.rows)
        for completed in compute_parts(missing) if missing else ():
            ledger.add(completed)
            computed += completed.rows
            progress.report("computing rows", sum(done.rows for done in ledger.done.values()), table.rows)
        return BatchReport(
            folder=str(folder),
            operation=request.operation.name,
            rows=table.rows,
            computed=computed,
            broken=sum(part.broken for part in ledger.done.values()),
            parts=len(ledger.done),
            seconds=time.perf_counter() - start,
        )


def _in_this_process(
    engine: Engine, table: Table, parts: Sequence[Part], request: RowRequest, folder: Path
) -> Iterator[CompletedPart]:
    """Process parts of a table in this process and yield each part when it is complete."""
    pool = ThreadPoolExecutor(_AT_ONCE)
    try:
        for future in as_completed([pool.submit(compute, engine, table, part, request, folder) for part in parts]):
            yield future.result()
    finally:
        pool.shutdown(cancel_futures=True)
