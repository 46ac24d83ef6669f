"""Models that generate: text, from text, speech or images, behind transformers' `GenerationMixin`.

A call of `forward` runs the decoder's session once, with a state that holds the KV cache where the runtime keeps it;
`StateCache` is that state as transformers sees a cache. Everything above one call, from beam search to streamers, is
transformers' own `generate`.
"""

from __future__ import annotations

import contextlib
import inspect
import logging
from collections.abc import Mapping
from numbers import Integral
from typing import Any, ClassVar

import torch
from transformers import (
    EosTokenCriteria,
    GenerationConfig,
    GenerationMixin,
    LogitsProcessorList,
    MaxLengthCriteria,
    StoppingCriteriaList,
)
from transformers.modeling_outputs import CausalLMOutputWithPast

from ..artifact.companions import open_generation_config
from ..artifact.manifest import Artifact
from ..decoding.kv_cache import HeldLayer, StateCache, is_theirs, one_cache, renamed
from ..decoding.next_token import has_own_threads, one_thread
from ..decoding.token_loop import decode
from ..errors import ConfigError, InputError
from ..interfaces.session_contract import check_filled, check_readable
from ..upstream.cache_names import CACHE_NAME
from .base import ORTModel
from .losses import computes_next_tokens_loss, loss_of
from .outputs import fast_output, numpy_too

logger = logging.getLogger(__name__)

# Architectures whose tokens get their positions by the mask where none are given; those of others by their place.
_COUNTS_BY_MASK = ("opt",)
# Those whose tokens count those before them that are no padding, whatever the mask says, from behind the position of padding.
_COUNTS_BY_TOKENS = (
    "camembert", "data2vec-text", "roberta", "roberta-prelayernorm", "xlm-roberta", "xlm-roberta-xl", "xmod",
)  # fmt: skip
# Those whose angles change with the length of a text, so that keys of a shorter one are computed again.
_ANGLES_BY_LENGTH = ("phi3", "phi4_multimodal", "phimoe")
# Modules whose way to prepare a call is as described above.
_KNOWN = ("accel.models.generation_mixin", "accel.models.speech", "accel.models.vision_language")
_CRITERIA = (MaxLengthCriteria, EosTokenCriteria)
# Tokens of a row, the prompt's among them: masks are made that long at the beginning.
_LONGEST = 1 << 20
_INTEGERS = (torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8)
_IDS, _MASKS = ("input_ids", "decoder_input_ids"), ("attention_mask", "decoder_attention_mask")
_SENSED = ("input_features", "input_values", "pixel_values", "flattened_patches")
# What `generate` may pass that changes nothing for a graph.
_IGNORED = frozenset(("return_dict", "output_attentions", "output_hidden_states", "cache_position"))


class Generator(ORTModel, GenerationMixin):  # type: ignore[misc]  # transformers is untyped here
    """What all generating models share."""

    _is_stateful: bool = False
    _decoder: ClassVar[str]

    def __init__(self, artifact: Artifact, **settings: Any) -> None:
        super().__init__(artifact, **settings)
        self.generation_config = open_generation_config(artifact.path, self.config)
        if self.generation_config.cache_implementation == "quantized":
            logger.warning(
                "The checkpoint's generation_config.json asks for a quantized cache of keys and values, which PyTorch rounds; this model "
                "keeps them in %s, so that its answers are those of the checkpoint without that setting.",
                str(self.dtype).removeprefix("torch."),
            )

    def _open(self) -> None:
        super()._open()
        component = self.artifact.component(self._decoder)
        self._decoder_session = self._opened.sessions[self._decoder]
        # transformers' word for a model whose cache no token can be taken out of.
        self._is_stateful = not component.croppable
        self._takes = frozenset(spec.name for spec in component.inputs if spec.pair is None)
        self._unused = frozenset(component.unused_inputs)
        self._limit = component.most_tokens
        self._limited = None
        # Reading a config is slow.
        kind = getattr(self.config, "model_type", None)
        self._counts_by_mask, self._counts_by_tokens = kind in _COUNTS_BY_MASK, kind in _COUNTS_BY_TOKENS
        self._short = _length_of_short_texts(self.config) if kind in _ANGLES_BY_LENGTH else None
        self._last = torch.zeros(1, dtype=torch.int64)
        # As sessions do for masks that declare bounds, which leaves out those that are to check nothing.
        self._fills_rows = any(spec.role == "mask" and spec.bounds is not None for spec in self._decoder_session.inputs)

    # What `generate` asks a model

    def can_generate(self) -> bool:
        """Whether `generate` works: yes."""
        return True

    def is_remote_code(self) -> bool:
        """Whether the model's code came with its weights: none is left in a graph."""
        return False

    def get_experts_implementation(self) -> dict[str, str]:
        """Implementations of experts that can be switched: none, a graph runs as it was traced."""
        return {}

    def new_cache(self) -> StateCache:
        """An empty cache to pass as `past_key_values`, for a conversation of several calls."""
        self._check_fork()
        return StateCache(self._decoder_session, croppable=self.artifact.component(self._decoder).croppable)

    def _prepare_cache_for_generation(
        self,
        generation_config: GenerationConfig,
        model_kwargs: dict[str, Any],
        generation_mode: Any,  # transformers' signature
        batch_size: int,
        max_cache_length: int,
    ) -> None:
        """Replaces transformers' caches by the session's state."""
        if self.config.is_encoder_decoder:
            # Parts of a prompt save memory, which prompts of a decoder with an encoder are too short for; transformers cuts the
            # encoder's mask with them.
            generation_config.prefill_chunk_size = None
        in_parts = getattr(generation_config, "prefill_chunk_size", None) is not None
        of_checkpoint = generation_config.cache_implementation == self.generation_config.cache_implementation
        if generation_config.cache_implementation not in (None, "dynamic") and not of_checkpoint:
            raise ConfigError(
                f"cache_implementation={generation_config.cache_implementation!r} is PyTorch's; this model's runtime keeps"
                " the cache.",
                fix="leave it out.",
            )
        # A checkpoint says where PyTorch keeps its cache, which changes no token. (A quantized one does: see `__init__`.)
        generation_config.cache_implementation = None
        if model_kwargs.get(CACHE_NAME) is not None:
            model_kwargs[CACHE_NAME] = self._own(model_kwargs[CACHE_NAME])
        elif generation_config.use_cache is not False:
            model_kwargs[CACHE_NAME] = self.new_cache()
        if in_parts and isinstance(cache := model_kwargs.get(CACHE_NAME), StateCache):
            cache.in_parts = True

    @numpy_too
    def generate(self, inputs: Any = None, generation_config: Any = None, **kwargs: Any) -> Any:
        """transformers' `generate`, with every argument it has.

        A `DynamicCache` as `past_key_values` is read first and written to at the end; a cache of this model is continued where
        it is. `cache` is the same argument by its name in transformers 5.24; both are taken with every version. NumPy in gives NumPy out.

        Raises:
            InputError: Nothing to generate, a prompt that is none or longer than the positions, a cache that does not fit or came twice.
        """
        self._check_prompt(inputs, kwargs)
        asked = kwargs.get("max_new_tokens", getattr(generation_config, "max_new_tokens", None))
        if asked is not None and asked < 1:
            raise InputError(f"max_new_tokens is {asked}.", fix="ask for at least one token.")
        # Before anything reads the encoder or the cache.
        self._check_fork()
        kwargs = renamed(kwargs)
        theirs = kwargs.get(CACHE_NAME)
        if not is_theirs(theirs):
            return super().generate(inputs, generation_config, **kwargs)
        kwargs[CACHE_NAME] = cache = self._own(theirs)
        made = super().generate(inputs, generation_config, **kwargs)
        cache.write_to(theirs)
        return made

    def changes_angles(self, most: int) -> bool:
        """Whether a text that grows to so many tokens passes the length at which its keys are computed again."""
        return self._short is not None and most > self._short

    def prepare_inputs_for_generation(self, input_ids: torch.Tensor, *args: Any, **kwargs: Any) -> dict[str, Any]:
        """transformers' own; where a text has just become so long that all angles change (LongRoPE), without what was kept."""
        cache = kwargs.get(CACHE_NAME)
        if (
            self.changes_angles(input_ids.shape[1])
            and isinstance(cache, StateCache)
            and cache.get_seq_length()
            and not self.changes_angles(cache.get_seq_length())
        ):
            kwargs |= {CACHE_NAME: self.new_cache(), "next_sequence_length": None}
        made: dict[str, Any] = super().prepare_inputs_for_generation(input_ids, *args, **kwargs)
        return made

    def _check_prompt(self, inputs: Any, given: Mapping[str, Any]) -> None:
        """Refuse prompts that transformers' code would stumble over, each for a reason of its own."""
        found = {self.main_input_name: inputs} if inputs is not None else {}
        found |= {name: given[name] for name in (*_IDS, *_MASKS, *_SENSED) if given.get(name) is not None}
        for name, value in found.items():
            check_readable(name, value)
            if name in _SENSED:
                if not value.numel() or not value.is_floating_point():
                    raise InputError(
                        f"{name} is a tensor {tuple(value.shape)} of {value.dtype}.",
                        fix="pass what the model's processor returns.",
                    )
                continue
            if value.ndim != 2 or not value.numel():
                raise InputError(
                    f"{name} has shape {tuple(value.shape)}; prompts are (batch, sequence), with a token each at least.",
                    fix="pass the tokenizer's output for a list of texts: tokenizer([text], return_tensors='pt').",
                )
            if name in _IDS and value.dtype not in _INTEGERS:
                raise InputError(f"{name} is {value.dtype}; tokens are integers.", fix="pass the tokenizer's output.")
            if name in _MASKS and self._fills_rows and value.is_cpu:
                check_filled(value.numpy(), name)

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
        """Greedy and sampled decoding, by our own loop where that makes the same tokens."""
        if synced_gpus or not fits(self, stopping_criteria, generation_config, model_kwargs):
            return super()._sample(
                input_ids, logits_processor, stopping_criteria, generation_config, synced_gpus, streamer, **model_kwargs
            )
        with one_thread() if has_own_threads(self) else contextlib.nullcontext():
            made = decode(
                self, input_ids, logits_processor, stopping_criteria, generation_config, streamer, model_kwargs
            )
        if streamer is not None:
            streamer.end()
        return made

    # Running

    def _own(self, cache: Any) -> StateCache:
        """A cache of this model, or one with what a `DynamicCache` holds."""
        if is_theirs(cache) and cache.layers and isinstance(cache.layers[0], HeldLayer):
            cache = cache.layers[0].cache
        elif is_theirs(cache):
            filled = self.new_cache()
            filled.fill(cache)
            return filled
        if not isinstance(cache, StateCache):
            raise InputError(
                f"past_key_values is a {type(cache).__name__}; this model's runtime keeps the cache itself.",
                fix="pass what this model returned as past_key_values, model.new_cache(), or a DynamicCache.",
            )
        if cache.session is not self._decoder_session:
            raise InputError(
                "past_key_values was made by another model, or before this one was opened again.",
                fix="pass the cache that this model returned.",
            )
        return cache

    def _step(
        self,
        tokens: Mapping[str, torch.Tensor],
        mask: torch.Tensor | None,
        position_ids: torch.Tensor | None,
        cache: StateCache,
        logits_to_keep: int | torch.Tensor,
    ) -> torch.Tensor:
        """One call of the decoder: the logits of the new tokens."""
        first = next(iter(tokens.values()))
        batch, new = int(first.shape[0]), int(first.shape[1])
        if cache.state is None:
            cache.state = self._decoder_session.new_state(batch)
        past = cache.state.length
        total = past + new
        if self._limit and total > self._limit:
            raise InputError(
                f"{past} cached and {new} new tokens are {total}; the model has {self._limit} positions.",
                fix="shorten the prompt, or ask for fewer new tokens.",
            )
        if new == 0:
            raise InputError("No new tokens were given.", fix="pass at least one.")
        if mask is None:
            mask = cache.whole_mask(batch, total)
        elif mask.ndim != 2:
            raise InputError(
                f"The attention mask has {mask.ndim} axes.", fix="pass the tokenizer's: (batch, tokens so far)."
            )
        elif not past and self._fills_rows and not cache.in_parts and mask.is_cpu and mask.numel():
            check_filled(mask.numpy(), "attention_mask")
        feeds = {**tokens, **cache.constants}
        if "attention_mask" in self._takes:
            feeds["attention_mask"] = mask
        elif not mask.all():
            raise InputError(
                "The mask hides tokens of the decoder, whose graph takes none.", fix="give prompts of one length."
            )
        if "position_ids" in self._takes:
            if position_ids is None:
                position_ids = self._positions(tokens, mask, past, total)
            feeds["position_ids"] = position_ids
        kept = None
        if "logits_to_keep" in self._takes:
            feeds["logits_to_keep"] = self._kept(new, logits_to_keep)
        elif type(logits_to_keep) is not int or logits_to_keep:
            kept = self._kept(new, logits_to_keep)
        logits = cache.run(feeds)
        return logits if kept is None else logits.index_select(1, kept.to(logits.device))

    def _positions(self, tokens: Mapping[str, torch.Tensor], mask: torch.Tensor, past: int, total: int) -> torch.Tensor:
        """Of the tokens behind those in the cache, where none are given: `(batch, new)`."""
        if self._counts_by_tokens and "input_ids" in tokens:
            padding: int = self.config.pad_token_id
            real = (tokens["input_ids"] != padding).long()
            return (real.cumsum(1) + past) * real + padding
        if self._counts_by_mask:
            return (mask.cumsum(1) * mask - 1)[:, past:]
        if total - past == 1:
            return torch.full((mask.shape[0], 1), past)
        return torch.arange(past, total).expand(mask.shape[0], -1)

    def _ids(self, input_ids: Any, rest: Mapping[str, Any]) -> torch.Tensor:
        """The tokens of a call, checked with what else it was given."""
        self._check_fork()
        if rest:
            self._check_rest(rest)
        ids = tensor_of("input_ids", input_ids)
        if ids.ndim != 2:
            raise InputError("input_ids must be (batch, sequence) token ids.", fix="pass the tokenizer's output.")
        return ids

    def _continued(
        self,
        tokens: Mapping[str, torch.Tensor],
        attention_mask: torch.Tensor | None,
        position_ids: torch.Tensor | None,
        past: Any,
        use_cache: bool | None,
        logits_to_keep: int | torch.Tensor,
    ) -> Any:
        """What a decoder-only model returns: the logits, and the cache behind these tokens."""
        cache = self.new_cache() if past is None else self._own(past)
        values: dict[str, Any] = {"logits": self._step(tokens, attention_mask, position_ids, cache, logits_to_keep)}
        if is_theirs(past):
            # Whoever filled it continues with it.
            cache.write_to(past)
            cache = past
        if use_cache is not False:
            values[CACHE_NAME] = cache
        return fast_output(CausalLMOutputWithPast, values)

    def _kept(self, new: int, logits_to_keep: int | torch.Tensor) -> torch.Tensor:
        """Positions of the new tokens whose logits are wanted; 0 for all, as in transformers."""
        if isinstance(logits_to_keep, torch.Tensor):
            return _places(new, logits_to_keep)
        if not isinstance(logits_to_keep, Integral) or isinstance(logits_to_keep, bool) or logits_to_keep < 0:
            raise InputError(
                f"logits_to_keep is {logits_to_keep!r}.",
                fix="pass how many of the last logits to compute, 0 for all; or a tensor of their places.",
            )
        if new == 1:
            return self._last
        return torch.arange(new - int(logits_to_keep) if 0 < logits_to_keep < new else 0, new)

    def _check_rest(self, rest: Mapping[str, Any]) -> None:
        """Refuse what the graph cannot follow."""
        for name, value in rest.items():
            if value is None or value is False or name in _IGNORED or name in self._unused:
                if name in ("output_attentions", "output_hidden_states") and value:
                    raise InputError(
                        f"Graphs that generate do not return what {name} asks for.",
                        fix=f"leave {name} out, or run the model with transformers.",
                    )
                continue
            if name in ("token_type_ids", "mm_token_type_ids") and not torch.as_tensor(value).any():
                # What models that know types take for no types.
                continue
            if name == "labels":
                raise InputError("No loss is computed here.", fix="leave labels out, and compute it from the logits.")
            # Not the graph's inputs: the embeddings of images and texts are made here.
            parameters = inspect.signature(self.forward).parameters.values()
            known = [one.name for one in parameters if one.kind is not inspect.Parameter.VAR_KEYWORD]
            raise InputError(f"The model takes {', '.join(known)}, not {name!r}.", fix=f"leave {name!r} out.")


def fits(model: Any, criteria: StoppingCriteriaList, config: GenerationConfig, kwargs: dict[str, Any]) -> bool:
    """Whether a call of `generate` can go through `decode`, which makes the same tokens."""
    return (
        isinstance(kwargs.get(CACHE_NAME), StateCache)
        and bool(kwargs.get("use_cache"))
        and not config.return_dict_in_generate
        and not config.is_assistant
        and all(type(one) in _CRITERIA for one in criteria)
        # transformers warns of texts longer than the positions, at a step.
        and all(
            one.max_position_embeddings is None or one.max_length <= one.max_position_embeddings
            for one in criteria
            if isinstance(one, MaxLengthCriteria)
        )
        and criteria.max_length is not None
        and criteria.max_length <= _LONGEST
        and not model.changes_angles(criteria.max_length)
        and type(model).prepare_inputs_for_generation.__module__ in _KNOWN
        and type(model)._update_model_kwargs_for_generation is GenerationMixin._update_model_kwargs_for_generation
    )


def tensor_of(name: str, value: Any) -> torch.Tensor:
    """The value, which is a tensor.

    Raises:
        InputError: It is none.
    """
    if not isinstance(value, torch.Tensor):
        raise InputError(
            f"{name} is a {type(value).__name__}; models that generate take torch tensors.",
            fix="pass the tokenizer's or processor's output, made with return_tensors='pt'.",
        )
    return value


def _places(new: int, asked: torch.Tensor) -> torch.Tensor:
    """The places of new tokens whose logits are wanted, those counted from the end as from the beginning."""
    check_readable("logits_to_keep", asked)
    if asked.ndim != 1 or not asked.numel() or asked.dtype not in _INTEGERS:
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


def _length_of_short_texts(config: Any) -> int | None:
    """How many tokens have the angles of short texts; `None` where there is one kind of them."""
    rope = getattr(config, "rope_parameters", None) or {}
    return getattr(config, "original_max_position_embeddings", None) if rope.get("rope_type") == "longrope" else None


class ORTModelForCausalLM(Generator):
    """Text generation: `input_ids: (batch, sequence)` to `logits: (batch, sequence, vocab_size)`."""

    task = "text-generation"
    _decoder = "model"

    @property
    def main_input_name(self) -> str:
        """The tokens."""
        return "input_ids"

    @numpy_too
    def forward(
        self,
        input_ids: torch.Tensor | None = None,
        attention_mask: torch.Tensor | None = None,
        position_ids: torch.Tensor | None = None,
        past_key_values: StateCache | None = None,
        use_cache: bool | None = None,
        logits_to_keep: int | torch.Tensor = 0,
        labels: torch.Tensor | None = None,
        cache: StateCache | None = None,
        **rest: Any,
    ) -> Any:
        """Run the decoder once.

        Args:
            input_ids: `(batch, new)` tokens behind those in the cache.
            attention_mask: `(batch, cached + new)`, 0 for padding; all ones when `None`.
            position_ids: `(batch, new)`; behind the cached ones when `None`.
            past_key_values: What an earlier call returned, continued in place; or a `DynamicCache`, whose keys and values are copied
                in and out at each call. What a state-space model keeps stays where it is; such a cache is empty at the first call.
            use_cache: Whether to return the cache (default).
            logits_to_keep: How many of the last logits to compute, 0 for all; or their positions.
            labels: `(batch, new)` ids, -100 for those that do not count: the result has the loss of each from the logits in front of it.
            cache: `past_key_values` by its name in transformers 5.24.
            **rest: Refused where it would change the result.

        Raises:
            InputError: Sizes that do not agree, a foreign cache, more tokens than positions; labels where transformers' model of this
                architecture has another loss.
        """
        if labels is not None and not computes_next_tokens_loss(self.config):
            self._check_rest({"labels": labels})
        tokens = {"input_ids": self._ids(input_ids, rest)}
        past = one_cache(past_key_values, cache)
        made = self._continued(tokens, attention_mask, position_ids, past, use_cache, logits_to_keep)
        if labels is None:
            return made
        loss = loss_of("ForCausalLM", {"logits": made.logits}, {"labels": labels}, self.config)
        return fast_output(CausalLMOutputWithPast, {"loss": loss, **made})
