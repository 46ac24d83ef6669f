"""Generation options of one prompt."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from numbers import Integral, Real
from typing import Any

from ..config import check_number, check_type
from ..errors import ConfigError, InputError

_COLDEST = 1e-5  # The logits are divided by the temperature. A smaller temperature would overflow float32.
_SAMPLING = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerationOptions:
    """Generation options of one prompt. A field that is `None` has the value of the model's `generation_config`.

    Attributes:
        max_new_tokens: Maximum number of new tokens. If the model's `generation_config` has no maximum either, the serving engine's
            default applies.
        temperature: With 0, the likeliest token is chosen. With a larger value, tokens are sampled.
        top_p: Sample only from the smallest set of likeliest tokens whose total probability is at least this value.
        top_k: Sample only from this number of likeliest tokens.
        min_p: Sample from tokens whose probability is at least this fraction of the likeliest token's probability.
        repetition_penalty: Values above 1 make tokens less likely that are already in the prompt or in the generated text.
        presence_penalty: Subtracted from the logits of every token that was already generated.
        frequency_penalty: Subtracted from the logits of a token once for each time that it was generated.
        logit_bias: Value added to the logits, by token id.
        stop: Stop texts. The generated text ends before the first stop text. A single string is one stop text.
        seed: Seed for sampling. The sampled tokens are the same as in a call of `generate` after `torch.manual_seed(seed)`.
        ignore_eos: Whether generation continues after the model's end-of-sequence token.
        grammar: Grammar of the generated text in a format of llguidance, such as the result of `json_grammar`. An empty text means no
            grammar.
        top_logprobs: Number of likeliest tokens whose log-probabilities are returned with each token. With 0, only the log-probability of
            the generated token is returned; with `None`, no log-probabilities.
        visible_tokens: Special tokens that stay in the generated text, such as the marks around a tool call.
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
    grammar: str = ""
    top_logprobs: int | None = None
    visible_tokens: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        if isinstance(self.stop, str):
            object.__setattr__(self, "stop", (self.stop,))
        elif isinstance(self.stop, list):
            object.__setattr__(self, "stop", tuple(self.stop))
        try:
            self._check()
        except ConfigError as error:
            raise InputError(error.message, fix=error.fix) from error

    def _check(self) -> None:
        for name, (kind, limits) in _NUMBERS.items():
            value = getattr(self, name)
            check_type(name, value, (kind,) if name in _NEEDED else (kind, type(None)))
            check_number(name, value, **limits)
        check_type("ignore_eos", self.ignore_eos, (bool,))
        check_type("grammar", self.grammar, (str,))
        check_type("visible_tokens", self.visible_tokens, (tuple,))
        check_type("logit_bias", self.logit_bias, (Mapping,))
        for token, bias in self.logit_bias.items():
            check_number(f"logit_bias[{token!r}]", bias, -math.inf, math.inf)  # This check rejects NaN.
        if not isinstance(self.stop, tuple) or not all(isinstance(text, str) and text for text in self.stop):
            raise ConfigError(
                f"stop is {self.stop!r}, which is not a list of non-empty strings.",
                fix="pass one non-empty string, or a list of non-empty strings.",
            )

    def overrides(self) -> dict[str, Any]:
        """Return the fields of transformers' `GenerationConfig` that these options replace."""
        changes: dict[str, Any] = {name: value for name in _SAMPLING if (value := getattr(self, name)) is not None}
        if self.temperature is not None:
            changes["do_sample"] = self.temperature >= _COLDEST
        if changes.get("do_sample") is False:
            # transformers warns if sampling settings are not the defaults although sampling is off.
            changes.update(temperature=1.0, top_p=1.0, top_k=50)
            changes.pop("min_p", None)
        if self.logit_bias:
            changes["sequence_bias"] = {(int(token),): float(bias) for token, bias in self.logit_bias.items()}
        return changes


_NEEDED = ("presence_penalty", "frequency_penalty")
_NUMBERS: Mapping[str, tuple[type, Mapping[str, float]]] = {
    "max_new_tokens": (Integral, {"least": 1}),
    "temperature": (Real, {"least": 0, "below": math.inf}),
    "top_p": (Real, {"above": 0, "most": 1}),
    "top_k": (Integral, {"least": 0}),
    "min_p": (Real, {"least": 0, "most": 1}),
    "repetition_penalty": (Real, {"above": 0, "below": math.inf}),
    "presence_penalty": (Real, {"above": -math.inf, "below": math.inf}),
    "frequency_penalty": (Real, {"above": -math.inf, "below": math.inf}),
    "top_logprobs": (Integral, {"least": 0, "most": 100}),
    "seed": (Integral, {"least": -(1 << 63), "below": 1 << 64}),
}
