"""Write small GGUF files from models in memory, with the layout that llama.cpp's converter uses."""

from pathlib import Path
from typing import Any

import numpy as np
import torch
from tokenizers.pre_tokenizers import ByteLevel

SHAPE: dict[str, Any] = {
    "vocab_size": 320, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 128, "initializer_range": 0.2, "bos_token_id": 1, "eos_token_id": 2,
    "pad_token_id": 0,
}  # fmt: skip
SPECIAL = ("<pad>", "<s>", "</s>", "<unk>")


def gguf_model(family: str, seed: int = 0, **overrides: Any) -> Any:
    """Return a tiny model of a family: `llama`, `qwen2`, `gemma2` or `gemma3`."""
    import transformers

    name, settings = {
        "llama": ("Llama", {}),
        "qwen2": ("Qwen2", {}),
        "gemma2": ("Gemma2", {"head_dim": 16, "query_pre_attn_scalar": 256, "sliding_window": 4096}),
        "gemma3": ("Gemma3", {"head_dim": 16, "sliding_window": 8}),
    }[family]
    config_class = getattr(transformers, f"{name}Config" if name != "Gemma3" else "Gemma3TextConfig")
    torch.manual_seed(seed)
    model = getattr(transformers, f"{name}ForCausalLM")(config_class(**{**SHAPE, **settings, **overrides}))
    with torch.no_grad():
        for parameter_name, parameter in model.named_parameters():
            if parameter_name.endswith(("norm.weight", "bias")):
                parameter.add_(0.1 * torch.randn_like(parameter))
    return model.eval()


def write_gguf(path: Path, model: Any, kind: str = "F32", *, tokenizer: str | None = "gpt2", more: Any = None) -> Path:
    """Write a model to a GGUF file. Matrices have the type `kind` (`F32`, `F16`, `Q8_0`, `Q4_0`), and vectors are F32.

    `tokenizer` is llama.cpp's name of the tokenizer: `gpt2` (byte-level) or `llama` (SentencePiece). `more` is a function that
    adds metadata or tensors to the writer.
    """
    import gguf

    config = model.config
    family = config.model_type.removesuffix("_text")
    writer = gguf.GGUFWriter(path, family)
    writer.add_name("tiny")
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_vocab_size(config.vocab_size)
    if family.startswith("gemma"):
        writer.add_key_length(config.head_dim)
        writer.add_value_length(config.head_dim)
        writer.add_sliding_window(config.sliding_window)
    else:
        writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    if family == "gemma2":
        writer.add_attn_logit_softcapping(config.attn_logit_softcapping)
        writer.add_final_logit_softcapping(config.final_logit_softcapping)
    if tokenizer is not None:
        _add_tokenizer(writer, tokenizer, config.vocab_size)
    if more is not None:
        more(writer)
    arch = next(key for key, name in gguf.MODEL_ARCH_NAMES.items() if name == family)
    names = gguf.get_tensor_name_map(arch, config.num_hidden_layers)
    tied = config.tie_word_embeddings
    for name, tensor in model.state_dict().items():
        if tied and name == "lm_head.weight":
            continue
        stem, _, suffix = name.rpartition(".")
        values = tensor.float()
        if family == "llama" and stem.endswith(("q_proj", "k_proj")):
            heads = config.num_attention_heads if stem.endswith("q_proj") else config.num_key_value_heads
            values = values.reshape(heads, 2, -1, values.shape[-1]).swapaxes(1, 2).reshape(values.shape)
        if family.startswith("gemma") and stem.endswith("norm"):
            values = values + 1
        quantized = gguf.GGMLQuantizationType[kind if values.ndim > 1 else "F32"]
        writer.add_tensor(
            f"{names.get_name(stem)}.{suffix}",
            gguf.quantize(np.ascontiguousarray(values), quantized),
            raw_dtype=quantized,
        )
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def _add_tokenizer(writer: Any, kind: str, size: int) -> None:
    """Add a tokenizer, whose vocabulary is padded to `size` tokens."""
    merges = ["h e", "l l", "he ll", "hell o", "w o"]
    words = [merge.replace(" ", "") for merge in merges]
    if kind == "gpt2":
        tokens = [*SPECIAL, *sorted(ByteLevel.alphabet()), *words]
    else:
        tokens = [*SPECIAL, *(f"<0x{byte:02X}>" for byte in range(256)), *"\u2581ehlorwd.", *words, "\u2581hello"]
    tokens += [f"extra{index}" for index in range(size - len(tokens))]
    writer.add_tokenizer_model(kind)
    writer.add_token_list(tokens)
    writer.add_token_types([3 if token in SPECIAL else 6 if token.startswith("<0x") else 1 for token in tokens])
    if kind == "gpt2":
        writer.add_tokenizer_pre("qwen2")
        writer.add_token_merges(merges)
    else:
        writer.add_token_scores([-float(index) for index in range(len(tokens))])
        writer.add_add_bos_token(True)
    writer.add_chat_template("{% for message in messages %}{{ message['content'] }}{% endfor %}")
    writer.add_pad_token_id(0)
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_unk_token_id(3)
