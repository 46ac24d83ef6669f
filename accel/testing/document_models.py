"""Tiny document models with fixed seeds and their tokenizers, created from configs like the models in `accel.testing.models`."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import transformers

from .models import POSITIONS, SIZES, check_family, rescale, small_config, tiny_tokenizer

DOCUMENT_FAMILIES: Mapping[str, tuple[str, dict[str, Any]]] = {
    "layoutlm": ("LayoutLM", {}),
    # LayoutLMv3's hidden size must be the sum of four coordinate sizes and two shape sizes: 4 * 6 + 2 * 4 = 32.
    "layoutlmv3": (
        "LayoutLMv3", {"vocab_size": 270, "pad_token_id": 1, "coordinate_size": 6, "shape_size": 4, "input_size": 32, "patch_size": 8}
    ),
}  # fmt: skip
"""Prefix of transformers' class names, and additional config fields, by family name."""


def save_document_model(folder: Path, family: str = "layoutlm", seed: int = 0) -> Path:
    """Save a tiny model of a family of `DOCUMENT_FAMILIES` and its tokenizer as a transformers folder."""
    check_family(family, DOCUMENT_FAMILIES)
    prefix, settings = DOCUMENT_FAMILIES[family]
    torch.manual_seed(seed)
    config = small_config(getattr(transformers, f"{prefix}Config"), SIZES, num_labels=2, **settings)
    model: Any = rescale(getattr(transformers, f"{prefix}ForQuestionAnswering")(config), seed).eval()
    model.save_pretrained(folder)
    (tiny_tokenizer() if family == "layoutlm" else _letters()).save_pretrained(folder)
    return folder


def _letters() -> Any:
    """Return LayoutLMv3's tokenizer without merges, so that each letter is a token."""
    from tokenizers import pre_tokenizers

    words = ["<s>", "<pad>", "</s>", "<unk>", "<mask>", *sorted(pre_tokenizers.ByteLevel.alphabet())]
    return transformers.LayoutLMv3Tokenizer(
        vocab={word: number for number, word in enumerate(words)}, merges=[], model_max_length=POSITIONS - 2
    )
