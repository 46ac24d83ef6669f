"""Models of one graph, a few lines for each task."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from transformers import modeling_outputs
from transformers.utils import ModelOutput

from ..errors import (
    ConfigError,
    InputError,
    TaskError,
)
from .base import ORTModel
from .outputs import SentenceEmbeddingOutput
from .ranking import Activation, scores
from .texts import Embedder


class _TextEncoder(ORTModel):
    """What the single-graph text tasks share: the signature that pipelines read."""

    def forward(
        self, input_ids: Any = None, attention_mask: Any = None, token_type_ids: Any = None, **inputs: Any
    ) -> Any:
        """Run the graph on `(batch, sequence)` integer inputs."""
        if token_type_ids is None:
            # `None` among the inputs would take the slow path of `_run`: 1.3 microseconds with warm caches.
            return self._run({"input_ids": input_ids, "attention_mask": attention_mask, **inputs})
        return self._run(
            {"input_ids": input_ids, "attention_mask": attention_mask, "token_type_ids": token_type_ids, **inputs}
        )


class ORTModelForSequenceClassification(_TextEncoder):
    """Text classification and regression: `logits: (batch, num_labels)`; cross-encoders rank documents."""

    task = "text-classification"

    def predict(
        self,
        pairs: Sequence[Sequence[str]],
        *,
        batch_size: int = 32,
        tokenizer: Any = None,
        activation_fn: Activation | None = None,
    ) -> Any:
        """Scores of pairs of texts, in their order, as Sentence Transformers' `CrossEncoder` gives them.

        Args:
            pairs: `[(query, document), ...]`.
            batch_size: Pairs a call; those of like length share one.
            tokenizer: The artifact's own when `None`.
            activation_fn: What turns outputs into scores. When `None`, what the model's config says, else a sigmoid for one output.

        Returns:
            `(len(pairs),)` float32 of a model with one output, else `(len(pairs), num_labels)`, as NumPy.
        """
        single = len(pairs) == 2 and all(isinstance(text, str) for text in pairs)
        given: Any = [pairs] if single else pairs
        found = scores(self, given, batch_size=batch_size, tokenizer=tokenizer, activation=activation_fn).numpy()
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
    ) -> list[dict[str, Any]]:
        """Documents by how well they answer a query, the best first: `[{"corpus_id": 2, "score": 0.98}, ...]`.

        Args:
            query: One text.
            documents: Texts; `corpus_id` is a place in them.
            top_k: How many of them; all when `None`.
            return_documents: Whether each has its `text`, too.
            batch_size, tokenizer, activation_fn: See `predict`.

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
        found = scores(self, pairs, batch_size=batch_size, tokenizer=tokenizer, activation=activation_fn).tolist()
        # The first of equals comes first.
        order = sorted(range(len(found)), key=lambda i: -found[i])[:top_k]
        texts = [{"text": documents[i]} if return_documents else {} for i in order]
        return [{"corpus_id": i, "score": found[i], **text} for i, text in zip(order, texts, strict=True)]


class ORTModelForTokenClassification(_TextEncoder):
    """Named entities and the like: `logits: (batch, sequence, num_labels)`."""

    task = "token-classification"


class ORTModelForQuestionAnswering(_TextEncoder):
    """Extractive question answering: `start_logits` and `end_logits: (batch, sequence)`."""

    task = "question-answering"


class ORTModelForMultipleChoice(_TextEncoder):
    """Multiple choice: inputs `(batch, choices, sequence)`, `logits: (batch, choices)`."""

    task = "multiple-choice"


class ORTModelForMaskedLM(_TextEncoder):
    """Masked language modelling: `logits: (batch, sequence, vocab_size)`."""

    task = "fill-mask"


class ORTModelForFeatureExtraction(ORTModel):
    """Hidden states, and sentence embeddings where pooling is in the graph."""

    task = "feature-extraction"

    def _choose_output(self, names: Sequence[str]) -> Any:
        if "logits" in names or "start_logits" in names:
            raise TaskError(
                f"The graph in {self.artifact.path} returns {', '.join(names)}, and no hidden states.",
                fix="use the class that the model was exported for.",
            )
        if "sentence_embedding" in names:
            return SentenceEmbeddingOutput
        if "pooler_output" in names:
            return modeling_outputs.BaseModelOutputWithPooling
        return modeling_outputs.BaseModelOutput

    def encode(
        self,
        texts: str | Sequence[str],
        *,
        batch_size: int = 32,
        tokenizer: Any = None,
        convert_to_numpy: bool = True,
        normalize_embeddings: bool = False,
    ) -> Any:
        """Embeddings of texts, in their order.

        Texts of like length share a batch. Without pooling in the graph, hidden states are averaged over the tokens. What
        a sentence-transformers folder says about its texts (longest length, lower case, default prompt) is followed.

        Args:
            texts: One text or many.
            batch_size: Texts a call.
            tokenizer: The artifact's own when `None`.
            convert_to_numpy: NumPy (default) or `torch`.
            normalize_embeddings: Scale each to length 1, so that products are cosines.

        Returns:
            `(len(texts), hidden)` float32; `(hidden,)` for one text.
        """
        single = isinstance(texts, str)
        items = [texts] if isinstance(texts, str) else list(texts) if isinstance(texts, Iterable) else [texts]
        if not all(isinstance(item, str) for item in items):
            raise InputError("encode takes texts.", fix="pass a string or a list of strings.")
        if batch_size < 1:
            raise ConfigError(f"batch_size is {batch_size}.", fix="use at least 1.")
        embedder = Embedder(self, tokenizer)
        order = sorted(range(len(items)), key=lambda i: len(items[i]))
        rows: list[torch.Tensor] = [torch.empty(0)] * len(items)
        for start in range(0, len(order), batch_size):
            part = order[start : start + batch_size]
            for i, row in zip(part, embedder.embed(embedder.rows([items[i] for i in part])), strict=True):
                rows[i] = row
        embeddings = torch.stack(rows) if rows else torch.empty(0, 0)
        if normalize_embeddings:
            embeddings = torch.nn.functional.normalize(embeddings, dim=-1)
        result: Any = embeddings.cpu().numpy() if convert_to_numpy else embeddings
        return result[0] if single else result


class ORTModelForImageClassification(ORTModel):
    """Image classification: `pixel_values: (batch, channels, height, width)` to `logits: (batch, num_labels)`."""

    task = "image-classification"

    def forward(self, pixel_values: Any = None, **inputs: Any) -> Any:
        """Run the graph on images."""
        return self._run({"pixel_values": pixel_values, **inputs})


class ORTModelForCustomTasks(ORTModel):
    """Any graph, its names kept: inputs by name, outputs as a `ModelOutput` with one entry a name."""

    task = "custom"

    def _choose_output(self, names: Sequence[str]) -> Any:
        return ModelOutput
