"""Position embeddings of text models, and the longest sequence that a model's position embeddings allow."""

from __future__ import annotations

import re
from typing import Any

import torch

from ..interfaces.family import Axes

_POSITIONS = re.compile(r"(^|[._])(position_embeddings?|positions_embed|embed_positions|wpe|pos_embed\w*)$")
_TABLES = ("token_embedding", "word_embeddings", "embed_tokens", "shared")
# Without a position table, position ids may be any 32-bit integer.
_FARTHEST = 2**31 - 1
# Vision and audio towers are recognized by their main input, or by their module name if they declare no main input (OWL-ViT, CLAP).
_OF_TOWERS = ("pixel_values", "pixel_values_videos", "input_features", "input_values")
_NAMES_OF_TOWERS = ("vision_model", "audio_model")


def rows_of_table(module: Any) -> int | None:
    """Return the number of rows of an embedding table, or `None` if the module is no embedding table.

    An embedding table is an `Embedding` of PyTorch, or a similar class of a model, as in I-BERT.
    """
    similar = type(module).__name__.endswith("Embedding") and hasattr(module, "padding_idx")
    weight = getattr(module, "weight", None) if similar or isinstance(module, torch.nn.Embedding) else None
    return weight.shape[0] if isinstance(weight, torch.Tensor) and weight.ndim == 2 else None


def has_position_table(module: torch.nn.Module, limit: int) -> bool:
    """Return whether a model has a table for position embeddings, or a buffer for about `limit` positions, such as a causal mask."""
    parts = _parts_that_read_text(module)
    if any(rows_of_table(child) is not None and _POSITIONS.search(name) for name, child in parts.items()):
        return True
    if any(
        _POSITIONS.search(f"{name}.{parameter}")
        for name, child in parts.items()
        for parameter, _ in child.named_parameters(recurse=False)
    ):
        return True
    # A table may have a few rows more than the config declares, as in OPT.
    buffers = (buffer for child in parts.values() for buffer in child.buffers(recurse=False))
    return any(limit <= size <= limit + 8 for buffer in buffers for size in buffer.shape)


def _parts_that_read_text(module: torch.nn.Module) -> dict[str, torch.nn.Module]:
    """Return the submodules that process text, by name.

    If the model's config has a `text_config`, the result contains the modules that were created from `text_config`. If not, the result
    contains all modules except vision and audio towers, whose positions are not positions of tokens.
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
    """Return whether a module name is one of the given names or inside one of them."""
    return any(name == part or name.startswith(f"{part}.") for part in parts)


def text_rows(module: torch.nn.Module) -> int | None:
    """Return the number of rows of the token embedding table, for a model that reads text in addition to images or audio."""
    config: Any = getattr(module, "config", None)
    declared = getattr(config.get_text_config(), "vocab_size", None) if config is not None else None
    if not isinstance(declared, int):
        return None
    tables = (child for name, child in _parts_that_read_text(module).items() if name.rpartition(".")[2] in _TABLES)
    return min((rows for rows in map(rows_of_table, tables) if rows is not None and rows >= declared), default=None)


def position_bounds(module: torch.nn.Module) -> tuple[int, int]:
    """Return the smallest and the largest valid value of `position_ids` of a text model.

    If positions are indices of a table, the number of rows of the table is the limit. Rotary angles can be computed for all positions
    that are not negative.
    """
    least, most = 0, _FARTHEST
    for name, child in _parts_that_read_text(module).items():
        rows_here = rows_of_table(child)
        tables = {} if rows_here is None else {name: rows_here}
        # Some position tables are not Embedding modules. GPT-J and CodeGen have a buffer, M2M100 and XGLM an attribute `weights`, and CTRL
        # a tensor.
        attributes = {**vars(child), **dict(child.named_buffers(recurse=False))}
        for attribute, value in attributes.items():
            if isinstance(value, torch.Tensor) and value.ndim == 2:
                tables[name if attribute == "weights" else attribute] = value.shape[0]
        for table, rows in tables.items():
            if table == "pos_encoding" or _POSITIONS.fullmatch(table.rpartition(".")[2]):
                # The tables of OPT and BART have additional rows at the start, because padding tokens have negative positions.
                offset = getattr(child, "offset", 0)
                offset = offset if isinstance(offset, int) else 0
                least, most = min(least, -offset), min(most, rows - 1 - offset)
    return least, most


def longest_at_once(config: Any) -> int | None:
    """Return the largest number of tokens that a model computes without splitting the text into blocks, or `None` for no limit.

    For longer texts, the model runs other code, so a longer text would need a different graph.
    """
    if getattr(config, "attention_type", None) == "block_sparse":
        # BigBird uses full attention for texts up to this length.
        return (5 + 2 * int(config.num_random_blocks)) * int(config.block_size)
    if "linear_attention" in (getattr(config, "layer_types", None) or ()) and hasattr(config, "block_size"):
        # MiniMax computes linear attention block by block.
        return int(config.block_size)
    return None


def max_sizes_of(module: torch.nn.Module, axes: Axes) -> dict[str, int]:
    """Return the largest sequence length that the model supports, as `{"sequence": n}`, or an empty dict for no limit."""
    if not any("sequence" in named.values() for named in axes.values()):
        return {}
    limits = []
    config: Any = getattr(module, "config", None)
    declared = getattr(config.get_text_config(), "max_position_embeddings", None) if config is not None else None
    for name, child in _parts_that_read_text(module).items():
        if not _POSITIONS.search(name):
            continue
        if (rows := rows_of_table(child)) is not None:
            # In models like RoBERTa, positions start after the `padding_idx` of the module that contains the table. LXMERT's table
            # has a padding index, but its positions start at 0. In OPT and BART, the table has two rows more than declared.
            padding = getattr(child, "padding_idx", None)
            counts_from_padding = hasattr(module.get_submodule(name.rpartition(".")[0]), "padding_idx")
            limits.append(rows - (padding + 1 if padding is not None and counts_from_padding else 0))
            if isinstance(declared, int) and 0 < declared < rows:
                limits.append(declared)
        elif isinstance(table := getattr(child, "weights", None), torch.Tensor):
            # The model computes this table in its constructor (M2M100, TIPSv2). The graph contains the rows that exist during the trace.
            limits.append(int(declared or table.shape[0]))
    if (block := longest_at_once(config)) is not None:
        limits.append(block)
    if isinstance(longest := getattr(config, "max_text_len", None), int):
        # Grounding DINO computes scores for at most this number of tokens.
        limits.append(longest)
    return {"sequence": min(limits)} if limits else {}
