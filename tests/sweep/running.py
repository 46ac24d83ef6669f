"""Test each pair (architecture and task) in its own process, which is forked from a process that has imported all
libraries.

A pair that does not end in time is killed. A crash of the interpreter ends only the process of one pair. Both events
are recorded as results with the reason, and a new process continues the pair after the failed stage.
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
from .cells import BUILD, EXPORT, FAILED, HALF, NOT_BUILT, PYTORCH, STAGES, Cell, cells_of, stages_of, sweep_pair
from .store import Store

_SAVE_EVERY_S = 10.0
Sweep = Callable[..., None]


@dataclass(slots=True)
class _Job:
    """A pair (architecture and task) that is being tested or waits for its test.

    Attributes:
        pair: Architecture and task.
        skip: (backend, stage) combinations that are already known or must not be tried again.
        tries: Number of processes started for this pair.
        process: The current process.
        reports: Connection from which the messages of the process are read.
        doing: Backend and stage that the process is running.
        since: Start time of this stage.
        slot: Number of the processor that the process uses.
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
    """Return part `i/n` of the pairs, counted from 1. All pairs of one architecture are in the same part, so that the
    modules of an architecture are imported once.

    Raises:
        ValueError: `text` is not a valid part.
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
    """Test pairs in processes. Write the results every few seconds and at the end.

    Args:
        pairs: (architecture, task) pairs to test.
        backends: Names of backends.
        store: Known results. Results with the current code digest are not computed again.
        digests: Code digest of each backend, and of `pytorch`.
        jobs: Number of processes at the same time.
        limit_s: Maximum duration of a stage in seconds.
        advance: Function that is called with each pair that is finished.
        sweep: Function that a process runs, with the signature of `sweep_pair`.
        stages: Stages to test. The export always runs, because other stages start from it.
    """
    waiting = []
    for pair in _longest_first(pairs, store):
        recorded = store.recorded_cells(pair, backends, digests)
        if backends and recorded >= cells_of(pair, backends, stages):
            advance(pair)
        else:
            waiting.append(_Job(pair, recorded | (cells_of(pair, backends) - cells_of(pair, backends, stages))))
    waiting.reverse()
    context = multiprocessing.get_context("fork")
    running: list[_Job] = []
    saved = time.monotonic()
    # Killed processes do not remove their files. All processes write into one folder, which this process removes.
    root = tempfile.TemporaryDirectory(prefix="sweep-", ignore_cleanup_errors=True)
    tempfile.tempdir = root.name
    try:
        while waiting or running:
            while waiting and len(running) < jobs:
                job = waiting.pop()
                used_slots = {running_job.slot for running_job in running}
                job.slot = next(i for i in range(jobs) if i not in used_slots)
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
    """Sort pairs by the duration of their last test, longest first. A stage of an unknown pair counts as 30 s, so
    generating models come first.
    """
    durations: dict[tuple[str, str], float] = {}
    for cell in store.cells.values():
        key = (cell.architecture, cell.task)
        durations[key] = durations.get(key, 0.0) + cell.seconds
    return sorted(pairs, key=lambda pair: -durations.get((pair.architecture, pair.task), 30.0 * len(stages_of(pair))))


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
    """Run in the child process: test one pair with one thread on one processor, and write nothing to the terminal."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # only the parent handles Ctrl-C
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    os.setpgid(0, 0)  # a process group, so that processes started by this one are killed as well
    quiet = os.open(os.devnull, os.O_WRONLY)
    os.dup2(quiet, 1)
    os.dup2(quiet, 2)
    # Use one processor, because runtimes create as many threads as the process may use processors.
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
    # Catch everything, because the parent process records the error as a result.
    except BaseException as error:  # noqa: BLE001
        reports.send(("error", f"{type(error).__name__}: {error} ({traceback.format_exc().splitlines()[-3].strip()})"))
    reports.send(("end", None))
    reports.close()
    # Skip exit handlers. Runtimes that were imported before the fork would wait for threads that do not exist in this
    # process.
    os._exit(0)


def _listen(job: _Job, store: Store, digests: Mapping[str, str]) -> bool:
    """Read the messages of a process. Return whether the process has ended."""
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
    """Record how a process ended. Return whether another process can try the remaining stages of the pair."""
    _end(job)
    if job.doing == ("", ""):
        return False
    code = job.process.exitcode
    reason = f"took more than {limit_s:g} s" if limit_s is not None else f"ended the process with {_signal(code)}"
    backend, stage = job.doing
    if stage == BUILD:
        store.put(_failed(job, backend, stage, reason, digests))
        return False
    lost = stages_of(job.pair, backend) if stage in (EXPORT, HALF) else (stage,)
    for lost_stage in lost:
        store.put(_failed(job, backend, lost_stage, reason, digests))
        job.skip.add((backend, lost_stage))
    return bool(cells_of(job.pair, backends) - job.skip) and job.tries < 4


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
    """End the process of a job, and the processes that this process started."""
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
