"""`accel.benchmark`: latency, throughput, memory and outputs of variants of one model, measured fairly.

Each variant runs in a process of its own. The processes take turns in rounds, so that a machine whose speed drifts hurts all
alike. All get the same inputs, warm-up and threads, and each one's outputs are compared with PyTorch float32 before it is
timed. A variant that fails is reported and the rest goes on.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from ...artifact.hub import HubOptions
from ...artifact.manifest import Artifact
from ...artifact.resolved_model import Resolved
from ...backends import registry
from ...backends.machine import machine
from ...backends.plan import RunSettings, make_plan
from ...config import ExportConfig, SessionOptions, available_processors, check_number, checked_arguments
from ...errors import AccelError, ConfigError, SessionError
from ...interfaces.specs import WEIGHTS
from ...interfaces.task_registry import task_spec
from ...stages.export import with_artifact
from ...stages.resolution import original, resolve
from ..disturbance import MachineWatch
from .results import Benchmark, result
from .rounds import Measured, check, restart, start, take_turns, warm_up
from .variants import Traffic, Variant, Workload, process_path
from .workloads import Load, lengths, workloads_of

logger = logging.getLogger(__name__)

Model = str | os.PathLike[str] | Artifact | Variant
Way = Literal["compile", "cuda_graph"]


@checked_arguments(batch=(int, Sequence), sequence=(int, Sequence), device=str, session_options=SessionOptions)
def benchmark(
    models: Model | Sequence[Model],
    *,
    backends: Sequence[str] | None = None,
    pytorch: Sequence[str] = ("float32",),
    compiled: Sequence[str] = (),
    cuda_graph: Sequence[str] | None = None,
    batch: int | Sequence[int] = (1,),
    sequence: int | Sequence[int] = (128,),
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
        batch: Rows a call, one number or several; each with each sequence.
        sequence: Tokens a row, likewise.
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
    watch = MachineWatch()
    hub = HubOptions(revision=revision, token=token, trust_remote_code=trust_remote_code)
    given = [models] if isinstance(models, str | os.PathLike | Artifact | Variant) else list(models)
    load = Load(
        batch=_sizes(batch), sequence=_sizes(sequence), texts=texts, tokenize=tokenize, max_length=max_length,
        new_tokens=new_tokens, seed=seed, threads=threads,
    )  # fmt: skip
    effort = Effort(warmup=warmup, rounds=rounds, calls=calls, processes=processes)
    traffic = Traffic(callers=callers, rate=rate, seed=seed)
    baselines = Baselines(
        eager=tuple(pytorch), compiled=tuple(compiled), cuda_graph=None if cuda_graph is None else tuple(cuda_graph)
    )
    variants = variants_of(
        given, backends=backends, baselines=baselines, task=task, device=device, options=session_options, hub=hub
    )
    return measure_variants(variants, load, effort, traffic, atol, watch)


def _sizes(given: int | Sequence[int]) -> tuple[int, ...]:
    return (given,) if isinstance(given, int) else tuple(given)


@dataclass(frozen=True, slots=True, kw_only=True)
class Effort:
    """Number of calls, rounds and processes.

    Attributes:
        warmup, rounds, calls, processes: As in `benchmark`.
    """

    warmup: int = 10
    rounds: int = 12
    calls: int = 20
    processes: int = 4

    def __post_init__(self) -> None:
        for name, least in (("warmup", 0), ("rounds", 1), ("calls", 1), ("processes", 1)):
            check_number(name, getattr(self, name), least)


@dataclass(frozen=True, slots=True, kw_only=True)
class Baselines:
    """Ways to run the PyTorch model, by dtype.

    Attributes:
        eager, compiled, cuda_graph: As `pytorch`, `compiled` and `cuda_graph` in `benchmark`.
    """

    eager: tuple[str, ...] = ("float32",)
    compiled: tuple[str, ...] = ()
    cuda_graph: tuple[str, ...] | None = None

    def __post_init__(self) -> None:
        for dtype in (*self.eager, *self.compiled, *(self.cuda_graph or ())):
            ExportConfig.from_dict({"dtype": dtype})

    def variants(self, model: Resolved, device: str | None) -> list[Variant]:
        """One a dtype and way; float32 first."""
        captured = self.cuda_graph
        if captured is None:
            captured = self.eager if device is not None and device.startswith("cuda") else ()
        return [
            *(pytorch_variant(model, dtype=dtype, device=device) for dtype in dict.fromkeys(("float32", *self.eager))),
            *(pytorch_variant(model, dtype=dtype, device=device, way="compile") for dtype in self.compiled),
            *(
                pytorch_variant(model, dtype=dtype, device=device, way="cuda_graph")
                for dtype in dict.fromkeys(captured)
            ),
        ]


def measure_variants(
    variants: Sequence[Variant],
    load: Load,
    effort: Effort,
    traffic: Traffic,
    atol: float | None = None,
    watch: MachineWatch | None = None,
) -> Benchmark:
    """Measure variants, the first of which is the baseline; see `benchmark`.

    Args:
        variants: What to measure.
        load: The calls.
        effort: How much is measured.
        traffic: How calls arrive.
        atol: As in `benchmark`.
        watch: The machine since before anything of ours worked; since now when `None`.
    """
    started = time.perf_counter()
    watch = watch or MachineWatch()
    if load.new_tokens and not (load.new_tokens > 1 and task_spec(variants[0].task).generates and load.texts is None):
        raise ConfigError(
            f"new_tokens is {load.new_tokens}, and the task is {variants[0].task}.",
            fix="give at least 2, with a model that generates and sequence=... for its prompts.",
        )
    spec = task_spec(variants[0].task)
    if not load.new_tokens and spec.generates and spec.encoder_decoder:
        raise ConfigError(
            f"Models for {spec.name} answer by generating, and new_tokens is 0.",
            fix="pass new_tokens=... (--new-tokens), at least 2.",
        )
    group = start(variants, load.threads)
    try:
        base = group[0]
        if base.worker is None or base.loaded is None:
            raise SessionError(f"The baseline {base.variant.name} failed: {base.error}", fix="run it alone to see why.")
        workloads = workloads_of(load, base.worker, base.loaded)
        for workload in workloads:
            warm_up(group, workload, effort.warmup)
            check(group, workload, atol)
        if base.error is not None:
            raise SessionError(f"The baseline {base.variant.name} failed: {base.error}", fix="run it alone to see why.")
        _take_all_turns(group, workloads, effort, traffic, load.threads)
    finally:
        for one in group:
            one.close()
    settings = {
        "rounds": effort.rounds, "calls": effort.calls, "processes": min(effort.processes, effort.rounds),
        "warmup": effort.warmup, "threads": load.threads or available_processors(),
        "callers": traffic.callers, "rate": traffic.rate, "tokenizer": "included" if load.tokenize else "excluded",
        "seed": load.seed,
        "workloads": [w.name for w in workloads],
        "lengths": lengths(workloads),
    }  # fmt: skip
    results = tuple(result(one, base, workloads) for one in group)
    return Benchmark(
        task=base.variant.task,
        baseline=base.variant.name,
        machine=machine(),
        settings=settings,
        variants=results,
        seconds=round(time.perf_counter() - started, 2),
        disturbance=watch.judge({cell.workload: cell.round_ms for cell in results[0].cells}),
    )


def _take_all_turns(
    group: Sequence[Measured], workloads: Sequence[Workload], effort: Effort, traffic: Traffic, threads: int | None
) -> None:
    """All rounds, each variant in several processes one after the other."""
    ends = [effort.rounds * (n + 1) // effort.processes for n in range(effort.processes)]
    for n, (first, end) in enumerate(zip([0, *ends], ends, strict=False)):
        if first == end:
            continue
        if first:
            restart(group, workloads, effort.warmup, threads, backwards=n % 2 == 1)
        for workload in workloads:
            take_turns(group, workload, rounds=end - first, calls=effort.calls, first=first, traffic=traffic)
        for one in group:
            peak = one.attempt(lambda worker: worker.peak_memory())
            one.peak_memory = max(peak or 0, one.peak_memory or 0) or None


def variants_of(
    models: Sequence[Model],
    *,
    backends: Sequence[str] | None,
    baselines: Baselines,
    task: str | None,
    device: str | None,
    options: SessionOptions | None,
    hub: HubOptions,
) -> list[Variant]:
    """Return the variants of the named models, PyTorch float32 first where its weights are here.

    Raises:
        ConfigError: Models of several tasks, or the same variant twice.
    """
    found: list[Variant] = []
    originals: dict[Path, Resolved] = {}
    for model in models:
        if isinstance(model, Variant):
            found.append(model)
            continue
        resolved = resolve(model, task=task, hub=hub)
        source = _original_here(resolved)
        if source is not None:
            originals.setdefault(source.location.folder, source)
        for backend in backends or (_runner(resolved),):
            # Exported now, so that load times are honest.
            artifact = with_artifact(make_plan(resolved, RunSettings(backend=backend, device=device))).artifact
            assert artifact is not None
            spec = registry.describe(backend) if backend is not None else None
            label = f"{resolved.name} [{spec.name}]" if spec is not None else resolved.name
            found.append(
                Variant(
                    name=_unused(label, found), path=process_path(artifact), task=resolved.task,
                    backend=spec.name if spec else None, device=device, options=options,
                    trust_remote_code=hub.trust_remote_code,
                )
            )  # fmt: skip
    made = [variant for source in list(originals.values())[:1] for variant in baselines.variants(source, device)]
    variants = [*made, *found]
    tasks = {variant.task for variant in variants}
    if len(tasks) != 1:
        raise ConfigError(f"The models do different tasks: {sorted(tasks)}.", fix="benchmark one task at a time.")
    return variants


def pytorch_variant(
    model: Resolved, *, dtype: str = "float32", device: str | None = None, way: Way | None = None
) -> Variant:
    """PyTorch on the model in a transformers folder.

    Args:
        model: The folder.
        dtype: What it computes in.
        device: The device that runs it.
        way: `compile`: through `torch.compile`; `cuda_graph`: replayed from a CUDA graph; `None`: eager.
    """
    compiles = way == "compile"
    # What is slower is measured, too: that is what the caller wants to see.
    options: dict[str, object] | None = {"keep_slower": True} if compiles else {way: True} if way is not None else None
    name = f"PyTorch {'compiled' if compiles else 'eager'} {dtype}"
    return Variant(
        name=f"{name} in a CUDA graph" if way == "cuda_graph" else name,
        path=model.location.folder,
        task=model.task,
        backend=(
            registry.owner("prepare", WEIGHTS, scheme="accelerate") if compiles else registry.owner("export", WEIGHTS)
        ).name,
        device=device,
        provider_options=options,
        options=SessionOptions.from_dict({"compute_dtype": dtype}),
        trust_remote_code=model.hub.trust_remote_code,
        lasting=compiles,
    )


def _runner(resolved: Resolved) -> str | None:
    """Backend of a model when none is named: its own choice, or else the first one that runs its format."""
    artifact = resolved.artifact
    if artifact is None or artifact.manifest.run is not None:
        return None
    able = [spec for spec in registry.describe_all()[0] if spec.capability("run", artifact.format)]
    return None if any(spec.auto for spec in able) or not able else able[0].name


def _unused(name: str, variants: Sequence[Variant]) -> str:
    taken = {variant.name for variant in variants}
    return next(n for n in (name, *(f"{name} ({i})" for i in range(2, 1000))) if n not in taken)


def _original_here(resolved: Resolved) -> Resolved | None:
    """The PyTorch model that a model was made from, or is, if it is still here."""
    try:
        source = original(resolved, local_files_only=True)
    except AccelError:
        return None
    return source if source.kind == "weights" and source.has_weights else None
