"""Private parts of transformers' `generate`, as public methods and functions.

Seen in transformers 5.23 and 5.24; tests/integration/test_generate_overrides.py compares their signatures with the installed
version. The public alternative, `generate(custom_generate=...)`, is not used: it replaces every decoding method, including
beam search, and users pass this argument themselves.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from transformers import (
    EosTokenCriteria,
    GenerationConfig,
    GenerationMixin,
    LogitsProcessorList,
    MaxLengthCriteria,
    StoppingCriteriaList,
)

_CRITERIA = (MaxLengthCriteria, EosTokenCriteria)


@dataclass(slots=True)
class DecodingLoopArguments:
    """Arguments of transformers' loop for greedy and sampled decoding, after `generate` has processed its own arguments.

    Attributes:
        model: The generating model.
        ids: `(batch, sequence)`: the prompt, or the tokens that a decoder starts with.
        processors: Processors of the logits.
        criteria: Stopping criteria.
        config: Generation config of the call.
        streamer: Streamer that receives the tokens of each step, or `None`.
        kwargs: Keyword arguments that `generate` passes from step to step, including the cache.
    """

    model: Any
    ids: torch.Tensor
    processors: LogitsProcessorList
    criteria: StoppingCriteriaList
    config: GenerationConfig
    streamer: Any
    kwargs: dict[str, Any]
    _updated: dict[str, Any] = field(default_factory=dict)

    @property
    def returns_tokens(self) -> bool:
        """Whether the caller requests only token ids, and uses only transformers' stopping criteria and cache updates."""
        update = "_update_model_kwargs_for_generation"
        return (
            not self.config.return_dict_in_generate
            and not self.config.is_assistant
            and all(type(criterion) in _CRITERIA for criterion in self.criteria)
            # transformers warns at each step after the largest position, so its own loop must run.
            and all(
                criterion.max_position_embeddings is None or criterion.max_length <= criterion.max_position_embeddings
                for criterion in self.criteria
                if isinstance(criterion, MaxLengthCriteria)
            )
            and self.criteria.max_length is not None
            and getattr(type(self.model), update) is getattr(GenerationMixin, update)
        )

    @property
    def end_tokens(self) -> frozenset[int]:
        """End tokens of the call."""
        return frozenset(
            end
            for criterion in self.criteria
            if isinstance(criterion, EosTokenCriteria)
            for end in criterion.eos_token_id.tolist()
        )

    @property
    def padding_token(self) -> int:
        """Token that pads a row after its end token; 0 if the call has no end token."""
        return int(self.config._pad_token_tensor) if self.end_tokens else 0

    def prompt_logits(self) -> torch.Tensor:
        """Run the prompt and return the logits `(batch, vocabulary)` after it."""
        outputs = self.model._prefill(self.ids, self.config, self.kwargs)
        self._updated = self.model._update_model_kwargs_for_generation(
            outputs, self.kwargs, is_encoder_decoder=self.model.config.is_encoder_decoder
        )
        logits: torch.Tensor = outputs.logits[:, -1]
        return logits

    def first_logits(self, tokens: torch.Tensor) -> torch.Tensor:
        """Return the logits `(batch, vocabulary)` after the first new tokens `(batch, 1)`. Requires `prompt_logits` before."""
        inputs = self.model.prepare_inputs_for_generation(tokens, next_sequence_length=1, **self._updated)
        logits: torch.Tensor = self.model(**inputs).logits[:, -1]
        return logits


class GenerateHooks(GenerationMixin):  # type: ignore[misc]  # transformers is untyped here
    """transformers' `generate`, whose private hooks call the public methods of this class."""

    can_crop: bool = True
    """Whether tokens can be removed from the cache."""

    def prepare_cache(self, config: GenerationConfig, kwargs: dict[str, Any]) -> None:
        """Add the cache of a call of `generate` to `kwargs`."""
        raise NotImplementedError

    def decode(self, call: DecodingLoopArguments) -> torch.Tensor | None:
        """Return the prompt with the new tokens, `(batch, sequence + new)`, or `None` to run transformers' own loop."""
        raise NotImplementedError

    @property
    def _is_stateful(self) -> bool:
        return not self.can_crop

    def _prepare_cache_for_generation(
        self,
        generation_config: GenerationConfig,
        model_kwargs: dict[str, Any],
        generation_mode: Any,
        batch_size: int,
        max_cache_length: int,
    ) -> None:
        self.prepare_cache(generation_config, model_kwargs)

    def _sample(
        self,
        input_ids: torch.Tensor,
        logits_processor: LogitsProcessorList,
        stopping_criteria: StoppingCriteriaList,
        generation_config: GenerationConfig,
        synced_gpus: bool = False,
        streamer: Any = None,
        **model_kwargs: Any,
    ) -> Any:
        arguments = (input_ids, logits_processor, stopping_criteria, generation_config)
        tokens = None if synced_gpus else self.decode(DecodingLoopArguments(self, *arguments, streamer, model_kwargs))
        return super()._sample(*arguments, synced_gpus, streamer, **model_kwargs) if tokens is None else tokens


def token_settings(
    model: Any,
    ids: torch.Tensor,
    encoder_ids: torch.Tensor,
    processors: LogitsProcessorList,
    *,
    ignore_eos: bool,
    **overrides: Any,
) -> tuple[LogitsProcessorList, bool, frozenset[int]]:
    """Prepare the selection of next tokens for one row, as `generate` does.

    Args:
        model: The model. Its `generation_config` gives the defaults for `overrides`.
        ids: `(1, sequence)`: tokens that the output continues.
        encoder_ids: `(1, sequence)`: input tokens of the encoder, or `ids` for a decoder-only model.
        processors: The caller's logits processors, which run after transformers' processors.
        ignore_eos: Whether generation continues after end tokens.
        **overrides: Fields of `GenerationConfig`.

    Returns:
        The logits processors, whether tokens are sampled, and the end tokens.

    Raises:
        ValueError, TypeError: transformers rejects the settings.
    """
    config, _ = model._prepare_generation_config(None, num_beams=1, **overrides)
    model._prepare_special_tokens(config, device="cpu")
    ends = config._eos_token_tensor
    if ignore_eos:
        config.eos_token_id = config._eos_token_tensor = ends = None
    chosen = model._get_logits_processor(
        generation_config=config,
        input_ids_seq_length=ids.shape[1],
        encoder_input_ids=encoder_ids,
        logits_processor=processors,
        device="cpu",
    )
    return chosen, bool(config.do_sample), frozenset(() if ends is None else ends.tolist())
