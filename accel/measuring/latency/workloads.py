"""What is timed: a grid of shapes, or real texts with the lengths that they have."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from ...errors import ConfigError, InputError
from .variants import Loaded, Workload
from .worker import Worker

_CASES_OF_TEXTS = 64


def check_sequences(sequences: Sequence[int], limits: Mapping[str, int]) -> None:
    """Refuse more tokens a row than a model reads.

    Raises:
        ConfigError: A sequence longer than the model's positions.
    """
    limit = limits.get("sequence")
    if limit is not None and max(sequences) > limit:
        raise ConfigError(
            f"The model has {limit} positions, not {max(sequences)}.",
            fix=f"name sequences up to {limit}: sequence=({limit},), or --sequence {limit}.",
        )


def grid(
    worker: Worker, loaded: Loaded, batches: Sequence[int], sequences: Sequence[int], new_tokens: int = 0
) -> list[Workload]:
    """A workload for each batch and sequence, with inputs that the model of `worker` takes.

    With `new_tokens` two each: until the first token, and until the last one.

    Raises:
        ConfigError: A sequence longer than the model's positions.
    """
    if "sequence" in loaded.axes:
        check_sequences(sequences, loaded.limits)
    shapes: list[tuple[int, int | None]] = [(b, s) for b in batches for s in sequences]
    if "sequence" not in loaded.axes:
        shapes = [(b, None) for b in batches]
    made = []
    for seed, (batch, sequence) in enumerate(shapes):
        sizes = {"batch": batch, **({"sequence": sequence} if sequence is not None else {})}
        name = f"{batch}x{sequence}" if sequence is not None else f"batch {batch}"
        plain = Workload(name=name, batch=batch, sequence=sequence, cases=(worker.sample(sizes, seed),))
        ends = [n for n in dict.fromkeys((1, new_tokens)) if n] if new_tokens else []
        made += [replace(plain, name=f"{name}+{end}", new_tokens=end) for end in ends] or [plain]
    return made


def read_texts(file: str | os.PathLike[str], task: str) -> list[str]:
    """Texts of a `.txt` file, one a line, or of the text column of a CSV, JSON or Parquet file.

    Raises:
        InputError: The file holds none.
        ConfigError: It does not exist.
    """
    from ...data.columns import map_columns
    from ...data.labels import texts
    from ...data.rows import load_rows

    path = Path(file)
    if path.suffix == ".txt":
        if not path.is_file():
            raise ConfigError(f"There is no file {path}.", fix="check the path of the texts.")
        lines = [line.strip() for line in path.read_text(encoding="utf-8").splitlines()]
        found = [line for line in lines if line]
    else:
        found = texts(map_columns(load_rows(path), task, None, answers=False), "text")
    if not found:
        raise InputError(f"{path} holds no texts.", fix="give one text a line.")
    return found


def of_texts(
    texts: Sequence[str],
    folder: Path,
    *,
    name: str,
    task: str,
    batch: int,
    tokenize: bool,
    max_length: int | None,
    seed: int = 0,
) -> Workload:
    """Batches of texts in random order, padded as they come: the length distribution of real traffic.

    Args:
        texts: All of them; up to 64 batches are drawn.
        folder: Of the tokenizer.
        name: Of the workload.
        task: Of the model.
        batch: Texts a call.
        tokenize: Tokenize inside the timed call.
        max_length: Tokens that longer texts are cut to.
        seed: Of the order.
    """
    from ...data.batches import load_processor

    order = np.random.default_rng(seed).permutation(len(texts))
    # Fewer texts than a batch: the same ones again.
    drawn = [texts[int(order[i % len(order)])] for i in range(max(batch, min(len(texts), batch * _CASES_OF_TEXTS)))]
    groups = [drawn[i : i + batch] for i in range(0, len(drawn) - batch + 1, batch)]
    if tokenize:
        cases: tuple[Mapping[str, Any], ...] = tuple({"texts": group} for group in groups)
        return Workload(name=name, batch=batch, sequence=None, cases=cases, tokenizer=folder, max_length=max_length)
    tokenizer = load_processor(folder, task)
    made = []
    for group in groups:
        feeds = tokenizer(group, padding=True, truncation=max_length is not None, max_length=max_length)
        made.append({key: np.asarray(value, dtype=np.int64) for key, value in feeds.items()})
    return Workload(name=name, batch=batch, sequence=None, cases=tuple(made))


def lengths(workloads: Sequence[Workload]) -> dict[str, dict[str, float]]:
    """The distribution of padded lengths of workloads whose length varies."""
    made = {}
    for workload in workloads:
        sizes = [case["input_ids"].shape[1] for case in workload.cases if "input_ids" in case]
        if workload.sequence is None and sizes:
            p50, p95 = np.percentile(sizes, [50, 95])
            made[workload.name] = {"min": min(sizes), "median": float(p50), "p95": float(p95), "max": max(sizes)}
    return made
