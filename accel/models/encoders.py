"""Models of one graph, a few lines for each task."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from transformers import modeling_outputs
from transformers.utils import ModelOutput

from ..artifact.sentence_settings import embedding_roles, sentence_settings
from ..errors import (
    ConfigError,
    InputError,
    TaskError,
)
from ..stages.resolution import recorded_export
from .base import ORTModel
from .outputs import SentenceEmbeddingOutput
from .ranking import Activation, scores
from .texts import Embedder, SentenceVectors


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
        found = scores(
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
        found = scores(
            self, pairs, batch_size=batch_size, tokenizer=tokenizer, activation=activation_fn, prompt_name=prompt_name,
            prompt=prompt,
        ).tolist()  # fmt: skip
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
        self._roles = embedding_roles(self._session.inputs, self._session.outputs)
        returned = {self._roles.get(name, name) for name in names}
        pools = self.artifact.task == "sentence-similarity" and "last_hidden_state" in returned
        self._pools = pools and "sentence_embedding" not in returned
        self._after = self._named_and_pooled if self._roles or self._pools else None
        self._vectors: SentenceVectors | None = None
        if self._pools or "sentence_embedding" in returned:
            return SentenceEmbeddingOutput
        if "pooler_output" in names:
            return modeling_outputs.BaseModelOutputWithPooling
        return modeling_outputs.BaseModelOutput

    @property
    def sentence_vectors(self) -> SentenceVectors:
        """What makes sentence embeddings of the outputs, as the files next to the graph say.

        Raises:
            TaskError: The model does not embed sentences.
            ConfigError, IntegrityError: The files are damaged, or have a setting that is not followed.
        """
        if self._vectors is None:
            recorded = recorded_export(self.artifact)
            settings = sentence_settings(self.artifact.path)
            self._vectors = SentenceVectors(settings, pooling=recorded.pooling, normalize=recorded.normalize)
        return self._vectors

    def _named_and_pooled(self, values: dict[str, Any], inputs: Mapping[str, Any]) -> dict[str, Any]:
        """Outputs by transformers' names, with the sentence embedding that the graph leaves out."""
        values = {self._roles.get(name, name): value for name, value in values.items()}
        if not self._pools:
            return values
        hidden = values["last_hidden_state"]
        mask = inputs.get("attention_mask")
        mask = torch.ones(hidden.shape[:2], dtype=torch.int64) if mask is None else mask
        return {**values, "sentence_embedding": self.sentence_vectors.pool(hidden, mask)}

    def encode(
        self,
        texts: str | Sequence[str],
        *,
        batch_size: int = 32,
        tokenizer: Any = None,
        convert_to_numpy: bool = True,
        normalize_embeddings: bool = False,
        prompt_name: str | None = None,
        prompt: str | None = None,
    ) -> Any:
        """Embeddings of texts, in their order.

        Texts of like length share a batch. What the files of sentence-transformers next to the graph say is followed: longest
        length, lower case, prompts, `truncate_dim`, and pooling where the graph has none. Without such files, hidden states are
        averaged over the tokens.

        Args:
            texts: One text or many.
            batch_size: Texts a call.
            tokenizer: The artifact's own when `None`.
            convert_to_numpy: NumPy (default) or `torch`.
            normalize_embeddings: Scale each to length 1, so that products are cosines.
            prompt_name: One of the prompts that the model's files name; their default one when `None`.
            prompt: What is put before each text, in place of it.

        Returns:
            `(len(texts), size)` float32; `(size,)` for one text.

        Raises:
            InputError: A text is not a string.
            TaskError: The model does not embed sentences: it is a cross-encoder, say.
            ConfigError: An unknown prompt, or a setting in the files next to the graph that accel does not follow.
        """
        single = isinstance(texts, str)
        items = [texts] if isinstance(texts, str) else list(texts) if isinstance(texts, Iterable) else [texts]
        if not all(isinstance(item, str) for item in items):
            raise InputError("encode takes texts.", fix="pass a string or a list of strings.")
        if batch_size < 1:
            raise ConfigError(f"batch_size is {batch_size}.", fix="use at least 1.")
        embedder = Embedder(self, tokenizer)
        before = prompt if prompt is not None else embedder.settings.prompt(prompt_name)
        order = sorted(range(len(items)), key=lambda i: len(items[i]))
        rows: list[torch.Tensor] = [torch.empty(0)] * len(items)
        for start in range(0, len(order), batch_size):
            part = order[start : start + batch_size]
            for i, row in zip(
                part, embedder.embed(embedder.rows([items[i] for i in part], prompt=before)), strict=True
            ):
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
