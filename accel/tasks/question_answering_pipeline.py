"""Extractive question answering, which transformers 5 removed."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from transformers.pipelines.base import ChunkPipeline

from ..errors import ConfigError, InputError


class QuestionAnsweringPipeline(ChunkPipeline):  # type: ignore[misc]  # transformers is untyped here
    """Extractive question answering with the arguments, defaults and scores of transformers 4: `{score, start, end, answer}`.

    A context longer than `max_seq_len` tokens is read in windows that overlap by `doc_stride` tokens. Equal answers, from several
    windows or places, are one answer, whose score is the sum of theirs.
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
            **kwargs: `top_k` (1), `max_seq_len` (the tokenizer's limit, at most 384), `doc_stride` (half of `max_seq_len`, at most
                128), `max_question_len` (tokens of a question that are read; all by default), `padding`, `max_answer_len` (15
                tokens), `handle_impossible_answer` (False), `align_to_words` (True: answers end where words end), `batch_size`.

        Returns:
            `{score, start, end, answer}` with character offsets into the context; a list of at most `top_k` of them where there
            are several, or none; and a list of these for a list of questions.

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
            "pre": ("doc_stride", "max_seq_len", "max_question_len", "padding"),
            "post": ("top_k", "max_answer_len", "handle_impossible_answer", "align_to_words"),
        }
        unknown = set(kwargs) - set(known["pre"]) - set(known["post"])
        if unknown:
            raise ConfigError(f"Question answering has no option {sorted(unknown)}.", fix=f"use {known}.")
        return (
            {name: kwargs[name] for name in known["pre"] if kwargs.get(name) is not None},
            {},
            {name: kwargs[name] for name in known["post"] if kwargs.get(name) is not None},
        )

    def preprocess(
        self,
        example: Mapping[str, str],
        max_seq_len: int | None = None,
        doc_stride: int | None = None,
        max_question_len: int | None = None,
        padding: bool | str = "do_not_pad",
    ) -> Iterator[dict[str, Any]]:
        """Tokenize one example into overlapping windows; the context is first where the tokenizer pads on the left."""
        tokenizer = self.tokenizer
        longest = max_seq_len if max_seq_len is not None else min(tokenizer.model_max_length, 384)
        stride = doc_stride if doc_stride is not None else min(longest // 2, 128)
        question, context = example["question"], example["context"]
        if max_question_len is not None:
            question = self._cut(question, max_question_len)
        context_place = 0 if tokenizer.padding_side == "left" else 1
        try:
            encoded = tokenizer(
                *((question, context) if context_place else (context, question)),
                truncation="only_second" if context_place else "only_first",
                max_length=longest,
                stride=stride,
                padding=padding,
                return_overflowing_tokens=True,
            )
        except BaseException as error:
            # Where a window has no room for the stride, tokenizers' panic is not even an `Exception`; its errors have no class.
            if type(error) is not Exception and type(error).__name__ != "PanicException":
                raise
            raise InputError(
                f"A window of {longest} tokens that overlap by {stride} has no room behind a question of "
                f"{len(tokenizer(question)['input_ids'])} tokens.",
                fix="shorten the question, lower doc_stride, or raise max_seq_len.",
            ) from error
        count = len(encoded["input_ids"])
        names = [name for name in tokenizer.model_input_names if name in encoded]
        for i in range(count):
            yield {
                "is_last": i == count - 1,
                "example": example,
                "encoding": encoded[i],
                **{name: torch.tensor([encoded[name][i]]) for name in names},
            }

    def _cut(self, question: str, tokens: int) -> str:
        """The beginning of a question, of at most so many tokens."""
        found = self.tokenizer(question, add_special_tokens=False, return_offsets_mapping=True)["offset_mapping"]
        return question[: found[tokens - 1][1]] if len(found) > tokens > 0 else question

    def _forward(self, model_inputs: dict[str, Any]) -> dict[str, Any]:
        extras = {name: model_inputs.pop(name) for name in ("is_last", "example", "encoding")}
        output = self.model(**model_inputs)
        return {"start": output["start_logits"], "end": output["end_logits"], **extras}

    def postprocess(
        self,
        model_outputs: Sequence[Mapping[str, Any]],
        top_k: int = 1,
        max_answer_len: int = 15,
        handle_impossible_answer: bool = False,
        align_to_words: bool = True,
    ) -> Any:
        """The best answers over all windows."""
        if top_k < 1 or max_answer_len < 1:
            raise ConfigError(f"top_k is {top_k} and max_answer_len {max_answer_len}.", fix="use at least 1 for both.")
        left = self.tokenizer.padding_side == "left"
        context_place = 0 if left else 1
        # Spans that become one answer when they are aligned to words leave room for others.
        spans = top_k * 2 + 10 if align_to_words else top_k
        context = model_outputs[0]["example"]["context"]
        answers: dict[str, dict[str, Any]] = {}
        impossible = 1.0
        for window in model_outputs:
            encoding = window["encoding"]
            # Padding of a batch follows the window's own tokens (or precedes them, for left-padding tokenizers).
            length = len(encoding.ids)
            part = slice(-length, None) if left else slice(0, length)
            inside = np.array([place == context_place for place in encoding.sequence_ids])
            # The [CLS] token stands for "no answer".
            no_answer = np.array(encoding.ids) == self.tokenizer.cls_token_id
            start, end = (
                _masked_softmax(window[name].float().numpy().reshape(-1)[part], inside | no_answer)
                for name in ("start", "end")
            )
            impossible = min(impossible, float((start * end)[no_answer].max(initial=0.0)))
            scores = np.tril(np.triu(np.outer(start * inside, end * inside)), max_answer_len - 1)
            for index in _largest(scores, spans):
                first, last = (int(place) for place in np.unravel_index(index, scores.shape))
                if scores[first, last] <= 0:
                    continue
                begins, ends = _characters(encoding, first, last, context_place, align_to_words)
                answer = context[begins:ends]
                equal = answers.setdefault(
                    answer.lower(), {"score": 0.0, "start": begins, "end": ends, "answer": answer}
                )
                equal["score"] += float(scores[first, last])
        found = list(answers.values())
        if handle_impossible_answer:
            found.append({"score": impossible, "start": 0, "end": 0, "answer": ""})
        found = sorted(found, key=lambda answer: -answer["score"])[:top_k]
        return found[0] if len(found) == 1 else found


def _largest(scores: np.ndarray[Any, Any], count: int) -> np.ndarray[Any, Any]:
    """Indices of the largest scores, the largest first, into the flattened array."""
    flat = -scores.reshape(-1)
    found = np.argpartition(flat, count)[:count] if count < flat.size else np.arange(flat.size)
    return found[np.argsort(flat[found], kind="stable")]


def _characters(encoding: Any, first: int, last: int, sequence: int, whole_words: bool) -> tuple[int, int]:
    """The characters of a span of tokens, or of the words that they belong to, where the tokenizer has words."""
    if whole_words:
        begins, ends = (encoding.token_to_word(token) for token in (first, last))
        if begins is not None and ends is not None:
            return int(encoding.word_to_chars(begins, sequence)[0]), int(encoding.word_to_chars(ends, sequence)[1])
    return int(encoding.offsets[first][0]), int(encoding.offsets[last][1])


def _masked_softmax(logits: np.ndarray[Any, Any], keep: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """Probabilities over the positions to keep; zeros where there is none."""
    weights = np.exp(np.where(keep, logits - logits[keep].max(initial=-np.inf), -np.inf))
    result: np.ndarray[Any, Any] = weights / max(float(weights.sum()), np.finfo(np.float32).tiny)
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
