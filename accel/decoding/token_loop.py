"""Greedy decoding and sampling for all rows of one call of `generate`."""

from __future__ import annotations

from collections.abc import Set
from typing import Any

import numpy as np
import torch

from ..interfaces.protocols import TokenStep
from .next_token import NextTokenSelector, likeliest
from .step import TokenSteps

# Number of token tensors that are allocated at once. The streamer gets one tensor per step.
_STREAMED_AHEAD = 64


def decode_rows(
    ids: torch.Tensor, logits: torch.Tensor, steps: TokenSteps, choice: NextTokenSelector, rows: LiveRows, streamer: Any
) -> torch.Tensor:
    """Generate tokens, and return the prompt and the new tokens as one tensor `(batch, sequence + new)`.

    Args:
        ids: The prompt, or the decoder's start tokens, `(batch, sequence)`.
        logits: Logits of the last token of `ids`, `(batch, vocabulary)`. The caller should keep no other reference to this tensor, so
            that its memory is released after the first choice.
        steps: Function that runs the decoding steps.
        choice: Function that chooses the tokens.
        rows: Record of the rows that have not ended.
        streamer: transformers streamer that receives the tokens of each step, or `None`.
    """
    parts = [ids]
    while True:
        if choice.processors:
            ids = torch.cat(parts, dim=1)
            parts = [ids]
        tokens = choice(ids, logits).unsqueeze(1)
        del logits
        if rows.ends:
            chosen = tokens[:, 0].tolist()
            values = rows.advance(chosen)
            # `advance` returns the same list if it changed no token. Then the tokens need not be copied to the device again.
            if values is not chosen:
                tokens = tokens.new_tensor(values).unsqueeze(1)
        parts.append(tokens)
        rows.left -= 1
        if streamer is not None:
            # The streamer may modify the tensor, so it gets a copy.
            streamer.put(tokens[:, 0].to("cpu", copy=True))
        if rows.done:
            return torch.cat(parts, dim=1)
        logits = steps(tokens)
        if steps.in_place is not None and choice.plain:
            parts.append(_decode_in_place(steps.in_place, logits, rows, streamer))
            return torch.cat(parts, dim=1)


def _decode_in_place(step: TokenStep, logits: torch.Tensor, rows: LiveRows, streamer: Any) -> torch.Tensor:
    """Generate by greedy decoding, and return the new tokens `(batch, new)`. The first tokens are chosen from `logits`.

    No torch operator runs between two steps. A step reads all weights and evicts torch's code from the CPU caches, so each torch
    operator after a step would be slow.
    """
    scores: np.ndarray = logits.float().numpy()
    chosen: list[list[int]] = []
    streamed: list[tuple[torch.Tensor, np.ndarray]] = []
    while True:
        values = rows.advance(likeliest(scores))
        chosen.append(values)
        rows.left -= 1
        if streamer is not None:
            if not streamed:
                several = torch.empty((_STREAMED_AHEAD, len(values)), dtype=torch.int64)
                streamed = [(tokens, tokens.numpy()) for tokens in several.unbind()]
            tokens, memory = streamed.pop()
            memory[:] = values
            streamer.put(tokens)
        if rows.done:
            return torch.tensor(chosen).T
        scores = step(values)


class LiveRows:
    """Record of the rows that have not ended, and the number of remaining tokens.

    Args:
        count: Number of rows.
        ends: Token ids that end a row.
        padding: Token id for rows that have ended.
        left: Maximum number of further tokens.
    """

    def __init__(self, count: int, ends: Set[int], padding: int, left: int) -> None:
        self.ends, self.left = ends, left
        self._padding = padding
        self._live = [True] * count

    @property
    def done(self) -> bool:
        """Whether generation is complete."""
        return self.left <= 0 or not any(self._live)

    def advance(self, values: list[int]) -> list[int]:
        """Return the next token of each row, with padding for rows that have ended. Mark rows with an end token as ended.

        While no row has ended, the method returns the same list object that it got.
        """
        if not all(self._live):
            values = [value if lives else self._padding for value, lives in zip(values, self._live, strict=True)]
        if not self.ends.isdisjoint(values):
            live = zip(values, self._live, strict=True)
            self._live = [lives and value not in self.ends for value, lives in live]
        return values
