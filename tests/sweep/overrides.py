"""Architectures whose sizes depend on each other in ways that their names do not tell.

A dictionary is put over what `shrinking` found, one in it over a sub-config; a function makes the config from small ones
of other architectures.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import transformers

Special = Mapping[str, Any] | Callable[[Callable[..., Any]], Any]


def _encoder_decoder(small: Callable[..., Any]) -> Any:
    decoder = small("bert", is_decoder=True, add_cross_attention=True)
    config = transformers.EncoderDecoderConfig.from_encoder_decoder_configs(small("bert"), decoder)
    config.decoder_start_token_id, config.pad_token_id = 2, 0
    return config


def _captioner(small: Callable[..., Any]) -> Any:
    decoder = small("gpt2", is_decoder=True, add_cross_attention=True)
    config = transformers.VisionEncoderDecoderConfig.from_encoder_decoder_configs(small("vit"), decoder)
    config.decoder_start_token_id, config.pad_token_id = 2, 0
    return config


def _speech_encoder_decoder(small: Callable[..., Any]) -> Any:
    decoder = small("bert", is_decoder=True, add_cross_attention=True)
    config = transformers.SpeechEncoderDecoderConfig.from_encoder_decoder_configs(small("wav2vec2"), decoder)
    config.decoder_start_token_id, config.pad_token_id = 2, 0
    return config


OVERRIDES: dict[str, Special] = {
    "encoder-decoder": _encoder_decoder,
    "vision-encoder-decoder": _captioner,
    "speech-encoder-decoder": _speech_encoder_decoder,
}
