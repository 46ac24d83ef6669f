"""Tiny decoders of many model families with typical tokenizers, for tests of the generation loop that runs inside
Triton.

`accel.testing.generative_models` has the families that other tests use. The families in this module have other kinds of
positions, caches and masks.
"""

from __future__ import annotations

import functools
import json
from pathlib import Path
from typing import Any

import torch
import transformers
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers

_VOCABULARY = 400
_SPECIAL = ["<pad>", "<unk>", "<s>", "</s>"]
_TEXTS = [
    "The quick brown fox jumps over the lazy dog, doesn't it? The fee was 3.14 pounds.",
    "Où est ma carte bancaire ? Je l'ai perdue à Paris, cet été.",
    "私のカードはどこですか。東京に住んでいます。",
    "def card(x):\n    return x + 1\n",
] * 4
PROMPTS = [
    "Where is my new card? I paid",
    " a space before",
    "Où est 私の🙂",
    "a\nb  c",
    "def f(x):\n    return",
    "dog",
]
_HUGGING: dict[str, Any] = {"pad_token_id": 0, "bos_token_id": 2, "eos_token_id": 3, "vocab_size": _VOCABULARY}
_PLAIN: dict[str, Any] = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 192,
    "initializer_range": 0.3,
    **_HUGGING,
}
_GROUPED: dict[str, Any] = {**_PLAIN, "num_key_value_heads": 2}
_EMBEDDED: dict[str, Any] = {
    "n_embd": 64,
    "n_layer": 2,
    "n_head": 4,
    "n_positions": 192,
    "initializer_range": 0.3,
    **_HUGGING,
}
_FALCON: dict[str, Any] = {
    **{key: value for key, value in _PLAIN.items() if key != "intermediate_size"},
    "multi_query": True,
    "new_decoder_architecture": False,
}
SHORT = 24
"""Length in tokens up to which the LongRoPE decoder uses its short rotary factors."""
_LONG_ROPE = {"rope_type": "longrope", "rope_theta": 1e4, "long_factor": [2.0] * 8, "short_factor": [1.0] * 8}
# For each family, the table has the class name in transformers, config fields, and whether the tokenizer has byte
# tokens as in sentencepiece.
FAMILIES: dict[str, tuple[str, dict[str, Any], bool]] = {
    "bert": ("BertLMHeadModel", {**_PLAIN, "is_decoder": True}, False),
    "bloom": (
        "BloomForCausalLM",
        {"hidden_size": 64, "n_layer": 2, "n_head": 4, "initializer_range": 0.3, **_HUGGING},
        False,
    ),
    "falcon, alibi": ("FalconForCausalLM", {**_FALCON, "alibi": True}, False),
    "gemma 2": (
        "Gemma2ForCausalLM",
        {**_GROUPED, "head_dim": 16, "sliding_window": 8, "query_pre_attn_scalar": 16},
        True,
    ),
    "gpt-bigcode": ("GPTBigCodeForCausalLM", _EMBEDDED, False),
    "gpt-j": ("GPTJForCausalLM", {**_EMBEDDED, "rotary_dim": 8}, False),
    "gpt-neo": (
        "GPTNeoForCausalLM",
        {
            **{key: value for key, value in _PLAIN.items() if "num" not in key and key != "intermediate_size"},
            "num_layers": 2,
            "num_heads": 4,
            "attention_types": [[["global", "local"], 1]],
            "window_size": 8,
        },
        False,
    ),
    "gpt-oss": (
        "GptOssForCausalLM",
        {**_GROUPED, "head_dim": 16, "num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": 8},
        False,
    ),
    "llama 2": ("LlamaForCausalLM", _GROUPED, True),
    "mpt": (
        "MptForCausalLM",
        {"d_model": 64, "n_layers": 2, "n_heads": 4, "max_seq_len": 192, "initializer_range": 0.3, **_HUGGING},
        False,
    ),
    "qwen 2": ("Qwen2ForCausalLM", _GROUPED, False),
    "qwen 2, windows": (
        "Qwen2ForCausalLM",
        {**_GROUPED, "use_sliding_window": True, "sliding_window": 8, "max_window_layers": 1},
        False,
    ),
    "smollm 3": ("SmolLM3ForCausalLM", {**_GROUPED, "no_rope_layers": [1, 0]}, False),
    "xglm": (
        "XGLMForCausalLM",
        {
            "d_model": 64,
            "num_layers": 2,
            "attention_heads": 4,
            "ffn_dim": 96,
            "max_position_embeddings": 192,
            "init_std": 0.3,
            **_HUGGING,
        },
        True,
    ),
    "phi 3, long": (
        "Phi3ForCausalLM",
        {
            **_GROUPED,
            "original_max_position_embeddings": SHORT,
            "rope_parameters": {**_LONG_ROPE, "original_max_position_embeddings": SHORT},
        },
        False,
    ),
}
LONG = "phi 3, long"


def save_family(folder: Path, family: str) -> Path:
    """Save a tiny decoder and its tokenizer as a transformers folder. The decoder has no end token."""
    architecture, settings, has_bytes = FAMILIES[family]
    cls = getattr(transformers, architecture)
    torch.manual_seed(0)
    model = cls(cls.config_class(**settings)).eval()
    model.generation_config.eos_token_id = None
    model.save_pretrained(folder)
    transformers.PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer.from_str(byte_tokenizer(has_bytes)),
        pad_token="<pad>",
        unk_token="<unk>",
        bos_token="<s>",
        eos_token="</s>",
        model_max_length=192,
    ).save_pretrained(folder)
    return folder


@functools.cache
def byte_tokenizer(has_bytes: bool) -> str:
    """Return a tokenizer as JSON. It is a byte-level BPE, or with `has_bytes` a BPE with byte fallback (one token for
    each byte).
    """
    if not has_bytes:
        tokenizer = Tokenizer(models.BPE())
        tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        tokenizer.decoder = decoders.ByteLevel()
        alphabet = pre_tokenizers.ByteLevel.alphabet()
        trainer = trainers.BpeTrainer(
            vocab_size=_VOCABULARY, special_tokens=_SPECIAL, initial_alphabet=alphabet, show_progress=False
        )
        tokenizer.train_from_iterator(_TEXTS, trainer)
        return str(tokenizer.to_str())
    tokenizer = Tokenizer(models.BPE(byte_fallback=True, unk_token="<unk>", fuse_unk=True))
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    single_bytes = [f"<0x{byte:02X}>" for byte in range(256)]
    trainer = trainers.BpeTrainer(
        vocab_size=_VOCABULARY, special_tokens=[*_SPECIAL, *single_bytes], show_progress=False
    )
    tokenizer.train_from_iterator(_TEXTS, trainer)
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 2)])
    # The trainer adds the byte tokens as special tokens, and decoding would skip special tokens. Remove the byte tokens
    # from the special tokens.
    content = json.loads(tokenizer.to_str())
    content["added_tokens"] = [token for token in content["added_tokens"] if token["content"] in _SPECIAL]
    return json.dumps(content)
