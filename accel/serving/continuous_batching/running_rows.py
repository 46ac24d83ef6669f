"""Rows of one model that are computed together, and their cache."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from ...decoding.kv_cache import StateCache
from ...decoding.next_token import RowChoice, choose_tokens
from ...errors import AccelError
from .token_stream import Generation, Token

# Columns in front that hold no row's tokens are kept until they are worth a copy of the cache.
_MIN_SLACK = 64


@dataclass(slots=True)
class AnswerRow:
    """One answer that is being generated.

    Attributes:
        generation: Gets the tokens.
        choice: Chooses them.
        held: Number of tokens in the cache.
        last: The last token, which is not in the cache yet.
        made: Number of tokens generated.
    """

    generation: Generation
    choice: RowChoice
    held: int = 0
    last: int = -1
    made: int = 0

    def take(self, token: int | AccelError) -> bool:
        """Add a token, or end with an error; returns whether the answer is complete."""
        if isinstance(token, AccelError):
            self.generation.end(token)
            return True
        self.last, self.made = token, self.made + 1
        finish = "stop" if token in self.choice.ends else "length" if self.made >= self.generation.new_tokens else None
        self.generation.put(Token(token, finish))  # type: ignore[arg-type]  # the literals above
        return finish is not None


class PromptReading:
    """A prompt that is read in parts, in a cache of its own, until its row can join the others.

    Args:
        model: A decoder.
        row: The prompt's row.
        parts: Whether the graph takes several tokens after others at once.
    """

    def __init__(self, model: Any, row: AnswerRow, *, parts: bool) -> None:
        self.row = row
        self.cache: StateCache = model.new_cache()
        self._step, self._parts = model.decoder_step, parts

    @property
    def left(self) -> int:
        """Number of tokens that are still to be read."""
        return len(self.row.generation.ids) - self.row.held

    def advance(self, tokens: int) -> torch.Tensor | None:
        """Read at most this many more; returns the logits `(1, vocabulary)` after the prompt once it is read."""
        ids = self.row.generation.ids[self.row.held :]
        ids = ids[:tokens] if self._parts else ids
        logits = self._step(self._step.embed(torch.tensor([ids])), self.cache, logits_to_keep=1)
        self.row.held += len(ids)
        return None if self.left else logits[:, -1]


class RunningRows:
    """The running rows: each has its last token in the last column of the cache, and the mask hides the columns in front.

    Args:
        model: A decoder, or an encoder with one.
        limit: Columns that the graph can have; 0 for any number.
    """

    def __init__(self, model: Any, limit: int) -> None:
        self.rows: list[AnswerRow] = []
        self._model, self._limit = model, limit
        self._cache: StateCache | None = None
        self._joinable = False
        self._held = torch.zeros(0, dtype=torch.int64)

    def clear(self) -> list[AnswerRow]:
        """Remove all rows and return them."""
        rows, self.rows = self.rows, []
        self._cache = None
        return rows

    def join(self, row: AnswerRow, cache: StateCache) -> None:
        """Add a row whose prompt is in a cache of its own."""
        if self._cache is None:
            self._cache, self._joinable = cache, True
        else:
            self._cache.join(cache)
        self.rows.append(row)
        self._count()

    def begin(self, rows: Sequence[AnswerRow]) -> None:
        """Read the prompts of all rows at once, where rows cannot join later, and choose their first tokens."""
        self.rows = list(rows)
        prompts = [row.generation.ids for row in rows]
        self._cache = self._model.new_cache()
        behind_encoder = self._model.config.is_encoder_decoder
        ids, mask = _padded(prompts, left=not behind_encoder)
        if behind_encoder:
            starts = torch.tensor([[row.last] for row in rows])
            given = {"input_ids": ids, "attention_mask": mask, "decoder_input_ids": starts}
            logits = self._model(**given, past_key_values=self._cache).logits
        else:
            positions = (mask.cumsum(-1) - 1).clamp(min=0)
            step = self._model.decoder_step
            logits = step(step.embed(ids), self._cache, mask=mask, position_ids=positions, logits_to_keep=1)
        for row in rows:
            row.held = 1 if behind_encoder else len(row.generation.ids)
        self._count()
        self._take(logits[:, -1])

    def step(self) -> None:
        """Add a token to every row; complete rows leave."""
        assert self._cache is not None
        columns = self._cache.get_seq_length() + 1
        mask = (torch.arange(columns) >= (columns - 1 - self._held).unsqueeze(1)).long()
        step = self._model.decoder_step
        tokens = step.embed(torch.tensor([[row.last] for row in self.rows]))
        logits = step(tokens, self._cache, mask=mask, position_ids=self._held.unsqueeze(1))[:, -1]
        for row in self.rows:
            row.held += 1
        self._held = self._held + 1
        self._take(logits)

    def leave(self, leaving: Sequence[AnswerRow]) -> None:
        """Remove rows; the last ones take their places, and columns that no row needs are dropped."""
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
        tokens = choose_tokens([row.choice for row in self.rows], logits)
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


def _padded(prompts: Sequence[Sequence[int]], *, left: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """Ids and mask, `(prompts, longest)`."""
    side = "left" if left else "right"
    sequences = [torch.tensor(prompt) for prompt in prompts]
    ids = torch.nn.utils.rnn.pad_sequence(sequences, batch_first=True, padding_side=side)
    ones = [torch.ones_like(sequence) for sequence in sequences]
    return ids, torch.nn.utils.rnn.pad_sequence(ones, batch_first=True, padding_side=side)
