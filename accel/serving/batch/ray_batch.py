"""Offline inference by Ray Data: each part is a row of a data set, and Ray's actors, each with an engine of its own, compute them.

Nothing else is other than in one process: an actor writes its part's file, whole or not at all, and who began the run records it. What
Ray Data adds is machines, and that it begins again elsewhere what was lost with one of them.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from ...errors import AccelError, ConfigError
from ..engine import Engine
from ..ray.cluster import connected, replicas_of
from .batch_run import UNLIMITED, BatchReport, identify, plan, work
from .ledger import Done
from .parts import Format, OnError, RowRequest, compute
from .table_files import Part, Table, scan


class _Actor:
    """An engine in a process of Ray's, for as many parts as it gets."""

    def __init__(
        self, model: str, engine: Mapping[str, Any], table: Table, request: RowRequest, folder: str, identity: Any
    ) -> None:
        self._engine = Engine(model, **engine).start()
        self._table, self._request, self._folder = table, request, Path(folder)
        found = identify(self._engine)
        if found != identity:
            raise ConfigError(f"The model is {found} here, and {identity} elsewhere.", fix="use nodes of one kind.")

    def __call__(self, row: Mapping[str, Any]) -> dict[str, Any]:
        part = self._table.parts[int(row["number"])]
        try:
            return {**asdict(compute(self._engine, self._table, part, self._request, self._folder)), "failure": None}
        except AccelError as error:
            # Ray would try it again, and again.
            return {"failure": [type(error).__name__, error.message, error.fix or ""]}


def batch_on_ray(
    model: str | os.PathLike[str],
    data: str | os.PathLike[str] | Sequence[str | os.PathLike[str]],
    out: str | os.PathLike[str],
    *,
    address: str | None = None,
    replicas: str = "1",
    cpus: float = 1.0,
    gpus: float = 0.0,
    operation: str | None = None,
    options: Mapping[str, Any] | None = None,
    columns: Mapping[str, str] | None = None,
    keep: Sequence[str] = (),
    rows_a_part: int = 2048,
    format: Format = "parquet",
    on_error: OnError = "stop",
    **engine: Any,
) -> BatchReport:
    """As `batch`, by actors of a Ray cluster. Data, model and output are to be where every node sees them under one path.

    Args:
        model: Hub id or folder.
        data, out: As in `batch`.
        address: Of a cluster; a new one on this machine when `None`.
        replicas: Actors: `4`, or `1:4` for as many as there is work for.
        cpus, gpus: That each takes; fractions share a device.
        operation, options, columns, keep, rows_a_part, format, on_error: As in `batch`.
        **engine: Of `Engine`.

    Raises:
        BackendUnavailableError: Ray is not installed, or no cluster is at the address.
    """
    least, most = replicas_of(replicas)
    source = str(Path(model).absolute()) if Path(model).exists() else os.fspath(model)
    table = scan(data, rows_a_part)
    folder = Path(out).expanduser().absolute()
    # What Ray gives an actor is not what the machine has.
    settings = {"processors": max(1, int(cpus)), **engine, "max_queue": UNLIMITED}
    with connected(address) as ray:
        resources = {"num_cpus": cpus, "num_gpus": gpus}

        def look() -> tuple[dict[str, str], RowRequest]:
            with Engine(source, **settings) as opened:
                request = plan(opened, table, operation, options or {}, columns, keep, format, on_error)
                return identify(opened), request

        # Where it will run: this machine may have no such device.
        identity, request = _unpacked(ray, ray.remote(**resources)(look).remote())

        def compute_parts(parts: Sequence[Part]) -> Iterator[Done]:
            from ray import data as ray_data

            ray_data.DataContext.get_current().enable_progress_bars = False
            rows = ray_data.from_items([{"number": part.number} for part in parts], override_num_blocks=len(parts))
            made = rows.map(
                _Actor, fn_constructor_args=(source, settings, table, request, str(folder), identity),
                concurrency=(least, most) if most > least else least, **resources,
            )  # fmt: skip
            for one in made.iter_rows():
                if one.get("failure"):
                    kind, message, fix = one["failure"]
                    raise _error(kind, message, fix)
                yield Done(**{name: one[name] for name in Done.__dataclass_fields__})

        return work(table, request, identity, folder, rows_a_part, compute_parts)


def _unpacked(ray: Any, reference: Any) -> Any:
    try:
        return ray.get(reference)
    except ray.exceptions.RayTaskError as error:
        if isinstance(error.cause, AccelError):
            raise _error(type(error.cause).__name__, error.cause.message, error.cause.fix) from error
        raise


def _error(kind: str, message: str, fix: str | None) -> AccelError:
    """The error that an actor met."""
    from ... import errors

    found: type[AccelError] = getattr(errors, kind, AccelError)
    return found(message, fix=fix or None)
