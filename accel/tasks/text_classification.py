"""Text classification and regression, of a text or of a pair of texts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch

from ..config import check_number
from ..data.batches import Encoded, cut, from_tokenizer
from ..data.labels import numbers, texts
from ..data.rows import Rows
from ..errors import InputError, TaskError
from ..interfaces.task import Task
from ..measuring.accuracy.metrics import Floats, Metric, Values, correlation, ratio
from ..measuring.accuracy.predictors import Classes, Model, Predictor
from ..models.modality_models import TextModel
from ..models.texts import Activation, PairScorer, activation_of


class ORTModelForSequenceClassification(TextModel):
    """Text classification and regression: `logits: (batch, num_labels)`; cross-encoders rank documents."""

    task = "text-classification"

    def predict(
        self,
        pairs: Sequence[Sequence[str]],
        *,
        batch_size: int = 32,
        tokenizer: Any = None,
        activation_fn: Activation | None = None,
        prompt_name: str | None = None,
        prompt: str | None = None,
    ) -> Any:
        """Scores of pairs of texts, in their order, as Sentence Transformers' `CrossEncoder` gives them.

        Args:
            pairs: `[(query, document), ...]`.
            batch_size: Pairs a call; those of like length share one.
            tokenizer: The artifact's own when `None`.
            activation_fn: What turns outputs into scores. When `None`, what the model's files say, else a sigmoid for one output.
            prompt_name: One of the prompts that the model's files name; their default one when `None`.
            prompt: What is put before each query, in place of it.

        Returns:
            `(len(pairs),)` float32 of a model with one output, else `(len(pairs), num_labels)`, as NumPy.
        """
        single = len(pairs) == 2 and all(isinstance(text, str) for text in pairs)
        given: Any = [pairs] if single else pairs
        found = _scores(
            self, given, batch_size=batch_size, tokenizer=tokenizer, activation=activation_fn, prompt_name=prompt_name,
            prompt=prompt,
        ).numpy()  # fmt: skip
        return found[0] if single else found

    def rank(
        self,
        query: str,
        documents: Sequence[str],
        *,
        top_k: int | None = None,
        return_documents: bool = False,
        batch_size: int = 32,
        tokenizer: Any = None,
        activation_fn: Activation | None = None,
        prompt_name: str | None = None,
        prompt: str | None = None,
    ) -> list[dict[str, Any]]:
        """Documents by how well they answer a query, the best first: `[{"corpus_id": 2, "score": 0.98}, ...]`.

        Args:
            query: One text.
            documents: Texts; `corpus_id` is a place in them.
            top_k: How many of them; all when `None`.
            return_documents: Whether each has its `text`, too.
            batch_size, tokenizer, activation_fn, prompt_name, prompt: See `predict`.

        Raises:
            TaskError: The model has more outputs than one.
        """
        if self.config.num_labels != 1:
            raise TaskError(
                f"A model that ranks has one output, and this one has {self.config.num_labels}.",
                fix="use predict, or a cross-encoder with one label.",
            )
        if isinstance(documents, str):
            raise InputError("rank takes a list of documents.", fix="pass a list of texts.")
        pairs = [(query, text) for text in documents]
        found = _scores(
            self, pairs, batch_size=batch_size, tokenizer=tokenizer, activation=activation_fn, prompt_name=prompt_name,
            prompt=prompt,
        ).tolist()  # fmt: skip
        # The first of equals comes first.
        order = sorted(range(len(found)), key=lambda i: -found[i])[:top_k]
        texts = [{"text": documents[i]} if return_documents else {} for i in order]
        return [{"corpus_id": i, "score": found[i], **text} for i, text in zip(order, texts, strict=True)]


def _scores(
    model: Any,
    pairs: Sequence[Sequence[str]],
    *,
    batch_size: int,
    tokenizer: Any,
    activation: Activation | None,
    prompt_name: str | None = None,
    prompt: str | None = None,
) -> torch.Tensor:
    """Scores of pairs of texts: `(pairs,)` of a model with one output, else `(pairs, num_labels)`; float32 on the CPU.

    Raises:
        InputError: They are no pairs of texts.
        ConfigError: A batch of no rows, an unknown prompt or activation.
    """
    if isinstance(pairs, str) or not all(_is_pair(pair) for pair in pairs):
        raise InputError("predict takes pairs of texts.", fix="pass [(query, document), ...].")
    check_number("batch_size", batch_size, 1)
    scorer = PairScorer(model, tokenizer)
    function = activation or activation_of(model)
    before = prompt if prompt is not None else scorer.settings.prompt(prompt_name)
    order = sorted(range(len(pairs)), key=lambda i: sum(map(len, pairs[i])))
    rows: list[torch.Tensor] = [torch.empty(0)] * len(pairs)
    for start in range(0, len(order), batch_size):
        part = order[start : start + batch_size]
        first, second = ([pairs[i][side] for i in part] for side in (0, 1))
        for i, row in zip(part, function(scorer.logits(scorer.rows(first, second, prompt=before))), strict=True):
            rows[i] = row
    found = torch.stack(rows) if rows else torch.empty(0, model.config.num_labels)
    return found[:, 0] if found.shape[1] == 1 else found


def _is_pair(pair: Any) -> bool:
    return isinstance(pair, Sequence) and len(pair) == 2 and all(isinstance(text, str) for text in pair)


class Numbers(Predictor):
    """A number a row: regression."""

    kind = "numbers"

    @classmethod
    def metrics(cls, classes: int) -> Mapping[str, Metric]:
        """See `Predictor`."""
        return {name: correlation(name) for name in ("spearmanr", "pearsonr")} | {"mse": _MSE}

    def _references(self) -> list[Any]:
        return numbers(self.rows, "label")

    def predict(self, model: Model, what: str) -> list[Any]:
        """Numbers."""
        return self._by_row(model, what, lambda logits, part: logits.reshape(len(part), -1)[:, 0].tolist())

    def agreement(self, first: Sequence[Any], second: Sequence[Any]) -> float | None:
        """Numbers are hardly ever the same."""
        return None


def _mse(predictions: Values, references: Values) -> dict[str, float]:
    found, true = np.asarray(predictions, np.float64), np.asarray(references, np.float64)
    return {"mse": float(np.mean((found - true) ** 2))}


def _squares(predictions: Values, references: Values) -> Floats:
    squared = (np.asarray(predictions, np.float64) - np.asarray(references, np.float64)) ** 2
    return np.stack([squared, np.ones_like(squared)], axis=1)


_MSE = Metric(
    name="mse", key="mse", compute=_mse, sums=_squares, finish=ratio, points=1.0, higher_is_better=False,
)  # fmt: skip


class TextClassification(Task):
    """Text classification and regression, of a text or of a pair of texts."""

    model = ORTModelForSequenceClassification

    def encode(self, rows: Rows, processor: Any, max_length: int | None) -> Encoded:
        both = [texts(rows, use) for use in ("text", "text_pair") if rows.has(use)]
        return from_tokenizer(processor(*both, **cut(max_length)), processor)

    def predictor(self, config: Any) -> type[Predictor]:
        kind = getattr(config, "problem_type", None)
        if kind == "multi_label_classification":
            raise TaskError("Models with several labels a row cannot be measured yet.", fix="measure them yourself.")
        return Numbers if kind == "regression" or getattr(config, "num_labels", 2) == 1 else Classes

    def fronts(self) -> Mapping[str, Any]:
        from ..deploying.triton.text_fronts import CLASSIFICATION, ZERO_SHOT

        return {"text-classification": CLASSIFICATION, "zero-shot-classification": ZERO_SHOT}
