"""Data of latency measurements: variants, calls, traffic, times."""

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
    """One thing to measure: a model and the way to run it.

    Attributes:
        name: Shown in tables.
        path: Artifact or transformers folder.
        task: The task.
        backend: Who runs it; its own choice when `None`.
        device: Where; the backend's choice when `None`.
        provider_options: The vendor's own options.
        options: How it is run; as its manifest says when `None`.
        trust_remote_code: Run code that comes with the model.
        lasting: Whether it is loaded once, because that takes minutes (compilers), and not anew for each share of the rounds.
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
    """Path by which another process opens an artifact: its folder, or a file of a folder without a manifest and several graphs."""
    complete = artifact.format == WEIGHTS or (artifact.path / MANIFEST).is_file()
    return artifact.path if complete else artifact.path / artifact.components[0].file


def planned_variant(variant: Variant) -> Plan:
    """How a variant is run; its model is exported where there is no artifact yet."""
    from ...artifact.hub import HubOptions
    from ...backends.plan import RunSettings, make_plan
    from ...stages.export import with_artifact
    from ...stages.resolution import resolve

    hub = HubOptions(local_files_only=True, trust_remote_code=variant.trust_remote_code)
    resolved = resolve(variant.path, task=variant.task, hub=hub)
    settings = RunSettings(
        backend=variant.backend,
        device=variant.device,
        provider_options=variant.provider_options,
        options=variant.options,
    )
    return with_artifact(make_plan(resolved, settings))


@dataclass(frozen=True, slots=True, kw_only=True)
class Loaded:
    """Facts about a loaded variant.

    Attributes:
        load_s: Seconds to load it, imports excluded.
        backend: What runs it.
        device: The device that ran it.
        compute_dtype: What its kernels compute in.
        threads: That work on one call.
        options: The session's options.
        axes: Names of the axes that may vary.
        limits: Largest sizes of named axes.
        notes: Settings that change what a number means.
        quantized: Whether its weights or activations have fewer bits.
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
    """Calls to time.

    Attributes:
        name: Shown in tables: `1x128`, or the file of texts.
        batch: Rows a call.
        sequence: Tokens a row; `None` where they vary.
        cases: Inputs of one call each (arrays by name), repeated in turn; or `{"texts": [...]}` each when tokenized in
            the timed call.
        tokenizer: Folder of the tokenizer that turns `texts` into inputs, inside the timed call.
        max_length: Tokens that longer texts are cut to.
        new_tokens: Tokens that a call generates from its inputs; 0: a call is one of the model's `forward`.
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
        callers: Threads that call. Each waits for its answer before it calls again (a closed loop).
        rate: Calls a second that arrive on their own, at random (Poisson) times, whether or not earlier ones are
            answered (an open loop); latency then counts from the arrival. `None`: a closed loop.
        seed: Of the arrivals.
    """

    callers: int = 1
    rate: float | None = None
    seed: int = 0

    def __post_init__(self) -> None:
        check_number("callers", self.callers, 1)
        check_number("rate", self.rate, above=0)


@dataclass(frozen=True, slots=True)
class Block:
    """Calls timed without a break.

    Attributes:
        milliseconds: Latency of each call.
        seconds: From the first call to the last answer.
        processor_seconds: Processor time of the whole process meanwhile.
    """

    milliseconds: tuple[float, ...]
    seconds: float
    processor_seconds: float
