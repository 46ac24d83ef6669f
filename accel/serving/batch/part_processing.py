"""Process one part of a table (consecutive rows): read the rows, run the engine, and write the results to a file."""

from __future__ import annotations

import hashlib
import io
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Literal

from ...artifact.json_writing import json_text
from ...decoding.generation_options import GenerationOptions
from ...errors import ConfigError, InputError, NotFiniteError, PluginError, TaskError
from ..engine import Engine
from ..job import UnknownOptionError
from ..operations import Operation, refuse_options
from .ledger import CompletedPart, write_whole
from .row_inputs import inputs_of
from .table_files import FailedRow, Part, Table

Format = Literal["parquet", "jsonl"]
OnError = Literal["stop", "record"]
_READERS = 16
"""Number of prompts of a part that are submitted at the same time; equal to the number of rows that the engine generates together."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RowRequest:
    """The request that is made for each row.

    Attributes:
        operation: The operation.
        options: Options of the operation.
        columns: Name of the table column for each input of the operation.
        keep: Names of columns that are copied to the output.
        format: Format of the output files.
        on_error: What happens to a failed row: `stop` ends the run, `record` writes the row with the reason.
    """

    operation: Operation
    options: Mapping[str, Any]
    columns: Mapping[str, str]
    keep: tuple[str, ...]
    format: Format
    on_error: OnError

    def check(self) -> None:
        """Check the request before any row is read.

        Raises:
            ConfigError: A required option is missing, or the format is unknown.
            InputError: An option is unknown, or its results do not fit into columns.
        """
        missing = [name for name in self.operation.needs if not self.options.get(name)]
        if missing:
            raise ConfigError(
                f"The operation {self.operation.name!r} requires the option {', '.join(missing)}.",
                fix=f'pass the option, for example --option \'{missing[0]}=["a", "b"]\'.',
            )
        refuse_options(
            self.options,
            dict.fromkeys(
                ("return_tensors", "return_documents"), "Tensors and documents do not fit into table columns."
            ),
        )
        answers = self.operation.columns(self.options)
        if self.format not in ("parquet", "jsonl"):
            raise ConfigError(
                f"{self.format!r} is not a supported format of output files.",
                fix="use 'parquet' or 'jsonl' (--format).",
            )
        if self.on_error not in ("stop", "record"):
            raise ConfigError(
                f"on_error is {self.on_error!r}; expected 'stop' or 'record'.",
                fix="use 'stop' to end at the first failed row, or 'record' to write failed rows with the reason (--on-error).",
            )
        reserved = {"row", "error", *answers} & set(self.keep)
        if reserved:
            raise ConfigError(
                f"The data columns {', '.join(sorted(reserved))} cannot be copied to the output, because the output already has "
                "columns with these names.",
                fix="leave these columns out of keep=[...] (--keep), or rename them in the data.",
            )
        if self.operation.name == "generate":
            _generation(self.options)


def compute(engine: Engine, data: Table, part: Part, request: RowRequest, folder: Path) -> CompletedPart:
    """Process the rows of a part and write the results to the part's file.

    Raises:
        InputError: A row failed and `on_error` is `stop`, or all rows failed because of an option.
    """
    columns = tuple(dict.fromkeys((*request.columns.values(), *request.keep)))
    rows = data.read(part, columns)
    inputs = [inputs_of(request.operation, row, request.columns) for row in rows]
    results = _answered(engine, inputs, request)
    wrong = next((i for i, result in enumerate(results) if isinstance(result, FailedRow)), None)
    all_failed = part.start == 0 and all(isinstance(result, FailedRow) for result in results)
    if wrong is not None and (request.on_error == "stop" or all_failed):
        _check_options(engine, inputs[wrong], part.start + wrong, results[wrong].reason, request)
    if wrong is not None and request.on_error == "stop":
        raise InputError(
            f"Row {part.start + wrong} of the data cannot be processed: {results[wrong].reason.rstrip('.')}.",
            fix="correct the row, or write failed rows to the output with the reason: on_error='record' (--on-error record).",
        )
    answers = [None if isinstance(result, FailedRow) else result for result in results]
    errors = [result.reason if isinstance(result, FailedRow) else None for result in results]
    copied = {name: [row[name] for row in rows] for name in request.keep}
    content = _written(_table(request, part.start, copied, data.types(request.keep), answers, errors), request.format)
    name = f"rows-{part.start:012d}-{part.start + part.rows - 1:012d}.{request.format}"
    write_whole(folder / name, content)
    return CompletedPart(
        number=part.number, file=name, start=part.start, rows=part.rows, broken=sum(error is not None for error in errors),
        sha256=hashlib.sha256(content).hexdigest(),
    )  # fmt: skip


def _table(
    request: RowRequest,
    start: int,
    copied_values: Mapping[str, Sequence[Any]],
    kept_types: Mapping[str, Any],
    answers: Sequence[Any],
    errors: Sequence[str | None],
) -> Any:
    """Return the output table of a part: row numbers, copied columns, results and errors.

    Args:
        request: The request that is made for each row.
        start: Number of the part's first row.
        copied_values: Values of the copied columns by name.
        kept_types: Arrow types of the copied columns by name.
        answers: Result of each row; `None` for failed rows.
        errors: Error text of each row; `None` for rows with a result.
    """
    import pyarrow as pa

    kinds = request.operation.columns(request.options)
    rows = [{} if answer is None else request.operation.values(answer, request.options) for answer in answers]
    for row in rows:
        if row.keys() - kinds.keys():
            raise PluginError(
                f"The operation {request.operation.name!r} declares the output columns {sorted(kinds)}, but it returned the "
                f"columns {sorted(row)}.",
                fix="let Operation.values return only columns that Operation.columns declares.",
            )
    try:
        copied = {name: pa.array(values, kept_types[name]) for name, values in copied_values.items()}
    except (pa.ArrowInvalid, pa.ArrowTypeError) as error:
        raise InputError(
            f"A column of keep=[...] (--keep) contains values that do not have the type of the column: {error}",
            fix="leave the column out of keep=[...] (--keep), or correct the data.",
        ) from error
    try:
        results = {name: pa.array([row.get(name) for row in rows], kind) for name, kind in kinds.items()}
    # Arrow raises these errors for values of the wrong type; `ArrowInvalid` is a `ValueError`.
    except (TypeError, ValueError) as error:
        raise PluginError(
            f"The operation {request.operation.name!r} returned values that do not match the declared types of its columns: {error}",
            fix="let Operation.values return values of the Arrow types that Operation.columns declares.",
        ) from error
    columns = {
        "row": pa.array(range(start, start + len(rows)), pa.int64()),
        **copied,
        **results,
        "error": pa.array(errors, pa.string()),
    }
    return pa.table(columns)


def _answered(engine: Engine, inputs: Sequence[Any], request: RowRequest) -> list[Any]:
    """Return the result of each row, or a `FailedRow` object for a failed row."""
    if request.operation.name == "generate":
        options, generator = _generation(request.options), engine.generator()
        with ThreadPoolExecutor(_READERS) as pool:
            return list(
                pool.map(
                    lambda row: _tried(lambda: generator(row, options)) if not isinstance(row, FailedRow) else row,
                    inputs,
                )
            )

    def submit(row_inputs: Any) -> Any:
        return engine.submit(row_inputs, operation=request.operation.name, **request.options)

    jobs = [row if isinstance(row, FailedRow) else _tried(partial(submit, row)) for row in inputs]
    return [job if isinstance(job, FailedRow) else _tried(job.future.result) for job in jobs]


def _check_options(engine: Engine, inputs: Any, number: int, reason: str, request: RowRequest) -> None:
    """Raise if a failed row succeeds without one of the options.

    Args:
        engine: The engine.
        inputs: Inputs of the failed row.
        number: Number of the failed row.
        reason: Reason of the failure.
        request: The request that is made for each row.

    Raises:
        InputError: The row succeeds without an option; the message names this option.
    """
    for name, value in request.options.items():
        others = {other: request.options[other] for other in request.options if other != name}
        if name in request.operation.needs or isinstance(inputs, FailedRow):
            continue
        (result,) = _answered(engine, [inputs], replace(request, options=others))
        if not isinstance(result, FailedRow):
            raise InputError(
                f"Row {number} of the data cannot be processed with the option {name}={value!r}, but it can be processed without this "
                f"option: {reason.rstrip('.')}.",
                fix=f"correct the option {name}, or leave it out.",
            )


def _tried(ask: Callable[[], Any]) -> Any:
    try:
        return ask()
    except UnknownOptionError:
        # The options of the request are wrong, so every row would fail: end the run.
        raise
    except (InputError, TaskError, NotFiniteError) as error:
        return FailedRow(error.message)


def _generation(options: Mapping[str, Any]) -> GenerationOptions:
    try:
        return GenerationOptions(**options)
    except TypeError as error:
        raise InputError(
            f"The options of text generation are invalid: {error}.",
            fix="use only the fields of accel.GenerationOptions.",
        ) from error


def _text(value: Any) -> str:
    """Return a value without a JSON type, such as a time or a decimal number, as text."""
    if isinstance(value, bytes):
        raise InputError(
            "A column that is copied to the output contains bytes, which JSON cannot represent.",
            fix="write Parquet files (--format parquet), or leave the column out of --keep.",
        )
    return str(value)


def _written(table: Any, format: Format) -> bytes:
    if format == "jsonl":
        lines = [json_text(row, default=_text) for row in table.to_pylist()]
        return "".join(f"{line}\n" for line in lines).encode()
    from pyarrow import parquet

    stream = io.BytesIO()
    parquet.write_table(table, stream, compression="zstd")
    return stream.getvalue()
