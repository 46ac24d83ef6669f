"""`accel.benchmark`: compare latency, throughput, memory and outputs of variants of one model.

Each variant runs in its own process. The processes run in turns, in rounds, so that a change in the machine's speed affects all
variants equally. All variants get the same inputs, warm-up and threads. Each variant's outputs are compared with PyTorch float32
before the variant is timed. A variant that fails is reported, and the other variants are still measured.
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
from ...artifact.resolved_model import ResolvedModel
from ...backends import registry
from ...backends.machine import machine
from ...backends.plan import RunPreferences, make_plan
from ...backends.stage_backend_selection import plan_stage
from ...config import ExportConfig, SessionOptions, available_processors, check_number, checked_arguments
from ...errors import AccelError, ConfigError, SessionError
from ...interfaces.specs import WEIGHTS
from ...interfaces.task_registry import task_spec
from ...stages.export import with_artifact
from ...stages.resolution import original, resolve
from ..disturbance import MachineWatch
from .results import BenchmarkResult, result
from .rounds import MeasuredVariant, check, restart, start, take_turns, warm_up
from .variants import Traffic, Variant, Workload, process_path
from .workloads import WorkloadSettings, lengths, workloads_of

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
) -> BenchmarkResult:
    """Measure variants of one model: PyTorch, and artifacts on backends.

    Takes up to 5 s to start each variant in each process, plus `rounds * calls` calls for each variant and workload.

    Args:
        models: One or several artifacts, transformers folders or Hub ids (exported if necessary), or `Variant`s.
        backends: Backends that run the artifacts, one variant for each; `None` for the automatic choice.
        pytorch: Dtypes of PyTorch eager to measure: `float32`, `bfloat16`, `float16`. Float32 is always measured if
            the PyTorch model is available, because all variants are compared with it.
        compiled: Dtypes of PyTorch under `torch.compile`; compiling takes up to minutes.
        cuda_graph: Dtypes of PyTorch eager replayed from CUDA graphs, which launch kernels without the host. `None` for the dtypes
            of `pytorch` on an NVIDIA GPU, where small eager models wait for the host, and for no dtype on other devices.
        batch: Number of rows in each call, one number or several. Each batch size is measured with each sequence length.
        sequence: Number of tokens in each row, one number or several.
        texts: A list of texts, or a file of texts (one per line, or a table with a text column), instead of `sequence`. Rows
            then have the lengths of these texts, and each batch is padded to its longest row.
        tokenize: Tokenize `texts` inside the timed call.
        max_length: Number of tokens after which longer texts are truncated; `None` for the model's number of positions.
        threads: Threads of each variant; `None` for all processors that the process may use.
        warmup: Calls before the first round.
        rounds: Number of rounds. In each round every variant runs once.
        calls: Calls of each variant in each round.
        processes: Number of processes, one after the other, in which each variant is loaded; each runs a part of the rounds. The
            speed of two processes of one variant differs by some percent. Compiled variants are loaded only once.
        new_tokens: For models that generate: time `generate` until the first token and until this many tokens, instead of one
            `forward`. `calls` may then be 1.
        callers: Threads that call at the same time. Each waits for its result before the next call (closed loop).
        rate: Calls per second that arrive at random times (open loop); latency is then measured from the arrival.
        task: The task; `None` to infer it.
        device: Device that runs artifacts and PyTorch.
        session_options: Options of the artifacts' sessions; `None` for the options in their manifests.
        atol: Accepted absolute difference from the baseline's outputs, for all variants. `None` for a default that depends on the
            dtype; any finite difference is then accepted for quantized variants.
        seed: Seed of inputs, of the order of texts and of arrival times.
        revision, token, trust_remote_code: As in transformers.

    Raises:
        ConfigError: The settings cannot work, or there is no variant.
        ArtifactNotFoundError: A model cannot be found.
        SessionError: The baseline failed, so that outputs cannot be compared.
    """
    watch = MachineWatch()
    hub = HubOptions(revision=revision, token=token, trust_remote_code=trust_remote_code)
    several = [models] if isinstance(models, str | os.PathLike | Artifact | Variant) else list(models)
    load = WorkloadSettings(
        batch=_sizes(batch), sequence=_sizes(sequence), texts=texts, tokenize=tokenize, max_length=max_length,
        new_tokens=new_tokens, seed=seed, threads=threads,
    )  # fmt: skip
    effort = BenchmarkEffort(warmup=warmup, rounds=rounds, calls=calls, processes=processes)
    traffic = Traffic(callers=callers, rate=rate, seed=seed)
    baselines = Baselines(
        eager=tuple(pytorch), compiled=tuple(compiled), cuda_graph=None if cuda_graph is None else tuple(cuda_graph)
    )
    variants = variants_of(
        several, backends=backends, baselines=baselines, task=task, device=device, options=session_options, hub=hub
    )
    return measure_variants(variants, load, effort, traffic, atol, watch)


def _sizes(sizes: int | Sequence[int]) -> tuple[int, ...]:
    return (sizes,) if isinstance(sizes, int) else tuple(sizes)


@dataclass(frozen=True, slots=True, kw_only=True)
class BenchmarkEffort:
    """Number of calls, rounds and processes of a benchmark.

    Attributes:
        warmup, rounds, calls, processes: The arguments of `benchmark` with the same names.
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
    """Dtypes and ways in which the PyTorch model is run.

    Attributes:
        eager: Dtypes of PyTorch eager; the argument `pytorch` of `benchmark`.
        compiled, cuda_graph: The arguments of `benchmark` with the same names.
    """

    eager: tuple[str, ...] = ("float32",)
    compiled: tuple[str, ...] = ()
    cuda_graph: tuple[str, ...] | None = None

    def __post_init__(self) -> None:
        for dtype in (*self.eager, *self.compiled, *(self.cuda_graph or ())):
            ExportConfig.from_dict({"dtype": dtype})

    def variants(self, model: ResolvedModel, device: str | None) -> list[Variant]:
        """Return one variant for each dtype and way to run the PyTorch model; eager float32 is the first."""
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
    load: WorkloadSettings,
    effort: BenchmarkEffort,
    traffic: Traffic,
    atol: float | None = None,
    watch: MachineWatch | None = None,
) -> BenchmarkResult:
    """Measure variants; the first variant is the baseline. See `benchmark`.

    Args:
        variants: The variants.
        load: The calls to time.
        effort: Number of calls, rounds and processes.
        traffic: How calls arrive.
        atol: Accepted absolute difference from the baseline's outputs; see `benchmark`.
        watch: Machine watch that was created before accel started to work; `None` to create one now.
    """
    started = time.perf_counter()
    watch = watch or MachineWatch()
    if load.new_tokens and not (load.new_tokens > 1 and task_spec(variants[0].task).generates and load.texts is None):
        raise ConfigError(
            f"new_tokens is {load.new_tokens} for the task {variants[0].task!r}"
            f"{' with texts' if load.texts is not None else ''}. accel can time generation only for new_tokens of at least 2, a task that "
            "generates, and prompts of a fixed length (sequence=...) instead of texts.",
            fix="pass a model for a task such as text-generation, new_tokens=2 or more, and sequence=... instead of texts=..., or leave "
            "new_tokens out.",
        )
    spec = task_spec(variants[0].task)
    if not load.new_tokens and spec.generates and spec.encoder_decoder:
        raise ConfigError(
            f"A benchmark of the task {spec.name!r} needs new_tokens, because accel times these encoder-decoders only while they generate.",
            fix="pass the number of tokens to generate, at least 2: new_tokens=32 (--new-tokens 32).",
        )
    group = start(variants, load.threads)
    try:
        base, workloads = group[0], []
        if base.worker is not None and base.loaded is not None:
            workloads = workloads_of(load, base.worker, base.loaded)
        for workload in workloads:
            warm_up(group, workload, effort.warmup)
            check(group, workload, atol)
        if base.error is not None:
            raise SessionError(
                f"The benchmark stopped, because its baseline {base.variant.name!r} failed: {base.error}",
                fix="load the model with ORTModel.from_pretrained and call it once to see the complete error.",
            )
        _take_all_turns(group, workloads, effort, traffic, load.threads)
    finally:
        for measured in group:
            measured.close()
    settings = {
        "rounds": effort.rounds, "calls": effort.calls, "processes": min(effort.processes, effort.rounds),
        "warmup": effort.warmup, "threads": load.threads or available_processors(),
        "callers": traffic.callers, "rate": traffic.rate, "tokenizer": "included" if load.tokenize else "excluded",
        "seed": load.seed,
        "workloads": [w.name for w in workloads],
        "lengths": lengths(workloads),
    }  # fmt: skip
    results = tuple(result(measured, base, workloads) for measured in group)
    return BenchmarkResult(
        task=base.variant.task,
        baseline=base.variant.name,
        machine=machine(),
        settings=settings,
        variants=results,
        seconds=round(time.perf_counter() - started, 2),
        disturbance=watch.judge({cell.workload: cell.round_ms for cell in results[0].cells}),
    )


def _take_all_turns(
    group: Sequence[MeasuredVariant],
    workloads: Sequence[Workload],
    effort: BenchmarkEffort,
    traffic: Traffic,
    threads: int | None,
) -> None:
    """Run all rounds; each variant runs in several processes, one after the other."""
    ends = [effort.rounds * (n + 1) // effort.processes for n in range(effort.processes)]
    for n, (first, end) in enumerate(zip([0, *ends], ends, strict=False)):
        if first == end:
            continue
        if first:
            restart(group, workloads, effort.warmup, threads, backwards=n % 2 == 1)
        for workload in workloads:
            take_turns(group, workload, rounds=end - first, calls=effort.calls, first=first, traffic=traffic)
        for measured in group:
            peak = measured.attempt(lambda worker: worker.peak_memory())
            measured.peak_memory = max(peak or 0, measured.peak_memory or 0) or None


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
    """Return the variants of the given models. PyTorch float32 is the first, if its weights are available on this machine.

    Raises:
        ConfigError: The models have different tasks, or a variant occurs twice.
    """
    variants: list[Variant] = []
    originals: dict[Path, ResolvedModel] = {}
    for model in models:
        if isinstance(model, Variant):
            variants.append(model)
            continue
        resolved = resolve(model, task=task, hub=hub)
        source = _original_here(resolved)
        if source is not None:
            originals.setdefault(source.location.folder, source)
        for backend in backends or (_runner(resolved),):
            # Export now, so that load times do not include the export.
            artifact = with_artifact(make_plan(resolved, RunPreferences(backend=backend, device=device))).artifact
            assert artifact is not None
            spec = registry.describe(backend) if backend is not None else None
            label = f"{resolved.name} [{spec.name}]" if spec is not None else resolved.name
            variants.append(
                Variant(
                    name=_unused(label, variants), path=process_path(artifact), task=resolved.task,
                    backend=spec.name if spec else None, device=device, options=options,
                    trust_remote_code=hub.trust_remote_code,
                )
            )  # fmt: skip
    for source in list(originals.values())[:1]:
        variants = [*baselines.variants(source, device), *variants]
    tasks = {variant.task for variant in variants}
    if len(tasks) != 1:
        raise ConfigError(
            f"All models of a benchmark must have the same task, but these models have the tasks {sorted(tasks)}."
            if tasks
            else "The benchmark has no model to measure.",
            fix="run one benchmark for each task." if tasks else "pass at least one model.",
        )
    return variants


def pytorch_variant(
    model: ResolvedModel, *, dtype: str = "float32", device: str | None = None, way: Way | None = None
) -> Variant:
    """Return a variant that runs the model of a transformers folder with PyTorch.

    Args:
        model: The transformers folder.
        dtype: Data type used for computation.
        device: Device that runs the model.
        way: `compile`: with `torch.compile`; `cuda_graph`: replayed from a CUDA graph; `None`: eager.
    """
    compiles = way == "compile"
    # `keep_slower` runs the compiled model even if it is slower than eager, because the caller wants to know its speed.
    options: dict[str, object] | None = {"keep_slower": True} if compiles else {way: True} if way is not None else None
    name = f"PyTorch {'compiled' if compiles else 'eager'} {dtype}"
    return Variant(
        name=f"{name} in a CUDA graph" if way == "cuda_graph" else name,
        path=model.location.folder,
        task=model.task,
        backend=(
            plan_stage("prepare", WEIGHTS, scheme="accelerate") if compiles else plan_stage("export", WEIGHTS)
        ).backend.name,
        device=device,
        provider_options=options,
        options=SessionOptions.from_dict({"compute_dtype": dtype}),
        trust_remote_code=model.hub.trust_remote_code,
        lasting=compiles,
    )


def _runner(resolved: ResolvedModel) -> str | None:
    """Return the backend for a model if the caller passed none.

    The result `None` means that accel chooses a backend automatically. If no backend of the automatic choice supports the format, return
    the first backend that supports it.
    """
    artifact = resolved.artifact
    if artifact is None or artifact.manifest.run is not None:
        return None
    able = [spec for spec in registry.describe_all()[0] if spec.capability("run", artifact.format)]
    return None if any(spec.auto for spec in able) or not able else able[0].name


def _unused(name: str, variants: Sequence[Variant]) -> str:
    names = {variant.name for variant in variants}
    return next(n for n in (name, *(f"{name} ({i})" for i in range(2, 1000))) if n not in names)


def _original_here(resolved: ResolvedModel) -> ResolvedModel | None:
    """Return the PyTorch model from which a model was made, or the PyTorch model itself; `None` if it is not on this machine."""
    try:
        source = original(resolved, local_files_only=True)
    except AccelError:
        return None
    return source if source.kind == "weights" and source.has_weights else None
