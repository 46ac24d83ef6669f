"""The rows of one model that run together in a batch, and their KV cache."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from ...decoding.kv_cache import StateCache
from ...decoding.next_token import RowTokenSelector, choose_tokens
from ...decoding.token_probabilities import token_probability
from ...errors import AccelError
from .prefix_cache import PrefixCache
from .token_stream import Finish, Generation, Token

# Minimum number of unused cache columns at the front before they are removed, because removing them copies the cache.
_MIN_SLACK = 64


@dataclass(slots=True)
class AnswerRow:
    """One row of the running batch: the state of one generation.

    Attributes:
        generation: Receives the generated tokens.
        choice: Selects the next token from the logits.
        held: Number of tokens of this row in the KV cache.
        last: The most recent token, which is not in the KV cache yet.
        made: Number of tokens generated so far.
    """

    generation: Generation
    choice: RowTokenSelector
    held: int = 0
    last: int = -1
    made: int = 0

    def take(self, token: int | AccelError, logits: torch.Tensor) -> bool:
        """Add a token, or end the generation with an error. Return whether the generation has ended.

        Args:
            token: The token, or the error.
            logits: Logits of the token, `(vocabulary,)`.
        """
        if isinstance(token, AccelError):
            self.generation.end(token)
            return True
        self.last, self.made = token, self.made + 1
        finish: Finish | None = "length" if self.made >= self.generation.new_tokens else None
        if self.choice.is_last(token):
            finish = "stop"
        top = self.generation.options.top_logprobs
        probability = None if top is None else token_probability(logits, token, top)
        self.generation.put(Token(token, finish, probability))
        return finish is not None


class PromptPrefill:
    """A prompt that the model reads in chunks, with its own KV cache, before its row joins the running batch.

    Args:
        model: A decoder.
        row: The row of the prompt.
        parts: Whether the graph can process several tokens at once after earlier tokens (chunked prefill).
    """

    def __init__(self, model: Any, row: AnswerRow, *, parts: bool) -> None:
        self.row = row
        self.cache: StateCache = model.new_cache()
        self._step, self._parts = model.decoder_step, parts
        self._begun = False

    def begin(self, prefixes: PrefixCache | None) -> None:
        """Take the keys and values of the prompt's beginning from an earlier prompt. Later calls have no effect."""
        if self._begun or prefixes is None:
            return
        self._begun = True
        generation = self.row.generation
        if (prefix := prefixes.find(generation.ids)) is not None:
            self.cache = prefix
            self.row.held = generation.reused_tokens = prefix.get_seq_length()

    def store(self, prefixes: PrefixCache | None) -> None:
        """Store the keys and values of the prompt for later prompts. The prompt must be completely read."""
        if prefixes is not None:
            prefixes.store(self.row.generation.ids, self.row.generation.reused_tokens, self.cache)

    @property
    def left(self) -> int:
        """Number of prompt tokens that the model has not read yet."""
        return len(self.row.generation.ids) - self.row.held

    def advance(self, tokens: int) -> torch.Tensor | None:
        """Read up to `tokens` more tokens of the prompt.

        Return the logits `(1, vocabulary)` after the last prompt token, or `None` if the prompt is not completely read yet.
        """
        ids = self.row.generation.ids[self.row.held :]
        ids = ids[:tokens] if self._parts else ids
        logits = self._step(self._step.embed(torch.tensor([ids])), self.cache, logits_to_keep=1)
        self.row.held += len(ids)
        return None if self.left else logits[:, -1]


class RunningRows:
    """The rows of the running batch. The last token of each row is in the last column of the KV cache; unused columns in front are masked.

    Args:
        model: A decoder or an encoder-decoder.
        limit: Greatest number of cache columns that the graph supports; 0 means no limit.
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
        """Add a row whose prompt has been read into its own KV cache."""
        if self._cache is None:
            self._cache, self._joinable = cache, True
        else:
            self._cache.join(cache)
        self.rows.append(row)
        self._count()

    def begin(self, rows: Sequence[AnswerRow]) -> None:
        """Read the prompts of all rows in one batch and select their first tokens. Used for backends where rows cannot join later."""
        self.rows = list(rows)
        prompts = [row.generation.ids for row in rows]
        self._cache = self._model.new_cache()
        behind_encoder = self._model.config.is_encoder_decoder
        ids, mask = _padded(prompts, left=not behind_encoder)
        if behind_encoder:
            starts = torch.tensor([[row.last] for row in rows])
            encoder_inputs = {"input_ids": ids, "attention_mask": mask, "decoder_input_ids": starts}
            logits = self._model(**encoder_inputs, past_key_values=self._cache).logits
        else:
            positions = (mask.cumsum(-1) - 1).clamp(min=0)
            step = self._model.decoder_step
            logits = step(step.embed(ids), self._cache, mask=mask, position_ids=positions, logits_to_keep=1)
        for row in rows:
            row.held = 1 if behind_encoder else len(row.generation.ids)
        self._count()
        self._take(logits[:, -1])

    def step(self) -> None:
        """Generate one token for each row, and remove the rows that have reached their end."""
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
        """Remove rows from the batch. The last rows move to the free indices, and cache columns that no row uses are removed."""
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
        chosen = zip(self.rows, tokens, logits, strict=True)
        done = [row for row, token, row_logits in chosen if row.take(token, row_logits)]
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
    """Return token ids and attention mask of the prompts, each `(prompts, length of the longest prompt)`, padded on the given side."""
    side = "left" if left else "right"
    sequences = [torch.tensor(prompt) for prompt in prompts]
    ids = torch.nn.utils.rnn.pad_sequence(sequences, batch_first=True, padding_side=side)
    masks = [torch.ones_like(sequence) for sequence in sequences]
    return ids, torch.nn.utils.rnn.pad_sequence(masks, batch_first=True, padding_side=side)
