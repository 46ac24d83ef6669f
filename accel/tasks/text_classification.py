"""Text classification and regression, of a text or of a pair of texts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from ..data.batches import Encoded, encode_pairs
from ..data.rows import Rows
from ..errors import ConfigError, InputError, TaskError
from ..interfaces.task import Task
from ..measuring.accuracy.predictors import Predictor, classifier
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
    if batch_size < 1:
        raise ConfigError(f"batch_size is {batch_size}.", fix="use at least 1.")
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


class TextClassification(Task):
    """Text classification and regression, of a text or of a pair of texts."""

    model = ORTModelForSequenceClassification

    def encode(self, rows: Rows, processor: Any, max_length: int | None) -> Encoded:
        return encode_pairs(rows, processor, max_length)

    def predictor(self, config: Any) -> type[Predictor]:
        return classifier(config)

    def fronts(self) -> Mapping[str, Any]:
        from ..deploying.triton.text_fronts import CLASSIFICATION, ZERO_SHOT

        return {"text-classification": CLASSIFICATION, "zero-shot-classification": ZERO_SHOT}
