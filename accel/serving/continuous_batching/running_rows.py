"""Rows of one model that are computed together, and their cache."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from ...decoding.kv_cache import StateCache
from ...errors import AccelError
from .choosing import Chooser, choose
from .token_stream import Generation, Token

# Columns in front that hold no row's tokens are kept until they are worth a copy of the cache.
_MIN_SLACK = 64


@dataclass(slots=True)
class Row:
    """One answer in the making.

    Attributes:
        request: Where its tokens go.
        chooser: What makes tokens of logits.
        held: Tokens in the cache.
        last: The last token, which is not in the cache yet.
        made: Tokens made.
    """

    request: Generation
    chooser: Chooser
    held: int = 0
    last: int = -1
    made: int = 0

    def take(self, token: int | AccelError) -> bool:
        """One more token, or why there is none; whether it is the last."""
        if isinstance(token, AccelError):
            self.request.end(token)
            return True
        self.last, self.made = token, self.made + 1
        finish = "stop" if token in self.chooser.ends else "length" if self.made >= self.request.new_tokens else None
        self.request.put(Token(token, finish))  # type: ignore[arg-type]  # the literals above
        return finish is not None


class Reading:
    """A prompt that is read in parts, in a cache of its own, until its row can join the others.

    Args:
        model: A decoder.
        row: Whose prompt.
        parts: Whether the graph takes several tokens behind others at once.
    """

    def __init__(self, model: Any, row: Row, *, parts: bool) -> None:
        self.row = row
        self.cache: StateCache = model.new_cache()
        self._model, self._parts = model, parts

    @property
    def left(self) -> int:
        """Tokens that are not read yet."""
        return len(self.row.request.ids) - self.row.held

    def advance(self, tokens: int) -> torch.Tensor | None:
        """Read so many more at most; the logits `(1, vocabulary)` behind the prompt, once it is read."""
        start = self.row.held
        end = min(start + tokens, len(self.row.request.ids)) if self._parts else len(self.row.request.ids)
        found = self._model(
            input_ids=torch.tensor([self.row.request.ids[start:end]]),
            attention_mask=torch.ones((1, end), dtype=torch.int64),
            past_key_values=self.cache,
            logits_to_keep=1,
        )
        self.row.held = end
        return found.logits[:, -1] if not self.left else None


class Batch:
    """The running rows: each has its last token in the last column of the cache, and the mask hides what is in front.

    Args:
        model: A decoder, or an encoder with one.
        limit: Columns that the graph can have; 0 for any number.
    """

    def __init__(self, model: Any, limit: int) -> None:
        self.rows: list[Row] = []
        self._model, self._limit = model, limit
        self._cache: StateCache | None = None
        self._joinable = False
        self._held = torch.zeros(0, dtype=torch.int64)

    def clear(self) -> list[Row]:
        """Let go of all rows."""
        rows, self.rows = self.rows, []
        self._cache = None
        return rows

    def join(self, row: Row, cache: StateCache) -> None:
        """A row whose prompt is in a cache of its own."""
        if self._cache is None:
            self._cache, self._joinable = cache, True
        else:
            self._cache.join(cache)
        self.rows.append(row)
        self._count()

    def begin(self, rows: Sequence[Row]) -> None:
        """Read the prompts of all rows at once, where rows cannot join later, and make their first tokens."""
        self.rows = list(rows)
        prompts = [row.request.ids for row in rows]
        cache = self._cache = self._model.new_cache()
        longest = max(map(len, prompts))
        if self._model.config.is_encoder_decoder:
            encoded, mask = _padded(prompts, longest, left=False)
            logits = self._model(
                input_ids=encoded,
                attention_mask=mask,
                decoder_input_ids=torch.tensor([[row.last] for row in rows]),
                past_key_values=cache,
            ).logits
            for row in rows:
                row.held = 1
        else:
            ids, mask = _padded(prompts, longest, left=True)
            positions = (mask.cumsum(-1) - 1).clamp(min=0)
            logits = self._model(
                input_ids=ids, attention_mask=mask, position_ids=positions, past_key_values=cache, logits_to_keep=1
            ).logits
            for row in rows:
                row.held = len(row.request.ids)
        self._count()
        self._take(logits[:, -1])

    def step(self) -> None:
        """One more token of every row; those that are done leave."""
        assert self._cache is not None
        last = torch.tensor([[row.last] for row in self.rows])
        held = self._held
        columns = self._cache.get_seq_length() + 1
        mask = (torch.arange(columns) >= (columns - 1 - held).unsqueeze(1)).long()
        names = ("input_ids", "attention_mask", "position_ids")
        if self._model.config.is_encoder_decoder:
            names = ("decoder_input_ids", "decoder_attention_mask", "decoder_position_ids")
        given = dict(zip(names, (last, mask, held.unsqueeze(1)), strict=True))
        logits = self._model(**given, past_key_values=self._cache).logits[:, -1]
        for row in self.rows:
            row.held += 1
        self._held = held + 1
        self._take(logits)

    def leave(self, leaving: Sequence[Row]) -> None:
        """Rows that go; the last ones take their places, and columns that nobody needs any more go, too."""
        gone = {id(row) for row in leaving}
        staying = [i for i, row in enumerate(self.rows) if id(row) not in gone]
        if not staying:
            self.clear()
            return
        if len(staying) < len(self.rows):
            assert self._cache is not None
            count = len(staying)
            spare = [i for i in staying if i >= count]
            order = [i if id(self.rows[i]) not in gone else spare.pop() for i in range(count)]
            self._cache.reorder_cache(torch.tensor(order))
            self.rows = [self.rows[i] for i in order]
            self._count()
        self._trim()

    def _take(self, logits: torch.Tensor) -> None:
        tokens = choose([row.chooser for row in self.rows], logits)
        done = [row for row, token in zip(self.rows, tokens, strict=True) if row.take(token)]
        if done:
            self.leave(done)
        elif self._limit and self._cache is not None and self._cache.get_seq_length() >= self._limit:
            self._trim()

    def _trim(self) -> None:
        if self._cache is None or not self._joinable:
            return
        columns = self._cache.get_seq_length()
        slack = columns - int(self._held.max())
        if slack >= max(_MIN_SLACK, columns // 4) or (slack and self._limit and columns >= self._limit):
            self._cache.drop(slack)

    def _count(self) -> None:
        self._held = torch.tensor([row.held for row in self.rows])


def _padded(prompts: Sequence[Sequence[int]], length: int, *, left: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """Ids and mask `(prompts, length)`."""
    ids = torch.zeros((len(prompts), length), dtype=torch.int64)
    mask = torch.zeros_like(ids)
    for row, prompt in enumerate(prompts):
        where = slice(length - len(prompt), None) if left else slice(0, len(prompt))
        ids[row, where] = torch.tensor(prompt)
        mask[row, where] = 1
    return ids, mask
