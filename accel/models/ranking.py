"""Cross-encoders: a score for a query with a document, as Sentence Transformers' `CrossEncoder` gives it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from ..artifact.sentence_settings import SentenceSettings, sentence_settings
from ..capture.sentence_embeddings import activation_function
from ..errors import ConfigError, InputError
from .texts import PairScorer

Activation = Callable[[torch.Tensor], torch.Tensor]


def scores(
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


def _is_pair(pair: Any) -> bool:
    return isinstance(pair, Sequence) and len(pair) == 2 and all(isinstance(text, str) for text in pair)
