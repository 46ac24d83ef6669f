"""Conversion of texts to rows of token ids, and of rows to padded batches."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from tokenizers import Tokenizer

Array = np.ndarray[Any, Any]


class InvalidRequestError(Exception):
    """Exception for an invalid request, with the reason. The other requests of the same batch are still processed."""


class NonFiniteOutputError(InvalidRequestError):
    """Exception for NaN or infinity in the graph's outputs, which is an error of the model and not of the request."""


@dataclass(frozen=True)
class GraphRow:
    """One row of a batch: token ids, attention mask and other inputs of the graph by name, each a list without padding."""

    values: Mapping[str, Sequence[int]]

    @property
    def length(self) -> int:
        """Number of tokens in the row."""
        return len(self.values["input_ids"])


class Tokens:
    """The tokenizer of a model.

    Args:
        folder: Folder that contains `tokenizer.json`.
        settings: `inputs` (data type by input name), `zeros` (inputs that are filled with 0), `padding` (the side, and the padding value
            by input name), `truncation_side`, `max_length`, `buckets` (lengths to pad to) and `required` (by input name, a token that each
            row must contain).

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
        """Return the encoding of a text or a text pair, followed by the encodings of its overflowing windows.

        Args:
            text: The first text.
            pair: The second text.
            cut: Truncation strategy for texts that are too long: `longest_first`, `only_first` or `only_second`. With `None`, a text that
                is too long raises.
            max_length: Greatest number of tokens in a row; `None` means the model's limit.
            stride: Number of tokens that consecutive windows have in common.

        Raises:
            Refused: The text is too long and is not truncated, or cannot be truncated.
        """
        limit = max_length if max_length is not None else self.max_length
        truncation = None if cut is None or limit is None else (limit, stride, cut)
        if truncation != self._cut:
            self._cut = None
            if truncation is None:
                self.tokenizer.no_truncation()
            else:
                try:
                    self.tokenizer.enable_truncation(
                        truncation[0], stride=stride, strategy=truncation[2], direction=self._cut_side
                    )
                except (KeyboardInterrupt, SystemExit):
                    raise
                # A stride that is too long causes a Rust panic, which does not inherit from `Exception`.
                except BaseException as error:
                    self.tokenizer.no_truncation()
                    raise InvalidRequestError(
                        f"texts cannot be truncated to {limit} tokens with a stride of {stride} tokens: {error}"
                    ) from error
            self._cut = truncation
        try:
            encoding = self.tokenizer.encode(text, pair)
        except (KeyboardInterrupt, SystemExit):
            raise
        # If the first text leaves fewer tokens for the second text than the stride, the tokenizers library panics.
        except BaseException as error:
            raise InvalidRequestError(f"a text cannot be truncated to {limit} tokens: {error}") from error
        if limit is not None and len(encoding.ids) > limit:
            raise InvalidRequestError(f"a text has {len(encoding.ids)} tokens, but the model supports at most {limit}")
        return [encoding, *encoding.overflowing]

    def row(self, encoding: Any) -> GraphRow:
        """Return the graph's inputs for an encoding.

        Raises:
            Refused: The text lacks a token that the graph needs to compute its output.
        """
        inputs = {
            "input_ids": encoding.ids,
            "attention_mask": encoding.attention_mask,
            "token_type_ids": encoding.type_ids,
        }
        length = len(encoding.ids)
        for name, token in self._required.items():
            if token not in inputs[name]:
                raise InvalidRequestError(
                    f"a text does not contain the token id {token}, which this model needs in each text (such as an end token)"
                )
        return GraphRow({name: [0] * length if name in self._zeros else inputs[name] for name in self._inputs})

    def pad(self, rows: Sequence[GraphRow]) -> dict[str, Array]:
        """Return rows as one batch, padded to the longest row or to the smallest bucket that is long enough."""
        longest = max(row.length for row in rows)
        length = next((bucket for bucket in self._buckets if bucket >= longest), longest)
        batch = {}
        for name, kind in self._inputs.items():
            batch[name] = values = np.full((len(rows), length), self._fill[name], dtype=kind)
            for i, row in enumerate(rows):
                values[i, self._token_slice(row.length, length)] = row.values[name]
        return batch

    def unpadded(self, values: Array, length: int) -> Array:
        """Return the values at the positions of a row's tokens, without the padding."""
        part: Array = values[self._token_slice(length, len(values))]
        return part

    def _token_slice(self, length: int, padded: int) -> slice:
        return slice(padded - length, None) if self.left else slice(0, length)
