"""Greedy and sampled decoding of rows that start together, as in one call of `generate`."""

from __future__ import annotations

from collections.abc import Set
from typing import Any

import numpy as np
import torch

from ..interfaces.protocols import TokenStep
from .next_token import TokenChoice, likeliest
from .step import TokenSteps

# Tensors for a streamer that are made at once.
_STREAMED_AHEAD = 64


def decode_rows(
    ids: torch.Tensor, logits: torch.Tensor, steps: TokenSteps, choice: TokenChoice, rows: LiveRows, streamer: Any
) -> torch.Tensor:
    """The prompt and the new tokens: `(batch, sequence + new)`.

    Args:
        ids: `(batch, sequence)`: the prompt, or the tokens that a decoder starts with.
        logits: `(batch, vocabulary)` after them; pass the only reference, because those of a whole prompt are large.
        steps: Makes the steps.
        choice: Chooses the tokens.
        rows: Which rows go on.
        streamer: Gets each step's tokens; or `None`.
    """
    made = [ids]
    while True:
        if choice.processors:
            ids = torch.cat(made, dim=1)
            made = [ids]
        tokens = choice(ids, logits).unsqueeze(1)
        del logits
        if rows.ends:
            chosen = tokens[:, 0].tolist()
            values = rows.advance(chosen)
            # A device is written to only where it has to be.
            if values is not chosen:
                tokens = tokens.new_tensor(values).unsqueeze(1)
        made.append(tokens)
        rows.left -= 1
        if streamer is not None:
            # A copy, which the streamer may write to.
            streamer.put(tokens[:, 0].to("cpu", copy=True))
        if rows.done:
            return torch.cat(made, dim=1)
        logits = steps(tokens)
        if steps.in_place is not None and choice.plain:
            made.append(_decode_in_place(steps.in_place, logits, rows, streamer))
            return torch.cat(made, dim=1)


def _decode_in_place(step: TokenStep, logits: torch.Tensor, rows: LiveRows, streamer: Any) -> torch.Tensor:
    """The likeliest tokens `(batch, new)`, beginning with those of `logits`.

    No operator of torch runs between two steps: a step reads all weights, so torch's code is in no cache of the processor after it.
    """
    scores: np.ndarray = logits.float().numpy()
    made: list[list[int]] = []
    streamed: list[tuple[torch.Tensor, np.ndarray]] = []
    while True:
        values = rows.advance(likeliest(scores))
        made.append(values)
        rows.left -= 1
        if streamer is not None:
            if not streamed:
                several = torch.empty((_STREAMED_AHEAD, len(values)), dtype=torch.int64)
                streamed = [(tokens, tokens.numpy()) for tokens in several.unbind()]
            tokens, memory = streamed.pop()
            memory[:] = values
            streamer.put(tokens)
        if rows.done:
            return torch.tensor(made).T
        scores = step(values)


class LiveRows:
    """Which rows go on, and for how long.

    Args:
        count: Number of rows.
        ends: Tokens that end a row.
        padding: The token of rows that have ended.
        left: Tokens that can still come.
    """

    def __init__(self, count: int, ends: Set[int], padding: int, left: int) -> None:
        self.ends, self.left = ends, left
        self._padding = padding
        self._live = [True] * count

    @property
    def done(self) -> bool:
        """Whether no more tokens come."""
        return self.left <= 0 or not any(self._live)

    def advance(self, values: list[int]) -> list[int]:
        """The next token of each row, chosen or padding: the same list while all rows live."""
        if not all(self._live):
            values = [value if lives else self._padding for value, lives in zip(values, self._live, strict=True)]
        if not self.ends.isdisjoint(values):
            live = zip(values, self._live, strict=True)
            self._live = [lives and value not in self.ends for value, lives in live]
        return values
