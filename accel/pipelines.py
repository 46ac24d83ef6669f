"""`accel.pipeline`: transformers' pipelines over our models, with length-sorted batches, and question answering."""

from __future__ import annotations

import functools
import itertools
import os
import pkgutil
import types
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch
import transformers
from transformers.pipelines import PIPELINE_REGISTRY
from transformers.pipelines.base import ChunkPipeline, Pipeline

import accel

from .errors import ConfigError, InputError, TaskError
from .modeling import ORTModel
from .tasks import SYNONYMS, TASKS, task_spec

WINDOW_BATCHES = 64
"""Batches that share one sort: enough for little padding, few enough that a stream starts early."""


class LengthSorted:
    """Sorts a list of inputs by length before it is cut into batches, and restores the order.

    A batch is padded to its longest member, so mixed lengths waste most of the work: on the BANKING77 queries sorting
    alone doubled the throughput. Mixed into a stock pipeline class.
    """

    _batch_size: int | None

    def __call__(self, inputs: Any = None, *args: Any, batch_size: int | None = None, **kwargs: Any) -> Any:
        """As the stock pipeline; lists, generators and data sets are sorted window by window."""
        if isinstance(inputs, tuple) or type(inputs).__module__.startswith("datasets."):
            inputs = list(inputs)
        if isinstance(inputs, list) and not inputs:
            return []
        size = batch_size if batch_size is not None else self._batch_size
        if size is not None and size > 1:
            kwargs["batch_size"] = size
            if isinstance(inputs, list) and len(inputs) > size:
                return list(self._windows(iter(inputs), size, args, kwargs))
            if isinstance(inputs, types.GeneratorType | torch.utils.data.Dataset):
                return self._windows(iter(inputs), size, args, kwargs)
        elif batch_size is not None:
            kwargs["batch_size"] = batch_size
        return super().__call__(*(() if inputs is None else (inputs,)), *args, **kwargs)  # type: ignore[misc]

    def _windows(
        self, items: Iterator[Any], size: int, args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> Iterator[Any]:
        while window := list(itertools.islice(items, size * WINDOW_BATCHES)):
            order = sorted(range(len(window)), key=lambda i: _length(window[i]))
            found = super().__call__([window[i] for i in order], *args, **kwargs)  # type: ignore[misc]
            # Some pipelines unwrap a list of one.
            results = found if len(window) > 1 or isinstance(found, list) else [found]
            restored: list[Any] = [None] * len(window)
            for i, result in zip(order, results, strict=True):
                restored[i] = result
            yield from restored


def _length(item: Any) -> int:
    """Characters of an input; 0 where length means nothing (images), which keeps the order."""
    if isinstance(item, str):
        return len(item)
    if isinstance(item, Mapping):
        return sum(len(value) for value in item.values() if isinstance(value, str))
    return 0


class QuestionAnsweringPipeline(ChunkPipeline):  # type: ignore[misc]  # transformers is untyped here
    """Extractive question answering, in the shape that transformers 4 had: `{score, start, end, answer}`.

    A context longer than `max_seq_len` tokens is read in windows that overlap by `doc_stride`.
    """

    _load_processor = False
    _load_image_processor = False
    _load_feature_extractor = False
    _load_tokenizer = True

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        if not getattr(self.tokenizer, "is_fast", False):
            raise ConfigError(
                "Question answering needs a fast tokenizer: answers are found by character offsets.",
                fix="load the tokenizer with AutoTokenizer.from_pretrained(...).",
            )

    def __call__(self, inputs: Any = None, *, question: Any = None, context: Any = None, **kwargs: Any) -> Any:
        """Answer one question or many.

        Args:
            inputs: `{"question": ..., "context": ...}`, or a list of them.
            question: One question or a list, with `context`.
            context: One context for all questions, or as many as questions.
            **kwargs: `top_k`, `doc_stride`, `max_seq_len`, `max_answer_len`, `handle_impossible_answer`, `batch_size`.

        Returns:
            `{score, start, end, answer}` with character offsets into the context; a list of `top_k` of them for
            `top_k` above 1; and a list of these for a list of questions.

        Raises:
            InputError: A question or context is missing or empty.
        """
        examples, many = _examples(inputs, question, context)
        answers = super().__call__(examples, **kwargs)
        return answers if many else answers[0]

    def _sanitize_parameters(self, **kwargs: Any) -> tuple[dict[str, Any], dict[str, Any], dict[str, Any]]:
        known = {
            "pre": ("doc_stride", "max_seq_len"),
            "post": ("top_k", "max_answer_len", "handle_impossible_answer"),
        }
        unknown = set(kwargs) - set(known["pre"]) - set(known["post"])
        if unknown:
            raise ConfigError(f"Question answering has no option {sorted(unknown)}.", fix=f"use {known}.")
        return (
            {name: kwargs[name] for name in known["pre"] if name in kwargs},
            {},
            {name: kwargs[name] for name in known["post"] if name in kwargs},
        )

    def preprocess(
        self, example: Mapping[str, str], max_seq_len: int | None = None, doc_stride: int | None = None
    ) -> Iterator[dict[str, Any]]:
        """Tokenize one example into overlapping windows."""
        tokenizer = self.tokenizer
        longest = min(max_seq_len or 384, tokenizer.model_max_length)
        encoded = tokenizer(
            example["question"],
            example["context"],
            truncation="only_second",
            max_length=longest,
            stride=doc_stride if doc_stride is not None else min(longest // 4, 128),
            return_overflowing_tokens=True,
            return_offsets_mapping=True,
        )
        count = len(encoded["input_ids"])
        names = [name for name in tokenizer.model_input_names if name in encoded]
        for i in range(count):
            offsets = [
                offset if sequence == 1 else None
                for offset, sequence in zip(encoded["offset_mapping"][i], encoded.sequence_ids(i), strict=True)
            ]
            yield {
                "is_last": i == count - 1,
                "example": example,
                "offsets": offsets,
                **{name: torch.tensor([encoded[name][i]]) for name in names},
            }

    def _forward(self, model_inputs: dict[str, Any]) -> dict[str, Any]:
        extras = {name: model_inputs.pop(name) for name in ("is_last", "example", "offsets")}
        output = self.model(**model_inputs)
        return {"start": output["start_logits"], "end": output["end_logits"], **extras}

    def postprocess(
        self,
        model_outputs: Sequence[Mapping[str, Any]],
        top_k: int = 1,
        max_answer_len: int = 15,
        handle_impossible_answer: bool = False,
    ) -> Any:
        """The best spans over all windows; a span found in two windows counts once."""
        if top_k < 1 or max_answer_len < 1:
            raise ConfigError(f"top_k is {top_k} and max_answer_len {max_answer_len}.", fix="use at least 1 for both.")
        best: dict[tuple[int, int], float] = {}
        impossible = 1.0
        for window in model_outputs:
            offsets = window["offsets"]
            # Padding of a batch follows the window's own tokens (or precedes them, for left-padding tokenizers).
            length = len(offsets)
            part = slice(-length, None) if self.tokenizer.padding_side == "left" else slice(0, length)
            inside = np.array([offset is not None for offset in offsets])
            keep = inside.copy()
            keep[0] = True  # the [CLS] position stands for "no answer"
            start = _masked_softmax(window["start"].float().numpy().reshape(-1)[part], keep)
            end = _masked_softmax(window["end"].float().numpy().reshape(-1)[part], keep)
            impossible = min(impossible, float(start[0] * end[0]))
            scores = np.tril(np.triu(np.outer(start * inside, end * inside)), max_answer_len - 1)
            for index in np.argsort(-scores, axis=None)[: top_k * 4]:
                first, last = np.unravel_index(index, scores.shape)
                if scores[first, last] > 0:
                    span = (int(offsets[first][0]), int(offsets[last][1]))
                    best[span] = max(best.get(span, 0.0), float(scores[first, last]))
        context = model_outputs[0]["example"]["context"]
        answers = [
            {"score": score, "start": start, "end": end, "answer": context[start:end]}
            for (start, end), score in best.items()
        ]
        if handle_impossible_answer:
            answers.append({"score": impossible, "start": 0, "end": 0, "answer": ""})
        answers.sort(key=lambda answer: -answer["score"])
        return answers[:top_k] if top_k > 1 else answers[0]


def _masked_softmax(logits: np.ndarray[Any, Any], keep: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    weights = np.where(keep, np.exp(logits - logits[keep].max()), 0.0)
    result: np.ndarray[Any, Any] = weights / weights.sum()
    return result


def _examples(inputs: Any, question: Any, context: Any) -> tuple[list[dict[str, str]], bool]:
    """All forms of a call as a list of examples, and whether a list was asked for."""
    if inputs is None:
        if question is None or context is None:
            raise InputError("A question and a context are needed.", fix="pass question=... and context=...")
        many = not isinstance(question, str)
        questions = [question] if isinstance(question, str) else list(question)
        contexts = [context] * len(questions) if isinstance(context, str) else list(context)
        if len(questions) != len(contexts):
            raise InputError(f"{len(questions)} questions and {len(contexts)} contexts.", fix="pass as many of each.")
        examples = [{"question": q, "context": c} for q, c in zip(questions, contexts, strict=True)]
    else:
        many = not isinstance(inputs, Mapping)
        examples = [dict(inputs)] if isinstance(inputs, Mapping) else [dict(item) for item in inputs]
    for example in examples:
        for name in ("question", "context"):
            if not isinstance(example.get(name), str) or not example[name].strip():
                raise InputError(f"An example has no {name}: {example}.", fix=f"give it a non-empty {name!r}.")
    return examples, many


@functools.cache
def _sorted_class(impl: type[Pipeline]) -> type[Pipeline]:
    """The stock pipeline with sorted batches, under its own name."""
    return type(impl.__name__, (LengthSorted, impl), {"__module__": __name__, "__doc__": impl.__doc__})


def pipeline(
    task: str | None = None,
    model: str | os.PathLike[str] | ORTModel | Any | None = None,
    *,
    backend: str | None = None,
    device: str | None = None,
    tokenizer: Any = None,
    image_processor: Any = None,
    feature_extractor: Any = None,
    batch_size: int | None = None,
    model_kwargs: Mapping[str, Any] | None = None,
    **kwargs: Any,
) -> Pipeline:
    """A pipeline over an accelerated model.

    Batched calls sort by length inside a window and restore the order. `question-answering`, which transformers 5
    removed, works as it did.

    Args:
        task: A pipeline task; the model's own when `None`.
        model: Hub id, folder, or a model (ours or transformers').
        backend: For an id or folder, as in `from_pretrained`.
        device: Likewise.
        tokenizer, image_processor, feature_extractor: Those beside the model when `None`.
        batch_size: Inputs a call of the model.
        model_kwargs: More arguments of `from_pretrained`.
        **kwargs: Arguments of the stock pipeline.

    Raises:
        ConfigError: No model was given.
        TaskError: The task is unknown, or the model does another one.
    """
    if model is None:
        raise ConfigError("No model was given; accel has no default models.", fix="pass model=<Hub id or folder>.")
    if isinstance(model, str | os.PathLike):
        model = _load(task, model, {"backend": backend, "device": device, **(model_kwargs or {})})
    elif backend is not None or device is not None:
        raise ConfigError(
            "backend=... and device=... are for a model given by id or folder.", fix="load the model with them."
        )
    if task is None:
        if not isinstance(model, ORTModel):
            raise TaskError("The task of a model from transformers must be named.", fix="pass task=...")
        task = "feature-extraction" if model.artifact.task == "sentence-similarity" else model.artifact.task
    if isinstance(model, ORTModel):
        _check_model(task, model)
    ours = _ours(task)
    impl: Any = ours or _stock(task)
    folder = model.artifact.path if isinstance(model, ORTModel) else None
    if folder is not None and (model.main_input_name == "input_ids" or model.can_generate()):
        tokenizer = tokenizer or transformers.AutoTokenizer.from_pretrained(folder, local_files_only=True)
    if folder is not None and model.main_input_name == "pixel_values":
        image_processor = image_processor or transformers.AutoImageProcessor.from_pretrained(
            folder, local_files_only=True
        )
    if folder is not None and model.main_input_name == "input_features":
        feature_extractor = feature_extractor or transformers.AutoFeatureExtractor.from_pretrained(
            folder, local_files_only=True
        )
    given = {"tokenizer": tokenizer, "image_processor": image_processor, "feature_extractor": feature_extractor}
    given = {name: value for name, value in given.items() if value is not None}
    if batch_size is not None:
        given["batch_size"] = batch_size
    if ours is not None:
        if tokenizer is None:
            raise ConfigError(f"The pipeline {task!r} needs a tokenizer.", fix="pass tokenizer=...")
        return ours(model=model, task=task, **given, **kwargs)
    made: Pipeline = transformers.pipeline(task, model=model, pipeline_class=_sorted_class(impl), **given, **kwargs)
    return made


def _ours(task: str) -> type[Pipeline] | None:
    """The class of a pipeline that transformers 5 removed and accel brings back; `None` for the others."""
    if task == "question-answering":
        return QuestionAnsweringPipeline
    from .text2text import PIPELINES

    return PIPELINES.get("translation" if task.startswith("translation_") else task)


def _load(task: str | None, model: str | os.PathLike[str], kwargs: dict[str, Any]) -> ORTModel:
    if task is None:
        from .artifact import MANIFEST, Artifact
        from .hub import HubOptions, locate
        from .tasks import infer_task, read_config

        folder = locate(model, HubOptions()).folder
        is_artifact = (folder / MANIFEST).is_file()
        task = Artifact.load(folder).task if is_artifact else infer_task(read_config(folder), folder)
    # A sentence-similarity artifact serves a feature-extraction pipeline: both have one class, which finds out itself.
    cls: type[ORTModel] = getattr(accel, task_spec(task).model)
    return cls.from_pretrained(model, **kwargs)


def _stock(task: str) -> type[Pipeline]:
    """The stock class of a pipeline task.

    Raises:
        TaskError: transformers has none, or accel does not serve it.
    """
    from .errors import did_you_mean

    serves = {name for spec in TASKS.values() for name in (spec.name, *spec.pipelines)} | set(SYNONYMS)
    try:
        _, targeted, _ = PIPELINE_REGISTRY.check_task(task)
    except KeyError as error:
        known = sorted(serves & set(PIPELINE_REGISTRY.get_supported_tasks()))
        raise TaskError(
            f"There is no pipeline {task!r}.{did_you_mean(task, known)}", fix=f"use one of {', '.join(known)}."
        ) from error
    impl = targeted["impl"]
    # transformers 5.2x names its classes by dotted path; a registered one is the class itself.
    found: type[Pipeline] = pkgutil.resolve_name(impl) if isinstance(impl, str) else impl
    return found


def _check_model(task: str, model: ORTModel) -> None:
    wanted = task_spec(task)
    if wanted.model != type(model).__name__:
        raise TaskError(
            f"{type(model).__name__} does not serve the pipeline {task!r}.", fix=f"use {wanted.model}, or another task."
        )
