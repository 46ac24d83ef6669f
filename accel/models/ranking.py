"""Cross-encoders: a score for a query with a document, as Sentence Transformers' `CrossEncoder` gives it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from ..errors import ConfigError, InputError
from .texts import PairScorer

Activation = Callable[[torch.Tensor], torch.Tensor]
_KNOWN: dict[str, Activation] = {"Sigmoid": torch.sigmoid, "Identity": lambda logits: logits}


def scores(
    model: Any, pairs: Sequence[Sequence[str]], *, batch_size: int, tokenizer: Any, activation: Activation | None
) -> torch.Tensor:
    """Scores of pairs of texts: `(pairs,)` of a model with one output, else `(pairs, num_labels)`; float32 on the CPU.

    Raises:
        InputError: They are no pairs of texts.
        ConfigError: A batch of no rows.
    """
    if isinstance(pairs, str) or not all(_is_pair(pair) for pair in pairs):
        raise InputError("predict takes pairs of texts.", fix="pass [(query, document), ...].")
    if batch_size < 1:
        raise ConfigError(f"batch_size is {batch_size}.", fix="use at least 1.")
    scorer = PairScorer(model, tokenizer)
    function = activation or activation_of(model.config)
    order = sorted(range(len(pairs)), key=lambda i: sum(map(len, pairs[i])))
    rows: list[torch.Tensor] = [torch.empty(0)] * len(pairs)
    for start in range(0, len(order), batch_size):
        part = order[start : start + batch_size]
        first, second = ([pairs[i][side] for i in part] for side in (0, 1))
        for i, row in zip(part, function(scorer.logits(scorer.rows(first, second))), strict=True):
            rows[i] = row
    found = torch.stack(rows) if rows else torch.empty(0, model.config.num_labels)
    return found[:, 0] if found.shape[1] == 1 else found


def activation_of(config: Any) -> Activation:
    """What turns outputs into scores; see `activation_name`."""
    return _KNOWN[activation_name(config)]


def activation_name(config: Any) -> str:
    """The name of what turns outputs into scores: as Sentence Transformers wrote it into the config, else its default, a sigmoid
    for one output and nothing for several.

    Raises:
        ConfigError: The config names another one.
    """
    written = getattr(config, "sentence_transformers", None) or {}
    name = written.get("activation_fn") or getattr(config, "sbert_ce_default_activation_function", None)
    if name is None:
        return "Sigmoid" if config.num_labels == 1 else "Identity"
    found = str(name).rpartition(".")[2]
    if found not in _KNOWN:
        raise ConfigError(
            f"The model's config asks for the activation {name}, which is not known here.", fix="pass activation_fn=..."
        )
    return found


def _is_pair(pair: Any) -> bool:
    return isinstance(pair, Sequence) and len(pair) == 2 and all(isinstance(text, str) for text in pair)
