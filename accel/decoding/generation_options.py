"""How to continue one prompt."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from numbers import Integral, Real
from typing import Any

from ..errors import InputError

_COLDEST = 1e-5  # logits divided by less overflow float32
_MAY_BE_NONE = ("max_new_tokens", "temperature", "top_p", "top_k", "min_p", "repetition_penalty", "seed")
_SAMPLING = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerationOptions:
    """How to continue one prompt; the model's `generation_config` decides what is `None`.

    Attributes:
        max_new_tokens: Greatest number of new tokens; the engine's default where the model has none.
        temperature: 0 takes the likeliest token; above 0, tokens are drawn.
        top_p: Draw from the likeliest tokens that have this probability together.
        top_k: Draw from this many tokens.
        min_p: Draw from tokens that have at least this share of the likeliest token's probability.
        repetition_penalty: Above 1, tokens of the text so far become less likely.
        presence_penalty: Subtracted from the logits of generated tokens.
        frequency_penalty: Subtracted for each time that a token was generated.
        logit_bias: Added to the logits of these tokens, by id.
        stop: The text ends before the first of these; a single text is one stop text.
        seed: Seed of the draws; they equal those of `generate` after `torch.manual_seed(seed)`.
        ignore_eos: Continue after the model's own end token.
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
        wrong = [
            f"{name} is {value!r}, not {expected}"
            for name, (fits, expected) in _VALID.items()
            if not fits(value := getattr(self, name)) and (value is not None or name not in _MAY_BE_NONE)
        ]
        if wrong:
            raise InputError(f"{'; '.join(wrong)}.", fix="correct these settings of the generation.")

    def overrides(self) -> dict[str, Any]:
        """Fields of transformers' `GenerationConfig` that replace the model's."""
        changes: dict[str, Any] = {name: value for name in _SAMPLING if (value := getattr(self, name)) is not None}
        if self.temperature is not None:
            changes["do_sample"] = self.temperature >= _COLDEST
        if changes.get("do_sample") is False:
            # transformers warns about settings of draws where no token is drawn.
            changes.update(temperature=1.0, top_p=1.0, top_k=50)
            changes.pop("min_p", None)
        if self.logit_bias:
            changes["sequence_bias"] = {(int(token),): float(bias) for token, bias in self.logit_bias.items()}
        return changes


def _is_integer(value: Any) -> bool:
    return isinstance(value, Integral) and not isinstance(value, bool)


def _is_number(value: Any) -> bool:
    return isinstance(value, Real) and not isinstance(value, bool) and math.isfinite(value)


def _are_biases(value: Any) -> bool:
    return isinstance(value, Mapping) and all(
        isinstance(bias, Real) and not isinstance(bias, bool) and not math.isnan(bias) for bias in value.values()
    )


_VALID: Mapping[str, tuple[Callable[[Any], bool], str]] = {
    "max_new_tokens": (lambda value: _is_integer(value) and value >= 1, "an integer of at least 1"),
    "temperature": (lambda value: _is_number(value) and value >= 0, "a number of at least 0"),
    "top_p": (lambda value: _is_number(value) and 0 < value <= 1, "a number above 0 and at most 1"),
    "top_k": (lambda value: _is_integer(value) and value >= 0, "an integer of at least 0"),
    "min_p": (lambda value: _is_number(value) and 0 <= value <= 1, "a number from 0 to 1"),
    "repetition_penalty": (lambda value: _is_number(value) and value > 0, "a number above 0"),
    "presence_penalty": (_is_number, "a finite number"),
    "frequency_penalty": (_is_number, "a finite number"),
    "logit_bias": (_are_biases, "a number for each of some tokens"),
    "stop": (
        lambda value: isinstance(value, tuple) and all(isinstance(text, str) and text for text in value),
        "texts of at least one letter",
    ),
    "seed": (lambda value: _is_integer(value) and -(1 << 63) <= value < 1 << 64, "an integer of 64 bits"),
    "ignore_eos": (lambda value: isinstance(value, bool), "True or False"),
}
