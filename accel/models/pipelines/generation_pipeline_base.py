"""Generation settings of the pipelines that transformers 5 removed, with the precedence rules of transformers 4."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from transformers import GenerationConfig
from transformers.pipelines.base import Pipeline


class GenerationPipeline(Pipeline):  # type: ignore[misc]  # transformers is untyped here
    """Base class of pipelines that call `generate`.

    The first source that contains a setting is used, in this order: the call; the pipeline's arguments; `task_specific_params` in the
    model's config.json for the pipeline's task; the model's generation_config.json; `_default_generation_config`.

    Attributes:
        prefix: Text put before each input text: from `task_specific_params`, or the config's `prefix`.
    """

    _pipeline_calls_generate = True

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        settings = self.task_settings(self.task)
        self.prefix: str = settings.get("prefix", getattr(self.model.config, "prefix", None)) or ""
        generation_fields = vars(GenerationConfig())
        self._task_settings = {
            name: value for name, value in settings.items() if name in generation_fields and value is not None
        }

    def task_settings(self, task: str) -> Mapping[str, Any]:
        """Return the `task_specific_params` of a task; empty if the config has none."""
        settings: Mapping[str, Any] = (getattr(self.model.config, "task_specific_params", None) or {}).get(task) or {}
        return settings

    def _prepare_generate_kwargs(self, generate_kwargs: dict[str, Any], **overrides: Any) -> dict[str, Any]:
        own_settings = {**self._generate_kwargs, **generate_kwargs}
        settings = {name: value for name, value in self._task_settings.items() if name not in own_settings}
        if "generation_config" in own_settings:
            # A complete generation config replaces the settings of the task.
            settings = {}
        if "max_new_tokens" in own_settings:
            settings.pop("max_length", None)
        if self.assistant_model is not None:
            settings["assistant_model"] = self.assistant_model
        if self.assistant_tokenizer is not None:
            settings |= {"tokenizer": self.tokenizer, "assistant_tokenizer": self.assistant_tokenizer}
        prepared: dict[str, Any] = super()._prepare_generate_kwargs({**settings, **generate_kwargs}, **overrides)
        return prepared

    def _forward(self, inputs: Mapping[str, Any], **generate: Any) -> Mapping[str, Any]:
        batch = inputs[self.model.main_input_name].shape[0]
        tokens = self.model.generate(**inputs, **self._prepare_generate_kwargs(generate))
        return {"output_ids": tokens.reshape(batch, tokens.shape[0] // batch, *tokens.shape[1:])}
