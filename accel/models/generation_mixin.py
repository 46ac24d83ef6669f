"""Base class of all generating models, which combines transformers' `generate` with `accel.decoding`.

One call of `forward` is one decoder step (`DecoderStep`). The session's state contains the KV cache in the runtime's memory. Greedy
decoding and sampling use accel's own loop. Beam search, assisted generation and other methods use transformers' code.
"""

from __future__ import annotations

import contextlib
import inspect
import logging
from collections.abc import Mapping
from typing import Any, ClassVar

import torch
from transformers import GenerationConfig
from transformers.modeling_outputs import CausalLMOutputWithPast

from ..artifact.manifest import Artifact
from ..artifact.processor_loading import open_generation_config
from ..decoding.host_threads import has_own_threads, one_thread
from ..decoding.kv_cache import StateCache, UncopiedStateLayer, is_theirs, renamed
from ..decoding.next_token import NextTokenSelector
from ..decoding.step import INTEGERS, DecoderStep, TokenSteps
from ..decoding.token_loop import LiveRows, decode_rows
from ..errors import ConfigError, InputError
from ..interfaces.family_registry import family_of
from ..interfaces.protocols import Feeds, Session
from ..interfaces.session_contract import check_filled, check_readable
from ..upstream.cache_names import CACHE_NAME
from ..upstream.generate_hooks import DecodingLoopArguments, GenerateHooks
from .base import ORTModel
from .outputs import fast_output, numpy_too

logger = logging.getLogger(__name__)

_IDS, _MASKS = ("input_ids", "decoder_input_ids"), ("attention_mask", "decoder_attention_mask")
_SENSED = ("input_features", "input_values", "pixel_values", "flattened_patches")
# Longer texts use transformers' loop, because accel's loop allocates the mask of the longest text at the start.
_LONGEST = 1 << 20
# Arguments that `generate` may pass and that do not change the graph's result.
_TOKENIZERS = ("tokenizer", "assistant_tokenizer")
_IGNORED = frozenset(("return_dict", "output_attentions", "output_hidden_states", "cache_position"))


class Generator(ORTModel, GenerateHooks):
    """Base class of all generating models; `forward` is one decoder step, `generate` is transformers' method."""

    _decoder: ClassVar[str]

    def __init__(self, artifact: Artifact, **settings: Any) -> None:
        super().__init__(artifact, **settings)
        self.generation_config = open_generation_config(self.artifact.path, self.config)
        if self.generation_config.cache_implementation == "quantized":
            logger.warning(
                "The model's generation_config.json has cache_implementation='quantized'. This model ignores the setting and stores the "
                "KV cache unquantized in %s; its output can differ slightly from the output of transformers with a quantized cache.",
                str(self.dtype).removeprefix("torch."),
            )

    def _open(self) -> None:
        super()._open()
        component = self.artifact.component(self._decoder)
        self.can_crop = component.croppable
        self._unused = frozenset(component.unused_inputs)
        self._limited = None
        self._short = length_of_short_texts(self.config) if family_of(self.config).recomputes_long_texts else None
        self._open_decoder(self._opened.sessions[self._decoder])

    def _open_decoder(self, session: Session) -> None:
        """Use a session for the decoder's steps."""
        self.decoder_step = DecoderStep(
            session,
            self.artifact.component(self._decoder),
            self._embed,
            counts=family_of(self.config).positions,
            padding=getattr(self.config, "pad_token_id", None) or 0,
        )

    def _embed(self, ids: torch.Tensor) -> Feeds:
        """Return the decoder's input for token ids `(batch, new)`."""
        return {"input_ids": ids}

    # Methods that `generate` calls

    def can_generate(self) -> bool:
        """Return whether `generate` is supported: always."""
        return True

    def is_remote_code(self) -> bool:
        """Return whether the model's code was downloaded with its weights: never, because a graph needs no code."""
        return False

    def get_experts_implementation(self) -> dict[str, str]:
        """Return the experts implementations that can be selected: none, because the graph is fixed."""
        return {}

    def new_cache(self) -> StateCache:
        """Return an empty cache to pass as `past_key_values`, for example for a conversation over several calls."""
        self._check_fork()
        return self.decoder_step.new_cache()

    def prepare_cache(self, config: GenerationConfig, kwargs: dict[str, Any]) -> None:
        """Add a KV cache that is stored in the session's state to the arguments of `generate`.

        Raises:
            ConfigError: The call requests a cache implementation of PyTorch, such as `static`.
        """
        if self.config.is_encoder_decoder:
            # Processing the prompt in parts saves memory, but decoder prompts of encoder-decoders are too short for it; transformers would
            # also split the encoder's mask.
            config.prefill_chunk_size = None
        in_parts = getattr(config, "prefill_chunk_size", None) is not None
        of_checkpoint = config.cache_implementation == self.generation_config.cache_implementation
        if config.cache_implementation not in (None, "dynamic") and not of_checkpoint:
            raise ConfigError(
                f"cache_implementation={config.cache_implementation!r} is not supported: this class of cache exists only in PyTorch, and "
                "this model's runtime stores the KV cache itself.",
                fix="leave cache_implementation out.",
            )
        # The checkpoint's setting only chooses where PyTorch stores its cache and changes no token. (`__init__` warns for "quantized".)
        config.cache_implementation = None
        if kwargs.get(CACHE_NAME) is not None:
            kwargs[CACHE_NAME] = self._own_cache(kwargs[CACHE_NAME])
        elif config.use_cache is not False:
            kwargs[CACHE_NAME] = self.new_cache()
        if in_parts and isinstance(cache := kwargs.get(CACHE_NAME), StateCache):
            cache.in_parts = True

    @numpy_too
    def generate(self, inputs: Any = None, generation_config: Any = None, **kwargs: Any) -> Any:
        """Generate tokens with transformers' `generate`; all of its arguments are supported.

        A `DynamicCache` passed as `past_key_values` is copied into the model's own cache first and updated at the end. A cache that this
        model returned is updated in place. transformers 5.24 calls this argument `cache`; both names work with every version of
        transformers. NumPy inputs give NumPy outputs.

        Raises:
            InputError: `max_new_tokens` is less than 1, the prompt is invalid or too long, the cache belongs to another model, or the
                cache is passed under both names.
        """
        self._check_prompt(inputs, kwargs)
        new_tokens = kwargs.get("max_new_tokens", getattr(generation_config, "max_new_tokens", None))
        if new_tokens is not None and new_tokens < 1:
            raise InputError(
                f"max_new_tokens is {new_tokens}, so there is nothing to generate.",
                fix="pass max_new_tokens=1 or more.",
            )
        # Must come before the encoder or the cache is accessed.
        self._check_fork()
        kwargs = renamed(kwargs)
        theirs = kwargs.get(CACHE_NAME)
        if not is_theirs(theirs):
            return super().generate(inputs, generation_config, **kwargs)
        kwargs[CACHE_NAME] = cache = self._own_cache(theirs)
        tokens = super().generate(inputs, generation_config, **kwargs)
        cache.write_to(theirs)
        return tokens

    def changes_angles(self, most: int) -> bool:
        """Return whether a text of `most` tokens exceeds the length at which LongRoPE changes its angles and keys must be recomputed."""
        return self._short is not None and most > self._short

    def prepare_inputs_for_generation(self, input_ids: torch.Tensor, *args: Any, **kwargs: Any) -> dict[str, Any]:
        """Prepare the inputs of a step like transformers.

        When the text becomes longer than LongRoPE's original length, the step starts with an empty cache, because all keys change.
        """
        cache = kwargs.get(CACHE_NAME)
        if (
            self.changes_angles(input_ids.shape[1])
            and isinstance(cache, StateCache)
            and cache.get_seq_length()
            and not self.changes_angles(cache.get_seq_length())
        ):
            kwargs |= {CACHE_NAME: self.new_cache(), "next_sequence_length": None}
        # `generate` passes the tokenizers for stop strings and assistants to every step. PyTorch models ignore them.
        for name in _TOKENIZERS:
            kwargs.pop(name, None)
        prepared: dict[str, Any] = super().prepare_inputs_for_generation(input_ids, *args, **kwargs)
        return prepared

    def _check_prompt(self, inputs: Any, arguments: Mapping[str, Any]) -> None:
        """Raise an error with the reason for prompts that would fail inside transformers' code."""
        prompts = {self.main_input_name: inputs} if inputs is not None else {}
        prompts |= {name: arguments[name] for name in (*_IDS, *_MASKS, *_SENSED) if arguments.get(name) is not None}
        for name, value in prompts.items():
            check_readable(name, value)
            if name in _SENSED:
                if not value.numel() or not value.is_floating_point():
                    raise InputError(
                        f"{name} has shape {tuple(value.shape)} and type {value.dtype}; it must be a floating-point tensor that is not "
                        "empty.",
                        fix=f"pass the {name} that the model's processor returns.",
                    )
                continue
            if value.ndim != 2 or not value.numel():
                raise InputError(
                    f"{name} has shape {tuple(value.shape)}; its shape must be (batch, sequence), with at least one row and one token.",
                    fix="tokenize a list of texts: model.generate(**tokenizer([text], return_tensors='pt')).",
                )
            if name in _IDS and value.dtype not in INTEGERS:
                raise InputError(
                    f"{name} has the type {value.dtype}, but token ids must be integers.",
                    fix=f"pass the {name} that the tokenizer returns, or convert it with .long().",
                )
            if name in _MASKS and self.decoder_step.fills_rows and value.is_cpu:
                check_filled(value.numpy(), name)

    def decode(self, call: DecodingLoopArguments) -> torch.Tensor | None:
        """Generate tokens with accel's greedy or sampling loop. Return `None` for calls that need transformers' own loop."""
        cache, longest = call.kwargs.get(CACHE_NAME), call.criteria.max_length
        if (
            not isinstance(cache, StateCache)
            or not call.kwargs.get("use_cache")
            or not call.returns_tokens
            or longest > _LONGEST
            or self.changes_angles(longest)
            # A subclass may prepare its inputs in another way.
            or not type(self).prepare_inputs_for_generation.__module__.startswith("accel.")
        ):
            return None
        rows = LiveRows(len(call.ids), call.end_tokens, call.padding_token, longest - call.ids.shape[1])
        choice = NextTokenSelector(call.processors, draw=call.config.do_sample)
        steps = TokenSteps(self.decoder_step, cache, call.first_logits, steps=rows.left - 1, padding=call.padding_token)
        with one_thread() if has_own_threads(self) else contextlib.nullcontext():
            tokens = decode_rows(call.ids, call.prompt_logits(), steps, choice, rows, call.streamer)
        if call.streamer is not None:
            call.streamer.end()
        return tokens

    # Running

    def _own_cache(self, cache: Any) -> StateCache:
        """Return the cache itself if it belongs to this model, or a new cache filled from a `DynamicCache`."""
        if is_theirs(cache) and cache.layers and isinstance(cache.layers[0], UncopiedStateLayer):
            cache = cache.layers[0].cache
        elif is_theirs(cache):
            filled = self.new_cache()
            filled.fill(cache)
            return filled
        if not isinstance(cache, StateCache):
            raise InputError(
                f"past_key_values is a {type(cache).__name__}, which this model cannot read: its runtime stores the KV cache itself.",
                fix="pass the past_key_values that this model returned, model.new_cache(), or a DynamicCache of transformers.",
            )
        if cache.session is not self.decoder_step.session:
            raise InputError(
                "past_key_values belongs to another model, or to this model before it was opened again (by model.to(...) or after a fork).",
                fix="pass the past_key_values that this model returned since it was opened, or start with model.new_cache().",
            )
        return cache

    def _ids(self, input_ids: Any, rest: Mapping[str, Any]) -> torch.Tensor:
        """Return the token ids of a call after checking them and the remaining arguments."""
        self._check_fork()
        if rest:
            self._check_rest(rest)
        ids = tensor_of("input_ids", input_ids)
        if ids.ndim != 2:
            raise InputError(
                f"input_ids has shape {tuple(ids.shape)}; its shape must be (batch, sequence).",
                fix="tokenize a list of texts: model(**tokenizer([text], return_tensors='pt')).",
            )
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
        """Run a decoder-only model and return the logits and the updated cache."""
        cache = self.new_cache() if past is None else self._own_cache(past)
        logits = self.decoder_step(
            tokens, cache, mask=attention_mask, position_ids=position_ids, logits_to_keep=logits_to_keep
        )
        values: dict[str, Any] = {"logits": logits}
        if is_theirs(past):
            # The caller continues with its own cache object.
            cache.write_to(past)
            cache = past
        if use_cache is not False:
            values[CACHE_NAME] = cache
        return fast_output(CausalLMOutputWithPast, values)

    def _check_rest(self, rest: Mapping[str, Any]) -> None:
        """Raise for arguments that would change a transformers model's result but that the graph does not support."""
        for name, value in rest.items():
            if value is None or value is False or name in _IGNORED or name in self._unused:
                if name in ("output_attentions", "output_hidden_states") and value:
                    raise InputError(
                        f"{name}={value!r} is not supported: the graph of a generating model does not return attentions or hidden states.",
                        fix=f"leave {name} out, or run the original model with transformers.",
                    )
                continue
            if name in ("token_type_ids", "mm_token_type_ids") and not torch.as_tensor(value).any():
                # Zeros are the same as no token types.
                continue
            if name == "labels":
                raise InputError(
                    "The argument labels is not supported, because this model does not compute a loss.",
                    fix="leave labels out, and compute the loss from the returned logits.",
                )
            # List the parameters of `forward`: the graph's inputs include embeddings, which this model computes itself.
            parameters = inspect.signature(self.forward).parameters.values()
            names = [parameter.name for parameter in parameters if parameter.kind is not inspect.Parameter.VAR_KEYWORD]
            raise InputError(
                f"The model has no input {name!r}; its inputs are {', '.join(names)}.", fix=f"leave {name!r} out."
            )


def tensor_of(name: str, value: Any) -> torch.Tensor:
    """Return the value if it is a tensor.

    Raises:
        InputError: The value is not a tensor.
    """
    if not isinstance(value, torch.Tensor):
        raise InputError(
            f"{name} is a {type(value).__name__}, but generating models accept only torch tensors.",
            fix="call the tokenizer or processor with return_tensors='pt', and pass its output.",
        )
    return value


def length_of_short_texts(config: Any) -> int | None:
    """Return the text length up to which a LongRoPE config uses its short-text angles; `None` for other configs."""
    rope = getattr(config, "rope_parameters", None) or {}
    longropes = [
        rope for rope in (rope, *rope.values()) if isinstance(rope, dict) and rope.get("rope_type") == "longrope"
    ]
    default = getattr(config, "original_max_position_embeddings", None)
    return min(
        (int(n) for rope in longropes if (n := rope.get("original_max_position_embeddings", default))), default=None
    )
