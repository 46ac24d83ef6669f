"""Texts to rows of token ids and to padded batches."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from tokenizers import Tokenizer

Array = np.ndarray[Any, Any]


class Refused(Exception):  # noqa: N818  # not an error of the server: the request cannot be answered
    """A request that cannot be answered, and why; the others of its batch are."""


class NotFinite(Refused):
    """A request for which the graph computed NaN or infinity: an error of the model, not of the request."""


@dataclass(frozen=True)
class GraphRow:
    """One row of a batch: ids, mask and so on by the graph's names, each a list of its own length."""

    values: Mapping[str, Sequence[int]]

    @property
    def length(self) -> int:
        """Its tokens."""
        return len(self.values["input_ids"])


class Tokens:
    """A tokenizer as a model was exported with it.

    Args:
        folder: Holds `tokenizer.json`.
        settings: `inputs` (types by name), `padding` (a side, and values by name), `truncation_side`, `max_length`, `buckets`
            and `required` (tokens that each row must hold, by input).

    Attributes:
        left: Whether rows are padded on the left.
    """

    def __init__(self, folder: Path, settings: Mapping[str, Any]) -> None:
        self.tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
        self.tokenizer.no_padding()
        self.tokenizer.no_truncation()
        self.max_length: int | None = settings["max_length"]
        self._inputs: Mapping[str, str] = settings["inputs"]
        self.left: bool = settings["padding"]["side"] == "left"
        self._fill: Mapping[str, int] = settings["padding"]["values"]
        self._zeros = frozenset(settings["zeros"])
        self._cut_side = settings["truncation_side"]
        self._buckets: Sequence[int] = settings["buckets"]
        self._required: Mapping[str, int] = settings["required"]
        self._cut: tuple[Any, ...] | None = None

    def encode(
        self,
        text: str,
        pair: str | None = None,
        *,
        cut: str | None = None,
        max_length: int | None = None,
        stride: int = 0,
    ) -> list[Any]:
        """The encoding of a text or of a pair, and those of its overflowing windows.

        Args:
            text: The first text.
            pair: The second.
            cut: What a text that is too long loses: `longest_first`, `only_first` or `only_second`; `None` refuses it.
            max_length: Tokens a row; the model's own limit when `None`.
            stride: Tokens that windows share.

        Raises:
            Refused: It is too long and must not be cut, or cannot be.
        """
        limit = max_length if max_length is not None else self.max_length
        wanted = None if cut is None or limit is None else (limit, stride, cut)
        if wanted != self._cut:
            self._cut = None
            if wanted is None:
                self.tokenizer.no_truncation()
            else:
                try:
                    self.tokenizer.enable_truncation(
                        wanted[0], stride=stride, strategy=wanted[2], direction=self._cut_side
                    )
                except (KeyboardInterrupt, SystemExit):
                    raise
                except BaseException as error:  # where a stride is too long, tokenizers' panic is no `Exception`
                    self.tokenizer.no_truncation()
                    raise Refused(
                        f"texts cannot be cut to {limit} tokens with a stride of {stride}: {error}"
                    ) from error
            self._cut = wanted
        try:
            found = self.tokenizer.encode(text, pair)
        except (KeyboardInterrupt, SystemExit):
            raise
        except BaseException as error:  # a panic where the first text leaves the second less room than the stride
            raise Refused(f"the text cannot be cut to {limit} tokens: {error}") from error
        if limit is not None and len(found.ids) > limit:
            raise Refused(f"the text has {len(found.ids)} tokens and the model reads {limit}")
        return [found, *found.overflowing]

    def row(self, encoding: Any) -> GraphRow:
        """What the graph reads of an encoding.

        Raises:
            Refused: It lacks a token that the graph reads its answer from.
        """
        known = {
            "input_ids": encoding.ids,
            "attention_mask": encoding.attention_mask,
            "token_type_ids": encoding.type_ids,
        }
        length = len(encoding.ids)
        for name, token in self._required.items():
            if token not in known[name]:
                raise Refused(f"the text has no token {token}, which the model looks for in each text")
        return GraphRow({name: [0] * length if name in self._zeros else known[name] for name in self._inputs})

    def pad(self, rows: Sequence[GraphRow]) -> dict[str, Array]:
        """Rows as one batch, as long as the longest of them, or as the bucket that it fits in."""
        longest = max(row.length for row in rows)
        length = next((bucket for bucket in self._buckets if bucket >= longest), longest)
        batch = {}
        for name, kind in self._inputs.items():
            batch[name] = values = np.full((len(rows), length), self._fill[name], dtype=kind)
            for i, row in enumerate(rows):
                values[i, self._own(row.length, length)] = row.values[name]
        return batch

    def unpadded(self, values: Array, length: int) -> Array:
        """Of what a graph returned for one row, by token, the part for its own tokens."""
        part: Array = values[self._own(length, len(values))]
        return part

    def _own(self, length: int, padded: int) -> slice:
        return slice(padded - length, None) if self.left else slice(0, length)
