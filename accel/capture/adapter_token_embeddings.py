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

# Endings of the names of embedding tensors in a PEFT adapter. `_AXES` maps each ending to the axis with one entry for each token.
_WHOLE = ("weight", "base_layer.weight", "modules_to_save.weight", "modules_to_save.default.weight")
_AXES = {
    **dict.fromkeys(_WHOLE, 0),
    **dict.fromkeys(("lora_embedding_A", "lora_embedding_A.default"), 1),
    **dict.fromkeys(("lora_B.weight", "lora_B.default.weight"), 0),
}
_PREFIX = "base_model.model."


def adapter_shapes(folder: Path) -> dict[str, tuple[int, ...]]:
    """Return the shapes of a PEFT adapter's tensors by name. The dict is empty if the folder has no weights.

    This function reads only the shapes. `peft.load_peft_weights` reads all weights, and downloads them from the Hub if the folder
    has none.
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

    PEFT resizes the embeddings to the length of the adapter's tokenizer. This function uses the exact size of the embedding
    tensors in the adapter, because models may have more embeddings than their tokenizer has tokens.

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
    sizes = _rows_of_tables(model, shapes)
    if len(set(sizes.values())) > 1:
        listing = ", ".join(f"{name} {size}" for name, size in sizes.items())
        raise ExportError(
            f"The embedding tensors of the PEFT adapter in {folder} have different numbers of tokens ({listing}).",
            fix="save the adapter again with PEFT's save_pretrained.",
        )
    trained = _trained_tokens(folder)
    tokens = max([*set(sizes.values())] or [rows])
    tokens = max(tokens, max(trained, default=-1) + 1)
    if tokens == rows:
        _tell_of_other_tokens(folder, rows)
        return
    input_name = next(name for name, module in model.named_modules() if module is table)
    has_table = any(f"{_PREFIX}{input_name}.{ending}" in shapes for ending in _WHOLE)
    missing = [token for token in range(rows, tokens) if token not in trained]
    if not has_table and missing:
        raise ExportError(
            f"The PEFT adapter in {folder} was trained with {tokens} tokens. Its base model has embeddings for {rows} tokens, and the "
            f"adapter contains no embeddings for the other {tokens - rows} tokens.",
            fix="save the adapter with model.save_pretrained(..., save_embedding_layers=True), or set base_model_name_or_path in "
            f"adapter_config.json to a base model with {tokens} tokens.",
        )
    model.resize_token_embeddings(tokens, mean_resizing=False)
    _fill_head(model, folder, rows, shapes)


def _fill_head(model: Any, folder: Path, rows: int, shapes: Mapping[str, tuple[int, ...]]) -> None:
    """Fill the output embeddings of added tokens with the mean of the existing rows. transformers does approximately the same.

    The function does nothing if the adapter contains the output embeddings, or if the output embeddings are tied to the input
    embeddings.
    """
    head = getattr(model, "get_output_embeddings", lambda: None)()
    if head is None or head.weight is model.get_input_embeddings().weight:
        return
    name = next((name for name, module in model.named_modules() if module is head), "")
    if any(f"{_PREFIX}{name}.{ending}" in shapes for ending in _WHOLE):
        return
    with torch.no_grad():
        for tensor in (head.weight, getattr(head, "bias", None)):
            if tensor is not None:
                tensor[rows:] = tensor[:rows].mean(0)
    logger.warning(
        "The PEFT adapter in %s contains input embeddings for added tokens, but no output embeddings for the added tokens. The model "
        "can read the added tokens, but it was not trained to generate these tokens.", folder,
    )  # fmt: skip


def _table(model: Any) -> Any:
    try:
        table = model.get_input_embeddings()
    # Models without token embeddings raise an AttributeError or a NotImplementedError.
    except (AttributeError, NotImplementedError):
        return None
    return table if isinstance(table, torch.nn.Embedding) else None


def _rows_of_tables(model: Any, shapes: Mapping[str, tuple[int, ...]]) -> dict[str, int]:
    """Return the number of tokens of each embedding tensor in an adapter, by tensor name."""
    tables = [model.get_input_embeddings(), getattr(model, "get_output_embeddings", lambda: None)()]
    names = [name for name, module in model.named_modules() if any(module is table for table in tables)]
    return {
        tensor: shapes[tensor][axis]
        for name in names
        for ending, axis in _AXES.items()
        if (tensor := f"{_PREFIX}{name}.{ending}") in shapes
    }


def _trained_tokens(folder: Path) -> set[int]:
    """Return the token ids whose embeddings the adapter trains one by one, instead of the full embedding table.

    PEFT writes these ids to `trainable_token_indices` (LoRA) or `token_indices` (trainable-tokens adapters).
    """
    settings = read_json(folder / "adapter_config.json")
    tokens: set[int] = set()
    for name in ("trainable_token_indices", "token_indices"):
        value = settings.get(name) or []
        lists = value.values() if isinstance(value, dict) else [value]
        tokens |= {token for ids in lists for token in ids if isinstance(token, int)}
    return tokens


def _tell_of_other_tokens(folder: Path, rows: int) -> None:
    """Warn if the adapter's tokenizer has tokens without embeddings. Usually the only token without an embedding is the padding token."""
    if not (folder / "tokenizer_config.json").is_file():
        return
    from transformers import AutoTokenizer

    try:
        tokens = len(AutoTokenizer.from_pretrained(folder, local_files_only=True))
    # This check is optional. A broken tokenizer raises its error when a caller loads the tokenizer.
    except Exception:  # noqa: BLE001
        return
    if tokens > rows:
        logger.warning(
            "The tokenizer in %s has %d tokens, but the PEFT adapter and its base model have embeddings for only %d tokens. A text "
            "that contains a token without an embedding raises an InputError.", folder, tokens, rows,
        )  # fmt: skip
