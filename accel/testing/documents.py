"""Seeded tiny models of documents with their tokenizers: made offline, as in `models`."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import transformers

from .models import POSITIONS, rescale, tiny_tokenizer

_COMMON: dict[str, Any] = {
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 48,
    "max_position_embeddings": POSITIONS,
    "num_labels": 2,
}
DOCUMENT_FAMILIES: Mapping[str, tuple[str, dict[str, Any]]] = {
    "layoutlm": ("LayoutLM", {**_COMMON, "vocab_size": 120}),
    # Six coordinates share the hidden size.
    "layoutlmv3": (
        "LayoutLMv3",
        {**_COMMON, "vocab_size": 270, "coordinate_size": 6, "shape_size": 4, "input_size": 32, "patch_size": 8},
    ),
}
"""Names and configs of classes, by family."""


def save_document_model(folder: Path, family: str = "layoutlm", seed: int = 0) -> Path:
    """Write a tiny model of a family of `DOCUMENT_FAMILIES` with its tokenizer as a transformers folder."""
    prefix, settings = DOCUMENT_FAMILIES[family]
    torch.manual_seed(seed)
    config = getattr(transformers, f"{prefix}Config")(**settings)
    model: Any = rescale(getattr(transformers, f"{prefix}ForQuestionAnswering")(config), seed).eval()
    model.save_pretrained(folder)
    (tiny_tokenizer() if family == "layoutlm" else _letters()).save_pretrained(folder)
    return folder


def _letters() -> Any:
    """LayoutLMv3's tokenizer without merges: a token a letter."""
    from tokenizers import pre_tokenizers

    words = ["<s>", "<pad>", "</s>", "<unk>", "<mask>", *sorted(pre_tokenizers.ByteLevel.alphabet())]
    return transformers.LayoutLMv3Tokenizer(
        vocab={word: number for number, word in enumerate(words)}, merges=[], model_max_length=POSITIONS - 2
    )
