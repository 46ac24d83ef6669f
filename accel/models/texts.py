"""Texts as rows of tokens, rows as batches, and what embedding models and cross-encoders make of them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from ..artifact.reading import read_json
from ..data.batches import longest
from ..errors import InputError
from .companions import kept_companion_of

TokenRow = Mapping[str, Sequence[int]]
"""Token ids, mask and so on of one text."""


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


class Embedder(TextRows):
    """Embeddings of texts by a model of hidden states or sentence embeddings.

    What a sentence-transformers folder says about its texts (longest length, lower case, default prompt) is followed. Without
    pooling in the graph, hidden states are averaged over the tokens.

    Args:
        model: An `ORTModelForFeatureExtraction`.
        tokenizer: The artifact's own when `None`.
    """

    def __init__(self, model: Any, tokenizer: Any = None) -> None:
        folder: Path = model.artifact.path
        tokenizer = tokenizer or kept_companion_of(model, "AutoTokenizer")
        self.model = model
        self._settings, self._prompt = sentence_settings(folder)
        own = tokenizer.model_max_length if tokenizer.model_max_length < 1 << 30 else None
        limits = [model.artifact.components[0].max_sizes.get("sequence"), own, self._settings.get("max_seq_length")]
        super().__init__(tokenizer, min((n for n in limits if n), default=None))

    def rows(self, texts: Sequence[str], pairs: Sequence[str] | None = None) -> list[TokenRow]:
        """One row a text.

        Raises:
            InputError: They are no texts.
        """
        if not all(isinstance(text, str) for text in texts):
            raise InputError("Only texts can be embedded.", fix="pass a string or a list of strings.")
        texts = [self._prompt + text for text in texts]
        return super().rows([text.lower() for text in texts] if self._settings.get("do_lower_case") else texts, pairs)

    def embed(self, rows: Sequence[TokenRow]) -> torch.Tensor:
        """Embeddings of rows: `(rows, hidden)`."""
        inputs = self.batch(rows)
        output = self.model(**inputs)
        if "sentence_embedding" in output:
            pooled: torch.Tensor = output.sentence_embedding
            return pooled
        hidden: torch.Tensor = output.last_hidden_state
        mask = inputs["attention_mask"].unsqueeze(-1).to(hidden.device, hidden.dtype)
        return (hidden * mask).sum(1) / mask.sum(1).clamp(min=1)


class PairScorer(TextRows):
    """Scores of pairs of texts by a cross-encoder, before what turns outputs into scores.

    Args:
        model: An `ORTModelForSequenceClassification`.
        tokenizer: The artifact's own when `None`.
    """

    def __init__(self, model: Any, tokenizer: Any = None) -> None:
        tokenizer = tokenizer or kept_companion_of(model, "AutoTokenizer")
        self.model = model
        limit = model.artifact.components[0].max_sizes.get("sequence")
        super().__init__(tokenizer, longest(limit, tokenizer, None))

    def logits(self, rows: Sequence[TokenRow]) -> torch.Tensor:
        """Outputs of rows: `(rows, num_labels)` float32 on the CPU."""
        found: torch.Tensor = self.model(**self.batch(rows)).logits.float().cpu()
        return found


def sentence_settings(folder: Path) -> tuple[Mapping[str, Any], str]:
    """What sentence-transformers' files in a folder say about texts, and the prompt before each of them."""

    def settings(name: str) -> dict[str, Any]:
        path = folder / name
        return read_json(path) if path.is_file() else {}

    general = settings("config_sentence_transformers.json")
    prompt = (general.get("prompts") or {}).get(general.get("default_prompt_name"), "")
    return settings("sentence_bert_config.json"), prompt
