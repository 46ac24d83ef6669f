"""Data classes of latency measurements: variants, workloads, traffic, timings."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ...artifact.manifest import MANIFEST, Artifact
from ...config import SessionOptions, check_number
from ...interfaces.specs import WEIGHTS

if TYPE_CHECKING:
    from ...backends.plan import Plan

Arrays = Mapping[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Variant:
    """A model and the way to run it.

    Attributes:
        name: Name in tables.
        path: Folder of the artifact, or transformers folder.
        task: Task of the model.
        backend: Backend that runs the model; `None` for the automatic choice.
        device: Device that runs the model; `None` for the backend's choice.
        provider_options: Options that are passed to the backend's runtime unchanged.
        options: Session options; `None` for the options in the artifact's manifest.
        trust_remote_code: Run Python code that is part of the model.
        lasting: Load the variant only once, because loading takes minutes (compilers), instead of again in each process.
    """

    name: str
    path: Path
    task: str
    backend: str | None = None
    device: str | None = None
    provider_options: Mapping[str, object] | None = None
    options: SessionOptions | None = None
    trust_remote_code: bool = False
    lasting: bool = False


def process_path(artifact: Artifact) -> Path:
    """Return the path from which another process loads an artifact: its folder, or its graph file if the folder has no manifest."""
    complete = artifact.format == WEIGHTS or (artifact.path / MANIFEST).is_file()
    return artifact.path if complete else artifact.path / artifact.components[0].file


def planned_variant(variant: Variant) -> Plan:
    """Return the plan to run a variant. If the model has no artifact yet, export it first."""
    from ...artifact.hub import HubOptions
    from ...backends.plan import RunPreferences, make_plan
    from ...stages.export import with_artifact
    from ...stages.resolution import resolve

    hub = HubOptions(local_files_only=True, trust_remote_code=variant.trust_remote_code)
    resolved = resolve(variant.path, task=variant.task, hub=hub)
    settings = RunPreferences(
        backend=variant.backend,
        device=variant.device,
        provider_options=variant.provider_options,
        options=variant.options,
    )
    return with_artifact(make_plan(resolved, settings))


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadedVariantFacts:
    """Facts about a loaded variant.

    Attributes:
        load_s: Time to load the variant, in seconds, without imports.
        backend: Backend that runs the variant.
        device: Device that runs the variant.
        compute_dtype: Data type used for computation.
        threads: Number of threads that work on one call.
        options: Options of the session.
        axes: Names of the dynamic axes.
        limits: Maximum sizes of named axes.
        notes: Settings that change the meaning of the numbers, such as TF32.
        quantized: Whether the artifact is quantized.
    """

    load_s: float
    backend: str
    device: str
    compute_dtype: str
    threads: int
    options: Mapping[str, Any] = field(default_factory=dict)
    axes: tuple[str, ...] = ()
    limits: Mapping[str, int] = field(default_factory=dict)
    notes: tuple[str, ...] = ()
    quantized: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    """The calls to time.

    Attributes:
        name: Name in tables: `1x128`, or the name of the file of texts.
        batch: Number of rows in each call.
        sequence: Number of tokens in each row; `None` if they vary.
        cases: One case for each different call: its inputs as arrays by name, or `{"texts": [...]}` if the timed call includes
            tokenization. The cases are repeated in turn.
        tokenizer: Folder of the tokenizer, if the timed call includes tokenization.
        max_length: Number of tokens after which longer texts are truncated.
        new_tokens: Number of tokens that each call generates; 0 if each call is one `forward` of the model.
    """

    name: str
    batch: int
    sequence: int | None
    cases: tuple[Arrays, ...]
    tokenizer: Path | None = None
    max_length: int | None = None
    new_tokens: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Traffic:
    """How calls arrive.

    Attributes:
        callers: Number of threads that call. Each thread waits for its result before its next call (closed loop).
        rate: Calls per second that arrive at random (Poisson) times, even if earlier calls have not finished (open loop). Latency
            is then measured from the arrival. `None` for a closed loop.
        seed: Seed of the arrival times.
    """

    callers: int = 1
    rate: float | None = None
    seed: int = 0

    def __post_init__(self) -> None:
        check_number("callers", self.callers, 1)
        check_number("rate", self.rate, above=0)


@dataclass(frozen=True, slots=True)
class CallTimings:
    """Timings of calls without a break between them.

    Attributes:
        milliseconds: Latency of each call.
        seconds: Time from the first call to the last result.
        processor_seconds: Processor time of the whole process during these calls.
    """

    milliseconds: tuple[float, ...]
    seconds: float
    processor_seconds: float
