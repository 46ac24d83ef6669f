"""Create a small config of any architecture. It is the architecture's default config, with every size replaced by a
small, consistent size.

Sizes are recognized by the names of config fields. Values that a config computes from its sizes are not set, so that
the config computes them again.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable, Mapping
from typing import Any

import transformers
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from .overrides import OVERRIDES

HIDDEN, HEADS, KEY_VALUE_HEADS, INNER, LAYERS = 64, 4, 2, 96, 2
VOCABULARY, POSITIONS, LABELS, IMAGE, PATCH = 120, 320, 3, 32, 8
PAD, BEGIN, END = 0, 2, 3
FIRST_PLAIN_TOKEN, LAST_PLAIN_TOKEN = 10, 99  # larger ids are reserved for special tokens
_MOST_LAYERS = 4

Rule = Callable[[int], int]


def _most(limit: int) -> Rule:
    return lambda old: min(old, limit)


def _always(value: int) -> Rule:
    return lambda _: value


# The first pattern that matches the field name gives the function that computes the small value from the original value.
_RULES: tuple[tuple[str, Rule], ...] = (
    (r"(^|_)pad_token_id$", _always(PAD)),
    (r"(^|_)(bos_token_id|decoder_start_token_id)$", _always(BEGIN)),
    (r"(^|_)eos_token_id$", _always(END)),
    (r"(vocab_size|vocabulary_size|num_embeddings|vocab_size_per_layer_input)$", _most(VOCABULARY)),
    (r"type_vocab_size", _most(2)),
    # The function `_fit_heads` later adapts key-value heads to the number of heads.
    (r"(^num_kv_heads|^num_key_value_heads|_key_value_heads|_kv_heads|^n_head_kv)$", lambda old: old),
    (r"(num_(attention_)?heads|_attention_heads|^n_heads?|_num_heads|_heads)$", _most(HEADS)),
    (r"(experts_per_tok|experts_per_token|moe_topk|moe_k|top_k_experts)", _most(2)),
    (r"(n_shared_experts|num_shared_experts|moe_num_shared_experts)", _most(1)),
    (r"(expert_group|n_group|topk_group|num_expert_group)", _always(1)),
    (r"(num_.*experts|n_routed_experts|experts$|moe_num_experts)", _most(4)),
    (r"(first_k_dense_replace|num_dense_layers|moe_layer_start_index|first_dense)", _most(1)),
    (r"(num_nextn_predict_layers|num_kv_shared_layers|num_mtp)", _always(0)),
    (r"(num_.*layers|n_layers?|_layers|^depth|_depth|num_.*blocks|^n_blocks?)$", _most(LAYERS)),
    (r"(intermediate_size|^ffn_dim|_ffn_dim|^d_ff|hidden_dim|^n_inner|_inner_dim)", _most(INNER)),
    (r"(ffn_hidden_size|ffn_size)", _most(INNER)),
    (r"(max_.*positions|n_positions|max_.*position_embeddings|^n_ctx)", _most(POSITIONS)),
    (r"(max_seq_len|max_sequence_length|max_window_length)", _most(POSITIONS)),
    (r"(sliding_window|local_attention|attention_window|window_size|attention_chunk_size)$", _most(16)),
    (r"image_size$", _most(IMAGE)),
    (r"(^|_)patch_size$", _most(PATCH)),
    (r"(qk_rope_head_dim|qk_nope_head_dim|rotary_dim)$", _most(8)),
    (r"(head_dim|head_size|kv_channels|d_kv|^d_head|key_dim|value_dim|head_k_dim|head_v_dim)$", _most(HIDDEN // HEADS)),
    (r"(_rank|low_rank_dim)$", _most(16)),
    (
        r"(hidden_size|d_model|^dim|n_embd|embed_dim|projection_dim|_dim|_size|_width|^width|channels)$",
        lambda old: old if old <= 16 else min(old, HIDDEN),
    ),
)
_RULES_COMPILED = tuple((re.compile(pattern), rule) for pattern, rule in _RULES)
# Config fields that keep their default value: strides, indices and other fields that are not sizes, and sizes that no other
# field depends on.
_KEPT = re.compile(
    r"(kernel|stride|chunk_size|num_channels|in_channels|num_mel|num_buckets|position_buckets|type_vocab|layers_per"
    r"|_idx$|_index$|_every_|_freq|_step|_period|_factor$|temporal_patch_size|conv_size|^num_stages$|^num_encoder_blocks$)"
)
# These fields are `None` by default, but some models need values that their configs do not contain.
_WANTED = {
    "head_dim": HIDDEN // HEADS,
    "n_routed_experts": 4,
    "n_shared_experts": 1,
    "num_experts_per_tok": 2,
    "num_key_value_heads": KEY_VALUE_HEADS,
    "vocab_size": VOCABULARY,
}
_TOKENS = re.compile(r"_token_ids$")
_TOKEN = re.compile(r"(_token_id|_token_index|_token_idx|_token|_id)$")


class NotShrinkable(Exception):  # noqa: N818  # an expected result, not an error
    """Error that is raised if no small config can be created."""


def small_config(architecture: str, **settings: Any) -> Any:
    """Return a small config of an architecture.

    Args:
        architecture: `model_type` in transformers.
        **settings: Values of config fields, set on the small config.

    Raises:
        NotShrinkable: The config class raises an error with small values.
    """
    special = OVERRIDES.get(architecture, {})
    if callable(special):
        config = special(small_config)
    else:
        try:
            cls = CONFIG_MAPPING[architecture]
        except Exception as error:  # transformers imports modules lazily, which may fail in many ways
            raise NotShrinkable(f"{type(error).__name__}: {error}") from error
        config = shrink(cls, special)
    for name, value in settings.items():
        setattr(config, name, value)
    return config


def shrink(cls: type[Any], special: Mapping[str, Any] | None = None) -> Any:
    """Return a small config of a config class.

    Raises:
        NotShrinkable: The class has no default config, or raises an error with the small values.
    """
    try:
        default = cls()
        values = small_values(cls, default)
        merge(values, special or {})
        config = cls(**values)
    # Catch all exceptions, because config classes check their sizes in different ways.
    except Exception as error:
        raise NotShrinkable(f"{cls.__name__}: {type(error).__name__}: {error}") from error
    return config


def merge(values: dict[str, Any], special: Mapping[str, Any]) -> None:
    """Replace small values by the special values of an architecture, also in sub-configs."""
    for name, value in special.items():
        inner = values.get(name)
        if isinstance(value, Mapping) and isinstance(inner, transformers.PreTrainedConfig):
            for key, item in value.items():
                setattr(inner, key, item)
        else:
            values[name] = value


def small_values(cls: type[Any], default: Any) -> dict[str, Any]:
    """Return small values for the fields of a config class, by name. Fields that the class computes itself are left
    out.
    """
    canonical = {value: key for key, value in getattr(cls, "attribute_map", {}).items()}
    declared = _declared(cls)
    values: dict[str, Any] = {}
    for name, declared_default in declared.items():
        value = _value(default, name, declared_default)
        if isinstance(value, transformers.PreTrainedConfig):
            special = OVERRIDES.get(value.model_type, {})
            values[name] = shrink(type(value), {} if callable(special) else special)
        elif value is None and name in _WANTED:
            values[name] = _WANTED[name]
        elif (declared_default is None and isinstance(value, list)) or isinstance(value, bool):
            continue
        elif isinstance(value, int):
            values[name] = value if _KEPT.search(name) else small_number(canonical.get(name, name), value)
        elif isinstance(value, list | tuple) and value and all(type(number) is int for number in value):
            values[name] = type(value)(_small_sequence(canonical.get(name, name), list(value)))
    _fit_heads(values, default, canonical)
    _choose_layers(values, default, canonical, declared)
    special_tokens = _special_tokens(values)
    values.update(special_tokens)
    if "pad_token_id" in declared or hasattr(default, "pad_token_id"):
        values["pad_token_id"] = PAD if not isinstance(values.get("pad_token_id"), int) else values["pad_token_id"]
    return values


def _value(config: Any, name: str, declared_default: Any) -> Any:
    """Return the value of a config field. If reading the field raises an error, because each layer has its own value,
    return the declared default.
    """
    try:
        return getattr(config, name, declared_default)
    except Exception:  # noqa: BLE001  # each architecture raises its own type of error
        return declared_default


def _declared(cls: type[Any]) -> dict[str, Any]:
    """Return the fields that a config class and its bases declare, with their default values."""
    defaults: dict[str, Any] = {}
    base = {field.name for field in dataclasses.fields(transformers.PreTrainedConfig)}
    for field in dataclasses.fields(cls):
        if field.name in base and not field.name.endswith("_token_id"):
            continue
        if not field.init:
            continue
        missing = field.default is dataclasses.MISSING
        built_default = (
            field.default_factory() if missing and field.default_factory is not dataclasses.MISSING else None
        )
        defaults[field.name] = built_default if missing else field.default
    return defaults


def small_number(name: str, value: int) -> int:
    """Return the small value of an integer field."""
    if _KEPT.search(name) or value <= 0:
        return value
    for pattern, rule in _RULES_COMPILED:
        if pattern.search(name):
            return rule(value)
    return value


def _small_sequence(name: str, values: list[int]) -> list[int]:
    """Return small values for a field that has one value for each stage or layer."""
    if _KEPT.search(name):
        return values
    if re.search(r"depths|num_blocks|layers", name):
        return [min(value, 1) for value in values]
    if re.search(r"num_.*heads|_heads", name):
        return [min(value, 2 ** min(i, 2)) for i, value in enumerate(values)]
    if re.search(r"sizes|dims?$|channels|embed|filters|width", name):
        # Keep the ratios of the sizes and use multiples of 16. Sizes may have to grow from stage to stage, and to be
        # divisible by the number of heads.
        smallest = min(values)
        return [max(16, round(16 * value / smallest / 16) * 16) if value > 16 else value for value in values]
    return values


def _fit_heads(values: dict[str, Any], default: Any, canonical: Mapping[str, str]) -> None:
    """Set the number of key-value heads. If it equals the number of heads in the default config, if it is smaller, or if it is
    one, the same is true after the change.
    """
    for name in list(values):
        if not re.search(r"(num_kv_heads|num_key_value_heads|_key_value_heads|_kv_heads|n_head_kv)$", name):
            continue
        heads_name = re.sub(r"(key_value_heads|kv_heads)$", "attention_heads", name)
        heads = _value(default, heads_name, None) or _value(default, "num_attention_heads", None)
        before = _value(default, name, None)
        if not isinstance(heads, int) or not isinstance(before, int):
            continue
        values[name] = HEADS if before >= heads else 1 if before == 1 else KEY_VALUE_HEADS


def _choose_layers(
    values: dict[str, Any], default: Any, canonical: Mapping[str, str], declared: Mapping[str, Any]
) -> None:
    """If the layers differ, keep one layer of each kind. Shorten every list that has one entry for each layer in the
    same way.
    """
    total = _value(default, "num_hidden_layers", None)
    if not isinstance(total, int) or total <= LAYERS:
        return
    lists = {
        name: value
        for name in declared
        if isinstance(value := _value(default, name, None), list) and len(value) == total
    }
    if not lists:
        return
    kinds: dict[tuple[str, ...], int] = {}
    for i in range(total):
        kinds.setdefault(tuple(repr(some[i]) for some in lists.values()), i)
    chosen = sorted(kinds.values())[:_MOST_LAYERS]
    chosen += [i for i in range(total) if i not in chosen][: max(0, LAYERS - len(chosen))]
    chosen.sort()
    for name, some in lists.items():
        values[name] = [some[i] for i in chosen]
    layers = next((name for name in declared if canonical.get(name, name) == "num_hidden_layers"), None)
    if layers is not None:
        values[layers] = len(chosen)


def _special_tokens(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return new ids of special tokens that would be outside of the small vocabulary. Each special token gets its own
    id at the end of the vocabulary.
    """
    token_ids: dict[str, Any] = {}
    free = VOCABULARY - 1
    for name, value in values.items():
        if _TOKEN.search(name) and isinstance(value, int) and value > LAST_PLAIN_TOKEN:
            token_ids[name] = free
            free -= 1
        elif _TOKENS.search(name) and isinstance(value, list | tuple) and value and min(value) > LAST_PLAIN_TOKEN:
            token_ids[name] = type(value)(range(free, free - len(value), -1))
            free -= len(value)
    return token_ids
