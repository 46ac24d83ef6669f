"""Tiny models with fixed seeds and tokenizers for tests, created from configs without downloads.

The weights are scaled so that logits are about 1 in size and the mask changes the results. With transformers' default initialization,
logits are near zero, so tests would not detect errors of a graph.
"""

from __future__ import annotations

import copy
import dataclasses
import functools
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
import transformers

from accel.errors import ConfigError, did_you_mean
from accel.interfaces.task_registry import task_spec

VOCABULARY = 120
LABELS = 3
POSITIONS = 96
_WORDS = (
    "the a my card is not here where when lost new old money bank pay paid top up app phone pin code help please i you we "
    "can cannot how why what account transfer cash machine fee rate open close good bad fast slow paris london berlin wolfgang"
).split()

SIZES: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    **dict.fromkeys(("hidden_size", "dim"), 32),
    **dict.fromkeys(("intermediate_size", "hidden_dim"), 48),
    **dict.fromkeys(("num_hidden_layers", "n_layers"), 2),
    **dict.fromkeys(("num_attention_heads", "n_heads"), 4),
    "embedding_size": 16,
    "max_position_embeddings": POSITIONS,
    "pad_token_id": 0,
}
"""Config fields of tiny models. Fields that a config class does not have are ignored."""
_ROBERTA: dict[str, Any] = {"pad_token_id": 1, "bos_token_id": 2, "eos_token_id": 3, "type_vocab_size": 1}
_RELATIVE: dict[str, Any] = {
    "relative_attention": True, "pos_att_type": ["c2p", "p2c"], "position_biased_input": False, "type_vocab_size": 0,
}  # fmt: skip

FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "albert": ("Albert", {}),
    "bert": ("Bert", {}),
    "deberta": ("Deberta", _RELATIVE),
    "deberta-v2": (
        "DebertaV2", {**_RELATIVE, "position_buckets": 16, "share_att_key": True, "norm_rel_ebd": "layer_norm"}
    ),
    "distilbert": ("DistilBert", {}),
    "electra": ("Electra", {}),
    "megatron-bert": ("MegatronBert", {}),
    "modernbert": (
        "ModernBert",
        {
            "global_attn_every_n_layers": 2, "local_attention": 8, "bos_token_id": 2, "eos_token_id": 3, "cls_token_id": 2,
            "sep_token_id": 3,
        },
    ),
    "mpnet": ("MPNet", {"pad_token_id": 1}),
    "roberta": ("Roberta", _ROBERTA),
    "vit": ("ViT", {"image_size": 32, "patch_size": 8}),
    "xlm-roberta": ("XLMRoberta", _ROBERTA),
}  # fmt: skip
"""Prefix of transformers' class names, and additional config fields, by family name."""


def small_config(cls: Any, sizes: Mapping[str, Any], **settings: Any) -> Any:
    """Return a config with small sizes.

    Args:
        cls: A config class of transformers.
        sizes: Values by field name; fields that the class does not have are ignored.
        **settings: Further config fields.
    """
    names = {field.name for field in dataclasses.fields(cls)}
    return cls(**{**{name: value for name, value in sizes.items() if name in names}, **settings})


def rescale(model: torch.nn.Module, seed: int = 0) -> torch.nn.Module:
    """Replace the weights of a model by random weights, so that every layer returns values of about 1 and biases are not zero."""
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


def check_family(family: str, families: Iterable[str]) -> None:
    """Check that `families` contains a family.

    Raises:
        ConfigError: There is no such family.
    """
    names = list(families)
    if family not in names:
        raise ConfigError(
            f"There is no tiny model of the family {family!r}.{did_you_mean(family, names)}",
            fix=f"use one of {', '.join(names)}.",
        )


def tiny_config(family: str, **overrides: Any) -> Any:
    """Return the config of a tiny model of a family of `FAMILIES`.

    Raises:
        ConfigError: `FAMILIES` has no such family.
    """
    check_family(family, FAMILIES)
    prefix, settings = FAMILIES[family]
    return small_config(getattr(transformers, f"{prefix}Config"), SIZES, **{**settings, **overrides})


def tiny_model(family: str, task: str = "text-classification", seed: int = 0, **overrides: Any) -> Any:
    """Return a tiny PyTorch model of a family for a task, in evaluation mode.

    Args:
        family: A key of `FAMILIES`.
        task: A task that the family has a head for.
        seed: Seed of the weights.
        **overrides: Config fields.
    """
    spec = task_spec(task)
    # A question answering head must have two labels (start and end); its `forward` fails for other numbers of labels.
    labels = 2 if "start_logits" in spec.outputs else LABELS
    config = tiny_config(family, **{"num_labels": labels, **overrides})
    torch.manual_seed(seed)
    model = getattr(transformers, spec.auto_model).from_config(config)
    return rescale(model, seed).eval()


def tiny_tokenizer(roberta_like: bool = False) -> Any:
    """Return a word-level tokenizer for the tiny models.

    The tokenizer lowercases texts and adds `[CLS]` and `[SEP]`. A word that is not in the vocabulary becomes `[UNK]`.
    Each call returns a copy, because a tokenizer stores its truncation and padding settings.
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
    """Save a tiny model with its tokenizer or image processor as a transformers folder."""
    model = tiny_model(family, task, seed, **overrides)
    model.save_pretrained(folder)
    if family == "vit":
        size = {"height": model.config.image_size, "width": model.config.image_size}
        transformers.ViTImageProcessorPil(size=size).save_pretrained(folder)
    else:
        tiny_tokenizer(roberta_like=model.config.pad_token_id == 1).save_pretrained(folder)
    return folder
