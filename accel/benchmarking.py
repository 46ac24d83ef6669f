"""`accel.benchmark`: latency, throughput, memory and outputs of variants of one model, measured fairly.

Each variant runs in a process of its own (`accel.workers`). The processes take turns in rounds, so that a machine whose
speed drifts hurts all alike. All get the same inputs, warm-up and threads, and each one's outputs are compared with
PyTorch float32 before it is timed. A variant that fails is reported and the rest goes on.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from . import registry
from .artifact import MANIFEST, Artifact
from .config import ExportConfig, SessionOptions, available_processors
from .errors import AccelError, ConfigError, SessionError
from .hub import HubOptions, Location, locate
from .rounds import Measured, check, restart, start, take_turns, warm_up
from .rounds import measure as measure
from .statistics import Ratio, Summary, geometric_mean, ratio, summarize
from .tasks import infer_task, read_config, task_spec
from .workers import Traffic, Workload
from .workers import Variant as Variant
from .workloads import grid, lengths, of_texts, read_texts

logger = logging.getLogger(__name__)

Model = str | os.PathLike[str] | Artifact | Variant


@dataclass(frozen=True, slots=True, kw_only=True)
class Cell:
    """One variant on one workload.

    Attributes:
        workload: Its name.
        batch: Rows a call.
        sequence: Tokens a row; `None` where they vary.
        latency: Milliseconds a call.
        throughput: Rows a second.
        tokens_per_s: Tokens generated a second behind each row's first one, all rows together; `None` where none are.
        processor_ms: Processor time a call, all threads together, spinning included.
        ratio: How many times faster than the baseline.
        milliseconds: Every call, a list for each round.
    """

    workload: str
    batch: int
    sequence: int | None
    latency: Summary
    throughput: float
    processor_ms: float
    ratio: Ratio | None
    milliseconds: tuple[tuple[float, ...], ...]
    tokens_per_s: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class VariantResult:
    """One variant.

    Attributes:
        name: Its name.
        backend: What ran it; `pytorch` for PyTorch.
        device: Where.
        compute_dtype: What its kernels computed in.
        threads: That worked on one call.
        options: The session's options.
        notes: Settings that change what a number means, such as TF32.
        path: Its folder.
        bytes: Of its weights and graphs on disk.
        load_s: Seconds to load, imports excluded.
        warmup_s: Seconds of the calls before the first round; compilers work then.
        peak_memory_bytes: Of its whole process, interpreter and PyTorch included.
        max_abs_difference: From the baseline's outputs; `None` for the baseline.
        tolerance: What was accepted of it; `None`: reported, not judged, which is so for quantized variants.
        agreement: Share of rows of the checked calls whose largest output is at the same place as the baseline's.
        cells: One a workload.
        error: Why it was not measured.
    """

    name: str
    backend: str = ""
    device: str = ""
    compute_dtype: str = ""
    threads: int = 0
    options: Mapping[str, Any] = field(default_factory=dict)
    notes: tuple[str, ...] = ()
    path: str = ""
    bytes: int | None = None
    load_s: float | None = None
    warmup_s: float | None = None
    peak_memory_bytes: int | None = None
    max_abs_difference: float | None = None
    tolerance: float | None = None
    agreement: float | None = None
    cells: tuple[Cell, ...] = ()
    error: str | None = None

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> VariantResult:
        """From `dataclasses.asdict` and JSON."""
        cells = tuple(
            Cell(
                **{
                    **cell,
                    "latency": Summary(**cell["latency"]),
                    "ratio": Ratio(**cell["ratio"]) if cell["ratio"] else None,
                    "milliseconds": tuple(tuple(block) for block in cell["milliseconds"]),
                }
            )
            for cell in values["cells"]
        )
        return cls(**{**values, "cells": cells, "notes": tuple(values["notes"])})

    @property
    def median_ms(self) -> float:
        """Geometric mean of the workloads' medians."""
        return geometric_mean([cell.latency.median for cell in self.cells])

    def lines(self) -> list[str]:
        """One line a workload, in the form that transformer-deploy prints."""
        if self.error is not None:
            return [f"[{self.name}] failed: {self.error.splitlines()[0]}"]
        made = []
        for cell in self.cells:
            s = cell.latency
            made.append(
                f"[{self.name}] mean={s.mean:.2f}ms, sd={s.sd:.2f}ms, min={s.min:.2f}ms, max={s.max:.2f}ms, "
                f"median={s.median:.2f}ms, 95p={s.p95:.2f}ms, 99p={s.p99:.2f}ms ({cell.workload})"
                + (f", {cell.tokens_per_s:.1f} tokens/s" if cell.tokens_per_s is not None else "")
            )
        return made


@dataclass(frozen=True, slots=True, kw_only=True)
class Benchmark:
    """What was measured.

    Attributes:
        task: Of the model.
        baseline: Name of the variant that ratios and differences refer to.
        machine: Facts that the numbers depend on.
        settings: Rounds, calls, warm-up, threads and traffic.
        variants: One each, in the order given.
        seconds: For everything.
    """

    task: str
    baseline: str
    machine: Mapping[str, Any]
    settings: Mapping[str, Any]
    variants: tuple[VariantResult, ...]
    seconds: float

    def __getitem__(self, name: str) -> VariantResult:
        """The variant of that name."""
        return next(variant for variant in self.variants if variant.name == name)

    def to_dict(self) -> dict[str, Any]:
        """As JSON values, every latency included."""
        return asdict(self)

    def __str__(self) -> str:
        return "\n".join(line for variant in self.variants for line in variant.lines())


def benchmark(
    models: Model | Sequence[Model],
    *,
    backends: Sequence[str] | None = None,
    pytorch: Sequence[str] = ("float32",),
    compiled: Sequence[str] = (),
    cuda_graph: Sequence[str] | None = None,
    batch: Sequence[int] = (1,),
    sequence: Sequence[int] = (128,),
    texts: str | os.PathLike[str] | Sequence[str] | None = None,
    tokenize: bool = False,
    max_length: int | None = None,
    threads: int | None = None,
    warmup: int = 10,
    rounds: int = 12,
    calls: int = 20,
    processes: int = 4,
    new_tokens: int = 0,
    callers: int = 1,
    rate: float | None = None,
    task: str | None = None,
    device: str | None = None,
    session_options: SessionOptions | None = None,
    atol: float | None = None,
    seed: int = 0,
    revision: str | None = None,
    token: str | bool | None = None,
    trust_remote_code: bool = False,
) -> Benchmark:
    """Measure variants of one model: PyTorch, and artifacts on backends.

    Takes up to 5 s a variant and process to start, plus `rounds * calls` calls a workload.

    Args:
        models: Artifacts, transformers folders or Hub ids (exported where needed), or `Variant`s; one or several.
        backends: Who runs artifacts: each one that is named makes a variant. Their own choice when `None`.
        pytorch: Dtypes of PyTorch eager to measure: `float32`, `bfloat16`, `float16`. Float32 is always measured where
            the PyTorch model is to be found, because the others are compared with it.
        compiled: Dtypes of PyTorch under `torch.compile`; compiling takes up to minutes.
        cuda_graph: Dtypes of PyTorch eager replayed from CUDA graphs, which launches kernels without the host. `None`: on an
            NVIDIA GPU those of `pytorch`, because eager small models wait for the host there; elsewhere none.
        batch: Rows a call; each with each sequence.
        sequence: Tokens a row.
        texts: A file of texts (one a line, or a table with a text column) or a list, instead of `sequence`: their lengths
            are those of real traffic, and padding is what batches of them need.
        tokenize: Tokenize `texts` inside the timed call.
        max_length: Tokens that longer texts are cut to; the model's positions when `None`.
        threads: Threads of each variant; what the process may use when `None`.
        warmup: Calls before the first round.
        rounds: How often the variants take turns.
        calls: Calls of a variant in each round.
        processes: How often each variant is loaded anew, in a process of its own, with its share of the rounds: a
            process may be some percent slower than the next for as long as it lives. Compiled variants are loaded once.
        new_tokens: Of models that generate: time `generate` until the first token and until this many, instead of one
            `forward`; `calls` may then be 1.
        callers: Threads that call at once, each waiting for its answer (closed loop).
        rate: Calls a second that arrive at random times (open loop); latency then counts from the arrival.
        task: The task; inferred when `None`.
        device: Where artifacts and PyTorch run.
        session_options: How artifacts run; as their manifests say when `None`.
        atol: Accepted absolute difference from the baseline's outputs, for all; by dtype when `None`, and for quantized
            variants then reported only.
        seed: Of inputs, of the order of texts and of arrivals.
        revision, token, trust_remote_code: As in transformers.

    Raises:
        ConfigError: Settings that cannot work, or no variant at all.
        ArtifactNotFoundError: A model is not to be found.
        SessionError: The baseline failed; without it nothing can be checked.
    """
    started = time.perf_counter()
    _check_settings(
        batch, sequence, warmup, rounds, calls, processes, callers, rate, (*pytorch, *compiled, *(cuda_graph or ())),
        tokenize and texts is None,
    )  # fmt: skip
    hub = HubOptions(revision=revision, token=token, trust_remote_code=trust_remote_code)
    given = [models] if isinstance(models, str | os.PathLike | Artifact | Variant) else list(models)
    variants = resolve(
        given, backends=backends, pytorch=pytorch, compiled=compiled, cuda_graph=cuda_graph, task=task, device=device,
        options=session_options, hub=hub,
    )  # fmt: skip
    if new_tokens and not (new_tokens > 1 and task_spec(variants[0].task).generates and texts is None):
        raise ConfigError(
            f"new_tokens is {new_tokens}, and the task is {variants[0].task}.",
            fix="give at least 2, with a model that generates and sequence=... for its prompts.",
        )
    traffic = Traffic(callers=callers, rate=rate, seed=seed)
    group = start(variants, threads)
    try:
        base = group[0]
        if base.worker is None or base.loaded is None:
            raise SessionError(f"The baseline {base.variant.name} failed: {base.error}", fix="run it alone to see why.")
        if texts is None:
            workloads = grid(base.worker, base.loaded, batch, sequence, new_tokens)
        else:
            name = Path(texts).name if isinstance(texts, str | os.PathLike) else "texts"
            lines = read_texts(texts, base.variant.task) if isinstance(texts, str | os.PathLike) else list(texts)
            limit = max_length or base.loaded.limits.get("sequence")
            workloads = [
                of_texts(
                    lines, base.variant.path, name=f"{b} of {name}", task=base.variant.task, batch=b, tokenize=tokenize,
                    max_length=limit, seed=seed,
                )
                for b in batch
            ]  # fmt: skip
        for workload in workloads:
            warm_up(group, workload, warmup)
            check(group, workload, atol)
        if base.error is not None:
            raise SessionError(f"The baseline {base.variant.name} failed: {base.error}", fix="run it alone to see why.")
        ends = [rounds * (n + 1) // processes for n in range(processes)]
        for n, (first, end) in enumerate(zip([0, *ends], ends, strict=False)):
            if first == end:
                continue
            if first:
                restart(group, workloads, warmup, threads, backwards=n % 2 == 1)
            for workload in workloads:
                take_turns(group, workload, rounds=end - first, calls=calls, first=first, traffic=traffic)
            for one in group:
                peak = one.attempt(lambda worker: worker.peak_memory())
                one.peak_memory = max(peak or 0, one.peak_memory or 0) or None
    finally:
        for one in group:
            one.close()
    from .doctor import machine

    settings = {
        "rounds": rounds, "calls": calls, "processes": min(processes, rounds), "warmup": warmup,
        "threads": threads or available_processors(),
        "callers": callers, "rate": rate, "tokenizer": "included" if tokenize else "excluded", "seed": seed,
        "workloads": [w.name for w in workloads],
        "lengths": lengths(workloads),
    }  # fmt: skip
    return Benchmark(
        task=base.variant.task,
        baseline=base.variant.name,
        machine=machine(),
        settings=settings,
        variants=tuple(result(one, base, workloads) for one in group),
        seconds=round(time.perf_counter() - started, 2),
    )


def _check_settings(
    batch: Sequence[int], sequence: Sequence[int], warmup: int, rounds: int, calls: int, processes: int, callers: int,
    rate: float | None, dtypes: Sequence[str], tokenizer_alone: bool,
) -> None:  # fmt: skip
    for name, values in (("batch", batch), ("sequence", sequence)):
        if not values or min(values) < 1:
            raise ConfigError(f"{name} is {list(values)}.", fix="use numbers from 1 on.")
    for name, value, least in (
        ("warmup", warmup, 0),
        ("rounds", rounds, 1),
        ("calls", calls, 1),
        ("processes", processes, 1),
        ("callers", callers, 1),
    ):
        if value < least:
            raise ConfigError(f"{name} is {value}.", fix=f"use at least {least}.")
    if rate is not None and not rate > 0:
        raise ConfigError(f"rate is {rate}.", fix="give calls a second, above 0.")
    for dtype in dtypes:
        ExportConfig.from_dict({"dtype": dtype})
    if tokenizer_alone:
        raise ConfigError(
            "The tokenizer needs texts.", fix="pass texts=... (--texts FILE), or leave the tokenizer out."
        )


def resolve(
    models: Sequence[Model],
    *,
    backends: Sequence[str] | None,
    pytorch: Sequence[str],
    compiled: Sequence[str],
    cuda_graph: Sequence[str] | None,
    task: str | None,
    device: str | None,
    options: SessionOptions | None,
    hub: HubOptions,
) -> list[Variant]:
    """The variants of what the user named, PyTorch float32 first where it is to be found.

    Raises:
        ConfigError: Models of several tasks, or the same variant twice.
    """
    found: list[Variant] = []
    originals: dict[Path, str] = {}
    trust = hub.trust_remote_code
    for model in models:
        if isinstance(model, Variant):
            found.append(model)
            continue
        location = None if isinstance(model, Artifact) else locate(model, hub)
        folder = model.path if isinstance(model, Artifact) else location.folder if location else Path()
        is_artifact = (folder / MANIFEST).is_file()
        if is_artifact:
            artifact = model if isinstance(model, Artifact) else Artifact.load(folder)
            chosen = artifact.task
            original = _original(artifact, hub)
            if original is not None:
                originals.setdefault(original, chosen)
        else:
            assert location is not None
            chosen = task_spec(task or infer_task(read_config(folder), folder)).name
            if _has_weights(folder):
                originals.setdefault(folder, chosen)
        chosen_backends = backends or ((_runner(artifact),) if is_artifact else (None,))
        for backend in chosen_backends:
            path = folder if is_artifact or location is None else _exported(location, chosen, backend, hub)
            spec = registry.describe(backend) if backend is not None else None
            label = f"{folder.name} [{spec.name}]" if spec is not None else folder.name
            found.append(
                Variant(
                    name=_unused(label, found), path=path, task=chosen, backend=spec.name if spec else None,
                    device=device, options=options, trust_remote_code=trust,
                )
            )  # fmt: skip
    made: list[Variant] = []
    for folder, chosen in list(originals.items())[:1]:
        eager = dict.fromkeys(("float32", *pytorch))
        made += [pytorch_variant(folder, chosen, trust, dtype=dtype, device=device) for dtype in eager]
        made += [
            pytorch_variant(folder, chosen, trust, dtype=dtype, compiled=True, device=device) for dtype in compiled
        ]
        on_gpu = device is not None and device.startswith("cuda")
        captured = cuda_graph if cuda_graph is not None else pytorch if on_gpu else ()
        made += [
            pytorch_variant(folder, chosen, trust, dtype=dtype, captured=True, device=device)
            for dtype in dict.fromkeys(captured)
        ]
    variants = [*made, *found]
    tasks = {variant.task for variant in variants}
    if len(tasks) != 1:
        raise ConfigError(f"The models do different tasks: {sorted(tasks)}.", fix="benchmark one task at a time.")
    return variants


def pytorch_variant(
    folder: Path,
    task: str,
    trust_remote_code: bool,
    *,
    dtype: str = "float32",
    compiled: bool = False,
    captured: bool = False,
    device: str | None = None,
) -> Variant:
    """PyTorch on the model in a transformers folder."""
    name = f"PyTorch {'compiled' if compiled else 'eager'} {dtype}{' in a CUDA graph' if captured else ''}"
    return Variant(
        name=name, path=folder, task=task, pytorch=dtype, compiled=compiled, captured=captured, device=device,
        trust_remote_code=trust_remote_code,
    )  # fmt: skip


def _runner(artifact: Artifact) -> str | None:
    """Who runs an artifact when nobody is named: its own choice, or else the first backend that runs its format."""
    if artifact.manifest.run is not None:
        return None
    able = [spec for spec in registry.describe_all()[0] if spec.capability("run", artifact.format)]
    return None if any(spec.auto for spec in able) or not able else able[0].name


def _unused(name: str, variants: Sequence[Variant]) -> str:
    taken = {variant.name for variant in variants}
    return next(n for n in (name, *(f"{name} ({i})" for i in range(2, 1000))) if n not in taken)


def _has_weights(folder: Path) -> bool:
    return any(folder.glob("*.safetensors")) or any(folder.glob("pytorch_model*.bin"))


def _original(artifact: Artifact, hub: HubOptions) -> Path | None:
    """The PyTorch folder that an artifact was made from, if it is still here."""
    source = artifact.manifest.source
    if source is None:
        return None
    try:
        folder = locate(
            source.id, replace(hub, revision=source.revision, local_files_only=True), want_graph=False
        ).folder
    except AccelError:
        return None
    return folder if _has_weights(folder) else None


def _exported(location: Location, task: str, backend: str | None, hub: HubOptions) -> Path:
    """The export of a transformers folder that `backend` would load, made now so that load times are honest."""
    from .exporting import cached_export, graph_location

    if graph_location(location):
        return location.folder
    owned = [c.produces for c in registry.describe(backend).capabilities if c.stage == "export"] if backend else []
    spec = registry.owner("export", owned[0] or "onnx", backend) if owned else registry.owner("export", "onnx")
    return cached_export(location, task=task, spec=spec, config=ExportConfig(), hub=hub).path


def result(one: Measured, base: Measured, workloads: Sequence[Workload]) -> VariantResult:
    """What was measured of a variant, for the report."""
    cells: list[Cell] = []
    for workload in workloads:
        blocks = one.blocks.get(workload.name, [])
        if one.error is not None or not blocks:
            continue
        times = [block.milliseconds for block in blocks]
        flat = [t for block in times for t in block]
        reference = [block.milliseconds for block in base.blocks.get(workload.name, [])]
        cells.append(
            Cell(
                workload=workload.name,
                batch=workload.batch,
                sequence=workload.sequence,
                latency=summarize(flat),
                throughput=workload.batch * len(flat) / sum(block.seconds for block in blocks),
                tokens_per_s=_tokens_per_s(workload, flat, cells),
                processor_ms=1000 * sum(block.processor_seconds for block in blocks) / len(flat),
                ratio=ratio(reference, times) if len(reference) == len(times) else None,
                milliseconds=tuple(times),
            )
        )
    loaded = one.loaded
    return VariantResult(
        name=one.variant.name,
        backend=loaded.backend if loaded else "",
        device=loaded.device if loaded else "",
        compute_dtype=loaded.compute_dtype if loaded else "",
        threads=loaded.threads if loaded else 0,
        options=loaded.options if loaded else {},
        notes=loaded.notes if loaded else (),
        path=str(one.variant.path),
        bytes=_bytes(one.variant),
        load_s=round(loaded.load_s, 3) if loaded else None,
        warmup_s=round(one.warmup_s, 3),
        peak_memory_bytes=one.peak_memory,
        max_abs_difference=one.difference,
        tolerance=one.tolerance,
        agreement=one.agreement,
        cells=tuple(cells),
        error=one.error,
    )


def _tokens_per_s(workload: Workload, milliseconds: Sequence[float], before: Sequence[Cell]) -> float | None:
    """Tokens behind the first one over the time that they took; the cell before holds the time until the first one."""
    if workload.new_tokens < 2 or not before:
        return None
    behind = summarize(milliseconds).median - before[-1].latency.median
    return 1000 * workload.batch * (workload.new_tokens - 1) / behind if behind > 0 else None


def _bytes(variant: Variant) -> int | None:
    """Size of the weights and graphs on disk."""
    if variant.pytorch is None and (variant.path / MANIFEST).is_file():
        return Artifact.load(variant.path).bytes
    weights = [*variant.path.glob("*.safetensors"), *variant.path.glob("pytorch_model*.bin")]
    return sum(path.stat().st_size for path in weights) or None
