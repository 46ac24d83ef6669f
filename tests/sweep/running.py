"""Shares the pairs out among processes: one process a pair, forked from one that has everything imported.

A pair that hangs is ended by its process id, one that crashes the interpreter takes nothing with it; both are cells with
the reason, and the pair goes on behind the stage that did it.
"""

from __future__ import annotations

import dataclasses
import multiprocessing
import multiprocessing.connection
import os
import signal
import tempfile
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from typing import Any

from .cases import Pair
from .cells import BUILD, EXPORT, FAILED, HALF, NOT_BUILT, PYTORCH, STAGES, Cell, stages_of, sweep_pair, wanted
from .store import Store

_SAVE_EVERY_S = 10.0
Sweep = Callable[..., None]


@dataclass(slots=True)
class _Job:
    """A pair on its way.

    Attributes:
        pair: What.
        skip: Backends and stages that need no trying, or no trying again.
        tries: Processes it had.
        process: The one it has.
        reports: What that one says.
        doing: Backend and stage that it is at.
        since: When that began.
        slot: Which processor it has.
    """

    pair: Pair
    skip: set[tuple[str, str]]
    tries: int = 0
    process: Any = None
    reports: Connection | None = None
    doing: tuple[str, str] = (PYTORCH, BUILD)
    since: float = field(default_factory=time.monotonic)
    slot: int = 0


def shard(pairs: Sequence[Pair], text: str) -> list[Pair]:
    """The part `i/n` of the pairs, counted from 1; architectures stay together, whose modules are imported once.

    Raises:
        ValueError: It is no such part.
    """
    first, _, second = text.partition("/")
    i, n = int(first), int(second or 0)
    if not 1 <= i <= n:
        raise ValueError(f"--shard {text}: use i/n with 1 <= i <= n")
    names = sorted({pair.architecture for pair in pairs})
    mine = set(names[i - 1 :: n])
    return [pair for pair in pairs if pair.architecture in mine]


def run(
    pairs: Sequence[Pair],
    backends: Sequence[str],
    store: Store,
    *,
    digests: Mapping[str, str],
    jobs: int,
    limit_s: float,
    advance: Callable[[Pair], None] = lambda _: None,
    sweep: Sweep = sweep_pair,
    stages: Sequence[str] = STAGES,
) -> None:
    """Sweep pairs in processes, and write what they found now and then, and at the end.

    Args:
        pairs: What to try.
        backends: Names of backends.
        store: Known cells; those with the same digest are skipped.
        digests: Of the code behind each backend, and `pytorch`.
        jobs: Processes at a time.
        limit_s: Seconds that a stage may take.
        advance: Called with each pair that is done.
        sweep: What a process does; `sweep_pair`'s signature.
        stages: What is tried; an export is made in any case, and known afterwards.
    """
    waiting = []
    for pair in _longest_first(pairs, store):
        known = store.known(pair, backends, digests)
        if backends and known >= wanted(pair, backends, stages):
            advance(pair)
        else:
            waiting.append(_Job(pair, known | (wanted(pair, backends) - wanted(pair, backends, stages))))
    waiting.reverse()
    context = multiprocessing.get_context("fork")
    running: list[_Job] = []
    saved = time.monotonic()
    # Of a process that is ended nothing cleans up: all of them write below one folder, which this one removes.
    root = tempfile.TemporaryDirectory(prefix="sweep-", ignore_cleanup_errors=True)
    tempfile.tempdir = root.name
    try:
        while waiting or running:
            while waiting and len(running) < jobs:
                job = waiting.pop()
                taken = {one.slot for one in running}
                job.slot = next(i for i in range(jobs) if i not in taken)
                _start(job, context, backends, sweep, one_core=jobs > 1)
                running.append(job)
            multiprocessing.connection.wait([job.reports for job in running if job.reports], timeout=1.0)
            for job in list(running):
                ended = _listen(job, store, digests)
                late = time.monotonic() - job.since > limit_s
                if not ended and not late:
                    continue
                running.remove(job)
                if _finish(job, store, digests, backends, limit_s if late and not ended else None):
                    waiting.append(job)
                else:
                    advance(job.pair)
            if time.monotonic() - saved > _SAVE_EVERY_S:
                store.write()
                saved = time.monotonic()
    finally:
        for job in running:
            _end(job)
        store.write()
        tempfile.tempdir = None
        root.cleanup()


def _longest_first(pairs: Sequence[Pair], store: Store) -> list[Pair]:
    """By how long they took before; unknown ones first, as models that generate take longer."""
    took: dict[tuple[str, str], float] = {}
    for cell in store.cells.values():
        key = (cell.architecture, cell.task)
        took[key] = took.get(key, 0.0) + cell.seconds
    return sorted(pairs, key=lambda pair: -took.get((pair.architecture, pair.task), 30.0 * len(stages_of(pair))))


def _start(job: _Job, context: Any, backends: Sequence[str], sweep: Sweep, *, one_core: bool) -> None:
    ours, theirs = context.Pipe(duplex=False)
    job.tries += 1
    job.doing, job.since = (PYTORCH, BUILD), time.monotonic()
    job.process = context.Process(
        target=_child, args=(theirs, job.pair, tuple(backends), tuple(job.skip), job.slot if one_core else None, sweep)
    )
    job.process.start()
    theirs.close()
    job.reports = ours


def _child(
    reports: Connection,
    pair: Pair,
    backends: Sequence[str],
    skip: Sequence[tuple[str, str]],
    slot: int | None,
    sweep: Sweep,
) -> None:
    """What a process does: one pair, with one thread on one processor, and nothing on its terminal."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the parent's business
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    os.setpgid(0, 0)  # ended with whatever it started
    quiet = os.open(os.devnull, os.O_WRONLY)
    os.dup2(quiet, 1)
    os.dup2(quiet, 2)
    # Runtimes make as many threads as a process may use processors.
    if slot is not None and hasattr(os, "sched_setaffinity"):
        allowed = sorted(os.sched_getaffinity(0))
        os.sched_setaffinity(0, {allowed[slot % len(allowed)]})
    try:
        sweep(
            pair,
            backends,
            lambda cell: reports.send(("cell", cell)),
            lambda backend, stage: reports.send(("doing", (backend, stage))),
            skip,
        )
    # Whatever it is, the parent writes it down.
    except BaseException as error:  # noqa: BLE001
        reports.send(("error", f"{type(error).__name__}: {error} ({traceback.format_exc().splitlines()[-3].strip()})"))
    reports.send(("end", None))
    reports.close()
    # No exit handlers: those of runtimes that were imported before the fork wait for threads that are not here.
    os._exit(0)


def _listen(job: _Job, store: Store, digests: Mapping[str, str]) -> bool:
    """Read what a process said; whether it has ended."""
    assert job.reports is not None
    try:
        while job.reports.poll():
            kind, value = job.reports.recv()
            if kind == "doing":
                job.doing, job.since = value, time.monotonic()
            elif kind == "cell":
                cell = dataclasses.replace(value, digest=digests[value.backend])
                store.put(cell)
                job.skip.add((cell.backend, cell.stage))
            elif kind == "error":
                store.put(_failed(job, *job.doing, value, digests))
                job.skip.add(job.doing)
            else:
                job.doing = ("", "")
                return True
    except (EOFError, OSError):
        return True
    return False


def _finish(
    job: _Job, store: Store, digests: Mapping[str, str], backends: Sequence[str], limit_s: float | None
) -> bool:
    """Write down how it ended; whether the pair has stages left that another process can try."""
    _end(job)
    if job.doing == ("", ""):
        return False
    code = job.process.exitcode
    what = f"took more than {limit_s:g} s" if limit_s is not None else f"ended the process with {_signal(code)}"
    backend, stage = job.doing
    if stage == BUILD:
        store.put(_failed(job, backend, stage, what, digests))
        return False
    lost = stages_of(job.pair, backend) if stage in (EXPORT, HALF) else (stage,)
    for one in lost:
        store.put(_failed(job, backend, one, what, digests))
        job.skip.add((backend, one))
    return bool(wanted(job.pair, backends) - job.skip) and job.tries < 4


def _failed(job: _Job, backend: str, stage: str, reason: str, digests: Mapping[str, str]) -> Cell:
    return Cell(
        architecture=job.pair.architecture,
        task=job.pair.task,
        backend=backend,
        stage=stage,
        status=NOT_BUILT if stage == BUILD else FAILED,
        reason=reason,
        seconds=round(time.monotonic() - job.since, 1),
        digest=digests[backend],
    )


def _signal(code: int | None) -> str:
    return signal.Signals(-code).name if code is not None and code < 0 else f"exit code {code}"


def _end(job: _Job) -> None:
    """End a job's process, and what it started."""
    if job.process is None:
        return
    if job.process.is_alive() and job.doing != ("", ""):
        try:
            os.killpg(job.process.pid, signal.SIGKILL)
        except ProcessLookupError:
            job.process.kill()
    job.process.join(10)
    if job.reports is not None:
        job.reports.close()
