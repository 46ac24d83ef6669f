"""Choice of the next token from logits, with transformers' logits processors and greedy decoding or sampling."""

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
from .grammars import GrammarConstraint


def likeliest(scores: np.ndarray[Any, Any]) -> list[int]:
    """Return the index of the greatest value in each row of `scores: (rows, vocabulary)`. NaN counts as the greatest value."""
    indices: list[int] = scores.argmax(axis=-1).tolist()
    return indices


class NextTokenSelector:
    """Choose the next tokens of rows with the same generation settings, as `generate` of transformers does.

    Args:
        processors: Logits processors. Each processor is called with the prompt and all generated tokens.
        draw: Whether tokens are sampled.
        generator: Random generator for sampling. With `None`, torch's default generator is used.

    Attributes:
        plain: Whether decoding is greedy and no logits processor is used.
    """

    def __init__(
        self, processors: LogitsProcessorList, *, draw: bool = False, generator: torch.Generator | None = None
    ) -> None:
        self.processors, self._draw, self._generator = processors, draw, generator
        self.plain = not draw and not processors

    def __call__(self, ids: torch.Tensor, logits: torch.Tensor) -> torch.Tensor:
        """Return the next token of each row.

        Args:
            ids: The prompt and the generated tokens, `(rows, sequence)`. Only logits processors read their values. The result is on
                the device of this tensor.
            logits: Logits of the next token, `(rows, vocabulary)`.

        Returns:
            Token ids, `(rows,) int64`.

        Raises:
            RuntimeError: No token can be sampled, because all probabilities are zero or not finite.
        """
        scores = self.scores(ids, logits)
        return self._drawn(scores) if self._draw else _likeliest(scores)

    def scores(self, ids: torch.Tensor, logits: torch.Tensor) -> torch.Tensor:
        """Return the logits after all logits processors, as float32."""
        # A logits processor may modify its argument in place, so it gets a copy of the logits.
        scores = logits.to(ids.device, torch.float32, copy=bool(self.processors))
        return self.processors(ids, scores) if self.processors else scores

    def _drawn(self, scores: torch.Tensor) -> torch.Tensor:
        """Sample the same tokens as `torch.multinomial(scores.softmax(-1), 1)`, but faster on the CPU.

        For one sample per row, `torch.multinomial` divides the probabilities by exponential random numbers and returns the argmax.
        This method computes the same values with NumPy's faster argmax.
        """
        probabilities = torch.softmax(scores, dim=-1)
        if not probabilities.is_cpu:
            return torch.multinomial(probabilities, num_samples=1, generator=self._generator).squeeze(1)
        ratios = probabilities.div_(torch.empty_like(probabilities).exponential_(1, generator=self._generator))
        tokens = _likeliest(ratios)
        largest = ratios.gather(1, tokens.unsqueeze(1))[:, 0].tolist()
        if not all(0 < value < math.inf for value in largest):
            raise RuntimeError("the logits are NaN or infinite, or all tokens have the probability 0.")
        return tokens


def _likeliest(scores: torch.Tensor) -> torch.Tensor:
    # On the CPU, `torch.argmax` is twenty times slower than `numpy.argmax`.
    return torch.tensor(likeliest(scores.detach().numpy())) if scores.is_cpu else scores.argmax(dim=-1)


class RowTokenSelector:
    """Choose the tokens of one row with its own generation options.

    The chosen tokens are the same as in a call of `generate` with this row as the only row of the batch.

    Args:
        model: The model. Options that are `None` in `options` have the values of the model's `generation_config`.
        ids: Token ids of the prompt, or the decoder's start tokens.
        options: The generation options of the row.
        encoded: Token ids of the encoder's input, or `None` for models without an encoder.
        constraint: Grammar of the generated text, or `None`.

    Attributes:
        plain: Whether decoding is greedy and no logits processor is used.
        ends: End-of-sequence token ids, after which generation stops.

    Raises:
        InputError: transformers rejects the options, or `logit_bias` contains a token id outside the vocabulary.
    """

    def __init__(
        self,
        model: Any,
        ids: Sequence[int],
        options: GenerationOptions,
        encoded: Sequence[int] | None = None,
        constraint: GrammarConstraint | None = None,
    ) -> None:
        penalties = LogitsProcessorList()
        if options.presence_penalty or options.frequency_penalty:
            penalties.append(_PresenceFrequencyPenalty(len(ids), options.presence_penalty, options.frequency_penalty))
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
        # transformers raises a ValueError or TypeError for invalid options. InputError tells the caller that the request is wrong.
        except (ValueError, TypeError) as error:
            raise InputError(
                f"transformers rejected the generation options: {error}",
                fix="correct the option that this message of transformers names.",
            ) from error
        vocabulary = model.config.get_text_config(decoder=True).vocab_size
        unknown = [token for token in options.logit_bias if not 0 <= token < vocabulary]
        if unknown:
            raise InputError(
                f"logit_bias contains the token id {unknown[0]}, but the model's token ids go from 0 to {vocabulary - 1}.",
                fix="use token ids of the model's tokenizer.",
            )
        self._constraint = constraint
        if constraint is not None:
            # The first processor, so that top_k and top_p select from allowed tokens.
            processors.insert(0, constraint)
        generator = torch.Generator().manual_seed(options.seed) if draw and options.seed is not None else None
        self._choice = NextTokenSelector(processors, draw=draw, generator=generator)
        self.plain = self._choice.plain

    def is_last(self, token: int) -> bool:
        """Return whether generation stops after a chosen token: it is an end token, or the grammar allows no further token."""
        return token in self.ends or (self._constraint is not None and self._constraint.complete)

    def scores(self, logits: torch.Tensor) -> torch.Tensor:
        """Return the logits `(1, vocabulary)` after the logits processors of this row."""
        return self._choice.scores(self._ids, logits)

    def __call__(self, logits: torch.Tensor) -> int:
        """Return the next token from logits `(1, vocabulary)` on the CPU, and append the token to the row."""
        token = self._choice(self._ids, logits)
        if self._constraint is not None:
            self._constraint.accept(int(token))
        self._ids = torch.cat([self._ids, token.unsqueeze(1)], dim=1)
        return int(token)


def choose_tokens(choices: Sequence[RowTokenSelector], logits: torch.Tensor) -> list[int | AccelError]:
    """Return the next token of each row from logits `(rows, vocabulary)`.

    If no token can be chosen for a row, the list contains an error in place of the row's token.
    """
    likeliest_tokens = _likeliest(logits.float())
    tokens: list[int | AccelError] = likeliest_tokens.tolist()
    # argmax returns the index of a NaN if a row contains NaN. So the logit at the returned index shows whether the row is valid.
    finite = logits.gather(1, likeliest_tokens.unsqueeze(1))[:, 0].isfinite().tolist()
    if not all(choice.plain for choice in choices):
        logits = logits.cpu()
    for row, choice in enumerate(choices):
        if not finite[row]:
            tokens[row] = NotFiniteError(
                "The next token cannot be chosen, because the model's logits contain NaN or infinity.",
                fix="run the model in float32, and check that its weights contain no NaN.",
            )
        elif not choice.plain:
            try:
                tokens[row] = choice(logits[row : row + 1])
            except RuntimeError as error:
                tokens[row] = InputError(
                    f"No token can be sampled with these generation options: {error}",
                    fix="use a higher temperature, or smaller values in logit_bias.",
                )
    return tokens


class _PresenceFrequencyPenalty(LogitsProcessor):  # type: ignore[misc]  # transformers is untyped here
    """Logits processor for the presence and frequency penalties of OpenAI's API.

    It subtracts `presence` once, and `frequency` once per occurrence, from the logit of each token that was already generated.
    """

    def __init__(self, prompt: int, presence: float, frequency: float) -> None:
        self._prompt, self._presence, self._frequency = prompt, presence, frequency

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        counts = Counter(input_ids[0, self._prompt :].tolist())
        for token, times in counts.items():
            scores[0, token] -= self._presence + self._frequency * times
        return scores
