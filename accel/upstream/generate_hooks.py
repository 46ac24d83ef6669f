"""Private parts of transformers' `generate`, as public methods and functions of ours.

Seen in transformers 5.23 and 5.24; tests/integration/test_generate_overrides.py compares their signatures with the installed version.
The public alternative, `generate(custom_generate=...)`, replaces every way of decoding, beam search included, and is an argument of
the caller's.
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
class SampleCall:
    """A call of transformers' loop of greedy and sampled decoding, after `generate` has read its arguments.

    Attributes:
        model: The generating model.
        ids: `(batch, sequence)`: the prompt, or the tokens that a decoder starts with.
        processors: Of the logits.
        criteria: What ends the text.
        config: The settings of the call.
        streamer: Gets each step's tokens; or `None`.
        kwargs: What `generate` keeps between two steps, the cache among it.
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
        """Whether the caller wants tokens alone, which end at a length or at a token, from a cache that the model updates as usual."""
        update = "_update_model_kwargs_for_generation"
        return (
            not self.config.return_dict_in_generate
            and not self.config.is_assistant
            and all(type(criterion) in _CRITERIA for criterion in self.criteria)
            # transformers warns at a step whose text is longer than the positions.
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
        """Tokens that end a row."""
        return frozenset(
            end
            for criterion in self.criteria
            if isinstance(criterion, EosTokenCriteria)
            for end in criterion.eos_token_id.tolist()
        )

    @property
    def padding_token(self) -> int:
        """The token that follows the end of a row; 0 where no token ends one."""
        return int(self.config._pad_token_tensor) if self.end_tokens else 0

    def prompt_logits(self) -> torch.Tensor:
        """Read the prompt: the logits `(batch, vocabulary)` after it."""
        outputs = self.model._prefill(self.ids, self.config, self.kwargs)
        self._updated = self.model._update_model_kwargs_for_generation(
            outputs, self.kwargs, is_encoder_decoder=self.model.config.is_encoder_decoder
        )
        logits: torch.Tensor = outputs.logits[:, -1]
        return logits

    def first_logits(self, tokens: torch.Tensor) -> torch.Tensor:
        """The logits `(batch, vocabulary)` after the first new tokens `(batch, 1)`; after `prompt_logits`."""
        inputs = self.model.prepare_inputs_for_generation(tokens, next_sequence_length=1, **self._updated)
        logits: torch.Tensor = self.model(**inputs).logits[:, -1]
        return logits


class GenerateHooks(GenerationMixin):  # type: ignore[misc]  # transformers is untyped here
    """transformers' `generate`, whose private hooks call the public methods of this class."""

    can_crop: bool = True
    """Whether tokens can be taken out of the cache."""

    def prepare_cache(self, config: GenerationConfig, kwargs: dict[str, Any]) -> None:
        """Put the cache of a call of `generate` into `kwargs`."""
        raise NotImplementedError

    def decode(self, call: SampleCall) -> torch.Tensor | None:
        """The prompt and the new tokens, `(batch, sequence + new)`; `None` where transformers' own loop has to run."""
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
        tokens = None if synced_gpus else self.decode(SampleCall(self, *arguments, streamer, model_kwargs))
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
    """How `generate` would choose the next tokens of one row.

    Args:
        model: Its `generation_config` has what `overrides` leave open.
        ids: `(1, sequence)`: what the answer continues.
        encoder_ids: `(1, sequence)`: what the encoder reads, or `ids`.
        processors: Processors of the caller's, which run after transformers'.
        ignore_eos: Whether the text goes on after the model's end tokens.
        **overrides: Fields of `GenerationConfig`.

    Returns:
        The processors, whether tokens are drawn, and the end tokens.

    Raises:
        ValueError, TypeError: Settings that transformers refuses.
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
