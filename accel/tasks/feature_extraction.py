"""Hidden states, and embeddings of sentences."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from transformers import modeling_outputs

from ..artifact.sentence_settings import embedding_roles, sentence_settings
from ..config import check_number
from ..data.batches import Encoded, from_tokenizer
from ..data.labels import numbers, texts
from ..errors import InputError, TaskError
from ..interfaces.task import Task
from ..measuring.accuracy.metrics import Metric, correlation
from ..measuring.accuracy.predictors import Cosines, Predictor
from ..models.base import ORTModel
from ..models.outputs import SentenceEmbeddingOutput
from ..models.texts import COUNTED, Embedder, SentenceRows, SentenceVectors
from ..stages.resolution import recorded_export
from ..upstream.library_output import quiet


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
        check_number("batch_size", batch_size, 1)
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


class Similarities(Cosines):
    """How alike the embeddings of a row's two texts are: their cosine, or what the model's own files name."""

    kind = "similarities"

    @classmethod
    def metrics(cls, classes: int) -> Mapping[str, Metric]:
        """See `Predictor`."""
        return {name: correlation(name) for name in ("spearmanr", "pearsonr")}

    def _references(self) -> list[Any]:
        return numbers(self.rows, "score")

    def _longest(self, limit: int | None, asked: int | None) -> int | None:
        found = super()._longest(limit, asked)
        own = self.settings.max_length
        return found if own is None or (found is not None and found < own) else own

    def _encode(self) -> Encoded:
        both = texts(self.rows, "text") + texts(self.rows, "text_pair")
        self._vectors = SentenceVectors(self.settings)
        reader = SentenceRows(self.processor, self.settings, self.max_length)
        with quiet():
            rows = reader.rows(both)
        tokens = {name: [row[name] for row in rows] for name in rows[0]}
        return replace(from_tokenizer({}, self.processor), tokens=tokens)

    def _embeddings(self, feeds: Mapping[str, torch.Tensor], output: Any) -> torch.Tensor:
        return self._vectors(output, feeds.get("attention_mask"), feeds.get(COUNTED)).cpu()


class FeatureExtraction(Task):
    """Hidden states, and embeddings of sentences."""

    model = ORTModelForFeatureExtraction

    def predictor(self, config: Any) -> type[Predictor]:
        return Similarities

    def fronts(self) -> Mapping[str, Any]:
        from ..deploying.triton.text_fronts import EMBEDDINGS

        return {"feature-extraction": EMBEDDINGS, "sentence-similarity": EMBEDDINGS}
