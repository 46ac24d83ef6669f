"""Decoder steps. A step reads new tokens of every row, returns the logits of these tokens, and adds the tokens to the KV cache."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from numbers import Integral
from typing import Any, Literal

import torch

from ..artifact.manifest import Component
from ..errors import InputError
from ..interfaces.protocols import Session, TokenStep
from ..interfaces.session_contract import check_filled, check_readable
from .kv_cache import StateCache

Feeds = Mapping[str, torch.Tensor]
INTEGERS = (torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8)


class DecoderStep:
    """Run a decoder's graph with new tokens and a KV cache.

    Args:
        session: The graph's session.
        component: The graph's entry in the manifest.
        embed: Function that turns token ids `(batch, new)` into an input of the graph: the ids themselves, or their embeddings.
        counts: How position ids are computed if the caller passes none. `place` uses the column index. `mask` counts the tokens with
            1 in the mask. `tokens` counts the tokens that are not the padding token, and starts after `padding`.
        padding: Id of the padding token, for `counts="tokens"`.

    Attributes:
        inputs: Names of the graph's inputs, without the KV cache.
        fills_rows: Whether every row must have at least one 1 in the mask.
    """

    def __init__(
        self,
        session: Session,
        component: Component,
        embed: Callable[[torch.Tensor], Feeds],
        *,
        counts: Literal["place", "mask", "tokens"] = "place",
        padding: int = 0,
    ) -> None:
        self.session, self.component = session, component
        self.inputs = frozenset(spec.name for spec in component.inputs if spec.pair is None)
        # Sessions reject rows without tokens only if the mask's spec has bounds. This class applies the same rule.
        self.fills_rows = any(spec.role == "mask" and spec.bounds is not None for spec in session.inputs)
        self._limit = component.most_tokens
        self.embed, self._counts, self._padding = embed, counts, padding
        self._last = torch.zeros(1, dtype=torch.int64)

    def new_cache(self) -> StateCache:
        """Return an empty cache for this decoder."""
        return StateCache(self.session, croppable=self.component.croppable)

    def __call__(
        self,
        tokens: Feeds,
        cache: StateCache,
        *,
        mask: torch.Tensor | None = None,
        position_ids: torch.Tensor | None = None,
        logits_to_keep: int | torch.Tensor = 0,
    ) -> torch.Tensor:
        """Return the logits `(batch, kept, vocabulary)` of new tokens, and add the tokens' keys and values to the cache.

        Args:
            tokens: Result of `embed`, of shape `(batch, new, ...)`.
            cache: The cache to continue. It is changed in place.
            mask: Attention mask `(batch, cached + new)` with 0 for padding. `None` means a mask of ones.
            position_ids: Position ids `(batch, new)`. With `None`, this method computes the position ids.
            logits_to_keep: Number of last tokens whose logits are returned (0 for all tokens), or a tensor of token indices.

        Raises:
            InputError: Shapes do not match, the text has more tokens than the model has positions, or the mask contains padding and
                the graph has no mask input.
        """
        batch, new = next(iter(tokens.values())).shape[:2]
        if cache.state is None:
            cache.state = self.session.new_state(batch)
        past = cache.state.length
        total = self.check_room(past, new)
        if mask is None:
            mask = cache.whole_mask(batch, total)
        elif mask.ndim != 2:
            raise InputError(
                f"attention_mask has {mask.ndim} axes, and the decoder needs 2.",
                fix="pass the attention_mask that the tokenizer returned, of shape (batch, number of cached and new tokens).",
            )
        elif not past and self.fills_rows and not cache.in_parts and mask.is_cpu and mask.numel():
            check_filled(mask.numpy(), "attention_mask")
        feeds = {**tokens, **cache.constants}
        if "attention_mask" in self.inputs:
            feeds["attention_mask"] = mask
        elif not mask.all():
            raise InputError(
                "The attention mask of the decoder contains padding, but the decoder's graph has no attention mask input.",
                fix="pass decoder inputs of the same length, without padding.",
            )
        if "position_ids" in self.inputs:
            feeds["position_ids"] = self._positions(tokens, mask, past, total) if position_ids is None else position_ids
        if "logits_to_keep" in self.inputs:
            feeds["logits_to_keep"] = self._places(new, logits_to_keep)
        logits = cache.run(feeds)
        if "logits_to_keep" in self.inputs or (type(logits_to_keep) is int and not logits_to_keep):
            return logits
        return logits.index_select(1, self._places(new, logits_to_keep).to(logits.device))

    def check_room(self, past: int, new: int) -> int:
        """Return the number of cached tokens after a call that adds `new` tokens to `past` cached tokens.

        Raises:
            InputError: The model has fewer positions than this number, or `new` is 0.
        """
        if self._limit and past + new > self._limit:
            raise InputError(
                f"The text is too long: {past} cached tokens and {new} new tokens are {past + new} tokens, and the model has only "
                f"{self._limit} positions.",
                fix="pass a shorter prompt, or a smaller max_new_tokens.",
            )
        if new == 0:
            raise InputError(
                "The call contains no new tokens.", fix="pass input_ids with at least one token in each row."
            )
        return past + new

    def _positions(self, tokens: Feeds, mask: torch.Tensor, past: int, total: int) -> torch.Tensor:
        """Return the position ids `(batch, new)` of the tokens that follow the cached tokens."""
        if self._counts == "tokens" and "input_ids" in tokens:
            real = (tokens["input_ids"] != self._padding).long()
            return (real.cumsum(1) + past) * real + self._padding
        if self._counts == "mask":
            return (mask.cumsum(1) * mask - 1)[:, past:]
        if total - past == 1:
            return torch.full((mask.shape[0], 1), past)
        return torch.arange(past, total).expand(mask.shape[0], -1)

    def _places(self, new: int, logits_to_keep: int | torch.Tensor) -> torch.Tensor:
        """Return the indices of the new tokens whose logits are computed.

        Raises:
            InputError: `logits_to_keep` is neither a number nor a tensor of valid indices.
        """
        if isinstance(logits_to_keep, torch.Tensor):
            return _checked_places(new, logits_to_keep)
        if not isinstance(logits_to_keep, Integral) or isinstance(logits_to_keep, bool) or logits_to_keep < 0:
            raise InputError(
                f"logits_to_keep is {logits_to_keep!r}, which is neither a number of tokens nor a tensor.",
                fix="pass the number of last tokens whose logits are computed (0 for all tokens), or a tensor of token indices.",
            )
        if new == 1:
            return self._last
        return torch.arange(new - int(logits_to_keep) if 0 < logits_to_keep < new else 0, new)


def _checked_places(new: int, indices: torch.Tensor) -> torch.Tensor:
    """Check a tensor of token indices, and replace negative indices (which count from the end) by non-negative indices."""
    check_readable("logits_to_keep", indices)
    if indices.ndim != 1 or not indices.numel() or indices.dtype not in INTEGERS:
        raise InputError(
            f"logits_to_keep is a tensor of shape {tuple(indices.shape)} and dtype {indices.dtype}; it must be a one-dimensional, "
            "non-empty tensor of integers.",
            fix="pass a number, or a one-dimensional integer tensor of token indices.",
        )
    least, most = int(indices.min()), int(indices.max())
    if least < -new or most >= new:
        raise InputError(
            f"logits_to_keep contains the token index {least if least < -new else most}, but the call has {new} new tokens.",
            fix=f"pass token indices from 0 to {new - 1}.",
        )
    return indices if least >= 0 else indices % new


class TokenSteps:
    """Decoding steps with one new token per row.

    The caller provides the function that runs the first step. For each later step, this class makes the inputs from the inputs of
    the previous step: the new tokens, a mask with one more column of ones, and position ids increased by one.

    Args:
        step: The decoder.
        cache: The cache to continue. It is changed in place.
        first: Function for the first step. It gets new tokens `(batch, 1)` and returns logits `(batch, vocabulary)`.
        steps: Maximum number of steps, including the first step.
        padding: Token id for rows that have ended.

    Attributes:
        in_place: The session's faster function for steps (see `Session.steps`), or `None` if the session has none. It is set after
            the first step.
    """

    def __init__(
        self,
        step: DecoderStep,
        cache: StateCache,
        first: Callable[[torch.Tensor], torch.Tensor],
        *,
        steps: int,
        padding: int = 0,
    ) -> None:
        self.in_place: TokenStep | None = None
        self._step, self._cache, self._first, self._left, self._padding = step, cache, first, steps, padding
        self._feeds: dict[str, torch.Tensor] | None = None
        self._mask: torch.Tensor | None = None
        self._columns = 0

    def __call__(self, tokens: torch.Tensor) -> torch.Tensor:
        """Return the logits `(batch, vocabulary)` for new tokens `(batch, 1)`."""
        if self.in_place is not None:
            return torch.from_numpy(self.in_place(tokens[:, 0].tolist()))
        if self._feeds is None:
            logits = self._first(tokens)
            self._prepare(logits.shape[-1])
            return logits
        feeds = self._feeds
        self._step.check_room(self._cache.get_seq_length(), 1)
        feeds |= self._step.embed(tokens)
        if "position_ids" in feeds:
            feeds["position_ids"] = feeds["position_ids"] + 1
        if self._mask is not None:
            self._columns += 1
            feeds["attention_mask"] = self._mask[:, : self._columns]
        return self._cache.run(feeds)[:, -1]

    def _prepare(self, vocabulary: int) -> None:
        """Prepare the steps after the first step: get the session's faster function, or make inputs that all steps reuse."""
        cache, session, left = self._cache, self._step.session, self._left - 1
        assert cache.state is not None, "the first step fills the cache"
        # The faster function does not check token ids. Chosen tokens are always in the vocabulary, but the padding token is a
        # setting of the user, so it is checked here.
        if 0 <= self._padding < vocabulary:
            self.in_place = session.steps(cache.last_feeds, cache.state, calls=left)
        self._feeds = feeds = dict(cache.last_feeds)
        mask: Any = feeds.get("attention_mask")
        if mask is not None and self.in_place is None:
            self._columns = mask.shape[1]
            # Allocate one mask for the longest possible text. Each step uses the first columns of this mask.
            self._mask = torch.cat([mask, mask.new_ones((len(mask), left))], dim=1)
