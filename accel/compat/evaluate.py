"""`evaluate.evaluator` for accel models: only the import line of a script changes."""

from __future__ import annotations

import os
from typing import Any

from ..errors import BackendUnavailableError, ConfigError
from ..models.base import ORTModel


def evaluator(task: str) -> Any:
    """Return the evaluator of a task, like `evaluate.evaluator`. Its `compute` also accepts accel models.

    `model_or_pipeline` may be an accel model with its `tokenizer` or `feature_extractor` (by default loaded from its
    folder), a Hub id or folder, a pipeline of accel or transformers, or a PyTorch model. Unlike the evaluator of
    `evaluate`, it supports transformers 5.

    Args:
        task: `text-classification`, `token-classification`, `question-answering`, `image-classification` and so on.

    Raises:
        BackendUnavailableError: `evaluate` is not installed.
        KeyError: `evaluate` does not have this task.
    """
    try:
        import evaluate
        from evaluate.evaluator import Evaluator
    except ImportError as error:
        raise BackendUnavailableError(
            f"The package evaluate cannot be imported: {error}.", fix='pip install "accel-transformers[evaluate]"'
        ) from error

    class Ours(Evaluator):  # type: ignore[misc]  # evaluate is untyped here
        """Create the pipeline of an evaluator. The original method of `evaluate` needs a class that transformers 5
        removed.
        """

        def prepare_pipeline(
            self, model_or_pipeline: Any, tokenizer: Any = None, feature_extractor: Any = None, device: Any = None
        ) -> Any:
            return _pipeline(self.task, model_or_pipeline, tokenizer, feature_extractor, device)

    made = evaluate.evaluator(task)
    kind = type(made)
    # The task's class comes first in the bases, because its methods call `super()`.
    return type(kind.__name__, (kind, Ours), {"__module__": __name__})(
        made.task, default_metric_name=made.default_metric_name
    )


def _pipeline(task: str, model: Any, tokenizer: Any, feature_extractor: Any, device: Any) -> Any:
    import transformers

    from ..models.pipelines.pipeline import pipeline as ours

    processors = {"tokenizer": tokenizer, "feature_extractor": feature_extractor}
    given = {name: value for name, value in processors.items() if value is not None}
    if task == "image-classification" and "feature_extractor" in given:
        # Name of this argument in transformers 5.
        given["image_processor"] = given.pop("feature_extractor")
    if model is None or isinstance(model, ORTModel | str | os.PathLike):
        return ours(task, model, **given, **({"device": device} if device is not None else {}))
    if isinstance(model, transformers.PreTrainedModel):
        return transformers.pipeline(task, model=model, device=-1 if device is None else device, **given)
    if getattr(model, "task", None) != task and not str(getattr(model, "task", "")).startswith(task):
        raise ConfigError(
            f"model_or_pipeline is a {type(model).__name__} with the task {getattr(model, 'task', None)!r}; this evaluator needs the "
            f"task {task!r}.",
            fix=f"pass a model, or a pipeline from accel.pipeline({task!r}, model).",
        )
    return model
