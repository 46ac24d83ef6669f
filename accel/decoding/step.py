"""One step of a decoder: new tokens of every row in, their logits out; keys and values stay in the session's state."""

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
    """A decoder's graph, called with new tokens and a cache.

    Args:
        session: The graph's session.
        component: The graph in the manifest.
        embed: Returns the input that stands for tokens `(batch, new)`: the tokens themselves, or their embeddings.
        counts: What position ids count where a call has none: columns (`place`), tokens that the mask shows (`mask`), or tokens
            other than the padding token, starting after `padding` (`tokens`).
        padding: The padding token, for `counts="tokens"`.

    Attributes:
        inputs: Names of the graph's inputs, without those of the cache.
        fills_rows: Whether every row needs a token that the mask shows.
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
        # Sessions check masks that declare bounds; masks without bounds are checked nowhere.
        self.fills_rows = any(spec.role == "mask" and spec.bounds is not None for spec in session.inputs)
        self._limit = component.most_tokens
        self.embed, self._counts, self._padding = embed, counts, padding
        self._last = torch.zeros(1, dtype=torch.int64)

    def new_cache(self) -> StateCache:
        """An empty cache."""
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
        """The logits `(batch, kept, vocabulary)` of new tokens, whose keys and values are in the cache from then on.

        Args:
            tokens: From `embed`: `(batch, new, ...)`.
            cache: Continued in place.
            mask: `(batch, cached + new)`, 0 for padding; all ones when `None`.
            position_ids: `(batch, new)`; counted when `None`.
            logits_to_keep: How many of the last logits are computed, 0 for all; or their places.

        Raises:
            InputError: Shapes that do not fit, more tokens than positions, or padding that the graph cannot mask.
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
                f"The attention mask has {mask.ndim} axes.", fix="pass the tokenizer's: (batch, tokens so far)."
            )
        elif not past and self.fills_rows and not cache.in_parts and mask.is_cpu and mask.numel():
            check_filled(mask.numpy(), "attention_mask")
        feeds = {**tokens, **cache.constants}
        if "attention_mask" in self.inputs:
            feeds["attention_mask"] = mask
        elif not mask.all():
            raise InputError(
                "The mask hides tokens of the decoder, whose graph has no mask.", fix="give prompts of one length."
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
        """How many tokens the cache holds after a call.

        Raises:
            InputError: More than the model has positions for, or no new ones.
        """
        if self._limit and past + new > self._limit:
            raise InputError(
                f"{past} cached and {new} new tokens are {past + new}; the model has {self._limit} positions.",
                fix="shorten the prompt, or ask for fewer new tokens.",
            )
        if new == 0:
            raise InputError("No new tokens were given.", fix="pass at least one.")
        return past + new

    def _positions(self, tokens: Feeds, mask: torch.Tensor, past: int, total: int) -> torch.Tensor:
        """Position ids `(batch, new)` of the tokens after those in the cache."""
        if self._counts == "tokens" and "input_ids" in tokens:
            real = (tokens["input_ids"] != self._padding).long()
            return (real.cumsum(1) + past) * real + self._padding
        if self._counts == "mask":
            return (mask.cumsum(1) * mask - 1)[:, past:]
        if total - past == 1:
            return torch.full((mask.shape[0], 1), past)
        return torch.arange(past, total).expand(mask.shape[0], -1)

    def _places(self, new: int, asked: int | torch.Tensor) -> torch.Tensor:
        """Places of the new tokens whose logits are computed.

        Raises:
            InputError: Neither a number nor places among the new tokens.
        """
        if isinstance(asked, torch.Tensor):
            return _checked_places(new, asked)
        if not isinstance(asked, Integral) or isinstance(asked, bool) or asked < 0:
            raise InputError(
                f"logits_to_keep is {asked!r}.",
                fix="pass how many of the last logits to compute, 0 for all; or a tensor of their places.",
            )
        if new == 1:
            return self._last
        return torch.arange(new - int(asked) if 0 < asked < new else 0, new)


def _checked_places(new: int, asked: torch.Tensor) -> torch.Tensor:
    """Places of new tokens; negative ones count from the end."""
    check_readable("logits_to_keep", asked)
    if asked.ndim != 1 or not asked.numel() or asked.dtype not in INTEGERS:
        raise InputError(
            f"logits_to_keep is a tensor {tuple(asked.shape)} of {asked.dtype}.",
            fix="pass a number, or places: (kept,) integers.",
        )
    least, most = int(asked.min()), int(asked.max())
    if least < -new or most >= new:
        raise InputError(
            f"logits_to_keep holds {least if least < -new else most}; {new} tokens are new.",
            fix=f"name places from 0 to {new - 1}.",
        )
    return asked if least >= 0 else asked % new


class TokenSteps:
    """Steps of one new token a row.

    The first one is made by its caller. The inputs of the others differ from its inputs in known ways: a new token, one more
    column of ones in the mask, positions greater by one.

    Args:
        step: The decoder.
        cache: Continued in place.
        first: Makes the first step: new tokens `(batch, 1)` to logits `(batch, vocabulary)`.
        steps: How many steps come at most, the first one included.
        padding: The token of rows that have ended.

    Attributes:
        in_place: The session's shorter way to make the steps, or `None`; known after the first step (`Session.steps`).
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
        """The logits `(batch, vocabulary)` after new tokens `(batch, 1)`."""
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
        """Find how the steps after the first one are made."""
        cache, session, left = self._cache, self._step.session, self._left - 1
        assert cache.state is not None, "the first step fills the cache"
        # Its tokens are not checked: the likeliest token is in the vocabulary, the padding token is a setting.
        if 0 <= self._padding < vocabulary:
            self.in_place = session.steps(cache.last_feeds, cache.state, calls=left)
        self._feeds = feeds = dict(cache.last_feeds)
        mask: Any = feeds.get("attention_mask")
        if mask is not None and self.in_place is None:
            self._columns = mask.shape[1]
            # The mask of the longest text; each step sees its first columns.
            self._mask = torch.cat([mask, mask.new_ones((len(mask), left))], dim=1)
