"""Extractive question answering, which transformers 5 removed."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from transformers.pipelines.base import ChunkPipeline

from ...errors import ConfigError, InputError


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

    def __call__(self, *inputs: Any, question: Any = None, context: Any = None, **kwargs: Any) -> Any:
        """Answer one question or many.

        Args:
            *inputs: `{"question": ..., "context": ...}`, or a list of them; or question and context.
            question: One question or a list, with `context`.
            context: One context for all questions, or as many as questions.
            **kwargs: `top_k`, `doc_stride`, `max_seq_len`, `max_answer_len`, `handle_impossible_answer`, `batch_size`.

        Returns:
            `{score, start, end, answer}` with character offsets into the context; a list of `top_k` of them for
            `top_k` above 1; and a list of these for a list of questions.

        Raises:
            InputError: A question or context is missing or empty.
        """
        given, *rest = inputs or (None,)
        if rest:
            given, question, context = None, given, rest[0]
        examples, many = _examples(given, question, context)
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
        stride = doc_stride if doc_stride is not None else min(longest // 4, 128)
        try:
            encoded = tokenizer(
                example["question"],
                example["context"],
                truncation="only_second",
                max_length=longest,
                stride=stride,
                return_overflowing_tokens=True,
                return_offsets_mapping=True,
            )
        except BaseException as error:
            # Where a window has no room for the stride, tokenizers' panic is not even an `Exception`; its errors have no class.
            if type(error) is not Exception and type(error).__name__ != "PanicException":
                raise
            raise InputError(
                f"A window of {longest} tokens that overlap by {stride} has no room behind a question of "
                f"{len(tokenizer(example['question'])['input_ids'])} tokens.",
                fix="shorten the question, lower doc_stride, or raise max_seq_len.",
            ) from error
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
    try:
        return _listed(inputs, question, context)
    except (TypeError, ValueError) as error:
        if isinstance(error, InputError):
            raise
        raise InputError(
            f"Of these inputs no questions and contexts can be taken: {error}.",
            fix='pass {"question": ..., "context": ...}, a list of such, or question=... and context=...',
        ) from error


def _listed(inputs: Any, question: Any, context: Any) -> tuple[list[dict[str, str]], bool]:
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
