"""Tokens of logits: transformers' own processors and draws, a row at a time; rows without any share one argmax."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

import torch
from transformers import LogitsProcessor, LogitsProcessorList

from ...decoding.next_token import drawn, likeliest
from ...errors import AccelError, InputError
from ..non_finite import not_finite_error
from .generation_options import GenerationOptions


class Chooser:
    """Chooses the tokens of one row, as `generate` does in a call of its own.

    Args:
        model: Whose `generation_config` says what the options leave open.
        ids: The tokens that the answer continues.
        options: Of the request.
        encoded: Of a model with an encoder: what that reads.

    Attributes:
        plain: Whether the likeliest token is taken and nothing changes which that is.
        ends: Tokens that end the answer.

    Raises:
        InputError: Settings that transformers refuses.
    """

    def __init__(
        self, model: Any, ids: Sequence[int], options: GenerationOptions, encoded: Sequence[int] | None = None
    ) -> None:
        added = LogitsProcessorList()
        if options.presence_penalty or options.frequency_penalty:
            added.append(_Repeated(len(ids), options.presence_penalty, options.frequency_penalty))
        try:
            config, _ = model._prepare_generation_config(None, num_beams=1, **options.overrides())
            model._prepare_special_tokens(config, device="cpu")
            ends = config._eos_token_tensor
            if options.ignore_eos:
                config.eos_token_id = config._eos_token_tensor = None
            self._processors = model._get_logits_processor(
                generation_config=config,
                input_ids_seq_length=len(ids),
                encoder_input_ids=torch.tensor([encoded if encoded is not None else ids]),
                logits_processor=added,
                device="cpu",
            )
        # A bias for a token that the model does not have is a plain ValueError there.
        except (ValueError, TypeError) as error:
            raise InputError(
                f"transformers refuses these settings: {error}", fix="correct the settings of the generation."
            ) from error
        vocabulary = model.config.get_text_config(decoder=True).vocab_size
        unknown = [token for token in options.logit_bias if not 0 <= token < vocabulary]
        if unknown:
            raise InputError(f"logit_bias names token {unknown[0]} of {vocabulary}.", fix="use ids that the model has.")
        self._draws = bool(config.do_sample)
        self.plain = not self._draws and not len(self._processors)
        self.ends = frozenset(() if ends is None or options.ignore_eos else ends.tolist())
        self._ids = torch.tensor([list(ids)]) if not self.plain else None
        self._generator: torch.Generator | None = None
        if self._draws and options.seed is not None:
            self._generator = torch.Generator().manual_seed(options.seed)

    def choose(self, logits: torch.Tensor) -> int:
        """The next token, from its logits `(1, vocabulary)` on the host."""
        assert self._ids is not None, "plain rows are chosen together"
        scores = self._processors(self._ids, logits.float().clone())
        if not self._draws:
            return self._taken(likeliest(scores))
        return self._taken(drawn(scores, self._generator))

    def _taken(self, token: torch.Tensor) -> int:
        assert self._ids is not None
        self._ids = torch.cat([self._ids, token.unsqueeze(1)], dim=1)
        return int(token)


def choose(choosers: Sequence[Chooser], logits: torch.Tensor) -> list[int | AccelError]:
    """The next token of each row, from logits `(rows, vocabulary)`; an error where a row's logits or settings leave none."""
    places = likeliest(logits)
    tokens: list[int | AccelError] = places.tolist()
    # NaN counts as the greatest: the value at that place tells whether a row holds any.
    finite = logits.gather(1, places.unsqueeze(1))[:, 0].isfinite().tolist()
    for row, is_finite in enumerate(finite):
        if not is_finite:
            tokens[row] = not_finite_error("the next token", "its logits hold NaN or infinity")
    odd = [row for row, chooser in enumerate(choosers) if not chooser.plain and finite[row]]
    if odd:
        on_host = logits[odd].cpu()
        for i, row in enumerate(odd):
            try:
                tokens[row] = choosers[row].choose(on_host[i : i + 1])
            except RuntimeError as error:
                tokens[row] = InputError(
                    f"With these settings no token can be drawn: {error}",
                    fix="use a higher temperature, or smaller biases.",
                )
    return tokens


class _Repeated(LogitsProcessor):  # type: ignore[misc]  # transformers is untyped here
    """OpenAI's penalties: logits minus `presence`, and `frequency` for each time, of tokens behind the prompt."""

    def __init__(self, prompt: int, presence: float, frequency: float) -> None:
        self._prompt, self._presence, self._frequency = prompt, presence, frequency

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        counts = Counter(input_ids[0, self._prompt :].tolist())
        for token, times in counts.items():
            scores[0, token] -= self._presence + self._frequency * times
        return scores
