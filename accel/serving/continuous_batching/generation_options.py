"""How to continue one prompt, and how much at once."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from numbers import Integral, Real
from typing import Any

from ...errors import ConfigError, InputError

_COLDEST = 1e-5  # logits divided by less are no float32 any more
_MAY_BE_NONE = ("max_new_tokens", "temperature", "top_p", "top_k", "min_p", "repetition_penalty", "seed")
_SAMPLING = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerationOptions:
    """How to continue one prompt. What is `None` is as the model's `generation_config` has it.

    Attributes:
        max_new_tokens: Tokens at most; the engine's default where the model has none either.
        temperature: 0 for the likeliest token; above it, tokens are drawn.
        top_p: Draw from the likeliest tokens that have this probability together.
        top_k: Draw from so many tokens.
        min_p: Draw from tokens that have this share of the likeliest one's probability.
        repetition_penalty: Above 1, tokens that are there already become less likely.
        presence_penalty: Taken from the logits of tokens that were generated.
        frequency_penalty: The same for each time they were.
        logit_bias: Added to the logits of these tokens, by id.
        stop: The text ends before the first of these; one text is one of them.
        seed: Of what is drawn: the same as `generate` behind `torch.manual_seed(seed)`.
        ignore_eos: Go on behind the model's own end.
    """

    max_new_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    stop: tuple[str, ...] = ()
    seed: int | None = None
    ignore_eos: bool = False

    def __post_init__(self) -> None:
        if isinstance(self.stop, str):
            object.__setattr__(self, "stop", (self.stop,))
        elif isinstance(self.stop, list):
            object.__setattr__(self, "stop", tuple(self.stop))
        self._check_types()
        wrong = [
            f"{name} is {value!r}, not {wanted}"
            for name, value, fits, wanted in (
                ("max_new_tokens", self.max_new_tokens, _at_least(self.max_new_tokens, 1), "at least 1"),
                ("temperature", self.temperature, _at_least(self.temperature, 0), "0 or more"),
                ("top_p", self.top_p, self.top_p is None or 0 < self.top_p <= 1, "above 0 and at most 1"),
                ("top_k", self.top_k, _at_least(self.top_k, 0), "0 or more"),
                ("min_p", self.min_p, self.min_p is None or 0 <= self.min_p <= 1, "from 0 to 1"),
                (
                    "repetition_penalty",
                    self.repetition_penalty,
                    self.repetition_penalty is None or 0 < self.repetition_penalty < math.inf,
                    "above 0",
                ),
                ("presence_penalty", self.presence_penalty, math.isfinite(self.presence_penalty), "a finite number"),
                ("frequency_penalty", self.frequency_penalty, math.isfinite(self.frequency_penalty), "a finite number"),
                ("logit_bias", dict(self.logit_bias), not any(map(math.isnan, self.logit_bias.values())), "numbers"),
                ("stop", self.stop, all(self.stop), "texts of at least one letter"),
                ("seed", self.seed, self.seed is None or -(1 << 63) <= self.seed < 1 << 64, "a number of 64 bits"),
            )
            if not fits
        ]
        if wrong:
            raise InputError(f"{'; '.join(wrong)}.", fix="correct these settings of the generation.")

    def _check_types(self) -> None:
        wrong = [
            f"{name} is {value!r}, not {wanted}"
            for names, fits, wanted in (
                (("max_new_tokens", "top_k", "seed"), _is_integer, "an integer"),
                (("temperature", "top_p", "min_p", "repetition_penalty"), _is_number, "a number"),
                (("presence_penalty", "frequency_penalty"), _is_number, "a number"),
                (("logit_bias",), _is_bias, "a number for each of some tokens"),
                (("stop",), _are_texts, "texts"),
                (("ignore_eos",), lambda value: isinstance(value, bool), "True or False"),
            )
            for name in names
            if (value := getattr(self, name)) is not None or name not in _MAY_BE_NONE
            if not fits(value)
        ]
        if wrong:
            raise InputError(f"{'; '.join(wrong)}.", fix="correct these settings of the generation.")

    def overrides(self) -> dict[str, Any]:
        """What of transformers' `GenerationConfig` differs from the model's own."""
        given: dict[str, Any] = {name: value for name in _SAMPLING if (value := getattr(self, name)) is not None}
        if self.temperature is not None:
            given["do_sample"] = self.temperature >= _COLDEST
        if given.get("do_sample") is False:
            # transformers warns of settings of a draw that does not take place.
            given.update(temperature=1.0, top_p=1.0, top_k=50)
            given.pop("min_p", None)
        if self.logit_bias:
            given["sequence_bias"] = {(int(token),): float(bias) for token, bias in self.logit_bias.items()}
        return given


def _is_integer(value: Any) -> bool:
    return isinstance(value, Integral) and not isinstance(value, bool)


def _is_number(value: Any) -> bool:
    return isinstance(value, Real) and not isinstance(value, bool)


def _is_bias(value: Any) -> bool:
    return isinstance(value, Mapping) and all(_is_number(one) for one in value.values())


def _are_texts(value: Any) -> bool:
    return isinstance(value, tuple) and all(isinstance(one, str) for one in value)


def _at_least(value: float | None, least: float) -> bool:
    return value is None or least <= value < math.inf


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerationLimits:
    """How much one model generates at once.

    Attributes:
        rows: Answers that are made together, at most.
        cache_tokens: Tokens that their caches hold together at most, padding counted: rows times the longest. As many as the
            model has positions, and at least 16,384, when `None`.
        queue: Prompts that may wait.
        prefill_tokens: Tokens of prompts that are read between two steps of the running rows: more read faster, and let
            those wait longer.
        new_tokens: Tokens of an answer where neither the request nor the model limits them.
        max_new_tokens: Tokens of an answer that a request may ask for: one that takes most of the caches lets nobody beside it.
            `None`: as many as they hold.
    """

    rows: int = 16
    cache_tokens: int | None = None
    queue: int = 256
    prefill_tokens: int = 512
    new_tokens: int = 256
    max_new_tokens: int | None = None

    def __post_init__(self) -> None:
        for name in ("rows", "cache_tokens", "queue", "prefill_tokens", "new_tokens", "max_new_tokens"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ConfigError(f"{name} is {value}.", fix="use at least 1.")
