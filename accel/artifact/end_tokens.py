"""Graphs whose head selects tokens by a mask over the whole batch: those of other tools, and of earlier versions of this library."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from .reading import read_json
from .tensors import TensorSpec

# The field of the config that names the token, and its value where a config leaves it out, by class (transformers 5.24).
_TOKENS = {
    "BartForSequenceClassification": ("eos_token_id", 2),
    "BigBirdPegasusForSequenceClassification": ("eos_token_id", 1),
    "LongformerForQuestionAnswering": ("sep_token_id", 2),
    "MBartForSequenceClassification": ("eos_token_id", 2),
    "MT5ForSequenceClassification": ("eos_token_id", 1),
    "MvpForSequenceClassification": ("eos_token_id", 2),
    "PLBartForSequenceClassification": ("eos_token_id", 2),
    "T5ForSequenceClassification": ("eos_token_id", 1),
    "UMT5ForSequenceClassification": ("eos_token_id", 1),
}


def with_equal_counts(inputs: Sequence[TensorSpec], architecture: str, folder: Path) -> tuple[TensorSpec, ...]:
    """Inputs of a graph, of which `input_ids` must hold the token of the head equally often in each row of a batch.

    Inputs of other architectures, and of graphs that answer each row by itself, stay as they are.

    Args:
        inputs: What the graph takes.
        architecture: Name of the transformers class.
        folder: Where its `config.json` is.
    """
    if architecture not in _TOKENS or any(spec.required is not None for spec in inputs):
        return tuple(inputs)
    field, default = _TOKENS[architecture]
    path = folder / "config.json"
    token = read_json(path).get(field, default) if path.is_file() else default
    token = token if isinstance(token, int) else default
    return tuple(
        replace(spec, required=token, equal_counts=True) if spec.name == "input_ids" else spec for spec in inputs
    )
