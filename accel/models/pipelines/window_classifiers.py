"""Texts classified window by window: tokenized at once, cut into batches of like lengths, scored without a loop of rows."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from transformers import TextClassificationPipeline
from transformers.pipelines.text_classification import ClassificationFunction, sigmoid, softmax

from .length_sorted_batches import WINDOW_BATCHES, LengthSorted, by_length, windows

# What a tokenizer is told that means the same for one text and for a window of them.
_SAME_FOR_MANY = {"truncation", "max_length", "add_special_tokens"}
_NO_PADDING = {"padding": (False, True, "longest", "do_not_pad")}
# Methods that are done here in another way, where they are the stock class's.
_STOCK = ("preprocess", "postprocess", "get_iterator")


class Window(NamedTuple):
    """Texts, or pairs of them, as tokens; the shortest first.

    Attributes:
        order: Which text each row is, `(rows,) int64`.
        lengths: Tokens of each row, `(rows,) int64`.
        values: By name of the input, the tokens of all rows one behind another, `(tokens,) int64`.
    """

    order: np.ndarray
    lengths: np.ndarray
    values: Mapping[str, np.ndarray]


class ClassifiesWindows(LengthSorted):
    """Text classification over windows of texts. Mixed into the stock class.

    What the stock pipeline does for each text (tokenize it, make tensors, look labels up) takes as long as a small model
    takes to compute it.
    """

    tokenizer: Any
    model: Any
    forward: Callable[..., Any]

    def _windows(
        self, items: Iterator[Any], size: int, args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> Iterator[Any]:
        # Sorted where tokens are known: in `get_iterator`.
        return iter(super(LengthSorted, self).__call__((one for one in items), *args, **kwargs))  # type: ignore[misc]

    def get_iterator(
        self,
        inputs: Iterable[Any],
        num_workers: int,
        batch_size: int,
        preprocess_params: Mapping[str, Any],
        forward_params: Mapping[str, Any],
        postprocess_params: Mapping[str, Any],
    ) -> Iterator[Any]:
        """Results in the order of the inputs; the stock pipeline's method of this name."""

        def by_rows(rows: Iterable[Any]) -> Iterator[Any]:
            parameters = (preprocess_params, forward_params, postprocess_params)
            found: Iterator[Any] = super(ClassifiesWindows, self).get_iterator(  # type: ignore[misc]
                rows, num_workers, batch_size, *parameters
            )
            return found

        if batch_size == 1 or num_workers or not vars(self).keys().isdisjoint(_STOCK):
            yield from by_rows(inputs)
            return
        for rows in windows(iter(inputs), batch_size * WINDOW_BATCHES):
            window = self._tokenized(rows, preprocess_params)
            if window is None:
                yield from by_length(rows, lambda ordered: list(by_rows(ordered)))
            else:
                yield from self._classified(window, batch_size, forward_params, postprocess_params)

    def _tokenized(self, rows: list[Any], settings: Mapping[str, Any]) -> Window | None:
        """`None` where the tokenizer might make of many at once something else than of each."""
        tokenizer = self.tokenizer
        texts = _texts(rows)
        if texts is None or not tokenizer.is_fast or tokenizer.pad_token_id is None or not _one_for_many(settings):
            return None
        found = tokenizer(**texts, **{name: value for name, value in settings.items() if name not in _NO_PADDING})
        lengths = np.fromiter(map(len, found["input_ids"]), np.int64)
        order = np.argsort(lengths, kind="stable")
        values = {}
        for name, tokens in found.items():
            if len(tokens) != len(rows) or any(len(one) != length for one, length in zip(tokens, lengths, strict=True)):
                return None
            values[name] = np.fromiter(itertools.chain.from_iterable(tokens[i] for i in order), np.int64)
        return Window(order, lengths[order], values)

    def _classified(
        self, window: Window, size: int, forward_params: Mapping[str, Any], postprocess_params: Mapping[str, Any]
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

    def _batch(self, window: Window, ends: np.ndarray, rows: slice) -> dict[str, torch.Tensor]:
        """Rows padded to the longest of them, as the stock pipeline pads."""
        lengths = window.lengths[rows]
        # Of empty texts alone a model would compute nothing; beside others they are padding.
        longest = max(lengths[-1], 1)
        place = np.arange(longest)
        left = self.tokenizer.padding_side == "left"
        held = place >= longest - lengths[:, None] if left else place < lengths[:, None]
        tokens = slice(ends[rows.start] - lengths[0], ends[rows.stop - 1])
        batch = {}
        for name, values in window.values.items():
            padded = np.full(held.shape, self.tokenizer.pad_token_id if name == "input_ids" else 0, np.int64)
            padded[held] = values[tokens]
            batch[name] = torch.from_numpy(padded)
        return batch

    def _results(
        self, logits: torch.Tensor, function_to_apply: Any = None, top_k: int | None = 1, _legacy: bool = True
    ) -> list[Any]:
        """What the stock class makes of each row, `(rows, labels)`."""
        config = self.model.config
        labels = config.id2label
        scores = _scores(logits.float().numpy(), function_to_apply or _usual_function(config))
        if top_k == 1 and _legacy:
            best = zip(scores.argmax(1).tolist(), scores.max(1).tolist(), strict=True)
            return [{"label": labels[i], "score": score} for i, score in best]
        order = np.argsort(-scores, axis=1, kind="stable")[:, :top_k]
        taken = zip(order.tolist(), np.take_along_axis(scores, order, 1).tolist(), strict=True)
        return [
            [{"label": labels[i], "score": score} for i, score in zip(row, of_row, strict=True)]
            for row, of_row in taken
        ]


def _texts(rows: list[Any]) -> dict[str, list[str]] | None:
    """A tokenizer's arguments for texts, or for pairs of them; `None` for other rows, and for both in one list."""
    if all(isinstance(row, str) for row in rows):
        return {"text": rows}
    names = ("text", "text_pair")
    pairs = all(isinstance(row, Mapping) and row.keys() == set(names) for row in rows)
    # An empty second text of one row is no text to a tokenizer, and one of many is.
    if pairs and all(
        isinstance(row["text"], str) and isinstance(row["text_pair"], str) and row["text_pair"] for row in rows
    ):
        return {name: [row[name] for row in rows] for name in names}
    return None


def _one_for_many(settings: Mapping[str, Any]) -> bool:
    """Whether a tokenizer that is told so makes of many texts at once what it makes of each."""
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
        raise ValueError(f"Unrecognized `function_to_apply` argument: {function}")
    found: np.ndarray = how[function](logits)
    return found


def classifies_windows(impl: type) -> bool:
    """Whether a pipeline class reads and answers texts as the stock one does."""
    stock = TextClassificationPipeline
    return issubclass(impl, stock) and all(getattr(impl, name) is getattr(stock, name) for name in _STOCK)
