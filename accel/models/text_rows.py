"""Texts as rows of tokens, rows as batches, and what embedding models and cross-encoders make of them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from ..artifact.sentence_settings import SentenceSettings, sentence_settings
from ..capture.sentence_embeddings import SentenceLayers, activation_function, sentence_layers
from ..data.batches import longest
from ..errors import InputError, TaskError
from .processors import kept_companion_of

Activation = Callable[[torch.Tensor], torch.Tensor]
"""What turns the outputs of a cross-encoder into scores."""
TokenRow = Mapping[str, Sequence[int]]
"""Token ids, mask and so on of one text."""
COUNTED = "counted"
"""The mask of the tokens that are pooled, in rows of a model that leaves its prompt out."""


class TextRows:
    """Makes rows of texts, and batches of rows. Not for several threads at once: a fast tokenizer keeps settings between calls.

    Args:
        tokenizer: Of the model.
        max_length: Tokens that longer texts are cut to; `None` cuts none.
    """

    def __init__(self, tokenizer: Any, max_length: int | None) -> None:
        self.tokenizer = tokenizer
        self.max_length = max_length
        pads = {"input_ids": tokenizer.pad_token_id, "token_type_ids": getattr(tokenizer, "pad_token_type_id", 0)}
        self._padding = {name: value for name, value in pads.items() if value is not None}

    @property
    def pads(self) -> bool:
        """Whether rows of unequal length can share a batch."""
        return "input_ids" in self._padding

    def rows(self, texts: Sequence[str], pairs: Sequence[str] | None = None) -> list[TokenRow]:
        """One row a text, or a pair of texts."""
        found = self.tokenizer(
            list(texts),
            None if pairs is None else list(pairs),
            truncation=self.max_length is not None,
            max_length=self.max_length,
        )
        names = [name for name in self.tokenizer.model_input_names if name in found]
        return [{name: found[name][i] for name in names} for i in range(len(texts))]

    def batch(self, rows: Sequence[TokenRow]) -> dict[str, torch.Tensor]:
        """Rows as `(rows, longest) int64`, padded on the tokenizer's side.

        Raises:
            InputError: They have unequal lengths, and the tokenizer has no padding token.
        """
        lengths = [len(row["input_ids"]) for row in rows]
        width = max(lengths)
        if min(lengths) == width:
            return {name: torch.tensor([row[name] for row in rows]) for name in rows[0]}
        if not self.pads:
            raise InputError(
                "The tokenizer has no padding token, and the texts have unequal lengths.",
                fix="set tokenizer.pad_token, or pass them one by one.",
            )
        left = self.tokenizer.padding_side == "left"
        feeds = {}
        for name in rows[0]:
            fill = self._padding.get(name, 0)
            padded = []
            for row, length in zip(rows, lengths, strict=True):
                rest = [fill] * (width - length)
                padded.append([*rest, *row[name]] if left else [*row[name], *rest])
            feeds[name] = torch.tensor(padded)
        return feeds


class SentenceRows(TextRows):
    """Makes rows of texts as sentence-transformers' files next to a model say: prompts, lower case, longest length.

    Args:
        tokenizer: Of the model.
        settings: What the files say.
        max_length: Tokens that the model reads at most; `None` where it does not say it.
    """

    def __init__(self, tokenizer: Any, settings: SentenceSettings, max_length: int | None) -> None:
        own = tokenizer.model_max_length if tokenizer.model_max_length < 1 << 30 else None
        limits = [max_length, own, settings.max_length]
        super().__init__(tokenizer, min((n for n in limits if n), default=None))
        self.settings = settings

    def rows(
        self, texts: Sequence[str], pairs: Sequence[str] | None = None, *, prompt: str | None = None
    ) -> list[TokenRow]:
        """One row a text.

        Where the tokens of the prompt are not pooled, each row also has `counted`, a mask of the tokens that are.

        Args:
            texts: The texts.
            pairs: Second texts.
            prompt: What is put before each of them; the default prompt when `None`.

        Raises:
            InputError: A text is not a string.
        """
        if not all(isinstance(text, str) for text in texts):
            raise InputError("Only texts can be embedded.", fix="pass a string or a list of strings.")
        before = self.settings.prompt() if prompt is None else prompt
        rows = super().rows([self._cased(before + text) for text in texts], pairs)
        if self.settings.include_prompt:
            return rows
        length = prompt_length(self.tokenizer, self._cased(before))
        return [{**row, COUNTED: [int(i >= length) for i in range(len(row["input_ids"]))]} for row in rows]

    def _cased(self, text: str) -> str:
        return text.lower() if self.settings.lower else text


def prompt_length(tokenizer: Any, prompt: str) -> int:
    """Tokens that a prompt takes before a text: without the special token that ends it."""
    if not prompt:
        return 0
    ids = tokenizer(prompt)["input_ids"]
    return len(ids) - (ids[-1] in tokenizer.all_special_ids)


class SentenceVectors:
    """Makes sentence embeddings of what a model returned, in float32.

    Args:
        settings: What sentence-transformers' files next to the model say.
        pooling: What was put into the graph in place of the folder's own pooling.
        normalize: Whether the graph scales vectors to length 1, in place of the folder's own setting.
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
        """Return `(batch, size)` float32.

        Args:
            output: `sentence_embedding`, or `last_hidden_state` to pool.
            mask: The attention mask, `(batch, sequence)`.
            counted: The tokens that are pooled, where these are others.
        """
        if "sentence_embedding" in output and (counted is None or mask is None or bool((counted == mask).all())):
            vectors: torch.Tensor = output["sentence_embedding"].float()
        elif "last_hidden_state" in output:
            hidden: torch.Tensor = output["last_hidden_state"]
            mask = torch.ones(hidden.shape[:2], dtype=torch.int64) if mask is None else mask
            vectors = self.pool(hidden, mask, counted)
        else:
            raise TaskError(
                f"The model in {self.settings.folder} returns {', '.join(output)}: no sentence embeddings, and no hidden states to pool.",
                fix="export it with task='sentence-similarity'.",
            )
        return vectors[:, : self.settings.truncate_dim]

    def pool(self, hidden: torch.Tensor, mask: torch.Tensor, counted: torch.Tensor | None = None) -> torch.Tensor:
        """Pool `hidden: (batch, sequence, hidden)`, not truncated; see `SentenceLayers.forward`."""
        if self._layers is None:
            self._layers = sentence_layers(self.settings, pooling=self._pooling, normalize=self._normalize)
        layers = self._layers.to(hidden.device)
        counted = counted.to(hidden.device) if counted is not None else None
        with torch.inference_mode():
            found: torch.Tensor = layers(hidden, mask.to(hidden.device), counted)
        return found


class Embedder(SentenceRows):
    """Embeddings of texts by a model of hidden states or sentence embeddings.

    Without pooling in the graph, hidden states are pooled as sentence-transformers' files next to it say, and averaged over the
    tokens where there are none.

    Args:
        model: An `ORTModelForFeatureExtraction`.
        tokenizer: The artifact's own when `None`.
    """

    def __init__(self, model: Any, tokenizer: Any = None) -> None:
        self.model = model
        self._vectors: SentenceVectors = model.sentence_vectors
        tokenizer = tokenizer or kept_companion_of(model, "AutoTokenizer")
        super().__init__(tokenizer, self._vectors.settings, model.artifact.components[0].max_sizes.get("sequence"))

    def embed(self, rows: Sequence[TokenRow]) -> torch.Tensor:
        """Embeddings of rows: `(rows, size)` float32."""
        inputs = self.batch(rows)
        counted = inputs.pop(COUNTED, None)
        return self._vectors(self.model(**inputs), inputs.get("attention_mask"), counted)


class PairScorer(TextRows):
    """Scores of pairs of texts by a cross-encoder, before what turns outputs into scores.

    Args:
        model: An `ORTModelForSequenceClassification`.
        tokenizer: The artifact's own when `None`.
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
        """One row a pair, the prompt before its first text; the default prompt when `None`."""
        before = self.settings.prompt() if prompt is None else prompt
        firsts, seconds = [before + text for text in texts], pairs
        if self.settings.lower:
            firsts = [text.lower() for text in firsts]
            seconds = [text.lower() for text in pairs] if pairs is not None else None
        return super().rows(firsts, seconds)

    def logits(self, rows: Sequence[TokenRow]) -> torch.Tensor:
        """Outputs of rows: `(rows, num_labels)` float32 on the CPU."""
        found: torch.Tensor = self.model(**self.batch(rows)).logits.float().cpu()
        return found


def activation_of(model: Any) -> Activation:
    """What turns a model's outputs into scores; see `activation_path`."""
    return activation_function(activation_path(model.config, sentence_settings(model.artifact.path)))


def activation_path(config: Any, settings: SentenceSettings) -> str:
    """The class that turns outputs into scores: as Sentence Transformers wrote it into its own file (from version 6) or into the
    model's config (before), else its default, a sigmoid for one output and nothing for several.
    """
    written = getattr(config, "sentence_transformers", None) or {}
    older = getattr(config, "sbert_ce_default_activation_function", None)
    found = settings.activation or written.get("activation_fn") or older
    return str(found or ("torch.nn.Sigmoid" if config.num_labels == 1 else "torch.nn.Identity"))
