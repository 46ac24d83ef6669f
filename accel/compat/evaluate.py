"""`evaluate.evaluator` over our models: a script changes its import line."""

from __future__ import annotations

import os
from typing import Any

from ..errors import BackendUnavailableError, ConfigError
from ..models.base import ORTModel


def evaluator(task: str) -> Any:
    """The evaluator of a task, as `evaluate.evaluator` gives it, whose `compute` takes our models, too.

    `model_or_pipeline` is a model of ours with its `tokenizer` or `feature_extractor` (its folder's where they are left out), a Hub
    id or folder, which is run by the backend that fits, a pipeline of ours or of transformers, or a PyTorch model. Unlike
    `evaluate`'s own it works beside transformers 5.

    Args:
        task: `text-classification`, `token-classification`, `question-answering`, `image-classification` and so on.

    Raises:
        BackendUnavailableError: `evaluate` is not installed.
        KeyError: `evaluate` has no such task.
    """
    try:
        import evaluate
        from evaluate.evaluator import Evaluator
    except ImportError as error:
        raise BackendUnavailableError(
            f"evaluate cannot be imported: {error}.", fix='pip install "accel-transformers[evaluate]"'
        ) from error

    class Ours(Evaluator):  # type: ignore[misc]  # evaluate is untyped here
        """Makes the pipeline, in the place of `evaluate`'s, which asks for a class that transformers 5 removed."""

        def prepare_pipeline(
            self, model_or_pipeline: Any, tokenizer: Any = None, feature_extractor: Any = None, device: Any = None
        ) -> Any:
            return _pipeline(self.task, model_or_pipeline, tokenizer, feature_extractor, device)

    made = evaluate.evaluator(task)
    kind = type(made)
    # Behind the task's own class, whose methods call the one that they extend.
    return type(kind.__name__, (kind, Ours), {"__module__": __name__})(
        made.task, default_metric_name=made.default_metric_name
    )


def _pipeline(task: str, model: Any, tokenizer: Any, feature_extractor: Any, device: Any) -> Any:
    import transformers

    from ..models.pipelines.pipeline import pipeline as ours

    processors = {"tokenizer": tokenizer, "feature_extractor": feature_extractor}
    given = {name: value for name, value in processors.items() if value is not None}
    if task == "image-classification" and "feature_extractor" in given:
        # transformers 5's word for it.
        given["image_processor"] = given.pop("feature_extractor")
    if model is None or isinstance(model, ORTModel | str | os.PathLike):
        return ours(task, model, **given, **({"device": device} if device is not None else {}))
    if isinstance(model, transformers.PreTrainedModel):
        return transformers.pipeline(task, model=model, device=-1 if device is None else device, **given)
    if getattr(model, "task", None) != task and not str(getattr(model, "task", "")).startswith(task):
        raise ConfigError(
            f"model_or_pipeline is a {type(model).__name__} for {getattr(model, 'task', 'no task')}, not {task}.",
            fix=f"pass a model, or accel.pipeline({task!r}, model).",
        )
    return model
