"""Rows of data that are encoded for a model: texts as token ids, or images and sounds that are loaded with their batch."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Self

from .labels import texts
from .rows import DatasetRows

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True, slots=True, kw_only=True)
class EncodedRows:
    """Encoded rows, ready for batching: token ids, or media with a processor.

    Attributes:
        tokens: Token ids, masks and other inputs, by input name, one list per row. Some inputs have several numbers per token.
        padding: Padding value by input name; it fills rows up to the longest row of a batch. When the mapping is empty, rows of
            different length are never in the same batch.
        left: Whether padding is added on the left.
        media: Images, videos or sounds, and the processor that turns several of them into inputs; replaces `tokens`.
        lengths: Number of samples of each sound. Sounds of different length are never in the same batch: padding changes the outputs
            of models whose feature extractor returns no mask, and adds letters to the end of a transcript.
        alone: Whether each image forms its own batch, because the processed images differ in size.
        words: For rows that are lists of words: the word index of each token, per row; `None` for special tokens.
    """

    tokens: Mapping[str, Sequence[Sequence[Any]]] = field(default_factory=dict)
    padding: Mapping[str, int] = field(default_factory=dict)
    left: bool = False
    media: tuple[Sequence[Any], Callable[..., Mapping[str, Any]]] | None = None
    lengths: Sequence[int] = ()
    alone: bool = False
    words: Sequence[Sequence[int | None]] | None = None

    def with_inputs(self, tokens: Mapping[str, Any]) -> Self:
        """Return a copy with the same images or sounds that adds the given text inputs to every batch."""
        assert self.media is not None
        column, processor = self.media
        return replace(self, media=(column, lambda items, **options: {**processor(items, **options), **tokens}))

    def __len__(self) -> int:
        return len(self.media[0]) if self.media is not None else len(self.tokens["input_ids"])

    def plan(self, batch_size: int, *, by_length: bool = True) -> list[list[int]]:
        """Return the row indices of each batch: grouped by similar length, shortest first, or in the order of the rows."""
        lengths = self.lengths or [len(row) for row in self.tokens.get("input_ids", ())]
        mixes = not self.lengths if self.media is not None else bool(self.padding)
        batch_size = 1 if self.alone else batch_size
        order = list(range(len(self)))
        if lengths and (by_length or not mixes):
            order.sort(key=lengths.__getitem__)
        groups = [order] if mixes else [list(same) for _, same in itertools.groupby(order, key=lengths.__getitem__)]
        return [group[i : i + batch_size] for group in groups for i in range(0, len(group), batch_size)]

    def batch(self, rows: Sequence[int]) -> dict[str, torch.Tensor]:
        """Return the model inputs of the given rows as one batch.

        For texts, the inputs have the shape `(rows, longest) int64`. For images and sounds, they are the processor's output, such as
        `pixel_values`.
        """
        if self.media is not None:
            column, processor = self.media
            return dict(processor([column[i] for i in rows], return_tensors="pt"))
        return {
            name: padded([values[i] for i in rows], self.padding.get(name, 0), left=self.left)
            for name, values in self.tokens.items()
        }


def padded(rows: Sequence[Sequence[Any]], fill: int, *, left: bool) -> torch.Tensor:
    """Pad rows to the longest row and stack them: `(rows, longest, ...) int64`.

    Each token has one number, such as a token id, or several numbers, such as a bounding box.
    """
    import torch

    lengths = [len(row) for row in rows]
    width = max(lengths)
    if min(lengths) == width:
        return torch.tensor(rows, dtype=torch.int64)
    first = next(row[0] for row in rows if len(row))
    pad = [fill] * len(first) if hasattr(first, "__len__") else fill
    pairs = zip(rows, ([pad] * (width - length) for length in lengths), strict=True)
    return torch.tensor([[*rest, *row] if left else [*row, *rest] for row, rest in pairs], dtype=torch.int64)


class LazyColumn(Sequence[Any]):
    """Concatenated columns of a data set; each value is loaded on access.

    Args:
        columns: Columns of equal length.
        read: Function of a value, its row and its column (both counted from 0) that returns an input for the processor.
    """

    def __init__(self, columns: Sequence[Sequence[Any]], read: Callable[[Any, int, int], Any]) -> None:
        self._columns, self._read = columns, read

    def __len__(self) -> int:
        return sum(map(len, self._columns))

    def __getitem__(self, index: Any) -> Any:
        column, row = divmod(index, len(self._columns[0]))
        return self._read(self._columns[column][row], row, column)


def encode_texts(rows: DatasetRows, processor: Any, max_length: int | None) -> EncodedRows:
    """Tokenize one text per row."""
    return from_tokenizer(processor(texts(rows, "text"), **cut(max_length)), processor)


def cut(max_length: int | None) -> dict[str, Any]:
    """Return the tokenizer arguments that truncate texts to `max_length` tokens; `None` means no truncation."""
    return {"truncation": max_length is not None, "max_length": max_length}


def from_tokenizer(encoding: Any, tokenizer: Any) -> EncodedRows:
    """Convert a tokenizer's output for a list of rows into `EncodedRows` rows."""
    names = [name for name in tokenizer.model_input_names if name in encoding]
    pad = tokenizer.pad_token_id
    padding = {"input_ids": pad, "token_type_ids": tokenizer.pad_token_type_id} if pad is not None else {}
    return EncodedRows(
        tokens={name: encoding[name] for name in names}, padding=padding, left=tokenizer.padding_side == "left"
    )
