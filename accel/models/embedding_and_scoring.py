"""Tokenization and batching of texts for embedding models and cross-encoders, and computation of their embeddings and scores."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from ..artifact.sentence_settings import SentenceSettings, sentence_settings
from ..capture.sentence_embeddings import SentenceLayers, activation_function, sentence_layers
from ..config import check_number
from ..data.batches import longest
from ..data.encoded_rows import padded
from ..errors import InputError, TaskError
from .processors import kept_companion_of

Activation = Callable[[torch.Tensor], torch.Tensor]
"""Function that maps outputs of a cross-encoder to scores."""
TokenRow = Mapping[str, Sequence[int]]
"""Token ids, attention mask and other inputs of one text."""
COUNTED = "counted"
"""Key of a row's pooling mask. Rows have the mask only if the model excludes its prompt from pooling."""


class TextBatcher:
    """Tokenizer and batcher of texts. Threads must not share an object, because a fast tokenizer stores settings between calls.

    Args:
        tokenizer: The model's tokenizer.
        max_length: Number of tokens to which longer texts are truncated; `None` means no truncation.
    """

    def __init__(self, tokenizer: Any, max_length: int | None) -> None:
        self.tokenizer = tokenizer
        self.max_length = max_length
        pads = {"input_ids": tokenizer.pad_token_id, "token_type_ids": getattr(tokenizer, "pad_token_type_id", 0)}
        self._padding = {name: value for name, value in pads.items() if value is not None}

    @property
    def pads(self) -> bool:
        """Whether rows of different length can be in one batch."""
        return "input_ids" in self._padding

    def rows(self, texts: Sequence[str], pairs: Sequence[str] | None = None) -> list[TokenRow]:
        """Return one tokenized row per text, or per pair of texts."""
        encoding = self.tokenizer(
            list(texts),
            None if pairs is None else list(pairs),
            truncation=self.max_length is not None,
            max_length=self.max_length,
        )
        names = [name for name in self.tokenizer.model_input_names if name in encoding]
        return [{name: encoding[name][i] for name in names} for i in range(len(texts))]

    def batch(self, rows: Sequence[TokenRow]) -> dict[str, torch.Tensor]:
        """Return rows as tensors `(rows, longest) int64`, padded on the tokenizer's padding side.

        Raises:
            InputError: The rows differ in length and the tokenizer has no padding token.
        """
        if not self.pads and len({len(row["input_ids"]) for row in rows}) > 1:
            raise InputError(
                "The tokenizer has no padding token, so texts with different numbers of tokens cannot be in one batch.",
                fix="set tokenizer.pad_token, or pass batch_size=1.",
            )
        left = self.tokenizer.padding_side == "left"
        return {name: padded([row[name] for row in rows], self._padding.get(name, 0), left=left) for name in rows[0]}


class SentenceRows(TextBatcher):
    """Tokenizer of texts that uses the prompt, lowercasing and maximum length in a model's sentence-transformers files.

    Args:
        tokenizer: The model's tokenizer.
        settings: Settings from the sentence-transformers files.
        max_length: Maximum number of tokens of the model; `None` if it has no limit.
    """

    def __init__(self, tokenizer: Any, settings: SentenceSettings, max_length: int | None) -> None:
        own_limit = tokenizer.model_max_length if tokenizer.model_max_length < 1 << 30 else None
        limits = [max_length, own_limit, settings.max_length]
        super().__init__(tokenizer, min((n for n in limits if n), default=None))
        self.settings = settings

    def rows(
        self, texts: Sequence[str], pairs: Sequence[str] | None = None, *, prompt: str | None = None
    ) -> list[TokenRow]:
        """Return one tokenized row per text.

        If the model excludes the prompt from pooling, each row also has `counted`, a mask of the pooled tokens.

        Args:
            texts: The texts.
            pairs: Second texts of pairs.
            prompt: Text to put before each text; the model's default prompt when `None`.

        Raises:
            InputError: A text is not a string.
        """
        if not all(isinstance(text, str) for text in texts):
            kinds = sorted({type(text).__name__ for text in texts if not isinstance(text, str)})
            raise InputError(
                f"The inputs contain values of type {', '.join(kinds)}, but embeddings can be computed only for strings.",
                fix="pass a string or a list of strings.",
            )
        before = self.settings.prompt() if prompt is None else prompt
        rows = super().rows([self._cased(before + text) for text in texts], pairs)
        if self.settings.include_prompt:
            return rows
        length = prompt_length(self.tokenizer, self._cased(before))
        return [{**row, COUNTED: [int(i >= length) for i in range(len(row["input_ids"]))]} for row in rows]

    def _cased(self, text: str) -> str:
        return text.lower() if self.settings.lower else text


def in_batches(
    rows: Sequence[Any], length: Callable[[Any], int], batch_size: int, compute: Callable[[list[Any]], torch.Tensor]
) -> list[torch.Tensor]:
    """Compute results in batches of rows that have similar lengths; return the results in the original order of the rows."""
    check_number("batch_size", batch_size, 1)
    order = sorted(range(len(rows)), key=lambda i: length(rows[i]))
    results: list[torch.Tensor] = [torch.empty(0)] * len(rows)
    for start in range(0, len(order), batch_size):
        part = order[start : start + batch_size]
        for i, result in zip(part, compute([rows[i] for i in part]), strict=True):
            results[i] = result
    return results


def prompt_length(tokenizer: Any, prompt: str) -> int:
    """Return the number of tokens of a prompt in front of a text; a special token at the prompt's end is not counted."""
    if not prompt:
        return 0
    ids = tokenizer(prompt)["input_ids"]
    return len(ids) - (ids[-1] in tokenizer.all_special_ids)


class SentenceEmbeddingFunction:
    """Function that computes sentence embeddings in float32 from a model's outputs.

    Args:
        settings: Settings from the model's sentence-transformers files.
        pooling: Pooling that the graph was exported with; replaces the setting in the files.
        normalize: Whether the graph normalizes embeddings to length 1; replaces the setting in the files.
    """

    def __init__(
        self, settings: SentenceSettings, *, pooling: str | None = None, normalize: bool | None = None
    ) -> None:
        if settings.kind not in ("", "embedder"):
            settings.check_embeds()
        self.settings = settings
        self._pooling, self._normalize = pooling, normalize
        self._layers: SentenceLayers | None = None

    def __call__(self, output: Any, mask: torch.Tensor | None, counted: torch.Tensor | None = None) -> torch.Tensor:
        """Return the embeddings, `(batch, size)` float32.

        Args:
            output: The model's outputs with `sentence_embedding`, or with `last_hidden_state` to pool.
            mask: Attention mask, `(batch, sequence)`.
            counted: Mask of pooled tokens, if it differs from `mask`.
        """
        if "sentence_embedding" in output and (counted is None or mask is None or bool((counted == mask).all())):
            vectors: torch.Tensor = output["sentence_embedding"].float()
        elif "last_hidden_state" in output:
            hidden: torch.Tensor = output["last_hidden_state"]
            mask = torch.ones(hidden.shape[:2], dtype=torch.int64) if mask is None else mask
            vectors = self.pool(hidden, mask, counted)
        else:
            raise TaskError(
                f"No embeddings can be computed: the graph in {self.settings.folder} returns {', '.join(output)}, and neither "
                "sentence_embedding nor last_hidden_state.",
                fix="export the model again with `accel export --task sentence-similarity`.",
            )
        return vectors[:, : self.settings.truncate_dim]

    def pool(self, hidden: torch.Tensor, mask: torch.Tensor, counted: torch.Tensor | None = None) -> torch.Tensor:
        """Pool hidden states `(batch, sequence, hidden)` and return the embeddings at full size; see `SentenceLayers.forward`."""
        if self._layers is None:
            self._layers = sentence_layers(self.settings, pooling=self._pooling, normalize=self._normalize)
        layers = self._layers.to(hidden.device)
        counted = counted.to(hidden.device) if counted is not None else None
        with torch.inference_mode():
            vectors: torch.Tensor = layers(hidden, mask.to(hidden.device), counted)
        return vectors


class Embedder(SentenceRows):
    """Embedder of texts, for models that return hidden states or sentence embeddings.

    If the graph has no pooling, the embedder pools the hidden states according to the model's sentence-transformers files. If the model
    has no such files, the embedding is the mean of the hidden states of all tokens.

    Args:
        model: An `ORTModelForFeatureExtraction`.
        tokenizer: The tokenizer; the artifact's own when `None`.
    """

    def __init__(self, model: Any, tokenizer: Any = None) -> None:
        self.model = model
        self._vectors: SentenceEmbeddingFunction = model.sentence_vectors
        tokenizer = tokenizer or kept_companion_of(model, "AutoTokenizer")
        super().__init__(tokenizer, self._vectors.settings, model.artifact.components[0].max_sizes.get("sequence"))

    def embed(self, rows: Sequence[TokenRow]) -> torch.Tensor:
        """Return the embeddings of rows: `(rows, size)` float32."""
        inputs = self.batch(rows)
        counted = inputs.pop(COUNTED, None)
        return self._vectors(self.model(**inputs), inputs.get("attention_mask"), counted)


class PairScorer(TextBatcher):
    """Scorer of text pairs that returns the logits of a cross-encoder, before the activation function.

    Args:
        model: An `ORTModelForSequenceClassification`.
        tokenizer: The tokenizer; the artifact's own when `None`.
    """

    def __init__(self, model: Any, tokenizer: Any = None) -> None:
        tokenizer = tokenizer or kept_companion_of(model, "AutoTokenizer")
        self.model = model
        self.settings = sentence_settings(model.artifact.path)
        limit = model.artifact.components[0].max_sizes.get("sequence")
        super().__init__(tokenizer, longest(limit, tokenizer, self.settings.max_length))

    def rows(
        self, texts: Sequence[str], pairs: Sequence[str] | None = None, *, prompt: str | None = None
    ) -> list[TokenRow]:
        """Return one row per pair. The prompt is put before the first text; `None` means the model's default prompt."""
        before = self.settings.prompt() if prompt is None else prompt
        firsts, seconds = [before + text for text in texts], pairs
        if self.settings.lower:
            firsts = [text.lower() for text in firsts]
            seconds = [text.lower() for text in pairs] if pairs is not None else None
        return super().rows(firsts, seconds)

    def logits(self, rows: Sequence[TokenRow]) -> torch.Tensor:
        """Return the logits of rows: `(rows, num_labels)` float32 on the CPU."""
        logits: torch.Tensor = self.model(**self.batch(rows)).logits.float().cpu()
        return logits


def activation_of(model: Any) -> Activation:
    """Return the function that maps a model's logits to scores; see `activation_path`."""
    return activation_function(activation_path(model.config, sentence_settings(model.artifact.path)))


def activation_path(config: Any, settings: SentenceSettings) -> str:
    """Return the import path of a cross-encoder's activation function.

    Sentence Transformers 6 stores the path in its own file, and earlier versions in the model's config.json. The default is a sigmoid for
    models with one label and the identity function for models with several labels.
    """
    written = getattr(config, "sentence_transformers", None) or {}
    older = getattr(config, "sbert_ce_default_activation_function", None)
    path = settings.activation or written.get("activation_fn") or older
    return str(path or ("torch.nn.Sigmoid" if config.num_labels == 1 else "torch.nn.Identity"))
