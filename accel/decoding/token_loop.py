"""Greedy and sampled decoding: transformers' loop, without the work between two steps whose result is known.

transformers reads the prompt and prepares the first call behind it. From then on the inputs of a call differ from those of the last one
in known ways alone: new tokens, a mask longer by one, positions greater by one.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from transformers import (
    EosTokenCriteria,
    GenerationConfig,
    LogitsProcessorList,
    StoppingCriteriaList,
)

from ..interfaces.protocols import TokenStep
from ..upstream.cache_names import CACHE_NAME
from .kv_cache import StateCache
from .next_token import drawn, likeliest

# Tensors for a streamer that are made at once.
_TOLD = 64


def decode(
    model: Any,
    ids: torch.Tensor,
    processors: LogitsProcessorList,
    criteria: StoppingCriteriaList,
    config: GenerationConfig,
    streamer: Any,
    kwargs: dict[str, Any],
) -> torch.Tensor:
    """The prompt and what the model writes behind it: `(batch, sequence + new)`.

    Args:
        model: Whose calls.
        ids: `(batch, sequence)`: the prompt, or the tokens that a decoder begins with.
        processors: Of the logits; called with all ids so far.
        criteria: The greatest length, and tokens that end a row; such rows go on with padding.
        config: Says whether tokens are drawn.
        streamer: Is given each step's tokens.
        kwargs: What transformers keeps between calls, the cache among it.
    """
    ends = {end for one in criteria if isinstance(one, EosTokenCriteria) for end in one.eos_token_id.tolist()}
    rows = _Rows(len(ids), ends, int(config._pad_token_tensor) if ends else 0, criteria.max_length - ids.shape[1])
    made = [ids]
    outputs = model._prefill(ids, config, kwargs)
    calls = _Calls(model, outputs, kwargs, rows.padding)
    logits = outputs.logits[:, -1]
    # Neither they nor the outputs are kept: those of a whole prompt are large.
    del outputs
    while True:
        # A processor may write to its logits.
        scores = logits.to(ids.device, torch.float32, copy=bool(processors))
        del logits
        if processors:
            ids = torch.cat(made, dim=1)
            made = [ids]
            scores = processors(ids, scores)
        tokens = (drawn(scores) if config.do_sample else likeliest(scores)).unsqueeze(1)
        del scores
        if ends:
            found = tokens[:, 0].tolist()
            values = rows.go_on(found)
            # A device is written to only where it has to be.
            if values is not found:
                tokens = tokens.new_tensor(values).unsqueeze(1)
        made.append(tokens)
        rows.left -= 1
        if streamer is not None:
            # A copy, which it may write to.
            streamer.put(tokens[:, 0].to("cpu", copy=True))
        if rows.done:
            return torch.cat(made, dim=1)
        logits = calls.after(tokens, rows.left)
        if calls.steps is not None and not processors and not config.do_sample:
            made.append(_greedy(calls.steps, logits, rows, streamer))
            return torch.cat(made, dim=1)


def _greedy(step: TokenStep, logits: torch.Tensor, rows: _Rows, streamer: Any) -> torch.Tensor:
    """The likeliest tokens `(batch, new)` from some logits on.

    Between two steps torch is not called: behind a run, which goes through all weights, its code is in no cache of the processor.
    """
    scores: np.ndarray = logits.float().numpy()
    made: list[list[int]] = []
    told: list[tuple[torch.Tensor, np.ndarray]] = []
    while True:
        values = rows.go_on(scores.argmax(axis=-1).tolist())
        made.append(values)
        rows.left -= 1
        if streamer is not None:
            if not told:
                several = torch.empty((_TOLD, len(values)), dtype=torch.int64)
                told = [(tokens, tokens.numpy()) for tokens in several.unbind()]
            tokens, memory = told.pop()
            memory[:] = values
            streamer.put(tokens)
        if rows.done:
            return torch.tensor(made).T
        scores = step(values)


class _Rows:
    """Which rows go on, and for how long.

    Args:
        count: Of them.
        ends: Tokens that end a row.
        padding: What a row goes on with when it has ended.
        left: Tokens that can still come.
    """

    def __init__(self, count: int, ends: set[int], padding: int, left: int) -> None:
        self._ends, self.padding, self.left = ends, padding, left
        self._live = [True] * count

    @property
    def done(self) -> bool:
        """Whether nothing comes any more."""
        return self.left <= 0 or not any(self._live)

    def go_on(self, values: list[int]) -> list[int]:
        """What rows go on with where these are their next tokens: the same object while all rows live."""
        if not all(self._live):
            values = [value if lives else self.padding for value, lives in zip(values, self._live, strict=True)]
        if not self._ends.isdisjoint(values):
            live = zip(values, self._live, strict=True)
            self._live = [lives and value not in self._ends for value, lives in live]
        return values


class _Calls:
    """The calls behind the prompt's.

    Args:
        model: Whose `generate` it is.
        outputs: Of the call before.
        kwargs: What transformers keeps between calls.
        padding: The token that rows go on with when they have ended.

    Attributes:
        steps: What makes the calls in place, where the session has a shorter way for them.
    """

    def __init__(self, model: Any, outputs: Any, kwargs: dict[str, Any], padding: int) -> None:
        self._model = model
        encoder = model.config.is_encoder_decoder
        self._kwargs = model._update_model_kwargs_for_generation(outputs, kwargs, is_encoder_decoder=encoder)
        self._cache: StateCache = kwargs[CACHE_NAME]
        self._ids, self._positions, self._mask = (
            f"decoder_{name}" if encoder else name for name in ("input_ids", "position_ids", "attention_mask")
        )
        self._inputs: dict[str, Any] = {}
        self._columns = 0
        # The mask of the longest text: each call sees the first columns of it.
        self._longest: torch.Tensor | None = None
        self._padding = padding
        self.steps: TokenStep | None = None

    def after(self, tokens: torch.Tensor, left: int) -> torch.Tensor:
        """The logits `(batch, vocabulary)` behind new tokens `(batch, 1)`; at most `left` calls come, this one among them."""
        if self.steps is not None:
            return torch.from_numpy(self.steps(tokens[:, 0].tolist()))
        first = not self._inputs
        logits: torch.Tensor = self._model(**self._inputs_with(tokens, left)).logits[:, -1]
        # Without a check of its own for each token: the likeliest is one of the vocabulary, padding is what a config says.
        if first and 0 <= self._padding < logits.shape[-1]:
            self.steps = self._cache.steps(left - 1)
        return logits

    def _inputs_with(self, tokens: torch.Tensor, left: int) -> dict[str, Any]:
        """Those of a call of the model."""
        inputs: dict[str, Any] = self._inputs
        if not inputs:
            inputs = self._inputs = self._model.prepare_inputs_for_generation(
                tokens, next_sequence_length=1, **self._kwargs
            )
            if (mask := inputs.get(self._mask)) is not None:
                self._columns = mask.shape[1]
                self._longest = torch.cat([mask, mask.new_ones((len(mask), left))], dim=1)
            return inputs
        inputs[self._ids] = tokens
        if inputs.get(self._positions) is not None:
            inputs[self._positions] = inputs[self._positions] + 1
        if self._longest is not None:
            self._columns += 1
            inputs[self._mask] = self._longest[:, : self._columns]
        return inputs
