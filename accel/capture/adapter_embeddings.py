"""Embeddings of a base model, resized to the tokens that a PEFT adapter was trained with."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from ..artifact.json_reading import read_json
from ..errors import ExportError

logger = logging.getLogger(__name__)

# Endings of the names of embedding tensors in an adapter, and the axis of each tensor that counts tokens.
_WHOLE = ("weight", "base_layer.weight", "modules_to_save.weight", "modules_to_save.default.weight")
_AXES = {
    **dict.fromkeys(_WHOLE, 0),
    **dict.fromkeys(("lora_embedding_A", "lora_embedding_A.default"), 1),
    **dict.fromkeys(("lora_B.weight", "lora_B.default.weight"), 0),
}
_PREFIX = "base_model.model."


def adapter_shapes(folder: Path) -> dict[str, tuple[int, ...]]:
    """Return the shapes of an adapter's tensors by name, without reading the weights; empty if there are no weights.

    `peft.load_peft_weights` reads all weights, and asks the Hub if the folder has none.
    """
    weights = folder / "adapter_model.safetensors"
    if weights.is_file():
        from safetensors import safe_open

        with safe_open(weights, framework="pt") as file:
            return {name: tuple(file.get_slice(name).get_shape()) for name in file.keys()}  # noqa: SIM118
    weights = folder / "adapter_model.bin"
    if not weights.is_file():
        return {}
    loaded = torch.load(weights, map_location="meta", weights_only=True)
    return {name: tuple(tensor.shape) for name, tensor in loaded.items()}


def fit_embeddings(model: Any, folder: Path, shapes: Mapping[str, tuple[int, ...]]) -> None:
    """Resize a base model's token embeddings to fit its PEFT adapter.

    PEFT resizes to the length of the adapter's tokenizer. The embedding tensors in the adapter give the exact size, because
    models may pad their embeddings beyond the tokenizer.

    Args:
        model: The base model. Changed in place.
        folder: Folder of the adapter.
        shapes: Shapes of the adapter's tensors by name.

    Raises:
        ExportError: The embedding tensors of the adapter differ in length, or the adapter has more tokens than the base
            model and does not contain embeddings for them.
    """
    table = _table(model)
    if table is None:
        return
    rows = int(table.weight.shape[0])
    found = _rows_of_tables(model, shapes)
    if len(set(found.values())) > 1:
        listing = ", ".join(f"{name} {size}" for name, size in found.items())
        raise ExportError(
            f"{folder} holds embeddings of different lengths ({listing}).", fix="save the adapter again with PEFT."
        )
    trained = _trained_tokens(folder)
    wanted = max([*set(found.values())] or [rows])
    wanted = max(wanted, max(trained, default=-1) + 1)
    if wanted == rows:
        _tell_of_other_tokens(folder, rows)
        return
    input_name = next(name for name, one in model.named_modules() if one is table)
    whole = any(f"{_PREFIX}{input_name}.{ending}" in shapes for ending in _WHOLE)
    missing = [token for token in range(rows, wanted) if token not in trained]
    if not whole and missing:
        raise ExportError(
            f"{folder} was trained with {wanted} tokens, its base model has {rows}, and the adapter holds no embeddings of the others.",
            fix="save it with PEFT's save_embedding_layers=True, or name the base model that has them in adapter_config.json.",
        )
    model.resize_token_embeddings(wanted, mean_resizing=False)
    _fill_head(model, folder, rows, shapes)


def _fill_head(model: Any, folder: Path, rows: int, shapes: Mapping[str, tuple[int, ...]]) -> None:
    """Fill the output embeddings of added tokens with the mean of the existing rows, as transformers does approximately.

    Does nothing if the adapter holds the output embeddings, or if they are tied to the input embeddings.
    """
    head = getattr(model, "get_output_embeddings", lambda: None)()
    if head is None or head.weight is model.get_input_embeddings().weight:
        return
    name = next((name for name, one in model.named_modules() if one is head), "")
    if any(f"{_PREFIX}{name}.{ending}" in shapes for ending in _WHOLE):
        return
    with torch.no_grad():
        for tensor in (head.weight, getattr(head, "bias", None)):
            if tensor is not None:
                tensor[rows:] = tensor[:rows].mean(0)
    logger.warning(
        "%s holds embeddings of added tokens for the model's input, none for its output: the model reads them, and was not trained "
        "to write them.", folder,
    )  # fmt: skip


def _table(model: Any) -> Any:
    try:
        found = model.get_input_embeddings()
    # Models without token embeddings raise one of these two errors.
    except (AttributeError, NotImplementedError):
        return None
    return found if isinstance(found, torch.nn.Embedding) else None


def _rows_of_tables(model: Any, shapes: Mapping[str, tuple[int, ...]]) -> dict[str, int]:
    """Return the number of tokens of each embedding tensor in an adapter, by tensor name."""
    tables = [model.get_input_embeddings(), getattr(model, "get_output_embeddings", lambda: None)()]
    names = [name for name, one in model.named_modules() if any(one is table for table in tables)]
    return {
        tensor: shapes[tensor][axis]
        for name in names
        for ending, axis in _AXES.items()
        if (tensor := f"{_PREFIX}{name}.{ending}") in shapes
    }


def _trained_tokens(folder: Path) -> set[int]:
    """Return the tokens whose single embeddings an adapter trains (`trainable_token_indices`, or a trainable-tokens adapter)."""
    settings = read_json(folder / "adapter_config.json")
    found: set[int] = set()
    for name in ("trainable_token_indices", "token_indices"):
        told = settings.get(name) or []
        lists = told.values() if isinstance(told, dict) else [told]
        found |= {token for one in lists for token in one if isinstance(token, int)}
    return found


def _tell_of_other_tokens(folder: Path, rows: int) -> None:
    """Warn if the adapter's tokenizer has tokens without embeddings. Usually this is a padding token."""
    if not (folder / "tokenizer_config.json").is_file():
        return
    from transformers import AutoTokenizer

    try:
        tokens = len(AutoTokenizer.from_pretrained(folder, local_files_only=True))
    # Errors of the tokenizer are reported later, when the tokenizer is used.
    except Exception:  # noqa: BLE001
        return
    if tokens > rows:
        logger.warning(
            "The tokenizer of %s has %d tokens, and neither the adapter nor its base model has embeddings for more than %d: "
            "texts with the others are refused.", folder, tokens, rows,
        )  # fmt: skip
