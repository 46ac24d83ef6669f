"""Offline inference with Ray Data: Ray actors, each with its own engine, process the parts of a table.

Each part is one row of a Ray data set. An actor writes the file of its part atomically, as in a run in one process. The process that
started the run records the complete parts. Ray Data distributes the parts to several machines, and computes a part again if its machine is
lost.
"""

from __future__ import annotations

import inspect
import os
import pickle
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from ...errors import AccelError, ConfigError
from ..engine import Engine
from ..ray.cluster import connected, replicas_of
from .batch_run import ROWS_A_PART, UNLIMITED, BatchReport, identify, plan, work
from .ledger import CompletedPart
from .part_processing import RowRequest, compute
from .table_files import Part, Table, scan


class _Actor:
    """A Ray actor with its own engine. It processes parts of a table and writes their output files."""

    def __init__(
        self, model: str, engine: Mapping[str, Any], table: Table, request: RowRequest, folder: str, identity: Any
    ) -> None:
        self._engine = Engine(model, **engine).start()
        self._table, self._request, self._folder = table, request, Path(folder)
        own_identity = identify(self._engine)
        if own_identity != identity:
            raise ConfigError(
                f"The nodes of the Ray cluster would compute different results: this node has {own_identity}, the first node "
                f"had {identity}.",
                fix="use nodes with the same model files, the same version of accel and the same hardware.",
            )

    def __call__(self, row: Mapping[str, Any]) -> dict[str, Any]:
        part = self._table.parts[int(row["number"])]
        try:
            return {**asdict(compute(self._engine, self._table, part, self._request, self._folder)), "failure": None}
        except AccelError as error:
            # Return the error instead of raising it, because Ray would retry the part again and again.
            return {"failure": pickle.dumps(error)}


def batch_on_ray(
    model: str | os.PathLike[str],
    data: str | os.PathLike[str] | Sequence[str | os.PathLike[str]],
    out: str | os.PathLike[str],
    *,
    address: str | None = None,
    replicas: str = "1",
    cpus: float = 1.0,
    gpus: float = 0.0,
    rows_a_part: int = ROWS_A_PART,
    **arguments: Any,
) -> BatchReport:
    """Run a model on every row of a table, like `batch`, with the actors of a Ray cluster.

    Every node must see the data, the model and the output folder under the same path.

    Args:
        model: Hub id or folder.
        data, out: Input data and output folder, as in `batch`.
        address: Address of the cluster; `None` starts a cluster on this machine.
        replicas: Number of actors: `4`, or `1:4` for a number that follows the amount of work.
        cpus, gpus: Number of processors and GPUs of an actor; with a fraction, actors share a device.
        rows_a_part: Number of rows in an output file.
        **arguments: Further arguments of `batch`, for the request and for `Engine`.

    Raises:
        BackendUnavailableError: Ray is not installed, or there is no cluster at the address.
    """
    least, most = replicas_of(replicas)
    source = str(Path(model).absolute()) if Path(model).exists() else os.fspath(model)
    table = scan(data, rows_a_part)
    folder = Path(out).expanduser().absolute()
    plan_arguments = {name: arguments.pop(name) for name in inspect.signature(plan).parameters if name in arguments}
    # Ray assigns only some of the machine's processors to an actor.
    settings = {"processors": max(1, int(cpus)), **arguments, "max_queue": UNLIMITED}
    with connected(address) as ray:
        resources = {"num_cpus": cpus, "num_gpus": gpus}

        def look() -> tuple[dict[str, str], RowRequest]:
            with Engine(source, **settings) as opened:
                return identify(opened), plan(opened, table, **plan_arguments)

        # Open the model on a node of the cluster, because this machine may not have the device.
        identity, request = _unpacked(ray, ray.remote(**resources)(look).remote())

        def compute_parts(parts: Sequence[Part]) -> Iterator[CompletedPart]:
            from ray import data as ray_data

            ray_data.DataContext.get_current().enable_progress_bars = False
            rows = ray_data.from_items([{"number": part.number} for part in parts], override_num_blocks=len(parts))
            done_rows = rows.map(
                _Actor, fn_constructor_args=(source, settings, table, request, str(folder), identity),
                concurrency=(least, most) if most > least else least, **resources,
            )  # fmt: skip
            for row in done_rows.iter_rows():
                if row.get("failure"):
                    raise pickle.loads(row["failure"])  # pickled by `_Actor`
                yield CompletedPart(**{name: row[name] for name in CompletedPart.__dataclass_fields__})

        return work(table, request, identity, folder, compute_parts)


def _unpacked(ray: Any, reference: Any) -> Any:
    try:
        return ray.get(reference)
    except ray.exceptions.RayTaskError as error:
        if isinstance(error.cause, AccelError):
            raise error.cause from error
        raise
