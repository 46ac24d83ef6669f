"""`accel batch`: all rows of a table through a model, on this machine."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ... import progress
from ..._version import __version__
from ...errors import ConfigError
from ..engine import Engine
from ..operations import operations_of, usual_operation
from ..worker_models import Source
from .ledger import Done, Ledger
from .parts import Format, OnError, RowRequest, compute
from .row_inputs import find_columns
from .table_files import Part, Table, scan

UNLIMITED = 1 << 40
"""Inputs that may wait: parts limit them."""
_AT_ONCE = 2
"""Parts in the making: while one is finished and written, the next one keeps the model busy."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchReport:
    """What a run did.

    Attributes:
        folder: Of the output.
        operation: What was asked.
        rows: Of the data, all of them written.
        computed: Of them, in this run; the others were there.
        broken: Rows that have no answer, and say why.
        parts: Files.
        seconds: From the first row of this run to the last.
    """

    folder: str
    operation: str
    rows: int
    computed: int
    broken: int
    parts: int
    seconds: float


Compute = Callable[[Sequence[Part]], Iterator[Done]]


def batch(
    model: Source,
    data: str | os.PathLike[str] | Sequence[str | os.PathLike[str]],
    out: str | os.PathLike[str],
    *,
    operation: str | None = None,
    options: Mapping[str, Any] | None = None,
    columns: Mapping[str, str] | None = None,
    keep: Sequence[str] = (),
    rows_a_part: int = 2048,
    format: Format = "parquet",
    on_error: OnError = "stop",
    **engine: Any,
) -> BatchReport:
    """Answer every row of a table, each exactly once.

    Killed at any moment and called again, it goes on: a part is there as a whole or not at all. Called with other data, another model or
    other options for the same folder, it refuses.

    Args:
        model: Hub id, folder, artifact or `ORTModelFor...`.
        data: CSV, TSV, JSON lines or Parquet: a file, a folder, a pattern, or several files of one kind.
        out: Folder for the answers: files with the rows' numbers in their names.
        operation: See `Engine.operations`; what the model is for when `None`.
        options: Of the operation.
        columns: Column by use, such as `{"text": "review"}`.
        keep: Columns that are copied to the answers.
        rows_a_part: Rows of a file, and what is lost at most by a kill, twice.
        format: `parquet` or `jsonl`.
        on_error: `stop` ends at the first row that cannot be answered; `record` writes it with what was wrong.
        **engine: Of `Engine`.

    Raises:
        ConfigError: Options that cannot work, or a folder with another run.
        InputError: A row that cannot be answered.
        OutputFolderError: A folder with something else, or one that another process works in.
        IntegrityError: A part was changed since it was written.
    """
    table = scan(data, rows_a_part)
    with Engine(model, **{**engine, "max_queue": UNLIMITED}) as opened:
        request = plan(opened, table, operation, options or {}, columns, keep, format, on_error)
        folder = Path(out).expanduser().absolute()
        identity = identify(opened)
        return work(
            table, request, identity, folder, rows_a_part, lambda parts: _here(opened, table, parts, request, folder)
        )


def plan(
    engine: Engine,
    table: Table,
    operation: str | None,
    options: Mapping[str, Any],
    columns: Mapping[str, str] | None,
    keep: Sequence[str],
    format: Format,
    on_error: OnError,
) -> RowRequest:
    """What is asked of each row, checked.

    Raises:
        ConfigError: Something that cannot work.
        InputError: A column that cannot be found.
    """
    model = next(iter(engine.models.values()))
    offered = operations_of(model)
    chosen = usual_operation(model) if operation is None else offered.get(operation)
    if chosen is None:
        raise ConfigError(f"The model does not do {operation!r}.", fix=f"use one of {', '.join(offered)}.")
    unknown = sorted(set(keep) - set(table.columns))
    if unknown:
        raise ConfigError(f"The data has no column {', '.join(unknown)}.", fix=f"use {', '.join(table.columns)}.")
    request = RowRequest(
        operation=chosen, options=dict(options), columns=find_columns(chosen, table.columns, columns),
        keep=tuple(keep), format=format, on_error=on_error,
    )  # fmt: skip
    request.check()
    return request


def identify(engine: Engine) -> dict[str, str]:
    """What the answers depend on besides the rows."""
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
    rows_a_part: int,
    compute_parts: Compute,
) -> BatchReport:
    """Have what is missing computed, and record it.

    Args:
        table: The data.
        request: What is asked.
        identity: Of the model.
        folder: Of the output.
        rows_a_part: As the data was scanned.
        compute_parts: Computes parts, in any order.
    """
    run = {
        "data": [{"name": path.name, "sha256": digest} for path, digest in zip(table.files, table.sha256, strict=True)],
        "rows": table.rows,
        "rows_a_part": rows_a_part,
        "model": dict(identity),
        "operation": request.operation.name,
        "options": dict(request.options),
        "columns": dict(request.columns),
        "keep": list(request.keep),
        "format": request.format,
    }
    ledger = Ledger(folder)
    with ledger.opened(run):
        for part in table.parts:
            done = ledger.done.get(part.number)
            if done is not None and (done.start, done.rows) != (part.start, part.rows):
                # Earlier versions began a part at each file.
                raise ConfigError(f"{folder} holds a run whose parts are others.", fix="name another folder.")
        missing = [part for part in table.parts if part.number not in ledger.done]
        computed, start = 0, time.perf_counter()
        progress.report("rows", table.rows - sum(part.rows for part in missing), table.rows)
        for one in compute_parts(missing) if missing else ():
            ledger.add(one)
            computed += one.rows
            progress.report("rows", sum(done.rows for done in ledger.done.values()), table.rows)
        return BatchReport(
            folder=str(folder),
            operation=request.operation.name,
            rows=table.rows,
            computed=computed,
            broken=sum(one.broken for one in ledger.done.values()),
            parts=len(ledger.done),
            seconds=time.perf_counter() - start,
        )


def _here(engine: Engine, table: Table, parts: Iterable[Part], request: RowRequest, folder: Path) -> Iterator[Done]:
    """Parts computed in this process, as they get done."""
    left = iter(parts)
    running: set[Future[Done]] = set()
    with ThreadPoolExecutor(_AT_ONCE) as pool:
        while True:
            while len(running) < _AT_ONCE and (part := next(left, None)) is not None:
                running.add(pool.submit(compute, engine, table, part, request, folder))
            if not running:
                return
            done, running = wait(running, return_when=FIRST_COMPLETED)
            for one in done:
                yield one.result()
