"""Tasks `feature-extraction` and `sentence-similarity`: hidden states and sentence embeddings."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Unpack

import torch
from transformers import modeling_outputs

from ..artifact.sentence_fields import TOKEN_VECTORS, VECTORS
from ..artifact.sentence_settings import DOCUMENT, QUERY, embedding_roles, sentence_kind, sentence_settings
from ..capture.sentence_embeddings import Normalize, sentence_layers
from ..capture.static_embeddings import load_static
from ..data.encoded_rows import EncodedRows, from_tokenizer
from ..data.labels import numbers, texts
from ..deploying.triton.text_fronts import TextFront, TextModelFacts, TritonTensor
from ..errors import TaskError
from ..interfaces.task import Task
from ..measuring.accuracy.metrics import correlation
from ..measuring.accuracy.predictors import CosinePredictor, Predictor
from ..models.base import ORTModel
from ..models.embedding_and_scoring import (
    COUNTED,
    SentenceEmbeddingFunction,
    SentenceRows,
    prompt_length,
)
from ..models.encoding import EncodeOptions, encode
from ..models.outputs import SentenceEmbeddingOutput
from ..models.vector_functions import Vectors, similarity
from ..serving.operations import Operation
from ..stages.resolution import recorded_export
from ..upstream.output_silencing import quiet
from .embedding_operations import (
    EmbeddingOperation,
    HiddenStatesOperation,
    SparseEmbeddingOperation,
    TokenEmbeddingOperation,
)

if TYPE_CHECKING:
    pass


class ORTModelForFeatureExtraction(ORTModel):
    """Model that returns hidden states, and sentence embeddings if its graph or its files define pooling."""

    task = "feature-extraction"

    def _choose_output(self, names: Sequence[str]) -> Any:
        # sentence-transformers exports the transformer of a sparse encoder alone; `encode` pools its logits.
        sparse = "logits" in names and sentence_kind(self.artifact.path) == "sparse encoder"
        if ("logits" in names and not sparse) or "start_logits" in names:
            raise TaskError(
                f"The graph in {self.artifact.path} returns {', '.join(names)} and no hidden states, which {type(self).__name__} needs.",
                fix="load the folder with the ORTModelFor... class of the task that the model was exported for.",
            )
        self._roles = embedding_roles(self._session.inputs, self._session.outputs)
        returned = {self._roles.get(name, name) for name in names}
        pools = self.artifact.task == "sentence-similarity" and "last_hidden_state" in returned
        self._pools = pools and "sentence_embedding" not in returned
        self._after = self._named_and_pooled if self._roles or self._pools else None
        self._vectors: SentenceEmbeddingFunction | None = None
        if self._pools or sparse or returned & {VECTORS, TOKEN_VECTORS}:
            return SentenceEmbeddingOutput
        if "pooler_output" in names:
            return modeling_outputs.BaseModelOutputWithPooling
        return modeling_outputs.BaseModelOutput

    @property
    def sentence_vectors(self) -> SentenceEmbeddingFunction:
        """Function that computes sentence embeddings from outputs, configured by the files next to the graph.

        Raises:
            TaskError: The model does not embed sentences.
            ConfigError, IntegrityError: The files have an unsupported setting or are damaged.
        """
        if self._vectors is None:
            recorded = recorded_export(self.artifact)
            settings = sentence_settings(self.artifact.path)
            self._vectors = SentenceEmbeddingFunction(settings, pooling=recorded.pooling, normalize=recorded.normalize)
        return self._vectors

    def _named_and_pooled(self, values: dict[str, Any], inputs: Mapping[str, Any]) -> dict[str, Any]:
        """Rename outputs to transformers' names, and compute the sentence embedding if the graph does not return it."""
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
        side: Literal["", "query", "document"] = "",
        **options: Unpack[EncodeOptions],
    ) -> Any:
        """Compute embeddings of texts, in the order of the texts.

        Texts of similar length are batched together. The model's sentence-transformers files define the maximum length, lowercasing,
        prompts, `truncate_dim`, and the pooling if the graph has none. Without such files, hidden states are averaged over the tokens.

        Args:
            texts: One text or a list of texts.
            side: Whether the texts are queries or documents. Multi-vector models and models with a router compute them differently. It
                does not select a prompt; `encode_query` and `encode_document` do.
            **options: See `EncodeOptions`.

        Returns:
            Dense embeddings: `(len(texts), size)` float32, or `(size,)` for a single text. Sparse embeddings: a sparse torch tensor
            `(len(texts), vocab_size)` float32. Multi-vector embeddings: a list with a tensor `(tokens, size)` float32 for each text.
            If `outputs` is a list, a dict with one of these results for each name.

        Raises:
            InputError: A text is not a string, or `truncate_dim` is larger than the embeddings.
            TaskError: The model does not embed sentences; cross-encoders, for example, do not.
            ConfigError: An option is invalid, the prompt is unknown, or the files next to the graph have an unsupported setting.
        """
        return encode(self, texts, side, options)

    def encode_query(self, texts: str | Sequence[str], **options: Unpack[EncodeOptions]) -> Any:
        """Compute embeddings of queries: `encode` with the prompt named `query`, if the model has one.

        Raises:
            AccelError: As in `encode`.
        """
        return encode(self, texts, QUERY, options, default_prompt=True)

    def encode_document(self, texts: str | Sequence[str], **options: Unpack[EncodeOptions]) -> Any:
        """Compute embeddings of documents: `encode` with the prompt named `document`, `passage` or `corpus`, if the model has one.

        Raises:
            AccelError: As in `encode`.
        """
        return encode(self, texts, DOCUMENT, options, default_prompt=True)

    def similarity(self, first: Vectors, second: Vectors) -> torch.Tensor:
        """Return the similarity of each embedding in `first` to each in `second`, `(len(first), len(second))` float32.

        The function is the one in the model's files (`similarity_fn_name`). The default is `cosine`, `dot` for sparse encoders, and
        `maxsim` for multi-vector models.

        Raises:
            InputError: The embeddings have different numbers of dimensions.
        """
        return similarity(self.sentence_vectors.settings.similarity, first, second)


class SimilarityPredictor(CosinePredictor):
    """Predictor of the similarity of the embeddings of a row's two texts.

    The similarity is the cosine, or the function that the model's sentence-transformers files define.
    """

    kind = "similarities"
    offline_metrics = (correlation("spearmanr"), correlation("pearsonr"))

    def _references(self) -> list[Any]:
        return numbers(self.rows, "score")

    def _longest(self, limit: int | None, max_length: int | None) -> int | None:
        longest = super()._longest(limit, max_length)
        own_limit = self.settings.max_length
        return longest if own_limit is None or (longest is not None and longest < own_limit) else own_limit

    def _encode(self) -> EncodedRows:
        both = texts(self.rows, "text") + texts(self.rows, "text_pair")
        self._vectors = SentenceEmbeddingFunction(self.settings)
        reader = SentenceRows(self.processor, self.settings, self.max_length)
        with quiet():
            rows = reader.rows(both)
        tokens = {name: [row[name] for row in rows] for name in rows[0]}
        return replace(from_tokenizer({}, self.processor), tokens=tokens)

    def _embeddings(self, feeds: Mapping[str, torch.Tensor], output: Any) -> torch.Tensor:
        return self._vectors(output, feeds.get("attention_mask"), feeds.get(COUNTED)).cpu()


class FeatureExtraction(Task):
    """The tasks `feature-extraction` and `sentence-similarity`: hidden states and sentence embeddings."""

    model = ORTModelForFeatureExtraction

    def load(self, folder: Path, **options: Any) -> torch.nn.Module | None:
        return load_static(folder, options["dtype"])

    def predictor(self, config: Any) -> type[Predictor]:
        return SimilarityPredictor

    def operations(self) -> Sequence[Operation]:
        return (EmbeddingOperation(), SparseEmbeddingOperation(), TokenEmbeddingOperation(), HiddenStatesOperation())

    def fronts(self) -> Mapping[str, TextFront]:
        return dict.fromkeys(("feature-extraction", "sentence-similarity"), EMBEDDINGS)


def _embedding(facts: TextModelFacts) -> dict[str, Any]:
    settings = sentence_settings(facts.artifact.path)
    component = facts.artifact.component()
    roles = embedding_roles(component.inputs, component.outputs)
    names = {roles.get(spec.name, spec.name): spec.name for spec in component.outputs}
    prompt = settings.prompt()
    text = prompt.lower() if settings.lower else prompt
    excluded = 0 if settings.include_prompt else prompt_length(facts.tokenizer, text)
    options = {"prompt": prompt, "lower": settings.lower, "size": settings.truncate_dim}
    if "sentence_embedding" in names and not excluded:
        return {**options, "output": names["sentence_embedding"], "pooled": True}
    if "last_hidden_state" not in names:
        raise TaskError(
            f"No embeddings can be computed: the graph in {facts.artifact.path} returns {', '.join(names)}, and neither "
            "sentence_embedding nor last_hidden_state.",
            fix="export the model again with `accel export --task sentence-similarity`.",
        )
    recorded = recorded_export(facts.artifact)
    layers = sentence_layers(settings, pooling=recorded.pooling, normalize=recorded.normalize)
    if any(not isinstance(layer, Normalize) for layer in layers.after):
        others = [layer.kind for layer in settings.layers if layer.kind not in {"Pooling", "Normalize"}]
        raise TaskError(
            f"The model in {facts.artifact.path} has the sentence-transformers modules {', '.join(others)}, which are not part of its "
            "graph and which the Triton model for texts cannot compute.",
            fix="export the original model with `accel export MODEL OUT`, which adds these modules to the graph.",
        )
    return {
        **options,
        "output": names["last_hidden_state"],
        "pooled": False,
        "modes": list(layers.modes),
        "excluded": excluded,
        "normalize": len(layers.after) > 0,
    }


def _hidden_size(facts: TextModelFacts) -> int:
    settings = _embedding(facts)
    size = facts.sizes(settings["output"])[-1]
    if not isinstance(size, int):
        return settings["size"] or -1
    size *= len(settings.get("modes", "1"))
    return min(size, settings["size"] or size)


EMBEDDINGS = TextFront(
    service="embeddings:TextEmbedder",
    inputs=(TritonTensor(name="TEXT", dtype="string"),),
    outputs=lambda facts: (TritonTensor(name="EMBEDDING", dtype="float32", dims=(_hidden_size(facts),)),),
    reads=lambda facts: (_embedding(facts)["output"],),
    options=_embedding,
    limit=lambda facts: sentence_settings(facts.artifact.path).max_length,
    sample={"TEXT": ["The card has not arrived."]},
    one_row=True,
)
