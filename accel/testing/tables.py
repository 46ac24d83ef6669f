"""A seeded tiny model of tables with its tokenizer: made offline, as in `models`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import transformers

from .models import POSITIONS, rescale, tiny_tokenizer

TAPAS = "tapas"
"""The family of the tiny model of tables."""


def save_tapas(folder: Path, seed: int = 0) -> Path:
    """Write a tiny TAPAS that aggregates, with its tokenizer."""
    folder.mkdir(parents=True, exist_ok=True)
    config = transformers.TapasConfig(
        vocab_size=120, hidden_size=32, num_hidden_layers=2, num_attention_heads=4, intermediate_size=48,
        max_position_embeddings=POSITIONS, num_aggregation_labels=4, select_one_column=True,
        aggregation_labels={0: "NONE", 1: "SUM", 2: "AVERAGE", 3: "COUNT"}, no_aggregation_label_index=0,
    )  # fmt: skip
    torch.manual_seed(seed)
    model: Any = rescale(transformers.TapasForQuestionAnswering(config), seed).eval()
    with torch.no_grad():
        # Else no cell is likelier than not.
        model.output_bias.fill_(1.0)
    model.save_pretrained(folder)
    words = sorted(tiny_tokenizer().get_vocab().items(), key=lambda item: item[1])
    # The letters inside of a word are pieces of their own.
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
