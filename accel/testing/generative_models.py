"""Tiny generating models with fixed seeds, created from configs.

The weights are large enough that generated tokens differ from step to step. If a model repeated one token, a test would not detect an
incorrect KV cache.
"""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import torch
import transformers

from .models import VOCABULARY, check_family, small_config, tiny_tokenizer

GENERATOR_POSITIONS = 192
_SIZES: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "pad_token_id": 0,
    "eos_token_id": 3,
    **dict.fromkeys(("bos_token_id", "decoder_start_token_id"), 2),
    **dict.fromkeys(("hidden_size", "n_embd", "d_model", "word_embed_proj_dim"), 64),
    **dict.fromkeys(("intermediate_size", "ffn_dim", "d_ff", "encoder_ffn_dim", "decoder_ffn_dim"), 96),
    **dict.fromkeys(
        (
            "num_hidden_layers", "n_layer", "num_layers", "num_decoder_layers", "encoder_layers", "decoder_layers",
            "encoder_num_hidden_layers", "decoder_num_hidden_layers",
        ),
        2,
    ),
    **dict.fromkeys(
        (
            "num_attention_heads", "n_head", "num_heads", "encoder_attention_heads", "decoder_attention_heads",
            "encoder_num_attention_heads", "decoder_num_attention_heads",
        ),
        4,
    ),
    "d_kv": 16,
    **dict.fromkeys(("max_position_embeddings", "n_positions", "max_target_positions"), GENERATOR_POSITIONS),
    **dict.fromkeys(("initializer_range", "init_std"), 0.3),
}  # fmt: skip
"""Config fields of tiny models. Fields that a config class does not have are ignored."""
_GROUPED: dict[str, Any] = {"num_key_value_heads": 2}
_BART: dict[str, Any] = {"bos_token_id": 2, "forced_eos_token_id": None}
_T5: dict[str, Any] = {"bos_token_id": 2, "initializer_factor": 3.0, "decoder_start_token_id": 0}
_MAMBA: dict[str, Any] = {"hidden_size": 32, "state_size": 8}
_MAMBA_2: dict[str, Any] = {
    **_GROUPED, "mamba_n_heads": 8, "mamba_d_head": 16, "mamba_d_state": 8, "mamba_chunk_size": 16,
}  # fmt: skip
_EXPERTS: dict[str, Any] = {"num_local_experts": 4, "num_experts_per_tok": 2}
_DELTA: dict[str, Any] = {
    **_GROUPED, "layer_types": ["linear_attention", "full_attention"], "linear_key_head_dim": 16, "linear_value_head_dim": 16,
    "linear_num_value_heads": 4,
}  # fmt: skip
_TEXT_GENERATION: dict[str, tuple[str, dict[str, Any]]] = {
    "gemma3": (
        "Gemma3ForCausalLM",
        {**_GROUPED, "head_dim": 16, "sliding_window": 8, "layer_types": ["sliding_attention", "full_attention"]},
    ),
    "gpt2": ("GPT2LMHeadModel", {}),
    "gpt-neox": ("GPTNeoXForCausalLM", {}),
    "llama": ("LlamaForCausalLM", _GROUPED),
    "mistral": ("MistralForCausalLM", {**_GROUPED, "sliding_window": 16}),
    "olmo3": ("Olmo3ForCausalLM", {**_GROUPED, "sliding_window": 8}),
    "opt": ("OPTForCausalLM", {}),
    "mixtral": ("MixtralForCausalLM", {**_GROUPED, **_EXPERTS}),
    "phi3": ("Phi3ForCausalLM", _GROUPED),
    "qwen3": ("Qwen3ForCausalLM", {**_GROUPED, "head_dim": 16, "tie_word_embeddings": True}),
    "deepseek-v3": (
        "DeepseekV3ForCausalLM",
        {
            "num_key_value_heads": 4, "q_lora_rank": 16, "kv_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 16,
            "v_head_dim": 16, "n_routed_experts": 4, "n_group": 2, "topk_group": 1, "num_experts_per_tok": 2,
            "moe_intermediate_size": 32, "first_k_dense_replace": 1,
        },
    ),
    "bamba": ("BambaForCausalLM", {**_MAMBA_2, "attn_layer_indices": [1]}),
    "falcon-h1": ("FalconH1ForCausalLM", {**_MAMBA_2, "mamba_d_ssm": 64, "mamba_n_heads": 4, "mamba_n_groups": 1}),
    "falcon-mamba": ("FalconMambaForCausalLM", _MAMBA),
    "granite-4": (
        "GraniteMoeHybridForCausalLM",
        {**_MAMBA_2, **_EXPERTS, "layer_types": ["mamba", "attention"], "shared_intermediate_size": 32},
    ),
    "jamba": (
        "JambaForCausalLM",
        {
            **_GROUPED, "attn_layer_period": 2, "attn_layer_offset": 1, "expert_layer_period": 2, "expert_layer_offset": 1,
            "num_experts": 4, "mamba_d_state": 8, "mamba_dt_rank": 4, "use_mamba_kernels": False,
        },
    ),
    "lfm2": (
        "Lfm2ForCausalLM", {**_GROUPED, "layer_types": ["conv", "full_attention"], "block_auto_adjust_ff_dim": False}
    ),
    "mamba": ("MambaForCausalLM", _MAMBA),
    "mamba-2": (
        "Mamba2ForCausalLM", {**_MAMBA, "num_heads": 4, "head_dim": 16, "n_groups": 2, "expand": 2, "chunk_size": 16}
    ),
    "olmo-hybrid": ("OlmoHybridForCausalLM", {**_DELTA, "linear_num_key_heads": 4}),
    "qwen3-next": (
        "Qwen3NextForCausalLM",
        {
            **_DELTA, "head_dim": 16, "linear_num_key_heads": 2, "num_experts": 4, "num_experts_per_tok": 2,
            "moe_intermediate_size": 32, "shared_expert_intermediate_size": 32,
        },
    ),
    "openai-gpt": ("OpenAIGPTLMHeadModel", {}),
}  # fmt: skip
_TEXT_TO_TEXT: dict[str, tuple[str, dict[str, Any]]] = {
    "bart": ("BartForConditionalGeneration", _BART),
    "marian": ("MarianMTModel", _BART),
    "m2m-100": ("M2M100ForConditionalGeneration", _BART),
    "mt5": ("MT5ForConditionalGeneration", _T5),
    "pegasus": ("PegasusForConditionalGeneration", _BART),
    "t5": ("T5ForConditionalGeneration", _T5),
}
_SPEECH: dict[str, tuple[str, dict[str, Any]]] = {
    "whisper": (
        "WhisperForConditionalGeneration",
        {
            **_BART, "num_mel_bins": 80, "max_source_positions": 20, "suppress_tokens": None,
            "begin_suppress_tokens": None,
        },
    ),
    "moonshine": ("MoonshineForConditionalGeneration", {"max_position_embeddings": 512}),
    "speech-to-text": (
        "Speech2TextForConditionalGeneration",
        {**_BART, "input_feat_per_channel": 20, "conv_channels": 32, "max_source_positions": 100},
    ),
}  # fmt: skip
GENERATORS: dict[str, tuple[str, str, dict[str, Any]]] = {
    **{family: ("text-generation", *rest) for family, rest in _TEXT_GENERATION.items()},
    **{family: ("text2text-generation", *rest) for family, rest in _TEXT_TO_TEXT.items()},
    **{family: ("automatic-speech-recognition", *rest) for family, rest in _SPEECH.items()},
    "vit-gpt2": ("image-to-text", "VisionEncoderDecoderModel", {}),
    "pix2struct": ("image-to-text", "Pix2StructForConditionalGeneration", {}),
    "llava": ("image-text-to-text", "LlavaForConditionalGeneration", {}),
}
"""Task, model class, and additional config fields, by family name."""
STATES = (
    "bamba", "falcon-h1", "falcon-mamba", "granite-4", "jamba", "lfm2", "mamba", "mamba-2", "olmo-hybrid", "qwen3-next"
)  # fmt: skip
"""Families whose layers have states of fixed size, such as Mamba. Some of these families also have a KV cache."""
RECOMPUTED = ("openai-gpt",)
"""Families without a KV cache or another state, which compute all tokens again in each step."""
PATCH = 4
"""Height and width of Pix2Struct's patches, in pixels."""
IMAGE_TOKEN = 1
"""Token id that represents an image patch in a prompt."""


def tiny_generator(family: str, seed: int = 0, **overrides: Any) -> Any:
    """Return a tiny generating PyTorch model in evaluation mode. It has no end token, so generation stops only at the
    maximum length.

    Args:
        family: A key of `GENERATORS`.
        seed: Seed of the weights.
        **overrides: Config fields.
    """
    check_family(family, GENERATORS)
    _, architecture, settings = GENERATORS[family]
    torch.manual_seed(seed)
    cls = getattr(transformers, architecture)
    composed = {"vit-gpt2": _captioner, "pix2struct": _reader_of_patches, "llava": _reader_of_images}
    make = composed.get(family, functools.partial(small_config, cls.config_class, _SIZES, **{**settings, **overrides}))
    model = cls(make()).eval()
    model.generation_config.eos_token_id = None
    model.generation_config.forced_eos_token_id = None
    return model


def _captioner() -> Any:
    encoder = small_config(transformers.ViTConfig, _SIZES, image_size=32, patch_size=8)
    decoder = small_config(transformers.GPT2Config, _SIZES, add_cross_attention=True, is_decoder=True)
    config = transformers.VisionEncoderDecoderConfig.from_encoder_decoder_configs(encoder, decoder)
    config.decoder_start_token_id, config.pad_token_id = 2, 0
    return config


def _reader_of_patches() -> Any:
    vision = small_config(transformers.Pix2StructVisionConfig, _SIZES, patch_embed_hidden_size=3 * PATCH**2, seq_len=64)
    text = small_config(transformers.Pix2StructTextConfig, _SIZES, bos_token_id=None)
    return transformers.Pix2StructConfig(
        text_config=text.to_dict(), vision_config=vision.to_dict(), initializer_range=0.3
    )


def _reader_of_images() -> Any:
    vision = small_config(transformers.CLIPVisionConfig, _SIZES, num_hidden_layers=3, image_size=16, patch_size=8)
    text = small_config(transformers.LlamaConfig, _SIZES, **_GROUPED)
    return transformers.LlavaConfig(
        vision_config=vision, text_config=text, image_token_index=IMAGE_TOKEN, image_token_id=IMAGE_TOKEN,
        image_seq_length=4,
    )  # fmt: skip


def save_generator(folder: Path, family: str, seed: int = 0, **overrides: Any) -> Path:
    """Save a tiny generating model with its tokenizer and processor as a transformers folder."""
    model = tiny_generator(family, seed, **overrides)
    model.save_pretrained(folder)
    tiny_tokenizer().save_pretrained(folder)
    if family == "vit-gpt2":
        size = {"height": model.config.encoder.image_size, "width": model.config.encoder.image_size}
        transformers.ViTImageProcessorPil(size=size).save_pretrained(folder)
    if family == "pix2struct":
        size = {"height": PATCH, "width": PATCH}
        transformers.Pix2StructImageProcessorPil(patch_size=size, max_patches=20).save_pretrained(folder)
    if family == "llava":
        size = model.config.vision_config.image_size
        tokenizer = tiny_tokenizer()
        tokenizer.add_special_tokens({"additional_special_tokens": [tokenizer.convert_ids_to_tokens(IMAGE_TOKEN)]})
        images = transformers.CLIPImageProcessorPil(
            size={"shortest_edge": size}, crop_size={"height": size, "width": size}
        )
        transformers.LlavaProcessor(
            images,
            tokenizer,
            patch_size=model.config.vision_config.patch_size,
            vision_feature_select_strategy="default",
            image_token=tokenizer.convert_ids_to_tokens(IMAGE_TOKEN),
            num_additional_image_tokens=1,
        ).save_pretrained(folder)
    if family == "moonshine":
        transformers.Wav2Vec2FeatureExtractor(return_attention_mask=True).save_pretrained(folder)
    if family == "whisper":
        # One frame is 10 ms, and one position is two frames.
        seconds = model.config.max_source_positions // 50 or 1
        transformers.WhisperFeatureExtractor(
            feature_size=model.config.num_mel_bins, chunk_length=seconds
        ).save_pretrained(folder)
    return folder
