"""Models that generate: text, from text, speech or images, behind transformers' `GenerationMixin`.

A call of `forward` runs the decoder's session once, with a state that holds the KV cache where the runtime keeps it;
`StateCache` is that state as transformers sees a cache. Everything above one call, from beam search to streamers, is
transformers' own `generate`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

import torch
from transformers import GenerationConfig, GenerationMixin
from transformers.cache_utils import Cache
from transformers.modeling_outputs import BaseModelOutput, CausalLMOutputWithPast, Seq2SeqLMOutput

from .errors import ConfigError, InputError
from .interfaces import Session, State
from .modeling import ORTModel, fast_output

_ENCODER_MASK = "encoder_attention_mask"
# What `generate` may pass that changes nothing for a graph.
_IGNORED = frozenset(("return_dict", "output_attentions", "output_hidden_states", "cache_position"))


class StateCache(Cache):  # type: ignore[misc]  # transformers is untyped here
    """A session's state as a transformers cache.

    Keys and values stay where the runtime has them: the cache can be continued, reordered, cropped and passed to the next
    `generate`, but its tensors cannot be read.

    Args:
        session: The decoder's session, which makes the state at the first call.
    """

    def __init__(self, session: Session) -> None:
        super().__init__(layers=[])
        self.session = session
        self.state: State | None = None
        self.constants: dict[str, torch.Tensor] = {}

    @property
    def batch_size(self) -> int:
        """Rows held, -1 before the first call."""
        return getattr(self.state, "batch", -1)

    @property
    def is_croppable(self) -> bool:
        """Whether tokens can be taken back: always."""
        return True

    @property
    def is_initialized(self) -> bool:
        """Whether a call was made."""
        return self.state is not None

    @property
    def is_compileable(self) -> bool:
        """Whether torch can compile over it: no."""
        return False

    def get_seq_length(self, layer_idx: int = 0) -> int:  # transformers' signature
        """Tokens held."""
        return self.state.length if self.state is not None else 0

    def get_max_length(self, layer_idx: int | None = None) -> int:
        """No limit of its own."""
        return -1

    def get_mask_sizes(self, query_length: int, layer_idx: int = 0) -> tuple[int, int]:
        """Tokens after the next call, and the first one's position."""
        return self.get_seq_length() + query_length, 0

    def reorder_cache(self, beam_idx: torch.Tensor) -> None:
        """Row `i` becomes row `beam_idx[i]`."""
        if self.state is not None:
            self.state.reorder(beam_idx)
            self.constants = {name: tensor.index_select(0, beam_idx) for name, tensor in self.constants.items()}

    def batch_select_indices(self, indices: torch.Tensor) -> None:
        """Keep these rows."""
        self.reorder_cache(indices)

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Each row `repeats` times."""
        if self.state is not None and self.batch_size > 0:
            self.reorder_cache(torch.arange(self.batch_size).repeat_interleave(repeats))

    def crop(self, tokens_to_remove: int) -> None:
        """Forget the last tokens, given as a negative number as in transformers."""
        if self.state is not None and tokens_to_remove:
            self.state.crop(self.state.length - abs(tokens_to_remove))

    def reset(self) -> None:
        """Forget everything."""
        self.state = None
        self.constants = {}

    def clone(self) -> StateCache:
        """An independent copy, for trying several continuations of one prompt."""
        copy = StateCache(self.session)
        copy.state = self.state.clone() if self.state is not None else None
        copy.constants = dict(self.constants)
        return copy

    def __len__(self) -> int:
        return 0

    def __repr__(self) -> str:
        return f"StateCache({self.get_seq_length()} tokens)"


class _Generator(ORTModel, GenerationMixin):  # type: ignore[misc]  # transformers is untyped here
    """What all generating models share."""

    _is_stateful: ClassVar[bool] = False
    _decoder: ClassVar[str]

    def _open(self) -> None:
        super()._open()
        component = self.artifact.component(self._decoder)
        self._decoder_session = self._opened.sessions[self._decoder]
        self._takes = frozenset(spec.name for spec in component.inputs if spec.pair is None)
        self._unused = frozenset(component.unused_inputs)
        self._limit = component.max_sizes.get("total", 0)
        self._limited = None
        self._last = torch.zeros(1, dtype=torch.int64)

    def _load_config(self) -> Any:
        config = super()._load_config()
        try:
            self.generation_config = GenerationConfig.from_pretrained(self.artifact.path, local_files_only=True)
        except OSError:
            self.generation_config = GenerationConfig.from_model_config(config)
        return config

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
        return StateCache(self._decoder_session)

    def _prepare_cache_for_generation(
        self,
        generation_config: GenerationConfig,
        model_kwargs: dict[str, Any],
        generation_mode: Any,  # transformers' signature
        batch_size: int,
        max_cache_length: int,
    ) -> None:
        """Replaces transformers' caches by the session's state."""
        if generation_config.cache_implementation not in (None, "dynamic"):
            raise ConfigError(
                f"cache_implementation={generation_config.cache_implementation!r} is PyTorch's; this model's runtime keeps"
                " the cache.",
                fix="leave it out.",
            )
        if model_kwargs.get("past_key_values") is not None:
            self._own(model_kwargs["past_key_values"])
        elif generation_config.use_cache is not False:
            model_kwargs["past_key_values"] = self.new_cache()

    def generate(self, inputs: Any = None, generation_config: Any = None, **kwargs: Any) -> Any:
        """transformers' `generate`, with every argument it has.

        Raises:
            InputError: Nothing to generate, a prompt longer than the positions, a cache that does not fit.
        """
        asked = kwargs.get("max_new_tokens", getattr(generation_config, "max_new_tokens", None))
        if asked is not None and asked < 1:
            raise InputError(f"max_new_tokens is {asked}.", fix="ask for at least one token.")
        # Before anything reads the encoder or the cache.
        self._check_fork()
        return super().generate(inputs, generation_config, **kwargs)

    # Running

    def _own(self, cache: Any) -> StateCache:
        if not isinstance(cache, StateCache):
            raise InputError(
                f"past_key_values is a {type(cache).__name__}; this model's runtime keeps the cache itself.",
                fix="pass what this model returned as past_key_values, or model.new_cache().",
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
            mask = torch.ones((batch, total), dtype=torch.int64)
        elif mask.ndim != 2:
            raise InputError(
                f"The attention mask has {mask.ndim} axes.", fix="pass the tokenizer's: (batch, tokens so far)."
            )
        feeds = {**tokens, "attention_mask": mask, **cache.constants}
        if "position_ids" in self._takes:
            if position_ids is None:
                position_ids = torch.arange(past, total).expand(batch, new)
            feeds["position_ids"] = position_ids
        kept = None
        if "logits_to_keep" in self._takes:
            feeds["logits_to_keep"] = self._kept(new, logits_to_keep)
        elif not isinstance(logits_to_keep, int) or logits_to_keep:
            kept = self._kept(new, logits_to_keep)
        logits = self._decoder_session.run(feeds, outputs=("logits",), state=cache.state)["logits"]
        return logits if kept is None else logits.index_select(1, kept)

    def _ids(self, input_ids: Any, rest: Mapping[str, Any]) -> torch.Tensor:
        """The tokens of a call, checked with what else it was given."""
        self._check_fork()
        if rest:
            self._check_rest(rest)
        if not isinstance(input_ids, torch.Tensor):
            raise InputError(
                f"input_ids is a {type(input_ids).__name__}; models that generate take torch tensors.",
                fix="pass the tokenizer's output, made with return_tensors='pt'.",
            )
        if input_ids.ndim != 2:
            raise InputError("input_ids must be (batch, sequence) token ids.", fix="pass the tokenizer's output.")
        return input_ids

    def _continued(
        self,
        tokens: Mapping[str, torch.Tensor],
        attention_mask: torch.Tensor | None,
        position_ids: torch.Tensor | None,
        past_key_values: Any,
        use_cache: bool | None,
        logits_to_keep: int | torch.Tensor,
    ) -> Any:
        """What a decoder-only model returns: the logits, and the cache behind these tokens."""
        cache = self.new_cache() if past_key_values is None else self._own(past_key_values)
        values: dict[str, Any] = {"logits": self._step(tokens, attention_mask, position_ids, cache, logits_to_keep)}
        if use_cache is not False:
            values["past_key_values"] = cache
        return fast_output(CausalLMOutputWithPast, values)

    def _kept(self, new: int, logits_to_keep: int | torch.Tensor) -> torch.Tensor:
        """Positions of the new tokens whose logits are wanted; 0 for all, as in transformers."""
        if isinstance(logits_to_keep, torch.Tensor):
            return logits_to_keep
        if new == 1:
            return self._last
        return torch.arange(new - logits_to_keep if 0 < logits_to_keep < new else 0, new)

    def _check_rest(self, rest: Mapping[str, Any]) -> None:
        """Refuse what the graph cannot follow."""
        for name, value in rest.items():
            if value is None or value is False or name in _IGNORED or name in self._unused:
                if name in ("output_attentions", "output_hidden_states") and value:
                    raise InputError(f"The graph does not return what {name} asks for.", fix=f"leave {name} out.")
                continue
            if name == "labels":
                raise InputError("The graph computes no loss.", fix="leave labels out.")
            raise InputError(f"The graph takes {sorted(self._takes)}, not {name!r}.", fix=f"leave {name!r} out.")


class ORTModelForCausalLM(_Generator):
    """Text generation: `input_ids: (batch, sequence)` to `logits: (batch, sequence, vocab_size)`."""

    task = "text-generation"
    _decoder = "model"

    @property
    def main_input_name(self) -> str:
        """The tokens."""
        return "input_ids"

    def forward(
        self,
        input_ids: torch.Tensor | None = None,
        attention_mask: torch.Tensor | None = None,
        position_ids: torch.Tensor | None = None,
        past_key_values: StateCache | None = None,
        use_cache: bool | None = None,
        logits_to_keep: int | torch.Tensor = 0,
        **rest: Any,
    ) -> Any:
        """Run the decoder once.

        Args:
            input_ids: `(batch, new)` tokens behind those in the cache.
            attention_mask: `(batch, cached + new)`, 0 for padding; all ones when `None`.
            position_ids: `(batch, new)`; behind the cached ones when `None`.
            past_key_values: What an earlier call returned; continued in place.
            use_cache: Whether to return the cache (default).
            logits_to_keep: How many of the last logits to compute, 0 for all; or their positions.
            **rest: Refused where it would change the result.

        Raises:
            InputError: Sizes that do not agree, a foreign cache, more tokens than positions.
        """
        tokens = {"input_ids": self._ids(input_ids, rest)}
        return self._continued(tokens, attention_mask, position_ids, past_key_values, use_cache, logits_to_keep)


class ORTModelForImageTextToText(_Generator):
    """Text from a prompt with images in it: `input_ids: (batch, sequence)`, `pixel_values: (images, channels, height, width)`."""

    task = "image-text-to-text"
    _decoder = "model"

    def _open(self) -> None:
        super()._open()
        self._vision, self._embedding = self._opened.sessions["vision"], self._opened.sessions["embedding"]

    @property
    def main_input_name(self) -> str:
        """The tokens."""
        return "input_ids"

    def prepare_inputs_for_generation(
        self, input_ids: torch.Tensor, is_first_iteration: bool = False, **kwargs: Any
    ) -> dict[str, Any]:  # transformers' signature
        """Images are read with the prompt; behind it the cache holds them."""
        images = kwargs.pop("pixel_values", None)
        made: dict[str, Any] = super().prepare_inputs_for_generation(
            input_ids, is_first_iteration=is_first_iteration, **kwargs
        )
        if images is not None and (is_first_iteration or made.get("past_key_values") is None):
            made["pixel_values"] = images
        return made

    def forward(
        self,
        input_ids: torch.Tensor | None = None,
        pixel_values: torch.Tensor | None = None,
        attention_mask: torch.Tensor | None = None,
        position_ids: torch.Tensor | None = None,
        past_key_values: StateCache | None = None,
        use_cache: bool | None = None,
        logits_to_keep: int | torch.Tensor = 0,
        **rest: Any,
    ) -> Any:
        """Run the vision tower over the images, if any, then the decoder once.

        Args:
            input_ids: `(batch, new)` tokens behind those in the cache, with the image token where images stand.
            pixel_values: `(images, channels, height, width)`, in the order of their tokens.
            attention_mask: `(batch, cached + new)`, 0 for padding; all ones when `None`.
            position_ids: `(batch, new)`; behind the cached ones when `None`.
            past_key_values: What an earlier call returned; continued in place.
            use_cache: Whether to return the cache (default).
            logits_to_keep: How many of the last logits to compute, 0 for all; or their positions.
            **rest: Refused where it would change the result.

        Raises:
            InputError: Image tokens that are not as many as the images need, and what `ORTModelForCausalLM` refuses.
        """
        ids = self._ids(input_ids, rest)
        embeds = self._embedding.run({"input_ids": ids})["inputs_embeds"]
        if pixel_values is not None:
            embeds = self._with_images(embeds, ids, pixel_values)
        tokens = {"inputs_embeds": embeds}
        return self._continued(tokens, attention_mask, position_ids, past_key_values, use_cache, logits_to_keep)

    def _with_images(self, embeds: torch.Tensor, input_ids: torch.Tensor, pixel_values: torch.Tensor) -> torch.Tensor:
        """The embeddings with the images' features in the place of the image tokens."""
        features = torch.cat(
            [self._vision.run({"pixel_values": image[None]})["image_features"] for image in pixel_values]
        )
        places = input_ids == self.config.image_token_id
        if int(places.sum()) != len(features):
            raise InputError(
                f"The prompt has {int(places.sum())} image tokens; {len(pixel_values)} images need {len(features)}.",
                fix="make prompt and images with one call of the model's processor.",
            )
        return embeds.masked_scatter(places.unsqueeze(-1), features.to(embeds.dtype))


class _EncoderOf:
    """A model's encoder as `generate` calls one."""

    def __init__(self, session: Session, main_input_name: str) -> None:
        self.session = session
        self.main_input_name = main_input_name
        self.names = tuple(spec.name for spec in session.inputs)

    def forward(
        self,
        input_ids: Any = None,
        attention_mask: Any = None,
        input_features: Any = None,
        pixel_values: Any = None,
        **_: Any,
    ) -> BaseModelOutput:
        """Run the encoder: `last_hidden_state: (batch, encoder_sequence, hidden)`."""
        given = {
            "input_ids": input_ids,
            "attention_mask": attention_mask,
            "input_features": input_features,
            "pixel_values": pixel_values,
        }
        feeds = {name: given[name] for name in self.names if given.get(name) is not None}
        if "attention_mask" in self.names and "attention_mask" not in feeds and "input_ids" in feeds:
            feeds["attention_mask"] = torch.ones_like(feeds["input_ids"])
        return BaseModelOutput(last_hidden_state=self.session.run(feeds)["last_hidden_state"])

    __call__ = forward


class EncoderDecoder(_Generator):
    """An encoder, its keys and values for the decoder, and the decoder."""

    _decoder = "decoder"

    def _open(self) -> None:
        super()._open()
        self._encoder = _EncoderOf(self._opened.sessions["encoder"], self.main_input_name)
        self._cross_session = self._opened.sessions["cross_attention"]

    @property
    def main_input_name(self) -> str:
        """The encoder's input."""
        return self.artifact.component("encoder").inputs[0].name

    @property
    def encoder(self) -> Any:
        """The encoder, whose arguments `generate` accepts, too."""
        return self._encoder

    def get_encoder(self, modality: str | None = None) -> Any:  # transformers' signature
        """The encoder, callable by itself."""
        self._check_fork()
        return self._encoder

    def forward(
        self,
        input_ids: torch.Tensor | None = None,
        attention_mask: torch.Tensor | None = None,
        decoder_input_ids: torch.Tensor | None = None,
        decoder_attention_mask: torch.Tensor | None = None,
        decoder_position_ids: torch.Tensor | None = None,
        encoder_outputs: Any = None,
        past_key_values: StateCache | None = None,
        use_cache: bool | None = None,
        **rest: Any,
    ) -> Any:
        """Run the encoder where `encoder_outputs` are not given, then the decoder once.

        Args:
            input_ids: `(batch, encoder_sequence)`; `pixel_values` or `input_features` for other encoders.
            attention_mask: `(batch, encoder_sequence)`.
            decoder_input_ids: `(batch, new)` tokens behind those in the cache.
            decoder_attention_mask: `(batch, cached + new)`.
            decoder_position_ids: `(batch, new)`, for models that have them.
            encoder_outputs: What the encoder returned.
            past_key_values: What an earlier call returned; continued in place.
            use_cache: Whether to return the cache (default).
            **rest: The encoder's other inputs.

        Raises:
            InputError: Sizes that do not agree, a foreign cache, encoder outputs without their mask.
        """
        self._check_fork()
        inputs = {"input_ids": input_ids, **rest}
        encoder_inputs = {n: v for n, v in inputs.items() if n in self._encoder.names and v is not None}
        self._check_rest({n: v for n, v in rest.items() if n not in self._encoder.names and n != "logits_to_keep"})
        if decoder_input_ids is None:
            raise InputError(
                "decoder_input_ids are missing.", fix="pass them, or call generate(), which starts the decoder."
            )
        cache = self.new_cache() if past_key_values is None else self._own(past_key_values)
        if cache.state is None:
            if encoder_outputs is None:
                if "attention_mask" in self._encoder.names and attention_mask is not None:
                    encoder_inputs["attention_mask"] = attention_mask
                encoder_outputs = self._encoder(**encoder_inputs)
                if attention_mask is None and input_ids is not None:
                    attention_mask = torch.ones_like(input_ids)
            elif attention_mask is None:
                # Left out, the encoder attended to everything, whoever ran it.
                hidden = encoder_outputs[0]
                attention_mask = torch.ones(hidden.shape[:2], dtype=torch.int64, device=hidden.device)
            cache.constants = self._cross_session.run({"encoder_hidden_states": encoder_outputs[0]})
        if _ENCODER_MASK in self._takes:
            if attention_mask is None:
                attention_mask = cache.constants.get(_ENCODER_MASK)
            if attention_mask is None:
                raise InputError("The encoder's attention mask is missing.", fix="pass attention_mask.")
            cache.constants[_ENCODER_MASK] = attention_mask
        tokens = {"input_ids": decoder_input_ids}
        logits = self._step(tokens, decoder_attention_mask, decoder_position_ids, cache, 0)
        values: dict[str, Any] = {"logits": logits}
        if use_cache is not False:
            values["past_key_values"] = cache
        if encoder_outputs is not None:
            values["encoder_last_hidden_state"] = encoder_outputs[0]
        return fast_output(Seq2SeqLMOutput, values)


class ORTModelForSeq2SeqLM(EncoderDecoder):
    """Translation, summarization and other text to text."""

    task = "text2text-generation"


class ORTModelForVision2Seq(EncoderDecoder):
    """Captions and text recognition: `pixel_values` to text."""

    task = "image-to-text"
