"""Workloads to time: a grid of batch sizes and sequence lengths, or texts with their own lengths."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from ...errors import ConfigError, InputError
from .variants import LoadedVariantFacts, Variant, Workload
from .worker import VariantProcess

_CASES_OF_TEXTS = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkloadSettings:
    """Settings of the calls to time.

    Attributes:
        batch, sequence, texts, tokenize, max_length, new_tokens, seed, threads: The arguments of `accel.benchmark` with these names.
        call: Inputs by name of one call, which replaces all other calls; `None` to use the other fields.
    """

    batch: tuple[int, ...] = (1,)
    sequence: tuple[int, ...] = (128,)
    texts: str | os.PathLike[str] | Sequence[str] | None = None
    tokenize: bool = False
    max_length: int | None = None
    new_tokens: int = 0
    seed: int = 0
    threads: int | None = None
    call: Mapping[str, Any] | None = None

    def __post_init__(self) -> None:
        for name in ("batch", "sequence"):
            values = getattr(self, name)
            if not values or min(values) < 1:
                raise ConfigError(
                    f"{name} is {list(values)}, but it must contain at least one number, and all numbers must be at least 1.",
                    fix=f"pass positive numbers, such as {name}=({'1, 8' if name == 'batch' else '32, 128'}).",
                )
        if self.tokenize and self.texts is None:
            raise ConfigError(
                "tokenize=True (--tokenize) times the tokenizer, but no texts were passed.",
                fix="pass texts=... (--texts FILE), or leave tokenize out.",
            )


def check_sequences(sequences: Sequence[int], limits: Mapping[str, int]) -> None:
    """Raise if a sequence is longer than the model's number of positions.

    Raises:
        ConfigError: A sequence is longer than the model's number of positions.
    """
    limit = limits.get("sequence")
    if limit is not None and max(sequences) > limit:
        raise ConfigError(
            f"The sequence length {max(sequences)} is too long: the model has position embeddings for only {limit} tokens.",
            fix=f"use sequence lengths up to {limit}: sequence=({limit},), or --sequence {limit}.",
        )


def grid(
    worker: VariantProcess,
    loaded: LoadedVariantFacts,
    batches: Sequence[int],
    sequences: Sequence[int],
    new_tokens: int = 0,
) -> list[Workload]:
    """Return a workload for each batch size and sequence length, with sample inputs for the model that `worker` runs.

    With `new_tokens`, return two workloads for each: generate one token, and generate `new_tokens` tokens.

    Raises:
        ConfigError: A sequence is longer than the model's number of positions.
    """
    if "sequence" in loaded.axes:
        check_sequences(sequences, loaded.limits)
    shapes: list[tuple[int, int | None]] = [(b, s) for b in batches for s in sequences]
    if "sequence" not in loaded.axes:
        shapes = [(b, None) for b in batches]
    workloads = []
    for seed, (batch, sequence) in enumerate(shapes):
        sizes = {"batch": batch, **({"sequence": sequence} if sequence is not None else {})}
        name = f"{batch}x{sequence}" if sequence is not None else f"batch {batch}"
        plain = Workload(name=name, batch=batch, sequence=sequence, cases=(worker.sample(sizes, seed),))
        ends = [n for n in dict.fromkeys((1, new_tokens)) if n] if new_tokens else []
        workloads += [replace(plain, name=f"{name}+{end}", new_tokens=end) for end in ends] or [plain]
    return workloads


def read_texts(file: str | os.PathLike[str], task: str) -> list[str]:
    """Read texts from a `.txt` file (one per line), or from the text column of a CSV, JSON or Parquet file.

    Raises:
        InputError: The file contains no texts.
        ConfigError: The file does not exist.
    """
    from ...data.columns import map_columns
    from ...data.labels import texts
    from ...data.rows import load_rows

    path = Path(file)
    if path.suffix == ".txt":
        if not path.is_file():
            raise ConfigError(
                f"The file of texts {path} does not exist.", fix="correct the path in texts=... (--texts)."
            )
        stripped = map(str.strip, path.read_text(encoding="utf-8").splitlines())
        lines = [line for line in stripped if line]
    else:
        lines = texts(map_columns(load_rows(path), task, None, answers=False), "text")
    if not lines:
        raise InputError(
            f"The file {path} contains no texts.", fix="write one text per line, or pass a table with a text column."
        )
    return lines


def workloads_of(load: WorkloadSettings, worker: VariantProcess, loaded: LoadedVariantFacts) -> list[Workload]:
    """Return the workloads of a load, with inputs for the baseline, which `worker` runs."""
    if load.call is not None:
        return [Workload(name="rows", batch=load.batch[0], sequence=None, cases=(load.call,))]
    if load.texts is None:
        return grid(worker, loaded, load.batch, load.sequence, load.new_tokens)
    return text_workloads(load, worker.variant, loaded.limits)


def text_workloads(load: WorkloadSettings, baseline: Variant, limits: Mapping[str, int]) -> list[Workload]:
    """Return, for each batch size, a workload of up to 64 batches of texts in random order. Each batch is padded to its longest text.

    Args:
        load: The texts, the batch sizes, and whether the timed calls include tokenization.
        baseline: The variant whose folder has the tokenizer.
        limits: Maximum sizes of named axes.
    """
    from ...data.batches import load_processor

    if isinstance(load.texts, str | os.PathLike):
        name, texts = Path(load.texts).name, read_texts(load.texts, baseline.task)
    else:
        name, texts = "texts", list(load.texts or ())
    max_length = load.max_length or limits.get("sequence")
    tokenizer = None if load.tokenize else load_processor(baseline.path, baseline.task)
    order = np.random.default_rng(load.seed).permutation(len(texts))
    workloads = []
    for batch in load.batch:
        # Repeat texts if there are fewer texts than rows in a batch.
        count = max(batch, min(len(texts), batch * _CASES_OF_TEXTS))
        drawn = [texts[int(order[i % len(order)])] for i in range(count)]
        groups = [drawn[i : i + batch] for i in range(0, len(drawn) - batch + 1, batch)]
        cases: list[Mapping[str, Any]] = [{"texts": group} for group in groups]
        if tokenizer is not None:
            cut = {"padding": True, "truncation": max_length is not None, "max_length": max_length}
            cases = [
                {key: np.asarray(value, dtype=np.int64) for key, value in tokenizer(group, **cut).items()}
                for group in groups
            ]
        folder = baseline.path if tokenizer is None else None
        workloads.append(
            Workload(
                name=f"{batch} of {name}", batch=batch, sequence=None, cases=tuple(cases), tokenizer=folder,
                max_length=max_length if load.tokenize else None,
            )
        )  # fmt: skip
    return workloads


def lengths(workloads: Sequence[Workload]) -> dict[str, dict[str, float]]:
    """Return the distribution of padded sequence lengths, for each workload with varying lengths."""
    distributions = {}
    for workload in workloads:
        sizes = [case["input_ids"].shape[1] for case in workload.cases if "input_ids" in case]
        if workload.sequence is None and sizes:
            p50, p95 = np.percentile(sizes, [50, 95])
            distributions[workload.name] = {
                "min": min(sizes),
                "median": float(p50),
                "p95": float(p95),
                "max": max(sizes),
            }
    return distributions
