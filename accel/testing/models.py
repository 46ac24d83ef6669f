"""Seeded tiny models of the families that tests cover, with tokenizers, made from configs: no network, no downloads.

Their weights are scaled so that logits are of order 1 and the mask matters; with transformers' own initialisation logits
are near zero, and a wrong graph goes unnoticed.
"""

from __future__ import annotations

import copy
import functools
from pathlib import Path
from typing import Any

import torch
import transformers

from accel.interfaces.task_registry import task_spec

VOCABULARY = 120
LABELS = 3
POSITIONS = 96
_WORDS = (
    "the a my card is not here where when lost new old money bank pay paid top up app phone pin code help please i you we "
    "can cannot how why what account transfer cash machine fee rate open close good bad fast slow paris london berlin wolfgang"
).split()

_COMMON: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 48,
    "max_position_embeddings": POSITIONS,
    "pad_token_id": 0,
}
_ROBERTA: dict[str, Any] = {**_COMMON, "pad_token_id": 1, "bos_token_id": 2, "eos_token_id": 3, "type_vocab_size": 1}

FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "albert": ("Albert", {**_COMMON, "embedding_size": 16}),
    "bert": ("Bert", _COMMON),
    "deberta": (
        "Deberta",
        {
            **_COMMON,
            "relative_attention": True,
            "pos_att_type": ["c2p", "p2c"],
            "position_biased_input": False,
            "type_vocab_size": 0,
        },
    ),
    "deberta-v2": (
        "DebertaV2",
        {
            **_COMMON,
            "relative_attention": True,
            "pos_att_type": ["c2p", "p2c"],
            "position_biased_input": False,
            "position_buckets": 16,
            "share_att_key": True,
            "norm_rel_ebd": "layer_norm",
            "type_vocab_size": 0,
        },
    ),
    "distilbert": (
        "DistilBert",
        {
            "vocab_size": VOCABULARY,
            "dim": 32,
            "n_layers": 2,
            "n_heads": 4,
            "hidden_dim": 48,
            "max_position_embeddings": POSITIONS,
            "pad_token_id": 0,
        },
    ),
    "electra": ("Electra", {**_COMMON, "embedding_size": 16}),
    "megatron-bert": ("MegatronBert", _COMMON),
    "modernbert": (
        "ModernBert",
        {
            **_COMMON,
            "global_attn_every_n_layers": 2,
            "local_attention": 8,
            "bos_token_id": 2,
            "eos_token_id": 3,
            "cls_token_id": 2,
            "sep_token_id": 3,
        },
    ),
    "mpnet": ("MPNet", {**_COMMON, "pad_token_id": 1}),
    "roberta": ("Roberta", _ROBERTA),
    "vit": (
        "ViT",
        {
            "hidden_size": 32,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "intermediate_size": 48,
            "image_size": 32,
            "patch_size": 8,
        },
    ),
    "xlm-roberta": ("XLMRoberta", _ROBERTA),
}

_HEADS = {
    "text-classification": "ForSequenceClassification",
    "text-ranking": "ForSequenceClassification",
    "token-classification": "ForTokenClassification",
    "question-answering": "ForQuestionAnswering",
    "multiple-choice": "ForMultipleChoice",
    "fill-mask": "ForMaskedLM",
    "feature-extraction": "Model",
    "sentence-similarity": "Model",
    "image-classification": "ForImageClassification",
}


def rescale(model: torch.nn.Module, seed: int = 0) -> torch.nn.Module:
    """Draw the weights anew so that every layer passes order-1 values on, with biases that are not zero."""
    generator = torch.Generator().manual_seed(seed)

    def draw(shape: torch.Size) -> torch.Tensor:
        return torch.randn(shape, generator=generator)

    with torch.no_grad():
        for name, parameter in sorted(model.named_parameters()):
            if parameter.ndim >= 2:
                fan_in = parameter[0].numel() if "embed" not in name else 1
                parameter.copy_(draw(parameter.shape) / fan_in**0.5)
            elif "norm" in name.lower() and name.endswith("weight"):
                parameter.copy_(1 + 0.1 * draw(parameter.shape))
            else:
                parameter.copy_(0.1 * draw(parameter.shape))
    return model


def tiny_model(family: str, task: str = "text-classification", seed: int = 0, **overrides: Any) -> Any:
    """A tiny PyTorch model of a family for a task, in evaluation mode.

    Args:
        family: A key of `FAMILIES`.
        task: A task that the family has a head for.
        seed: Of its weights.
        **overrides: Fields of its config.
    """
    prefix, settings = FAMILIES[family]
    # A question-answering head has two outputs, start and end; any other number fails in its forward.
    labels = 2 if task_spec(task).name == "question-answering" else LABELS
    config = getattr(transformers, f"{prefix}Config")(**{"num_labels": labels, **settings, **overrides})
    torch.manual_seed(seed)
    model = getattr(transformers, prefix + _HEADS[task_spec(task).name])(config)
    return rescale(model, seed).eval()


def tiny_tokenizer(roberta_like: bool = False) -> Any:
    """A word-level tokenizer for the tiny models: lower case, `[CLS] … [SEP]`, unknown words by character.

    Each caller's own: a tokenizer remembers how it was told to truncate and pad.
    """
    return copy.deepcopy(_tokenizer(roberta_like))


@functools.cache
def _tokenizer(roberta_like: bool) -> Any:
    from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, processors

    special = ["<s-unused>", "[PAD]", "[CLS]", "[SEP]"] if roberta_like else ["[PAD]", "<unused>", "[CLS]", "[SEP]"]
    vocabulary = [*special, "[UNK]", "[MASK]", *_WORDS, *"abcdefghijklmnopqrstuvwxyz0123456789?.,!'"]
    vocabulary = list(dict.fromkeys(vocabulary))[:VOCABULARY]
    ids = {token: i for i, token in enumerate(vocabulary)}
    tokenizer = Tokenizer(models.WordLevel(ids, unk_token="[UNK]"))
    tokenizer.normalizer = normalizers.Lowercase()
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]",
        pair="[CLS] $A [SEP] $B:1 [SEP]:1",
        special_tokens=[("[CLS]", ids["[CLS]"]), ("[SEP]", ids["[SEP]"])],
    )
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        model_max_length=POSITIONS - 2,
        pad_token="[PAD]",
        cls_token="[CLS]",
        sep_token="[SEP]",
        unk_token="[UNK]",
        mask_token="[MASK]",
    )


def save_tiny(folder: Path, family: str, task: str = "text-classification", seed: int = 0, **overrides: Any) -> Path:
    """Write a tiny model with its tokenizer or image processor as a transformers folder."""
    model = tiny_model(family, task, seed, **overrides)
    model.save_pretrained(folder)
    if family == "vit":
        size = {"height": model.config.image_size, "width": model.config.image_size}
        transformers.ViTImageProcessorPil(size=size).save_pretrained(folder)
    else:
        tiny_tokenizer(roberta_like=model.config.pad_token_id == 1).save_pretrained(folder)
    return folder
