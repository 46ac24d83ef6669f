"""Open the models of an engine, once for each worker."""

from __future__ import annotations

import copy
import os
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

from ..artifact.manifest import Artifact
from ..config import available_processors
from ..errors import ConfigError
from ..models.base import ORTModel
from ..models.loading_arguments import read_arguments
from ..stages.export import with_artifact

Source = str | os.PathLike[str] | Artifact | ORTModel


def name_of(source: Source) -> str:
    """Return the default name of a model: the name of its folder, or its Hub id."""
    if isinstance(source, ORTModel):
        source = source.artifact
    if isinstance(source, Artifact):
        source = source.path
    path = Path(source)
    return path.resolve().name if path.exists() else str(source)


def named(models: Source | Sequence[Source] | Mapping[str, Source]) -> dict[str, Source]:
    """Return the models by name.

    Raises:
        ConfigError: There is no model, or two models have the same name.
    """
    if isinstance(models, Mapping):
        sources = dict(models)
    else:
        several: list[Source] = list(models) if isinstance(models, list | tuple) else [cast(Source, models)]
        sources = {name_of(source): source for source in several}
        if len(sources) != len(several):
            names = ", ".join(name_of(source) for source in several)
            raise ConfigError(
                f"Two models have the same name; the names are {names}.",
                fix="give each model its own name: models={name: model, ...} or NAME=MODEL in a command.",
            )
    if not sources:
        raise ConfigError("The list of models to serve is empty.", fix="pass at least one model.")
    return sources


def open_all(source: Source, *, workers: int, processors: int | None = None, **arguments: Any) -> list[ORTModel]:
    """Open a model once for each worker. A model that the caller opened is used as the first one.

    Args:
        source: The model.
        workers: Number of workers; each one gets its own session.
        processors: Number of processors that the workers share; `None` means all that the process may use.
        **arguments: Arguments of `from_pretrained`.
    """
    if isinstance(source, ORTModel):
        return [source, *(copy.copy(source) for _ in range(workers - 1))]
    parsed = read_arguments(**arguments)
    plan = with_artifact(ORTModel.plan(source, parsed))
    if parsed.settings.options is None:
        uses_all = workers == 1 and processors is None
        share = None if uses_all else max(1, (processors or available_processors()) // workers)
        # Threads that spin between calls occupy processors that the tokenizer and the callers need (docs/adr/0025-serving.md).
        # Lengths vary from call to call and a runtime may compile each new length, so rows are padded to the multiple that the
        # backend prefers (docs/adr/0034-padded-lengths.md).
        options = replace(plan.options, spinning=False, threads=plan.options.threads or share, pad_to_multiple_of=None)
        plan = plan.with_options(options)
    return [ORTModel.from_plan(plan) for _ in range(workers)]
