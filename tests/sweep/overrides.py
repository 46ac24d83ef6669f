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


# A state-space layer's heads together are as wide as its inner size, twice the hidden one.
_MAMBA = {"mamba_n_heads": 8, "mamba_d_head": 16, "mamba_n_groups": 1, "mamba_d_state": 16}

# Three strides instead of seven: the sizes in a trace are formulas of them, and take minutes.
_WAVES: dict[str, Any] = {
    "conv_dim": (16, 16, 16), "conv_kernel": (10, 3, 3), "conv_stride": (5, 4, 4),
    "num_conv_pos_embeddings": 16, "num_conv_pos_embedding_groups": 4,
    "tdnn_dim": (32, 32, 32, 32, 48), "xvector_output_dim": 32, "classifier_proj_size": 32,
}  # fmt: skip

_ROPE = {"rope_type": "default", "rope_theta": 10000.0}

OVERRIDES: dict[str, Special] = {
    "bamba": {**_MAMBA, "attn_layer_indices": [1]},
    "bit": {"num_groups": 4, "embedding_size": 16},
    "data2vec-audio": {name: value for name, value in _WAVES.items() if not name.startswith("num_")},
    "hubert": {name: value for name, value in _WAVES.items() if not name.startswith(("tdnn", "xvector"))},
    "sew": {name: value for name, value in _WAVES.items() if not name.startswith(("tdnn", "xvector"))},
    "sew-d": {name: value for name, value in _WAVES.items() if not name.startswith(("tdnn", "xvector"))},
    "unispeech": {name: value for name, value in _WAVES.items() if not name.startswith(("tdnn", "xvector"))},
    "unispeech-sat": _WAVES,
    "wav2vec2": _WAVES,
    "wav2vec2-conformer": _WAVES,
    "wavlm": _WAVES,
    "cohere_compass_text": {
        "layer_types": ["sliding_attention", "full_attention"],
        "rope_parameters": dict.fromkeys(("sliding_attention", "full_attention"), _ROPE),
    },
    # As many as there are positions, as in the real ones: what is beyond the window is another computation.
    "doge": {"keep_window_size": 320},
    "donut-swin": {"window_size": 2, "image_size": 64},
    "esm": {"pad_token_id": 1, "mask_token_id": 119, "vocab_size": 120},
    "esmc": {"vocab_size": 120},
    "falcon_h1": {**_MAMBA, "mamba_d_ssm": 128},
    "gpt_neo": {"attention_types": [[["global", "local"], 1]]},
    "granitemoehybrid": {**_MAMBA, "layer_types": ["mamba", "attention"]},
    "hgnet_v2": {
        "embedding_size": 16,
        "hidden_sizes": [32, 32, 64, 64],
        "stem_channels": [3, 16, 16],
        "stage_in_channels": [16, 32, 32, 64],
        "stage_mid_channels": [8, 8, 8, 8],
        "stage_out_channels": [32, 32, 64, 64],
        "stage_numb_of_layers": [1, 1, 1, 1],
        "stage_num_blocks": [1, 1, 1, 1],
    },
    "jamba": {"num_hidden_layers": 4, "attn_layer_period": 2, "attn_layer_offset": 1},
    # Six coordinates share the hidden size.
    "layoutlmv3": {"coordinate_size": 12, "shape_size": 8},
    "levit": {"image_size": 64},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"], "num_hidden_layers": 2},
    "lilt": {"hidden_size": 96},
    "longcat_flash": {"head_dim": 8},
    "mamba2": {"num_heads": 8, "head_dim": 16, "n_groups": 1},
    "mobilevitv2": {"image_size": 64},
    "perceiver": {"num_latents": 8, "d_latents": 64, "d_model": 64, "num_self_attends_per_block": 2},
    "pvt": {"image_size": 64},
    "recurrent_gemma": {"num_hidden_layers": 3},
    "swin": {"window_size": 2, "image_size": 64},
    "textnet": {"image_size": (64, 64), "stem_out_channels": 16},
    "xmod": {"default_language": "en_XX"},
    "encoder-decoder": _encoder_decoder,
    "vision-encoder-decoder": _captioner,
    "speech-encoder-decoder": _speech_encoder_decoder,
}
