"""Replacement of `evaluate.evaluator` that also accepts accel models. Only the import line of a script changes."""

from __future__ import annotations

import os
from typing import Any

from ..errors import BackendUnavailableError, ConfigError
from ..models.base import ORTModel


def evaluator(task: str) -> Any:
    """Return the evaluator of a task, as `evaluate.evaluator` does. Its method `compute` also accepts accel models.

    The argument `model_or_pipeline` of `compute` may be an accel model, a Hub id or folder, a pipeline of accel or transformers, or a
    PyTorch model. For an accel model, the tokenizer or feature extractor is loaded from the model's folder, if the caller passes none.
    The returned evaluator works with transformers 5. The evaluator of `evaluate` does not.

    Args:
        task: Task of `evaluate`, such as `text-classification`, `token-classification` or `image-classification`.

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
        """Evaluator base class that creates the pipeline. The original method of `evaluate` needs a class that does not exist in
        transformers 5.
        """

        def prepare_pipeline(
            self, model_or_pipeline: Any, tokenizer: Any = None, feature_extractor: Any = None, device: Any = None
        ) -> Any:
            return _pipeline(self.task, model_or_pipeline, tokenizer, feature_extractor, device)

    original = evaluate.evaluator(task)
    kind = type(original)
    # The class of `evaluate` for the task is the first base class, because its methods call the methods of `Ours` with `super()`.
    return type(kind.__name__, (kind, Ours), {"__module__": __name__})(
        original.task, default_metric_name=original.default_metric_name
    )


def _pipeline(task: str, model: Any, tokenizer: Any, feature_extractor: Any, device: Any) -> Any:
    import transformers

    from ..models.pipelines.pipeline import pipeline as ours

    processors = {"tokenizer": tokenizer, "feature_extractor": feature_extractor}
    arguments = {name: value for name, value in processors.items() if value is not None}
    if task == "image-classification" and "feature_extractor" in arguments:
        # In transformers 5, image pipelines call this argument `image_processor`.
        arguments["image_processor"] = arguments.pop("feature_extractor")
    if model is None or isinstance(model, ORTModel | str | os.PathLike):
        return ours(task, model, **arguments, **({"device": device} if device is not None else {}))
    if isinstance(model, transformers.PreTrainedModel):
        return transformers.pipeline(task, model=model, device=-1 if device is None else device, **arguments)
    if getattr(model, "task", None) != task and not str(getattr(model, "task", "")).startswith(task):
        raise ConfigError(
            f"model_or_pipeline is a {type(model).__name__} with the task {getattr(model, 'task', None)!r}; this evaluator needs the "
            f"task {task!r}.",
            fix=f"pass a model, or a pipeline from accel.pipeline({task!r}, model).",
        )
    return model
