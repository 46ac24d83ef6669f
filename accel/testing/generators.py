"""Seeded tiny generating models of the families that tests cover, made from configs.

Their weights are large enough that tokens differ from step to step: a model that repeats one token hides a wrong cache.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import transformers

from .models import VOCABULARY, tiny_tokenizer

GENERATOR_POSITIONS = 192
_SPECIAL: dict[str, Any] = {"pad_token_id": 0, "bos_token_id": 2, "eos_token_id": 3}
_DECODER: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": GENERATOR_POSITIONS,
    "initializer_range": 0.3,
    **_SPECIAL,
}
_GROUPED: dict[str, Any] = {**_DECODER, "num_key_value_heads": 2}
_BART: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "d_model": 64,
    "encoder_layers": 2,
    "decoder_layers": 2,
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 4,
    "encoder_ffn_dim": 96,
    "decoder_ffn_dim": 96,
    "max_position_embeddings": GENERATOR_POSITIONS,
    "init_std": 0.3,
    "decoder_start_token_id": 2,
    "forced_eos_token_id": None,
    **_SPECIAL,
}
_T5: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "d_model": 64,
    "d_kv": 16,
    "d_ff": 96,
    "num_layers": 2,
    "num_decoder_layers": 2,
    "num_heads": 4,
    "initializer_factor": 3.0,
    "decoder_start_token_id": 0,
    **_SPECIAL,
}
_MAMBA: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "state_size": 8,
    "initializer_range": 0.3,
    **_SPECIAL,
}
_MAMBA_2: dict[str, Any] = {"mamba_n_heads": 8, "mamba_d_head": 16, "mamba_d_state": 8, "mamba_chunk_size": 16}
_DELTA: dict[str, Any] = {
    **_GROUPED,
    "layer_types": ["linear_attention", "full_attention"],
    "head_dim": 16,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
}
_LATENT: dict[str, Any] = {
    **_DECODER,
    "num_key_value_heads": 4,
    "q_lora_rank": 16,
    "kv_lora_rank": 16,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 16,
    "v_head_dim": 16,
    "n_routed_experts": 4,
    "n_group": 2,
    "topk_group": 1,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "first_k_dense_replace": 1,
}

GENERATORS: dict[str, tuple[str, str, dict[str, Any]]] = {
    # Family: task, class, config.
    "gemma3": (
        "text-generation",
        "Gemma3ForCausalLM",
        {**_GROUPED, "head_dim": 16, "sliding_window": 8, "layer_types": ["sliding_attention", "full_attention"]},
    ),
    "gpt2": (
        "text-generation",
        "GPT2LMHeadModel",
        {
            "vocab_size": VOCABULARY,
            "n_embd": 64,
            "n_layer": 2,
            "n_head": 4,
            "n_positions": GENERATOR_POSITIONS,
            "initializer_range": 0.3,
            **_SPECIAL,
        },
    ),
    "gpt-neox": ("text-generation", "GPTNeoXForCausalLM", _DECODER),
    "llama": ("text-generation", "LlamaForCausalLM", _GROUPED),
    "mistral": ("text-generation", "MistralForCausalLM", {**_GROUPED, "sliding_window": 16}),
    "olmo3": ("text-generation", "Olmo3ForCausalLM", {**_GROUPED, "sliding_window": 8}),
    "opt": (
        "text-generation",
        "OPTForCausalLM",
        {
            "vocab_size": VOCABULARY,
            "hidden_size": 64,
            "ffn_dim": 96,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "max_position_embeddings": GENERATOR_POSITIONS,
            "word_embed_proj_dim": 64,
            "init_std": 0.3,
            **_SPECIAL,
        },
    ),
    "mixtral": (
        "text-generation",
        "MixtralForCausalLM",
        {**_GROUPED, "num_local_experts": 4, "num_experts_per_tok": 2},
    ),
    "phi3": ("text-generation", "Phi3ForCausalLM", _GROUPED),
    "qwen3": ("text-generation", "Qwen3ForCausalLM", {**_GROUPED, "head_dim": 16, "tie_word_embeddings": True}),
    "deepseek-v3": ("text-generation", "DeepseekV3ForCausalLM", _LATENT),
    "bamba": ("text-generation", "BambaForCausalLM", {**_GROUPED, **_MAMBA_2, "attn_layer_indices": [1]}),
    "falcon-h1": (
        "text-generation",
        "FalconH1ForCausalLM",
        {**_GROUPED, **_MAMBA_2, "mamba_d_ssm": 64, "mamba_n_heads": 4, "mamba_n_groups": 1},
    ),
    "falcon-mamba": ("text-generation", "FalconMambaForCausalLM", _MAMBA),
    "granite-4": (
        "text-generation",
        "GraniteMoeHybridForCausalLM",
        {
            **_GROUPED,
            **_MAMBA_2,
            "layer_types": ["mamba", "attention"],
            "num_local_experts": 4,
            "num_experts_per_tok": 2,
            "shared_intermediate_size": 32,
        },
    ),
    "jamba": (
        "text-generation",
        "JambaForCausalLM",
        {
            **_GROUPED,
            "attn_layer_period": 2,
            "attn_layer_offset": 1,
            "expert_layer_period": 2,
            "expert_layer_offset": 1,
            "num_experts": 4,
            "mamba_d_state": 8,
            "mamba_dt_rank": 4,
            "use_mamba_kernels": False,
        },
    ),
    "lfm2": (
        "text-generation",
        "Lfm2ForCausalLM",
        {**_GROUPED, "layer_types": ["conv", "full_attention"], "block_auto_adjust_ff_dim": False},
    ),
    "mamba": ("text-generation", "MambaForCausalLM", _MAMBA),
    "mamba-2": (
        "text-generation",
        "Mamba2ForCausalLM",
        {**_MAMBA, "num_heads": 4, "head_dim": 16, "n_groups": 2, "expand": 2, "chunk_size": 16},
    ),
    "olmo-hybrid": (
        "text-generation",
        "OlmoHybridForCausalLM",
        {key: value for key, value in {**_DELTA, "linear_num_key_heads": 4}.items() if key != "head_dim"},
    ),
    "qwen3-next": (
        "text-generation",
        "Qwen3NextForCausalLM",
        {
            **_DELTA,
            "num_experts": 4,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 32,
            "shared_expert_intermediate_size": 32,
        },
    ),
    "openai-gpt": (
        "text-generation",
        "OpenAIGPTLMHeadModel",
        {
            "vocab_size": VOCABULARY,
            "n_embd": 64,
            "n_layer": 2,
            "n_head": 4,
            "n_positions": GENERATOR_POSITIONS,
            "initializer_range": 0.3,
            **_SPECIAL,
        },
    ),
    "bart": ("text2text-generation", "BartForConditionalGeneration", _BART),
    "marian": ("text2text-generation", "MarianMTModel", _BART),
    "m2m-100": ("text2text-generation", "M2M100ForConditionalGeneration", _BART),
    "mt5": ("text2text-generation", "MT5ForConditionalGeneration", _T5),
    "pegasus": ("text2text-generation", "PegasusForConditionalGeneration", _BART),
    "t5": ("text2text-generation", "T5ForConditionalGeneration", _T5),
    "whisper": (
        "automatic-speech-recognition",
        "WhisperForConditionalGeneration",
        {
            **{key: value for key, value in _BART.items() if key != "max_position_embeddings"},
            "num_mel_bins": 80,
            "max_source_positions": 20,
            "max_target_positions": GENERATOR_POSITIONS,
            "suppress_tokens": None,
            "begin_suppress_tokens": None,
        },
    ),
    "moonshine": (
        "automatic-speech-recognition",
        "MoonshineForConditionalGeneration",
        {
            "vocab_size": VOCABULARY,
            "hidden_size": 64,
            "intermediate_size": 96,
            "encoder_num_hidden_layers": 2,
            "decoder_num_hidden_layers": 2,
            "encoder_num_attention_heads": 4,
            "decoder_num_attention_heads": 4,
            "decoder_start_token_id": 2,
            "initializer_range": 0.3,
            **_SPECIAL,
        },
    ),
    "speech-to-text": (
        "automatic-speech-recognition",
        "Speech2TextForConditionalGeneration",
        {
            **{key: value for key, value in _BART.items() if key != "max_position_embeddings"},
            "input_feat_per_channel": 20,
            "conv_channels": 32,
            "max_source_positions": 100,
            "max_target_positions": GENERATOR_POSITIONS,
        },
    ),
    "vit-gpt2": ("image-to-text", "VisionEncoderDecoderModel", {}),
    "pix2struct": ("image-to-text", "Pix2StructForConditionalGeneration", {}),
    "llava": ("image-text-to-text", "LlavaForConditionalGeneration", {}),
}
STATES = (
    "bamba", "falcon-h1", "falcon-mamba", "granite-4", "jamba", "lfm2", "mamba", "mamba-2", "olmo-hybrid", "qwen3-next"
)  # fmt: skip
"""Those that keep states of one size beside keys and values, or nothing else."""
RECOMPUTED = ("openai-gpt",)
"""Those that keep nothing."""
PATCH = 4
"""Edge of Pix2Struct's patches, in pixels."""
IMAGE_TOKEN = 1
"""What stands in a prompt for each of an image's patches."""


def tiny_generator(family: str, seed: int = 0, **overrides: Any) -> Any:
    """A tiny generating PyTorch model, in evaluation mode; it generates until told to stop.

    Args:
        family: A key of `GENERATORS`.
        seed: Of its weights.
        **overrides: Fields of its config.
    """
    _, architecture, settings = GENERATORS[family]
    torch.manual_seed(seed)
    cls = getattr(transformers, architecture)
    made = {"vit-gpt2": _captioner, "pix2struct": _reader_of_patches, "llava": _reader_of_images}
    config = made[family]() if family in made else cls.config_class(**{**settings, **overrides})
    model = cls(config).eval()
    model.generation_config.eos_token_id = None
    model.generation_config.forced_eos_token_id = None
    return model


def _captioner() -> Any:
    encoder = transformers.ViTConfig(
        hidden_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        intermediate_size=96,
        image_size=32,
        patch_size=8,
        initializer_range=0.3,
    )
    decoder = transformers.GPT2Config(**{**GENERATORS["gpt2"][2], "add_cross_attention": True, "is_decoder": True})
    config = transformers.VisionEncoderDecoderConfig.from_encoder_decoder_configs(encoder, decoder)
    config.decoder_start_token_id, config.pad_token_id = 2, 0
    return config


def _reader_of_patches() -> Any:
    vision = {
        "hidden_size": 64, "patch_embed_hidden_size": 3 * PATCH**2, "d_ff": 96, "d_kv": 16, "num_hidden_layers": 2,
        "num_attention_heads": 4, "seq_len": 64,
    }  # fmt: skip
    text = {
        "vocab_size": VOCABULARY, "hidden_size": 64, "d_kv": 16, "d_ff": 96, "num_layers": 2, "num_heads": 4,
        "pad_token_id": 0, "decoder_start_token_id": 2, "eos_token_id": 3,
    }  # fmt: skip
    return transformers.Pix2StructConfig(text_config=text, vision_config=vision, initializer_range=0.3)


def _reader_of_images() -> Any:
    vision = transformers.CLIPVisionConfig(
        hidden_size=64,
        num_hidden_layers=3,
        num_attention_heads=4,
        intermediate_size=96,
        image_size=16,
        patch_size=8,
        initializer_range=0.3,
    )
    text = transformers.LlamaConfig(**_GROUPED)
    return transformers.LlavaConfig(
        vision_config=vision, text_config=text, image_token_index=IMAGE_TOKEN, image_token_id=IMAGE_TOKEN,
        image_seq_length=4,
    )  # fmt: skip


def save_generator(folder: Path, family: str, seed: int = 0, **overrides: Any) -> Path:
    """Write a tiny generating model with its tokenizer and processor as a transformers folder."""
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
        # Ten milliseconds a frame, two frames a position.
        seconds = model.config.max_source_positions // 50 or 1
        transformers.WhisperFeatureExtractor(
            feature_size=model.config.num_mel_bins, chunk_length=seconds
        ).save_pretrained(folder)
    return folder
