"""Logits to the next token: transformers' processors, then the likeliest token or a draw."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from transformers import LogitsProcessor, LogitsProcessorList

from ..errors import AccelError, InputError, NotFiniteError
from ..upstream.generate_hooks import token_settings
from .generation_options import GenerationOptions


def likeliest(scores: np.ndarray[Any, Any]) -> list[int]:
    """The index of the greatest value of each row of `scores: (rows, vocabulary)`; NaN counts as the greatest."""
    indices: list[int] = scores.argmax(axis=-1).tolist()
    return indices


class TokenChoice:
    """Chooses the next tokens of rows that share their settings, as `generate` does.

    Args:
        processors: Called with all tokens so far.
        draw: Whether tokens are drawn.
        generator: Random numbers of the draws; torch's own when `None`.

    Attributes:
        plain: Whether the likeliest token is taken and no processor changes which one that is.
    """

    def __init__(
        self, processors: LogitsProcessorList, *, draw: bool = False, generator: torch.Generator | None = None
    ) -> None:
        self.processors, self._draw, self._generator = processors, draw, generator
        self.plain = not draw and not processors

    def __call__(self, ids: torch.Tensor, logits: torch.Tensor) -> torch.Tensor:
        """The next token of each row.

        Args:
            ids: `(rows, sequence)`: the tokens so far, which only processors read; the answer is on their device.
            logits: `(rows, vocabulary)` after them.

        Returns:
            `(rows,) int64`.

        Raises:
            RuntimeError: No token can be drawn.
        """
        scores = self.scores(ids, logits)
        return self._drawn(scores) if self._draw else _likeliest(scores)

    def scores(self, ids: torch.Tensor, logits: torch.Tensor) -> torch.Tensor:
        """The logits as the processors change them."""
        # A processor may write to its scores.
        scores = logits.to(ids.device, torch.float32, copy=bool(self.processors))
        return self.processors(ids, scores) if self.processors else scores

    def _drawn(self, scores: torch.Tensor) -> torch.Tensor:
        """The tokens that `torch.multinomial(scores.softmax(-1), 1)` draws.

        For one draw, that is the greatest of the probabilities, each divided by an exponential random number.
        """
        probabilities = torch.softmax(scores, dim=-1)
        if not probabilities.is_cpu:
            return torch.multinomial(probabilities, num_samples=1, generator=self._generator).squeeze(1)
        raced = probabilities.div_(torch.empty_like(probabilities).exponential_(1, generator=self._generator))
        tokens = _likeliest(raced)
        won = raced.gather(1, tokens.unsqueeze(1))[:, 0].tolist()
        if not all(0 < value < math.inf for value in won):
            raise RuntimeError("The scores leave no token that can be drawn, or are not numbers.")
        return tokens


def _likeliest(scores: torch.Tensor) -> torch.Tensor:
    # torch's argmax takes twenty times as long on the host.
    return torch.tensor(likeliest(scores.detach().numpy())) if scores.is_cpu else scores.argmax(dim=-1)


class RowChoice:
    """Chooses the tokens of one row, whose settings are its own, as a call of `generate` for this row alone does.

    Args:
        model: Its `generation_config` has what the options leave open.
        ids: The tokens that the answer continues.
        options: The settings of the row.
        encoded: What the encoder reads, if there is one.

    Attributes:
        plain: As in `TokenChoice`.
        ends: Tokens that end the answer.

    Raises:
        InputError: Settings that transformers refuses.
    """

    def __init__(
        self, model: Any, ids: Sequence[int], options: GenerationOptions, encoded: Sequence[int] | None = None
    ) -> None:
        penalties = LogitsProcessorList()
        if options.presence_penalty or options.frequency_penalty:
            penalties.append(_AnswerPenalty(len(ids), options.presence_penalty, options.frequency_penalty))
        self._ids = torch.tensor([list(ids)])
        try:
            processors, draw, self.ends = token_settings(
                model,
                self._ids,
                self._ids if encoded is None else torch.tensor([list(encoded)]),
                penalties,
                ignore_eos=options.ignore_eos,
                **options.overrides(),
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
        generator = torch.Generator().manual_seed(options.seed) if draw and options.seed is not None else None
        self._choice = TokenChoice(processors, draw=draw, generator=generator)
        self.plain = self._choice.plain

    def scores(self, logits: torch.Tensor) -> torch.Tensor:
        """The logits `(1, vocabulary)` as the processors of the row change them."""
        return self._choice.scores(self._ids, logits)

    def __call__(self, logits: torch.Tensor) -> int:
        """The next token, from logits `(1, vocabulary)` on the host."""
        token = self._choice(self._ids, logits)
        self._ids = torch.cat([self._ids, token.unsqueeze(1)], dim=1)
        return int(token)


def choose_tokens(choices: Sequence[RowChoice], logits: torch.Tensor) -> list[int | AccelError]:
    """The next token of each row, from logits `(rows, vocabulary)`; an error where a row's logits or settings leave none."""
    likeliest_tokens = _likeliest(logits.float())
    tokens: list[int | AccelError] = likeliest_tokens.tolist()
    # NaN counts as the greatest: the value of the likeliest token tells whether a row holds any.
    finite = logits.gather(1, likeliest_tokens.unsqueeze(1))[:, 0].isfinite().tolist()
    if not all(choice.plain for choice in choices):
        logits = logits.cpu()
    for row, choice in enumerate(choices):
        if not finite[row]:
            tokens[row] = NotFiniteError(
                "The model computed no finite number for the next token: its logits hold NaN or infinity.",
                fix="run the model in float32, and look for NaN among its weights.",
            )
        elif not choice.plain:
            try:
                tokens[row] = choice(logits[row : row + 1])
            except RuntimeError as error:
                tokens[row] = InputError(
                    f"With these settings no token can be drawn: {error}",
                    fix="use a higher temperature, or smaller biases.",
                )
    return tokens


class _AnswerPenalty(LogitsProcessor):  # type: ignore[misc]  # transformers is untyped here
    """OpenAI's penalties: take `presence`, and `frequency` for each occurrence, from the logits of tokens after the prompt."""

    def __init__(self, prompt: int, presence: float, frequency: float) -> None:
        self._prompt, self._presence, self._frequency = prompt, presence, frequency

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        counts = Counter(input_ids[0, self._prompt :].tolist())
        for token, times in counts.items():
            scores[0, token] -= self._presence + self._frequency * times
        return scores
