"""How far a model of texts counts: tables of positions, and the longest sequence that they allow."""

from __future__ import annotations

import re
from typing import Any

import torch

from ..interfaces.family import Axes

_POSITIONS = re.compile(r"(^|[._])(position_embeddings?|positions_embed|embed_positions|wpe|pos_embed\w*)$")
_TABLES = ("token_embedding", "word_embeddings", "embed_tokens", "shared")
# Positions that are looked up nowhere may be as large as 32 bits hold.
_FARTHEST = 2**31 - 1
# What the parts of a model read that see no tokens; those that do not say it are called so (OWL-ViT's, CLAP's).
_OF_TOWERS = ("pixel_values", "pixel_values_videos", "input_features", "input_values")
_NAMES_OF_TOWERS = ("vision_model", "audio_model")


def rows_of_table(module: Any) -> int | None:
    """How many rows ids choose from in a table, PyTorch's or a model's own (I-BERT's); `None` of any other module."""
    own = type(module).__name__.endswith("Embedding") and hasattr(module, "padding_idx")
    weight = getattr(module, "weight", None) if own or isinstance(module, torch.nn.Embedding) else None
    return weight.shape[0] if isinstance(weight, torch.Tensor) and weight.ndim == 2 else None


def has_position_table(module: torch.nn.Module, limit: int) -> bool:
    """Whether a model looks positions, or which tokens see which, up in a table of `limit` rows."""
    parts = _parts_that_read_text(module)
    if any(rows_of_table(child) is not None and _POSITIONS.search(name) for name, child in parts.items()):
        return True
    if any(_POSITIONS.search(f"{name}.{own}") for name, child in parts.items() for own in child._parameters):
        return True
    # Tables may have a few rows more than declared (OPT).
    buffers = [buffer for child in parts.values() for buffer in child._buffers.values() if buffer is not None]
    return any(limit <= size <= limit + 8 for buffer in buffers for size in buffer.shape)


def _parts_that_read_text(module: torch.nn.Module) -> dict[str, torch.nn.Module]:
    """The modules in a module by name, without the towers that read images or sounds: positions there are no tokens'.

    Where a config has a part for texts, they are those that were made of it, whatever the towers are called.
    """
    every = {name: child for name, child in module.named_modules() if name}
    text = getattr(getattr(module, "config", None), "text_config", None)
    readers: list[str] = []
    for name, child in every.items() if text is not None else ():
        if type(getattr(child, "config", None)) is type(text) and not _is_within(name, readers):
            readers.append(name)
    if readers:
        return {name: child for name, child in every.items() if _is_within(name, readers)}
    towers = [
        name
        for name, child in every.items()
        if getattr(child, "main_input_name", "input_ids") in _OF_TOWERS or name.rpartition(".")[2] in _NAMES_OF_TOWERS
    ]
    return {"": module} | {name: child for name, child in every.items() if not _is_within(name, towers)}


def _is_within(name: str, parts: list[str]) -> bool:
    """Whether a module is one of these parts or in one of them."""
    return any(name == part or name.startswith(f"{part}.") for part in parts)


def text_rows(module: torch.nn.Module) -> int | None:
    """Rows of the table that a model of texts beside images or sounds looks its tokens up in."""
    config: Any = getattr(module, "config", None)
    declared = getattr(config.get_text_config(), "vocab_size", None) if config is not None else None
    if not isinstance(declared, int):
        return None
    tables = (child for name, child in _parts_that_read_text(module).items() if name.rpartition(".")[2] in _TABLES)
    return min((rows for rows in map(rows_of_table, tables) if rows is not None and rows >= declared), default=None)


def position_bounds(module: torch.nn.Module) -> tuple[int, int]:
    """The smallest and the largest of the `position_ids` that a model of texts has.

    Those that are looked up have the rows of their table. Angles are computed of any position; of those below 0 they are
    no text's.
    """
    least, most = 0, _FARTHEST
    for name, child in _parts_that_read_text(module).items():
        rows_here = rows_of_table(child)
        tables = {} if rows_here is None else {name: rows_here}
        # Computed once and kept: GPT-J's and CodeGen's buffers, M2M100's and XGLM's modules, CTRL's tensor.
        kept = {**vars(child), **child._buffers}
        for own, held in kept.items():
            if isinstance(held, torch.Tensor) and held.ndim == 2:
                tables[name if own == "weights" else own] = held.shape[0]
        for table, rows in tables.items():
            if table == "pos_encoding" or _POSITIONS.fullmatch(table.rpartition(".")[2]):
                # OPT's and BART's tables have rows in front, which padded tokens read: their positions are negative.
                offset = getattr(child, "offset", 0)
                offset = offset if isinstance(offset, int) else 0
                least, most = min(least, -offset), min(most, rows - 1 - offset)
    return least, most


def longest_at_once(config: Any) -> int | None:
    """How long texts may be before a model computes them in blocks, which is another graph; `None` where it never does."""
    if getattr(config, "attention_type", None) == "block_sparse":
        # BigBird attends to everything in texts up to this length.
        return (5 + 2 * int(config.num_random_blocks)) * int(config.block_size)
    if "linear_attention" in (getattr(config, "layer_types", None) or ()) and hasattr(config, "block_size"):
        # MiniMax computes with all of them at once.
        return int(config.block_size)
    return None


def max_sizes_of(module: torch.nn.Module, axes: Axes) -> dict[str, int]:
    """How long a sequence the model's learned positions allow."""
    if not any("sequence" in named.values() for named in axes.values()):
        return {}
    limits = []
    config: Any = getattr(module, "config", None)
    declared = getattr(config.get_text_config(), "max_position_embeddings", None) if config is not None else None
    for name, child in _parts_that_read_text(module).items():
        if not _POSITIONS.search(name):
            continue
        if (rows := rows_of_table(child)) is not None:
            # RoBERTa-like tables start counting behind the padding row; OPT's and BART's have two rows more than declared.
            padding = getattr(child, "padding_idx", None)
            offset = 0 if padding is None else padding + 1
            limits.append(rows - offset)
            if isinstance(declared, int) and 0 < declared < rows:
                limits.append(declared)
        elif isinstance(kept := getattr(child, "weights", None), torch.Tensor):
            # Computed once and kept (M2M100, TIPSv2): a graph has the rows that the model had.
            limits.append(int(declared or kept.shape[0]))
    if (block := longest_at_once(config)) is not None:
        limits.append(block)
    if isinstance(whole := getattr(config, "max_text_len", None), int):
        # Grounding DINO scores so many tokens.
        limits.append(whole)
    return {"sequence": min(limits)} if limits else {}
