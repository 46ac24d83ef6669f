"""List the pairs of architecture and task to test, from transformers' own tables of models and accel's tasks."""

from __future__ import annotations

import fnmatch
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import transformers
from transformers.models.auto import modeling_auto
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from accel.interfaces.task_registry import all_tasks, task_spec

# These tasks add only pooling to another task or have only one model class. The custom task has no architecture.
_NOT_SWEPT = ("sentence-similarity", "text-ranking", "custom")


@dataclass(frozen=True, slots=True, order=True)
class Pair:
    """An architecture together with a task.

    Attributes:
        architecture: `model_type` in transformers.
        task: Name of the task.
        model: Name of the model class in transformers.
    """

    architecture: str
    task: str
    model: str

    @property
    def name(self) -> str:
        """Name of the pair, `architecture/task`, which the option `--only` matches."""
        return f"{self.architecture}/{self.task}"


def pairs(tasks: Sequence[str] = (), only: Sequence[str] = ()) -> list[Pair]:
    """Return all (architecture, task) pairs, limited to `tasks`, and to names or architectures that match a pattern in `only`.

    Raises:
        TaskError: accel does not have one of the tasks.
    """
    task_names = {task_spec(task).name for task in tasks}
    matching = [pair for pair in _all_pairs() if not task_names or pair.task in task_names]
    if only:
        matching = [
            pair
            for pair in matching
            if any(fnmatch.fnmatchcase(word, pattern) for word in (pair.name, pair.architecture) for pattern in only)
        ]
    return matching


def _all_pairs() -> Iterable[Pair]:
    for spec in all_tasks():
        if spec.name in _NOT_SWEPT or not spec.auto_model:
            continue
        for architecture, model in sorted(_models(spec.auto_models).items()):
            if spec.embeds and architecture not in _encoders_of_text():
                continue
            if not spec.embeds and spec.auto_model == "AutoModel" and not _has_fields(architecture, spec.fields):
                # `AutoModel` contains all models. Skip architectures without the config fields that the task requires.
                continue
            if spec.name == "text2text-generation" and not _has_encoder(architecture):
                # Skip architectures like Voxtral. They have only a decoder with audio in the prompt, and belong to the
                # speech task.
                continue
            pictures = spec.generates and "image" in spec.modalities
            # transformers has one table for both tasks. Encoder-decoders write captions, and decoders read prompts that
            # contain images.
            if pictures and _has_encoder(architecture) != (spec.name == "image-to-text"):
                continue
            yield Pair(architecture, spec.name, model)


def _models(auto_models: Sequence[str]) -> dict[str, str]:
    """Return the model class name for each model type. If several auto classes contain a model type, the class name of
    the first auto class is used.
    """
    architectures: dict[str, str] = {}
    for auto_model in auto_models:
        architectures = {**_table(auto_model), **architectures}
    return architectures


def loader_of(pair: Pair) -> Any:
    """Return the auto class of transformers that loads the model of a pair (architecture and task)."""
    names = task_spec(pair.task).auto_models
    name = next((loader for loader in names if _table(loader).get(pair.architecture) == pair.model), names[0])
    return getattr(transformers, name)


def _table(auto_model: str) -> dict[str, str]:
    """Return the model class name for each model type of an auto class. If there are several class names, the first
    name is used.
    """
    # Read the private table of names. transformers has no public table that does not import all models.
    table = getattr(transformers, auto_model)._model_mapping._model_mapping
    return {key: value if isinstance(value, str) else value[0] for key, value in table.items()}


def _has_encoder(architecture: str) -> bool:
    try:
        return bool(getattr(CONFIG_MAPPING[architecture], "is_encoder_decoder", False))
    except Exception:  # noqa: BLE001  # transformers imports modules lazily, which may fail in many ways
        return True  # keep the architecture, so that the sweep reports the error


def _has_fields(architecture: str, fields: Sequence[str]) -> bool:
    try:
        return all(hasattr(CONFIG_MAPPING[architecture], field) for field in fields)
    except Exception:  # noqa: BLE001  # transformers imports modules lazily, which may fail in many ways
        return False


def _encoders_of_text() -> set[str]:
    """Return the model types of text encoders, for the embedding task. Decoders also have hidden states, but belong to
    text generation.
    """
    return {*modeling_auto.MODEL_FOR_TEXT_ENCODING_MAPPING_NAMES, *modeling_auto.MODEL_FOR_MASKED_LM_MAPPING_NAMES}
