"""Which architectures are swept for which tasks: transformers' own tables, asked by the tasks that accel has."""

from __future__ import annotations

import fnmatch
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import transformers
from transformers.models.auto import modeling_auto
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from accel.interfaces.task_registry import all_tasks, task_spec

# Tasks that are another one with pooling behind it or with one class, and the one without any architecture.
_NOT_SWEPT = ("sentence-similarity", "text-ranking", "custom")


@dataclass(frozen=True, slots=True, order=True)
class Pair:
    """One architecture doing one task.

    Attributes:
        architecture: transformers' `model_type`.
        task: The task's name.
        model: Name of the transformers class.
    """

    architecture: str
    task: str
    model: str

    @property
    def name(self) -> str:
        """What `--only` matches, and what keys start with."""
        return f"{self.architecture}/{self.task}"


def pairs(tasks: Sequence[str] = (), only: Sequence[str] = ()) -> list[Pair]:
    """All pairs, or those of some tasks, or those whose name or architecture matches a pattern.

    Raises:
        TaskError: A task that accel does not have.
    """
    wanted = {task_spec(task).name for task in tasks}
    found = [pair for pair in _all_pairs() if not wanted or pair.task in wanted]
    if only:
        found = [
            pair
            for pair in found
            if any(fnmatch.fnmatchcase(word, pattern) for word in (pair.name, pair.architecture) for pattern in only)
        ]
    return found


def _all_pairs() -> Iterable[Pair]:
    for spec in all_tasks():
        if spec.name in _NOT_SWEPT or not spec.auto_model:
            continue
        for architecture, model in sorted(_models(spec.auto_models).items()):
            if spec.embeds and architecture not in _encoders_of_text():
                continue
            if not spec.embeds and spec.auto_model == "AutoModel" and not _has_fields(architecture, spec.fields):
                # The class for any model, of which the task is for some.
                continue
            if spec.name == "text2text-generation" and not _has_encoder(architecture):
                # Voxtral and its kind: sounds in the prompt of a decoder, which the table of speech has as well.
                continue
            pictures = spec.generates and "image" in spec.modalities
            # One table for captions (an encoder-decoder of images) and for prompts that hold images.
            if pictures and _has_encoder(architecture) != (spec.name == "image-to-text"):
                continue
            yield Pair(architecture, spec.name, model)


def _models(auto_models: Sequence[str]) -> dict[str, str]:
    """Class by model type, of the first auto class that has one."""
    found: dict[str, str] = {}
    for auto_model in auto_models:
        found = {**_table(auto_model), **found}
    return found


def loader_of(pair: Pair) -> Any:
    """The auto class that loads a pair's model."""
    names = task_spec(pair.task).auto_models
    name = next((one for one in names if _table(one).get(pair.architecture) == pair.model), names[0])
    return getattr(transformers, name)


def _table(auto_model: str) -> dict[str, str]:
    """Class by model type, as transformers' auto class has them; the first where there are several."""
    # The table of names, before anything is imported: transformers keeps no public way to it.
    table = getattr(transformers, auto_model)._model_mapping._model_mapping
    return {key: value if isinstance(value, str) else value[0] for key, value in table.items()}


def _has_encoder(architecture: str) -> bool:
    try:
        return bool(getattr(CONFIG_MAPPING[architecture], "is_encoder_decoder", False))
    except Exception:  # noqa: BLE001  # transformers imports a module by its name
        return True  # whatever is wrong is to be seen


def _has_fields(architecture: str, fields: Sequence[str]) -> bool:
    try:
        return all(hasattr(CONFIG_MAPPING[architecture], field) for field in fields)
    except Exception:  # noqa: BLE001  # transformers imports a module by its name
        return False


def _encoders_of_text() -> set[str]:
    """Those whose hidden states are their product; every decoder has hidden states, too, and another task already."""
    return {*modeling_auto.MODEL_FOR_TEXT_ENCODING_MAPPING_NAMES, *modeling_auto.MODEL_FOR_MASKED_LM_MAPPING_NAMES}
