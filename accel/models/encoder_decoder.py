"""Encoder-decoder models, which generate text from text, speech or images."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from transformers.cache_utils import Cache
from transformers.modeling_outputs import BaseModelOutput, Seq2SeqLMOutput

from ..decoding.kv_cache import StateCache, one_cache
from ..errors import InputError
from ..interfaces.protocols import Session
from ..interfaces.session_contract import check_readable
from ..upstream.cache_names import CACHE_NAME
from .generation_mixin import Generator, tensor_of
from .outputs import fast_output, numpy_too

_ENCODER_MASK = "encoder_attention_mask"
_HIDDEN = "encoder_hidden_states"
_PATCHES = "flattened_patches"


@dataclass
class EncoderOutput(BaseModelOutput):  # type: ignore[misc]  # transformers is untyped here
    """Output of an encoder.

    Attributes:
        attention_mask: Mask `(batch, encoder_sequence)` of the output positions, for encoders that shorten their inputs.
    """

    attention_mask: torch.Tensor | None = None


class GenerateEncoder:
    """Encoder of a model, with the interface that transformers' `generate` expects."""

    def __init__(self, session: Session, main_input_name: str) -> None:
        self._session = session
        self.main_input_name = main_input_name
        self.names = tuple(spec.name for spec in session.inputs)
        self.shortens = _ENCODER_MASK in {spec.name for spec in session.outputs}
        # Maximum number of spectrogram frames; 0 means no limit.
        self.longest = 0
        # Number of rows, and of columns, of patches that have position embeddings; 0 means no check.
        self.rows = 0

    def forward(
        self,
        input_ids: Any = None,
        attention_mask: Any = None,
        input_features: Any = None,
        pixel_values: Any = None,
        token_type_ids: Any = None,
        input_values: Any = None,
        flattened_patches: Any = None,
        **_: Any,
    ) -> EncoderOutput:
        """Run the encoder; the output has `last_hidden_state: (batch, encoder_sequence, hidden)`.

        Raises:
            InputError: The token types are not all zero, which the graph does not support; the sound has more frames than the model has
                positions; or patches have row or column numbers without embeddings.
        """
        if token_type_ids is not None and torch.as_tensor(token_type_ids).any():
            raise InputError(
                "token_type_ids has values other than 0, but the encoder's graph was exported without this input and uses type 0 for all "
                "tokens.",
                fix="leave token_type_ids out, or pass zeros.",
            )
        inputs = {
            "input_ids": input_ids,
            "attention_mask": attention_mask,
            "input_features": input_features,
            "pixel_values": pixel_values,
            "input_values": input_values,
            _PATCHES: flattened_patches,
        }
        feeds = {name: inputs[name] for name in self.names if inputs.get(name) is not None}
        if self.rows and _PATCHES in feeds:
            _check_places(feeds[_PATCHES], self.rows)
        if "attention_mask" in self.names and self.main_input_name in feeds:
            feeds["attention_mask"] = _mask_for(feeds, self.main_input_name)
        if self.longest and feeds[self.main_input_name].shape[1] > self.longest:
            raise InputError(
                f"{self.main_input_name} has {feeds[self.main_input_name].shape[1]} spectrogram frames, but the model supports at most "
                f"{self.longest} frames per recording.",
                fix="cut the recording into shorter parts.",
            )
        outputs = self._session.run(feeds)
        return EncoderOutput(last_hidden_state=outputs["last_hidden_state"], attention_mask=outputs.get(_ENCODER_MASK))

    __call__ = forward


class EncoderDecoder(Generator):
    """Encoder-decoder model with up to three graphs: encoder, cross-attention (keys and values for the decoder), and decoder."""

    _decoder = "decoder"

    def _open(self) -> None:
        super()._open()
        self._encoder = self._bounded(self._opened.sessions["encoder"])
        # In graphs exported by other tools, the decoder may read the encoder's output itself.
        self._cross_session = self._opened.sessions.get("cross_attention")

    def _bounded(self, session: Session) -> GenerateEncoder:
        encoder = self._make_encoder(session, self.main_input_name)
        encoder.longest = self.artifact.component("encoder").max_sizes.get("frames", 0)
        if encoder.main_input_name == _PATCHES:
            encoder.rows = int(self.config.vision_config.seq_len)
        return encoder

    def _make_encoder(self, session: Session, main_input_name: str) -> GenerateEncoder:
        return GenerateEncoder(session, main_input_name)

    def watch(self, around: Callable[[str, Session], Session]) -> None:
        """Wrap the session of each component with `around(name, session)`, until the model is opened again."""
        self._encoder = self._bounded(around("encoder", self._opened.sessions["encoder"]))
        self._open_decoder(around("decoder", self.decoder_step.session))
        if self._cross_session is not None:
            self._cross_session = around("cross_attention", self._cross_session)

    @property
    def main_input_name(self) -> str:
        """Name of the encoder's main input."""
        return self.artifact.component("encoder").inputs[0].name

    @property
    def encoder(self) -> Any:
        """The encoder; `generate` calls it with the encoder's arguments."""
        return self._encoder

    def get_encoder(self, modality: str | None = None) -> Any:  # transformers' signature
        """Return the encoder; the modality is ignored."""
        self._check_fork()
        return self._encoder

    def _own_cache(self, cache: Any) -> StateCache:
        if isinstance(cache, Cache) and not isinstance(cache, StateCache):
            raise InputError(
                f"past_key_values is a {type(cache).__name__} of transformers, which this model cannot read, because the cache does "
                "not contain the encoder's output in the form that the decoder's graph requires.",
                fix="pass the past_key_values that this model returned, pass model.new_cache(), or leave past_key_values out.",
            )
        return super()._own_cache(cache)

    @numpy_too
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
        cache: StateCache | None = None,
        **rest: Any,
    ) -> Any:
        """Run the encoder unless `encoder_outputs` is given, then run the decoder once.

        Args:
            input_ids: Token ids `(batch, encoder_sequence)`. Other encoders take `pixel_values`, `flattened_patches` or `input_features`,
                by name or as the first argument.
            attention_mask: Mask of the encoder's input, `(batch, encoder_sequence)`.
            decoder_input_ids: New decoder tokens `(batch, new)`, which follow the cached tokens.
            decoder_attention_mask: Mask of the decoder's tokens, `(batch, cached + new)`.
            decoder_position_ids: Position ids `(batch, new)`, for models that take them.
            encoder_outputs: Output of the encoder from an earlier call.
            past_key_values: Cache returned by an earlier call; it is changed in place.
            use_cache: Whether to return the cache (default).
            cache: The name of `past_key_values` in transformers 5.24.
            **rest: Other inputs of the encoder.

        Raises:
            InputError: The sizes of the inputs do not match, the cache has an unsupported type, or an encoder's output that is shorter
                than the encoder's input has no mask.
        """
        self._check_fork()
        if isinstance(input_ids, torch.Tensor) and input_ids.is_floating_point():
            # The first positional argument of a speech or image model.
            rest, input_ids = {self.main_input_name: input_ids, **rest}, None
        inputs = {"input_ids": input_ids, **rest}
        encoder_inputs = {n: tensor_of(n, v) for n, v in inputs.items() if n in self._encoder.names and v is not None}
        self._check_rest({n: v for n, v in rest.items() if n not in self._encoder.names and n != "logits_to_keep"})
        if decoder_input_ids is None:
            raise InputError(
                "The argument decoder_input_ids is missing; the decoder needs at least its start token.",
                fix="pass decoder_input_ids of shape (batch, tokens), or call model.generate(), which creates them.",
            )
        tensor_of("decoder_input_ids", decoder_input_ids)
        past = one_cache(past_key_values, cache)
        cache = self.new_cache() if past is None else self._own_cache(past)
        if cache.state is None:
            if encoder_outputs is None:
                if "attention_mask" in self._encoder.names and attention_mask is not None:
                    encoder_inputs["attention_mask"] = attention_mask
                encoder_outputs = self._encoder(**encoder_inputs)
            if attention_mask is None:
                # Without a mask, the encoder attends to all positions.
                hidden = encoder_outputs[0]
                attention_mask = torch.ones(hidden.shape[:2], dtype=torch.int64, device=hidden.device)
            if self._encoder.shortens:
                attention_mask = _mask_of(encoder_outputs, attention_mask)
            hidden = {_HIDDEN: encoder_outputs[0]}
            cache.constants = self._cross_session.run(hidden) if self._cross_session is not None else {}
            if _HIDDEN in self.decoder_step.inputs:
                cache.constants.update(hidden)
        elif self._encoder.shortens:
            # `generate` passes the mask of the encoder's input, which is longer than the encoder's output.
            attention_mask = None
        if _ENCODER_MASK in self.decoder_step.inputs:
            if attention_mask is None:
                attention_mask = cache.constants.get(_ENCODER_MASK)
            if attention_mask is None:
                raise InputError(
                    "The argument attention_mask is missing; the decoder needs it to ignore padding in the encoder's output.",
                    fix="pass the attention_mask that the tokenizer or processor returned for the encoder's input.",
                )
            cache.constants[_ENCODER_MASK] = _integer_mask(attention_mask)
        tokens = {"input_ids": decoder_input_ids}
        logits = self.decoder_step(tokens, cache, mask=decoder_attention_mask, position_ids=decoder_position_ids)
        values: dict[str, Any] = {"logits": logits}
        if use_cache is not False:
            values[CACHE_NAME] = cache
        if encoder_outputs is not None:
            values["encoder_last_hidden_state"] = encoder_outputs[0]
        return fast_output(Seq2SeqLMOutput, values)


def _mask_for(feeds: Mapping[str, Any], main: str) -> Any:
    """Return the encoder's mask `(batch, encoder_sequence) int64`, or the model's default if the caller passed none."""
    if "attention_mask" in feeds:
        return _integer_mask(feeds["attention_mask"])
    main_input = feeds[main]
    if main == _PATCHES:
        # All-zero patches are padding. transformers treats every patch with a zero sum as padding.
        return (main_input.sum(dim=-1) != 0).to(torch.int64)
    return torch.ones(main_input.shape[:2], dtype=torch.int64, device=main_input.device)


def _integer_mask(mask: Any) -> Any:
    """Convert a floating-point mask to integers; Pix2Struct's processor returns floating-point masks."""
    return (mask != 0).to(torch.int64) if isinstance(mask, torch.Tensor) and mask.is_floating_point() else mask


def _check_places(patches: torch.Tensor, rows: int) -> None:
    """Check the row and column numbers in patches `(batch, patches, 2 + values per patch)`.

    Runtimes differ in how they handle numbers outside the embedding table.

    Raises:
        InputError: A row or column number has no embedding, or `patches` is not a tensor.
    """
    check_readable(_PATCHES, patches)
    # The session raises for other shapes. NaN fails the check, because comparisons with NaN are false.
    numbers = patches[..., :2] if patches.ndim else patches
    if not bool(((numbers > -1) & (numbers < rows)).all()):
        raise InputError(
            f"flattened_patches has row and column numbers from {float(numbers.min()):g} to {float(numbers.max()):g}, but the model has "
            f"position embeddings only for 0 to {rows - 1}.",
            fix="create flattened_patches with the model's processor, and pass a smaller max_patches: "
            "processor(images=..., max_patches=...).",
        )


def _mask_of(encoded: Any, mask: torch.Tensor | None) -> torch.Tensor | None:
    """Return the mask of the encoder's output, which has fewer positions than the mask of its input.

    Raises:
        InputError: The encoder's output has no mask, and the input's mask has another length.
    """
    own_mask: torch.Tensor | None = getattr(encoded, "attention_mask", None)
    if own_mask is None and mask is not None and mask.shape[1] != encoded[0].shape[1]:
        raise InputError(
            f"encoder_outputs has {encoded[0].shape[1]} positions and contains no attention mask, but the argument attention_mask has "
            f"{mask.shape[1]} positions. The encoder shortens its input, so the mask of the encoder's input does not fit the encoder's "
            "output.",
            fix="pass the object that model.encoder(...) returned as encoder_outputs, or leave attention_mask out if no row is padded.",
        )
    return mask if own_mask is None else own_mask
