"""Text classification of many texts: a window of texts is tokenized together, batched by length, and scored with array operations."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from transformers import TextClassificationPipeline
from transformers.pipelines.text_classification import ClassificationFunction, sigmoid, softmax

from .length_sorted_batches import WINDOW_BATCHES, LengthSorted, by_length, windows

# Tokenizer settings whose effect is the same for one text and for a list of texts.
_SAME_FOR_MANY = {"truncation", "max_length", "add_special_tokens"}
_NO_PADDING = {"padding": (False, True, "longest", "do_not_pad")}
# Methods of transformers' `TextClassificationPipeline` that `BulkTextClassification` replaces.
_STOCK = ("preprocess", "postprocess", "get_iterator")


class SortedTexts(NamedTuple):
    """Tokenized texts or text pairs, sorted by length, shortest first.

    Attributes:
        order: Index of the text in each row, `(rows,) int64`.
        lengths: Number of tokens of each row, `(rows,) int64`.
        values: Concatenated values of all rows, `(tokens,) int64`, by input name.
    """

    order: np.ndarray
    lengths: np.ndarray
    values: Mapping[str, np.ndarray]


class BulkTextClassification(LengthSorted):
    """Mixin for transformers' text classification pipeline that processes windows of texts.

    transformers' own pipeline tokenizes each text, creates its tensors and looks up its label one by one. For a small model, this work
    takes as long as the model's computation.
    """

    tokenizer: Any
    model: Any
    forward: Callable[..., Any]

    def _windows(
        self, items: Iterator[Any], size: int, args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> Iterator[Any]:
        # `get_iterator` sorts the inputs by their number of tokens, so the sorting of `LengthSorted` is skipped. For a
        # generator, transformers returns an iterator.
        return iter(super(LengthSorted, self).__call__((item for item in items), *args, **kwargs))  # type: ignore[misc]

    def get_iterator(
        self,
        inputs: Iterable[Any],
        num_workers: int,
        batch_size: int,
        preprocess_params: Mapping[str, Any],
        forward_params: Mapping[str, Any],
        postprocess_params: Mapping[str, Any],
    ) -> Iterator[Any]:
        """Yield results in the order of the inputs; replaces the method of transformers' pipeline."""

        def by_rows(rows: Iterable[Any]) -> Iterator[Any]:
            parameters = (preprocess_params, forward_params, postprocess_params)
            results: Iterator[Any] = super(BulkTextClassification, self).get_iterator(  # type: ignore[misc]
                rows, num_workers, batch_size, *parameters
            )
            return results

        if batch_size == 1 or num_workers or not vars(self).keys().isdisjoint(_STOCK):
            yield from by_rows(inputs)
            return
        for rows in windows(iter(inputs), batch_size * WINDOW_BATCHES):
            window = self._tokenized(rows, preprocess_params)
            if window is None:
                yield from by_length(rows, lambda ordered: list(by_rows(ordered)))
            else:
                yield from self._classified(window, batch_size, forward_params, postprocess_params)

    def _tokenized(self, rows: list[Any], settings: Mapping[str, Any]) -> SortedTexts | None:
        """Tokenize rows together; return `None` if tokenizing them one by one could give another result."""
        tokenizer = self.tokenizer
        texts = _texts(rows)
        if texts is None or not tokenizer.is_fast or tokenizer.pad_token_id is None or not _one_for_many(settings):
            return None
        encoding = tokenizer(**texts, **{name: value for name, value in settings.items() if name not in _NO_PADDING})
        lengths = np.fromiter(map(len, encoding["input_ids"]), np.int64)
        order = np.argsort(lengths, kind="stable")
        values = {}
        for name, tokens in encoding.items():
            if len(tokens) != len(rows) or any(len(row) != length for row, length in zip(tokens, lengths, strict=True)):
                return None
            values[name] = np.fromiter(itertools.chain.from_iterable(tokens[i] for i in order), np.int64)
        return SortedTexts(order, lengths[order], values)

    def _classified(
        self, window: SortedTexts, size: int, forward_params: Mapping[str, Any], postprocess_params: Mapping[str, Any]
    ) -> list[Any]:
        results: list[Any] = [None] * len(window.order)
        ends = window.lengths.cumsum()
        for start in range(0, len(results), size):
            rows = slice(start, min(start + size, len(results)))
            outputs = self.forward(self._batch(window, ends, rows), **forward_params)
            for i, result in zip(
                window.order[rows], self._results(outputs["logits"], **postprocess_params), strict=True
            ):
                results[i] = result
        return results

    def _batch(self, window: SortedTexts, ends: np.ndarray, rows: slice) -> dict[str, torch.Tensor]:
        """Return rows of a window as tensors, padded to the longest row as in transformers' pipeline."""
        lengths = window.lengths[rows]
        # The tensors have at least one column, because the model cannot run on the zero columns of a batch of empty texts.
        longest = max(lengths[-1], 1)
        column = np.arange(longest)
        left = self.tokenizer.padding_side == "left"
        is_token = column >= longest - lengths[:, None] if left else column < lengths[:, None]
        tokens = slice(ends[rows.start] - lengths[0], ends[rows.stop - 1])
        batch = {}
        for name, values in window.values.items():
            padded = np.full(is_token.shape, self.tokenizer.pad_token_id if name == "input_ids" else 0, np.int64)
            padded[is_token] = values[tokens]
            batch[name] = torch.from_numpy(padded)
        return batch

    def _results(
        self, logits: torch.Tensor, function_to_apply: Any = None, top_k: int | None = 1, _legacy: bool = True
    ) -> list[Any]:
        """Return the same results as transformers' pipeline for logits `(rows, labels)`, one per row."""
        config = self.model.config
        labels = config.id2label
        scores = _scores(logits.float().numpy(), function_to_apply or _usual_function(config))
        if top_k == 1 and _legacy:
            best = zip(scores.argmax(1).tolist(), scores.max(1).tolist(), strict=True)
            return [{"label": labels[i], "score": score} for i, score in best]
        order = np.argsort(-scores, axis=1, kind="stable")[:, :top_k]
        best_rows = zip(order.tolist(), np.take_along_axis(scores, order, 1).tolist(), strict=True)
        return [
            [{"label": labels[i], "score": score} for i, score in zip(row, of_row, strict=True)]
            for row, of_row in best_rows
        ]


def _texts(rows: list[Any]) -> dict[str, list[str]] | None:
    """Return tokenizer arguments for texts or text pairs; `None` for other inputs and for a mixture."""
    if all(isinstance(row, str) for row in rows):
        return {"text": rows}
    names = ("text", "text_pair")
    pairs = all(isinstance(row, Mapping) and row.keys() == set(names) for row in rows)
    # Tokenizers ignore an empty second text in a single row, but not in a batch.
    if pairs and all(
        isinstance(row["text"], str) and isinstance(row["text_pair"], str) and row["text_pair"] for row in rows
    ):
        return {name: [row[name] for row in rows] for name in names}
    return None


def _one_for_many(settings: Mapping[str, Any]) -> bool:
    """Return whether a tokenizer with these settings gives the same result for a list of texts as for each text alone."""
    return all(name in _SAME_FOR_MANY or value in _NO_PADDING.get(name, ()) for name, value in settings.items())


def _usual_function(config: Any) -> ClassificationFunction:
    if config.problem_type == "regression":
        return ClassificationFunction.NONE
    each_alone = config.problem_type == "multi_label_classification" or config.num_labels == 1
    return ClassificationFunction.SIGMOID if each_alone else ClassificationFunction.SOFTMAX


def _scores(logits: np.ndarray, function: Any) -> np.ndarray:
    how = {
        ClassificationFunction.SIGMOID: sigmoid,
        ClassificationFunction.SOFTMAX: softmax,
        ClassificationFunction.NONE: lambda outputs: outputs,
    }
    if function not in how:
        # The same error as in transformers' pipeline, which this class replaces.
        raise ValueError(f"Unrecognized `function_to_apply` argument: {function}")
    scores: np.ndarray = how[function](logits)
    return scores


def classifies_windows(impl: type) -> bool:
    """Return whether a pipeline class pre- and postprocesses texts exactly like transformers' text classification pipeline."""
    stock = TextClassificationPipeline
    return issubclass(impl, stock) and all(getattr(impl, name) is getattr(stock, name) for name in _STOCK)
