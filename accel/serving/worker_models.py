"""What is to be served, opened: a session a worker, each with its share of the processors."""

from __future__ import annotations

import copy
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, cast

from ..artifact.manifest import Artifact
from ..config import available_processors, check_number
from ..errors import ConfigError
from ..models.arguments import read_arguments
from ..models.base import ORTModel
from ..stages.export import with_artifact

Source = str | os.PathLike[str] | Artifact | ORTModel


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerSettings:
    """How models are opened, where they are named by folder or id.

    Attributes:
        workers: Sessions a model.
        processors: That they share; all that the process may use when `None`.
        arguments: Of `from_pretrained`.
    """

    workers: int = 1
    processors: int | None = None
    arguments: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        check_number("workers", self.workers, 1)
        check_number("processors", self.processors, 1)


def name_of(source: Source) -> str:
    """What a model is called where nobody gave it a name: its folder or its id."""
    if isinstance(source, ORTModel):
        source = source.artifact
    if isinstance(source, Artifact):
        source = source.path
    path = Path(source)
    return path.resolve().name if path.exists() else str(source)


def named(models: Source | Sequence[Source] | Mapping[str, Source]) -> dict[str, Source]:
    """Models by name.

    Raises:
        ConfigError: None, or two of one name.
    """
    if isinstance(models, Mapping):
        found = dict(models)
    else:
        several: list[Source] = list(models) if isinstance(models, list | tuple) else [cast(Source, models)]
        found = {name_of(one): one for one in several}
        if len(found) != len(several):
            raise ConfigError("Two models have one name.", fix="pass {name: model, ...}.")
    if not found:
        raise ConfigError("There is no model to serve.", fix="name at least one.")
    return found


def open_all(source: Source, settings: WorkerSettings) -> list[ORTModel]:
    """A model once for each worker; one that was opened by the caller is the first of them."""
    if isinstance(source, ORTModel):
        return [source, *(copy.copy(source) for _ in range(settings.workers - 1))]
    arguments = read_arguments(**settings.arguments)
    plan = with_artifact(ORTModel.plan(source, arguments))
    if arguments.settings.options is None:
        whole = settings.workers == 1 and settings.processors is None
        share = None if whole else max(1, (settings.processors or available_processors()) // settings.workers)
        # Threads that spin between calls take the processors that the tokenizer and the callers need (docs/adr/0025-serving.md);
        # lengths vary from call to call, and a runtime may compile each of them (docs/adr/0034-lengths-in-steps.md).
        options = replace(plan.options, spinning=False, threads=plan.options.threads or share, pad_to_multiple_of=None)
        plan = plan.with_options(options)
    return [ORTModel.from_plan(plan) for _ in range(settings.workers)]


def close_all(source: Source, models: Sequence[Any]) -> None:
    """Close what `open_all` opened."""
    for model in models:
        if model is not source:
            model.close()
