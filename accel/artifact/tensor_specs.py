"""Name, element type and shape of the inputs and outputs of a graph."""

from __future__ import annotations

from dataclasses import KW_ONLY, dataclass
from typing import Literal

Role = Literal["data", "mask", "cache"]


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """Name, element type and shape of one input or output of a graph.

    Attributes:
        name: The name in the graph.
        dtype: Name of a `torch` dtype: `float32`, `int64`, ...
        shape: Sizes of the axes; a dynamic axis is given by its name (`batch`, `sequence`, ...).
        role: `data`, a padding `mask`, or a `cache` tensor.
        pad_value: Value of the padding when an axis is rounded up to a bucket size.
        bounds: Smallest and largest allowed value of token ids, positions and masks; `None` if unbounded. A mask with
            bounds must keep at least one token in every row.
        required: A token id that each row must contain where its mask is not 0, because a head reads the last such
            token (BART's classifier).
        equal_counts: Whether all rows of a batch must contain the required token equally often. Graphs of other tools
            select these tokens with a mask over the whole batch, and mix up rows if the counts differ.
        pair: For a cache tensor: the name of the matching past input or present output.
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
