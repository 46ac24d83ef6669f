"""Pipeline `question-answering` (extractive), which transformers 5 removed."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from transformers.pipelines.base import ChunkPipeline

from ..config import check_names
from ..errors import ConfigError, InputError


class QuestionAnsweringPipeline(ChunkPipeline):  # type: ignore[misc]  # transformers is untyped here
    """Pipeline for extractive question answering with the arguments, defaults and scores of transformers 4.

    The result of each question is `{score, start, end, answer}`.

    A context longer than `max_seq_len` tokens is split into windows that overlap by `doc_stride` tokens. Equal answers from several
    windows or positions are merged and their scores are added.
    """

    _load_processor = False
    _load_image_processor = False
    _load_feature_extractor = False
    _load_tokenizer = True

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        if not getattr(self.tokenizer, "is_fast", False):
            raise ConfigError(
                f"The tokenizer {type(self.tokenizer).__name__} is not a fast tokenizer. The pipeline 'question-answering' needs the "
                "character offsets of tokens, which only fast tokenizers return.",
                fix="load the tokenizer with AutoTokenizer.from_pretrained(...), or leave the argument tokenizer out.",
            )

    def __call__(self, *inputs: Any, question: Any = None, context: Any = None, **kwargs: Any) -> Any:
        """Answer one or several questions.

        Args:
            *inputs: `{"question": ..., "context": ...}` or a list of such dictionaries; or question and context as two arguments.
            question: One question or a list of questions, together with `context`.
            context: One context for all questions, or a list with one context per question.
            **kwargs: `top_k` (1), `max_seq_len` (the tokenizer's limit, at most 384), `doc_stride` (half of `max_seq_len`, at most
                128), `max_question_len` (longer questions are truncated; no limit by default), `padding`, `max_answer_len` (15
                tokens), `handle_impossible_answer` (False), `align_to_words` (True: answers consist of whole words), `batch_size`.

        Returns:
            `{score, start, end, answer}`, where `start` and `end` are character offsets in the context. If there are several answers or no
            answer, the result is a list of at most `top_k` of these dictionaries. For a list of questions, a list with the result of each
            question.

        Raises:
            InputError: A question or context is missing or empty.
        """
        first, *rest = inputs or (None,)
        if rest:
            first, question, context = None, first, rest[0]
        examples, many = _examples(first, question, context)
        answers = super().__call__(examples, **kwargs)
        return answers if many else answers[0]

    def _sanitize_parameters(self, **kwargs: Any) -> tuple[dict[str, Any], dict[str, Any], dict[str, Any]]:
        before = ("doc_stride", "max_seq_len", "max_question_len", "padding")
        after = ("top_k", "max_answer_len", "handle_impossible_answer", "align_to_words")
        check_names("Question answering", "option", kwargs, (*before, *after))
        options = {name: value for name, value in kwargs.items() if value is not None}
        return {n: options[n] for n in before if n in options}, {}, {n: options[n] for n in after if n in options}

    def preprocess(
        self,
        example: Mapping[str, str],
        max_seq_len: int | None = None,
        doc_stride: int | None = None,
        max_question_len: int | None = None,
        padding: bool | str = "do_not_pad",
    ) -> Iterator[dict[str, Any]]:
        """Split one example into overlapping windows of tokens. If the tokenizer pads on the left, the context precedes the question."""
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
            # If a window is too small for the stride, the tokenizers library raises `PanicException`, which does not inherit from
            # `Exception`. Other errors of the library have exactly the type `Exception`.
            if type(error) is not Exception and type(error).__name__ != "PanicException":
                raise
            raise InputError(
                f"The context cannot be split into windows: max_seq_len is {longest} tokens, the question has "
                f"{len(tokenizer(question)['input_ids'])} tokens, and windows overlap by doc_stride = {stride} tokens, so no tokens are "
                "left for the context.",
                fix="shorten the question, or pass a smaller doc_stride or a larger max_seq_len.",
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
        """Return the question truncated to at most `tokens` tokens."""
        offsets = self.tokenizer(question, add_special_tokens=False, return_offsets_mapping=True)["offset_mapping"]
        return question[: offsets[tokens - 1][1]] if len(offsets) > tokens > 0 else question

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
        """Return the best answers over all windows."""
        if top_k < 1 or max_answer_len < 1:
            raise ConfigError(
                f"top_k is {top_k} and max_answer_len is {max_answer_len}; both must be at least 1.",
                fix="pass positive numbers, such as top_k=1 and max_answer_len=15.",
            )
        left = self.tokenizer.padding_side == "left"
        context_place = 0 if left else 1
        # Several token spans can become the same answer when they are extended to complete words, so take more spans than `top_k`.
        spans = top_k * 2 + 10 if align_to_words else top_k
        context = model_outputs[0]["example"]["context"]
        answers: dict[str, dict[str, Any]] = {}
        impossible = 1.0
        for window in model_outputs:
            encoding = window["encoding"]
            # Padding that was added for the batch is after the window's tokens, or before them if the tokenizer pads on the left.
            length = len(encoding.ids)
            part = slice(-length, None) if left else slice(0, length)
            inside = np.array([place == context_place for place in encoding.sequence_ids])
            # Models for questions without an answer predict the [CLS] token as start and end of the answer.
            no_answer = np.array(encoding.ids) == self.tokenizer.cls_token_id
            start, end = (
                _masked_softmax(window[name].float().numpy().reshape(-1)[part], inside | no_answer)
                for name in ("start", "end")
            )
            impossible = min(impossible, float((start * end)[no_answer].max(initial=0.0)))
            scores = np.tril(np.triu(np.outer(start * inside, end * inside)), max_answer_len - 1)
            for index in _largest(scores, spans):
                first, last = (int(position) for position in np.unravel_index(index, scores.shape))
                if scores[first, last] <= 0:
                    continue
                begins, ends = _characters(encoding, first, last, context_place, align_to_words)
                answer = context[begins:ends]
                equal = answers.setdefault(
                    answer.lower(), {"score": 0.0, "start": begins, "end": ends, "answer": answer}
                )
                equal["score"] += float(scores[first, last])
        ranked = list(answers.values())
        if handle_impossible_answer:
            ranked.append({"score": impossible, "start": 0, "end": 0, "answer": ""})
        ranked = sorted(ranked, key=lambda answer: -answer["score"])[:top_k]
        return ranked[0] if len(ranked) == 1 else ranked


def _largest(scores: np.ndarray[Any, Any], count: int) -> np.ndarray[Any, Any]:
    """Return the indices of the largest scores in the flattened array, largest score first.

    If scores are equal, the first indices are returned. `np.argpartition` would choose among them by the processor's
    instruction sets.
    """
    flat = -scores.reshape(-1)
    indices = (
        np.flatnonzero(flat <= np.partition(flat, count - 1)[count - 1]) if count < flat.size else np.arange(flat.size)
    )
    return indices[np.argsort(flat[indices], kind="stable")][:count]


def _characters(encoding: Any, first: int, last: int, sequence: int, whole_words: bool) -> tuple[int, int]:
    """Return the start and end character of a token span. With `whole_words`, extend the span to whole words if the tokenizer has words."""
    if whole_words:
        begins, ends = (encoding.token_to_word(token) for token in (first, last))
        if begins is not None and ends is not None:
            return int(encoding.word_to_chars(begins, sequence)[0]), int(encoding.word_to_chars(ends, sequence)[1])
    return int(encoding.offsets[first][0]), int(encoding.offsets[last][1])


def _masked_softmax(logits: np.ndarray[Any, Any], keep: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """Return the softmax over the positions in `keep`; all zeros if there are none."""
    weights = np.exp(np.where(keep, logits - logits[keep].max(initial=-np.inf), -np.inf))
    result: np.ndarray[Any, Any] = weights / max(float(weights.sum()), np.finfo(np.float32).tiny)
    return result


def _examples(inputs: Any, question: Any, context: Any) -> tuple[list[dict[str, str]], bool]:
    """Convert the arguments of a call to a list of examples; also return whether the caller passed a list."""
    single = isinstance(question, str) if inputs is None else isinstance(inputs, Mapping)
    try:
        if inputs is not None:
            examples = [dict(item) for item in ([inputs] if single else inputs)]
        elif question is None or context is None:
            raise InputError(
                f"The argument {'question' if question is None else 'context'} is missing.",
                fix="pass question=... and context=...",
            )
        else:
            questions = [question] if single else list(question)
            contexts = [context] * len(questions) if isinstance(context, str) else list(context)
            if len(questions) != len(contexts):
                raise InputError(
                    f"{len(questions)} questions were passed with {len(contexts)} contexts.",
                    fix="pass one context for each question, or one context (a string) for all questions.",
                )
            examples = [{"question": q, "context": c} for q, c in zip(questions, contexts, strict=True)]
    except (TypeError, ValueError) as error:
        if isinstance(error, InputError):
            raise
        raise InputError(
            f"The inputs cannot be converted to questions and contexts: {error}.",
            fix='pass {"question": ..., "context": ...}, a list of these dictionaries, or question=... and context=...',
        ) from error
    for example in examples:
        for name in ("question", "context"):
            if not isinstance(example.get(name), str) or not example[name].strip():
                raise InputError(
                    f"The {name!r} of an example is missing, empty or not a string: {example}.",
                    fix=f"pass a string that is not empty as {name!r}.",
                )
    return examples, not single
