"""What all generating models share: transformers' `generate` over `accel.decoding`.

A call of `forward` is one step of the decoder (`DecoderStep`), whose state holds the KV cache where the runtime keeps it. Greedy
and sampled decoding run our own loop; everything else above one step, from beam search to assistants, is transformers'.
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

from ..artifact.companions import open_generation_config
from ..artifact.manifest import Artifact
from ..decoding.host_threads import has_own_threads, one_thread
from ..decoding.kv_cache import HeldLayer, StateCache, is_theirs, renamed
from ..decoding.next_token import TokenChoice
from ..decoding.step import INTEGERS, DecoderStep, TokenSteps
from ..decoding.token_loop import LiveRows, decode_rows
from ..errors import ConfigError, InputError
from ..interfaces.family_registry import family_of
from ..interfaces.protocols import Feeds, Session
from ..interfaces.session_contract import check_filled, check_readable
from ..upstream.cache_names import CACHE_NAME
from ..upstream.generate_hooks import GenerateHooks, SampleCall
from .base import ORTModel
from .outputs import fast_output, numpy_too

logger = logging.getLogger(__name__)

_IDS, _MASKS = ("input_ids", "decoder_input_ids"), ("attention_mask", "decoder_attention_mask")
_SENSED = ("input_features", "input_values", "pixel_values", "flattened_patches")
# The mask of the longest text is made at its start.
_LONGEST = 1 << 20
# Arguments that `generate` may pass and that change nothing for a graph.
_IGNORED = frozenset(("return_dict", "output_attentions", "output_hidden_states", "cache_position"))


class Generator(ORTModel, GenerateHooks):
    """What all generating models share."""

    _decoder: ClassVar[str]

    def __init__(self, artifact: Artifact, **settings: Any) -> None:
        super().__init__(artifact, **settings)
        self.generation_config = open_generation_config(self.artifact.path, self.config)
        if self.generation_config.cache_implementation == "quantized":
            logger.warning(
                "The checkpoint's generation_config.json asks for a quantized cache of keys and values, which PyTorch rounds; this model "
                "keeps them in %s, so that its answers are those of the checkpoint without that setting.",
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
        """Run the decoder's steps with a session."""
        self.decoder_step = DecoderStep(
            session,
            self.artifact.component(self._decoder),
            self._embed,
            counts=family_of(self.config).positions,
            padding=getattr(self.config, "pad_token_id", None) or 0,
        )

    def _embed(self, ids: torch.Tensor) -> Feeds:
        """The decoder's input for tokens `(batch, new)`."""
        return {"input_ids": ids}

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
        return self.decoder_step.new_cache()

    def prepare_cache(self, config: GenerationConfig, kwargs: dict[str, Any]) -> None:
        """Put a cache over the session's state into the arguments of `generate`.

        Raises:
            ConfigError: The call asks for a cache of PyTorch's.
        """
        if self.config.is_encoder_decoder:
            # Parts of a prompt save memory, which prompts of a decoder with an encoder are too short for; transformers cuts the
            # encoder's mask with them.
            config.prefill_chunk_size = None
        in_parts = getattr(config, "prefill_chunk_size", None) is not None
        of_checkpoint = config.cache_implementation == self.generation_config.cache_implementation
        if config.cache_implementation not in (None, "dynamic") and not of_checkpoint:
            raise ConfigError(
                f"cache_implementation={config.cache_implementation!r} is PyTorch's; this model's runtime keeps"
                " the cache.",
                fix="leave it out.",
            )
        # A checkpoint says where PyTorch keeps its cache, which changes no token. (A quantized one does: see `__init__`.)
        config.cache_implementation = None
        if kwargs.get(CACHE_NAME) is not None:
            kwargs[CACHE_NAME] = self._own(kwargs[CACHE_NAME])
        elif config.use_cache is not False:
            kwargs[CACHE_NAME] = self.new_cache()
        if in_parts and isinstance(cache := kwargs.get(CACHE_NAME), StateCache):
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
            if name in _IDS and value.dtype not in INTEGERS:
                raise InputError(f"{name} is {value.dtype}; tokens are integers.", fix="pass the tokenizer's output.")
            if name in _MASKS and self.decoder_step.fills_rows and value.is_cpu:
                check_filled(value.numpy(), name)

    def decode(self, call: SampleCall) -> torch.Tensor | None:
        """Greedy and sampled decoding by `accel.decoding`, where its tokens are those of transformers' loop."""
        cache, longest = call.kwargs.get(CACHE_NAME), call.criteria.max_length
        if (
            not isinstance(cache, StateCache)
            or not call.kwargs.get("use_cache")
            or not call.returns_tokens
            or longest > _LONGEST
            or self.changes_angles(longest)
            # A subclass may prepare inputs in its own way.
            or not type(self).prepare_inputs_for_generation.__module__.startswith("accel.")
        ):
            return None
        rows = LiveRows(len(call.ids), call.end_tokens, call.padding_token, longest - call.ids.shape[1])
        choice = TokenChoice(call.processors, draw=call.config.do_sample)
        steps = TokenSteps(self.decoder_step, cache, call.first_logits, steps=rows.left - 1, padding=call.padding_token)
        with one_thread() if has_own_threads(self) else contextlib.nullcontext():
            tokens = decode_rows(call.ids, call.prompt_logits(), steps, choice, rows, call.streamer)
        if call.streamer is not None:
            call.streamer.end()
        return tokens

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
        if cache.session is not self.decoder_step.session:
            raise InputError(
                "past_key_values was made by another model, or before this one was opened again.",
                fix="pass the cache that this model returned.",
            )
        return cache

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
        logits = self.decoder_step(
            tokens, cache, mask=attention_mask, position_ids=position_ids, logits_to_keep=logits_to_keep
        )
        values: dict[str, Any] = {"logits": logits}
        if is_theirs(past):
            # Whoever filled it continues with it.
            cache.write_to(past)
            cache = past
        if use_cache is not False:
            values[CACHE_NAME] = cache
        return fast_output(CausalLMOutputWithPast, values)

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


def length_of_short_texts(config: Any) -> int | None:
    """The length up to which a config with LongRoPE has its first angles; `None` for others."""
    rope = getattr(config, "rope_parameters", None) or {}
    each = [one for one in (rope, *rope.values()) if isinstance(one, dict) and one.get("rope_type") == "longrope"]
    own = getattr(config, "original_max_position_embeddings", None)
    return min((int(n) for one in each if (n := one.get("original_max_position_embeddings", own))), default=None)
