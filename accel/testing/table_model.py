"""A tiny model for questions about tables, with a fixed seed and a tokenizer, created without downloads."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import transformers

from .models import POSITIONS, SIZES, rescale, small_config, tiny_tokenizer

TAPAS = "tapas"
"""Family name of the tiny table model."""


def save_tapas(folder: Path, seed: int = 0) -> Path:
    """Save a tiny TAPAS model with aggregation and its tokenizer as a transformers folder."""
    folder.mkdir(parents=True, exist_ok=True)
    config = small_config(
        transformers.TapasConfig, SIZES, num_aggregation_labels=4, select_one_column=True,
        aggregation_labels={0: "NONE", 1: "SUM", 2: "AVERAGE", 3: "COUNT"}, no_aggregation_label_index=0,
    )  # fmt: skip
    torch.manual_seed(seed)
    model: Any = rescale(transformers.TapasForQuestionAnswering(config), seed).eval()
    with torch.no_grad():
        # A high bias makes the model select cells of the table.
        model.output_bias.fill_(1.0)
    model.save_pretrained(folder)
    words = sorted(tiny_tokenizer().get_vocab().items(), key=lambda item: item[1])
    listed = [word for word, _ in words]
    (folder / "vocab.txt").write_text("\n".join(listed), encoding="utf-8")
    tokenizer = transformers.TapasTokenizer(
        str(folder / "vocab.txt"),
        model_max_length=POSITIONS,
        empty_token="<unused>",
        additional_special_tokens=["<unused>"],
    )
    tokenizer.save_pretrained(folder)
    return folder
