"""Name, element type and shape of what goes in and out of a graph."""

from __future__ import annotations

from dataclasses import KW_ONLY, dataclass
from typing import Literal

Role = Literal["data", "mask", "cache"]


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """Name, element type and shape of one input or output of a graph.

    Attributes:
        name: Its name in the graph.
        dtype: A `torch` dtype name: `float32`, `int64`, ...
        shape: Sizes; an axis that varies is its name (`batch`, `sequence`, ...).
        role: What it is for: `data`, a padding `mask`, or a `cache` tensor.
        pad_value: What fills the padding when an axis is rounded up to a bucket.
        bounds: The smallest and the largest value that it may hold, where there are such: ids of tokens, positions, masks. A mask with
            bounds leaves every row a token.
        required: A token that each row must hold at a place that its mask keeps: a head reads the last of them (BART's classifier).
        equal_counts: All rows of a batch must hold the required token equally often. Graphs of other tools select these tokens by a
            mask over the whole batch, and answer a row from another row's tokens where the counts differ.
        pair: For a cache tensor, the name of its past (of an output) or present (of an input) counterpart.
    """

    name: str
    dtype: str
    shape: tuple[int | str, ...]
    _: KW_ONLY
    role: Role = "data"
    pad_value: float = 0
    pair: str | None = None
    bounds: tuple[int, int] | None = None
    required: int | None = None
    equal_counts: bool = False
