"""Small config values for architectures whose sizes depend on each other in ways that field names do not show.

A dictionary replaces values that `shrinking` computed, and a nested dictionary replaces values of a sub-config. A
function creates the whole config from small configs of other architectures.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import transformers

from accel.testing.image_models import lightglue_config, superglue_config

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


def _efficientnet(small: Callable[..., Any]) -> Any:
    return transformers.EfficientNetConfig(
        image_size=64, width_coefficient=1.0, depth_coefficient=1.0, in_channels=[32, 16, 24], out_channels=[16, 24, 40],
        kernel_sizes=[3, 3, 5], strides=[1, 2, 2], num_block_repeats=[1, 1, 1], expand_ratios=[1, 2, 2], hidden_dim=1280,
    )  # fmt: skip


def _resnet(*stages: int) -> Any:
    """Return the config of a small backbone of a detector. The backbone is transformers' own ResNet, because timm's
    backbones would be downloaded from the Hub.
    """
    return transformers.ResNetConfig(
        embedding_size=16, hidden_sizes=[16, 16, 32, 32], depths=[1, 1, 1, 1], layer_type="basic",
        out_features=[f"stage{i}" for i in stages],
    )  # fmt: skip


def _rt_detr_backbone() -> Any:
    return transformers.RTDetrResNetConfig(
        embedding_size=16, hidden_sizes=[16, 16, 32, 32], depths=[1, 1, 1, 1], layer_type="basic",
        out_features=["stage2", "stage3", "stage4"],
    )  # fmt: skip


def _detr(*stages: int) -> Special:
    return {
        "use_timm_backbone": False, "backbone": None, "backbone_config": _resnet(*(stages or (4,))), "num_queries": 8,
        "d_model": 64,
    }  # fmt: skip


_RT_DETR = {
    "backbone_config": _rt_detr_backbone(), "encoder_in_channels": [16, 32, 32], "encoder_hidden_dim": 64, "d_model": 64,
    "decoder_in_channels": [64, 64, 64], "num_queries": 8, "anchor_image_size": None,
}  # fmt: skip
_DINOV2 = {
    "hidden_size": 64, "num_hidden_layers": 4, "num_attention_heads": 4, "mlp_ratio": 2, "image_size": 28, "patch_size": 14,
    "out_indices": [1, 2, 3, 4], "reshape_hidden_states": False, "apply_layernorm": True,
}  # fmt: skip
_PYRAMID = {
    "hidden_sizes": [16, 16, 32, 32], "depths": [1, 1, 1, 1], "num_attention_heads": [1, 1, 2, 2],
    "decoder_hidden_size": 32,
}  # fmt: skip


def _maskformer(small: Callable[..., Any]) -> Any:
    decoder = transformers.DetrConfig(
        use_timm_backbone=False, backbone=None, backbone_config=_resnet(4), d_model=32, encoder_layers=1, decoder_layers=1,
        encoder_attention_heads=4, decoder_attention_heads=4, encoder_ffn_dim=48, decoder_ffn_dim=48, num_queries=8,
    )  # fmt: skip
    return transformers.MaskFormerConfig(
        backbone_config=_resnet(1, 2, 3, 4), decoder_config=decoder, fpn_feature_size=32, mask_feature_size=32
    )


def _mask2former(small: Callable[..., Any]) -> Any:
    backbone = transformers.SwinConfig(
        image_size=64, embed_dim=16, depths=[1, 1, 1, 1], num_heads=[1, 1, 2, 2], window_size=4,
        out_features=["stage1", "stage2", "stage3", "stage4"],
    )  # fmt: skip
    return transformers.Mask2FormerConfig(
        backbone_config=backbone, feature_size=32, mask_feature_size=32, hidden_dim=32, encoder_feedforward_dim=48,
        dim_feedforward=48, encoder_layers=1, decoder_layers=2, num_attention_heads=4, num_queries=8,
    )  # fmt: skip


def _sam(name: str) -> Callable[[Callable[..., Any]], Any]:
    """Return a function that creates a small SAM config. The image size and the patch size of the image encoder and of
    the prompt encoder must be equal.
    """
    edges = {"image_size": 32, "patch_size": 8}

    def build(small: Callable[..., Any]) -> Any:
        decoder = {
            "hidden_size": 32, "mlp_dim": 48, "num_hidden_layers": 2, "num_attention_heads": 4, "iou_head_hidden_dim": 32,
            **({"vit_dim": 64} if name == "SamHQ" else {}),
        }  # fmt: skip
        return getattr(transformers, f"{name}Config")(
            vision_config={
                **edges, "hidden_size": 64, "output_channels": 32, "num_hidden_layers": 2, "num_attention_heads": 4,
                "mlp_dim": 96, "window_size": 2, "global_attn_indexes": [1], "num_pos_feats": 16,
            },
            prompt_encoder_config={**edges, "hidden_size": 32, "mask_input_channels": 4}, mask_decoder_config=decoder,
        )  # fmt: skip

    return build


def _clap(small: Callable[..., Any]) -> Any:
    audio = {
        "hidden_size": 32, "patch_embeds_hidden_size": 16, "depths": [1, 1], "num_attention_heads": [2, 2], "patch_size": 4,
        "patch_stride": [4, 4], "num_hidden_layers": 2, "window_size": 4, "num_mel_bins": 16, "spec_size": 64,
    }  # fmt: skip
    text = {
        "vocab_size": 120, "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 96,
        "max_position_embeddings": 322, "type_vocab_size": 1,
    }  # fmt: skip
    return transformers.ClapConfig(text_config=text, audio_config=audio, projection_dim=32)


def _grounding_dino(name: str) -> Callable[[Callable[..., Any]], Any]:
    def build(small: Callable[..., Any]) -> Any:
        backbone = transformers.SwinConfig(
            image_size=64, embed_dim=16, depths=[1, 1, 1, 1], num_heads=[1, 1, 2, 2], window_size=4,
            out_features=["stage2", "stage3", "stage4"],
        )  # fmt: skip
        return getattr(transformers, f"{name}Config")(
            backbone_config=backbone, text_config=small("bert"), d_model=32, encoder_layers=1, decoder_layers=2,
            encoder_ffn_dim=48, decoder_ffn_dim=48, encoder_attention_heads=4, decoder_attention_heads=4, num_queries=8,
            max_text_len=64,
        )  # fmt: skip

    return build


_VITS = {
    "vocab_size": 120, "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "ffn_dim": 32, "flow_size": 8,
    "spectrogram_bins": 9, "duration_predictor_num_flows": 2, "duration_predictor_flow_bins": 4, "prior_encoder_num_flows": 1,
    "prior_encoder_num_wavenet_layers": 1, "posterior_encoder_num_wavenet_layers": 1, "upsample_initial_channel": 16,
    "upsample_rates": [4, 4], "upsample_kernel_sizes": [8, 8], "resblock_kernel_sizes": [3], "resblock_dilation_sizes": [[1]],
    "depth_separable_num_layers": 1, "num_speakers": 1, "speaker_embedding_size": 0,
}  # fmt: skip

# In a state-space layer, the number of heads times the head size must be the inner size, which is twice the hidden
# size.
_MAMBA = {"mamba_n_heads": 8, "mamba_d_head": 16, "mamba_n_groups": 1, "mamba_d_state": 16}

# Use three strides instead of seven, because each stride adds a formula to the sizes in a trace, and the trace would
# take minutes.
_WAVES: dict[str, Any] = {
    "conv_dim": (16, 16, 16), "conv_kernel": (10, 3, 3), "conv_stride": (5, 4, 4),
    "num_conv_pos_embeddings": 16, "num_conv_pos_embedding_groups": 4,
    "tdnn_dim": (32, 32, 32, 32, 48), "xvector_output_dim": 32, "classifier_proj_size": 32,
}  # fmt: skip

# These are the values of DeBERTa's checkpoints, which differ from the defaults of its config.
_DISENTANGLED = {
    "relative_attention": True,
    "pos_att_type": ["c2p", "p2c"],
    "position_biased_input": False,
    "type_vocab_size": 0,
}

_ROPE = {"rope_type": "default", "rope_theta": 10000.0}

OVERRIDES: dict[str, Special] = {
    "bamba": {**_MAMBA, "attn_layer_indices": [1]},
    "beit": {"num_hidden_layers": 4, "out_indices": [1, 2, 3, 4]},
    "conditional_detr": _detr(),
    "deberta": _DISENTANGLED,
    "deberta-v2": {**_DISENTANGLED, "share_att_key": True, "position_buckets": 16, "norm_rel_ebd": "layer_norm"},
    "deformable_detr": _detr(2, 3, 4),
    "depth_anything": {
        "backbone_config": transformers.Dinov2Config(**_DINOV2),
        "patch_size": 14,
        "reassemble_hidden_size": 64,
        "neck_hidden_sizes": [16] * 4,
        "fusion_hidden_size": 16,
        "head_hidden_size": 16,
    },
    "detr": _detr(),
    "dpt": {
        "num_hidden_layers": 4,
        "backbone_out_indices": [0, 1, 2, 3],
        "neck_hidden_sizes": [16] * 4,
        "is_hybrid": False,
        "fusion_hidden_size": 16,
    },
    "glpn": _PYRAMID,
    "mask2former": _mask2former,
    "maskformer": _maskformer,
    "rt_detr": _RT_DETR,
    "rt_detr_v2": _RT_DETR,
    "segformer": _PYRAMID,
    "swin2sr": {"image_size": 16, "embed_dim": 16, "depths": [1, 1], "num_heads": [2, 2], "window_size": 4},
    "table-transformer": _detr(),
    "upernet": {
        "backbone_config": transformers.ConvNextConfig(
            hidden_sizes=[16, 16, 32, 32], depths=[1, 1, 1, 1], out_features=[f"stage{i}" for i in (1, 2, 3, 4)]
        ),
        "hidden_size": 32,
        "auxiliary_in_channels": 32,
        "pool_scales": [1, 2],
    },
    "vipllava": {"vision_feature_layers": [-2, -1]},
    "yolos": {"image_size": [64, 64], "num_detection_tokens": 8},
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
    # The window is as large as the number of positions, as in real checkpoints. Text outside of the window is computed
    # differently.
    "doge": {"keep_window_size": 320},
    "donut-swin": {"window_size": 2, "image_size": 64},
    "efficientnet": _efficientnet,
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
    # LayoutLMv3 concatenates six position embeddings to the hidden size: 4 x 12 + 2 x 8 = 64.
    "layoutlmv3": {"coordinate_size": 12, "shape_size": 8},
    "levit": lambda small: transformers.LevitConfig(
        image_size=64, hidden_sizes=[16, 32, 48], num_attention_heads=[1, 2, 3], depths=[1, 1, 1]
    ),
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
    "xmod": {"languages": ["de_DE", "en_XX"], "default_language": "en_XX"},
    "encoder-decoder": _encoder_decoder,
    "vision-encoder-decoder": _captioner,
    "speech-encoder-decoder": _speech_encoder_decoder,
    "clap": _clap,
    "efficientloftr": {
        "stage_num_blocks": [1, 1, 1, 1],
        "stage_stride": [2, 1, 2, 2],
        "out_features": [8, 8, 16, 64],
        "hidden_size": 64,
        "num_attention_layers": 1,
        "num_attention_heads": 8,
        "fine_matching_slice_dim": 4,
    },
    "superglue": lambda small: superglue_config(),
    "lightglue": lambda small: lightglue_config(),
    "grounding-dino": _grounding_dino("GroundingDino"),
    "mm-grounding-dino": _grounding_dino("MMGroundingDino"),
    # Real checkpoints have 16 positions, but the texts of the sweep have up to 33 tokens.
    "owlv2": {"text_config": {"max_position_embeddings": 64}},
    "owlvit": {"text_config": {"max_position_embeddings": 64}},
    "sam": _sam("Sam"),
    "sam_hq": _sam("SamHQ"),
    "vits": _VITS,
}
