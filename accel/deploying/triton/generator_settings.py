"""Settings of the generation loop that runs inside Triton, and a check that the loop supports a decoder."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

from ...artifact.processor_loading import open_generation_config
from ...errors import ConfigError, TaskError
from ...models.generation_mixin import length_of_short_texts
from .text_fronts import TextModelFacts
from .triton_config import TritonConfig

logger = logging.getLogger(__name__)

_TAKES = ("input_ids", "attention_mask", "position_ids", "logits_to_keep")
_FOLLOWED = ("max_new_tokens", "do_sample", "temperature", "top_k", "top_p", "repetition_penalty")
# Defaults of the generation loop. The value of `top_k` is also the default in transformers.
_MAX_NEW_TOKENS = 128
_TOP_K = 50
# Fields of a generation config that do not change the texts that the loop generates.
_HARMLESS = frozenset(
    ("transformers_version", "bos_token_id", "eos_token_id", "pad_token_id", "decoder_start_token_id", "use_cache",
     "max_length", "return_dict_in_generate", "cache_implementation", "trust_remote_code", "num_return_sequences")
)  # fmt: skip
# Values that disable a field (`_OFF`), and fields that are used only by beam search (`_OF_BEAMS`).
_OFF: Mapping[str, tuple[object, ...]] = {
    "num_beams": (1,), "num_beam_groups": (1,), "min_length": (0,), "min_new_tokens": (0,), "no_repeat_ngram_size": (0,),
    "encoder_no_repeat_ngram_size": (0,), "typical_p": (1.0,), "epsilon_cutoff": (0.0,), "eta_cutoff": (0.0,),
}  # fmt: skip
_OF_BEAMS = ("early_stopping", "length_penalty", "diversity_penalty")


def generator_settings(facts: TextModelFacts, config: TritonConfig) -> dict[str, Any]:
    """Return the settings of the generation loop.

    Raises:
        TaskError: The decoder has inputs other than tokens and key-value caches.
        ConfigError: The loop does not support a deployment setting or a field of the model's generation config.
    """
    artifact = facts.artifact
    if artifact.format != "onnx" or len(artifact.components) != 1:
        raise TaskError(
            f"Text generation in Triton needs an artifact with exactly one ONNX graph; {artifact.path} has the format {artifact.format} "
            f"and {len(artifact.components)} graph(s).",
            fix="export a decoder-only model to ONNX with `accel export MODEL OUT`, and deploy the folder OUT.",
        )
    if config.backend not in ("auto", "python") or config.device != "cpu":
        raise ConfigError(
            f"backend={config.backend!r} and device={config.device!r} are not supported for text generation, which runs in Triton's Python "
            "backend on the CPU.",
            fix="leave backend and device out.",
        )
    unsupported = [n for n in ("max_length", "buckets", "accelerator", "parameters") if getattr(config, n)]
    if unsupported:
        raise ConfigError(
            f"The settings {', '.join(unsupported)} are not supported for text generation in Triton.",
            fix=f"leave {', '.join(unsupported)} out.",
        )
    component = artifact.components[0]
    pasts = [spec for spec in component.inputs if spec.pair is not None]
    others = [spec.name for spec in component.inputs if spec.pair is None and spec.name not in _TAKES]
    grow = all(len(s.shape) == 4 and s.shape[0] == "batch" and isinstance(s.shape[2], str) for s in pasts)
    fixed = all(isinstance(s.shape[1], int) and isinstance(s.shape[3], int) for s in pasts if len(s.shape) == 4)
    if others or not pasts or not (grow and fixed) or "attention_mask" not in {s.name for s in component.inputs}:
        problem = f"has the inputs {', '.join(others)}" if others else "has no KV cache with an attention mask"
        raise TaskError(
            f"The decoder in {artifact.path} {problem}, which text generation in Triton does not support.",
            fix="deploy a decoder with standard attention, or run the model with accel.pipeline or `accel serve`.",
        )
    if facts.tokenizer.clean_up_tokenization_spaces and type(facts.tokenizer.backend_tokenizer.model).__name__ != "BPE":
        raise ConfigError(
            "The tokenizer has clean_up_tokenization_spaces=true, which removes spaces from text that was already sent to the client, so "
            "streaming in Triton does not support it.",
            fix="set clean_up_tokenization_spaces to false in tokenizer_config.json, then run `accel validate ARTIFACT --accept-files` to "
            "record the changed file.",
        )
    if any(spec.dtype == "bfloat16" for spec in pasts):
        raise TaskError(
            "The KV cache of the graph is bfloat16, but Triton's Python backend uses NumPy, which has no bfloat16.",
            fix="export the model with --dtype float32 or --dtype float16, and deploy that artifact.",
        )
    return {
        "caches": {
            spec.name: {
                "present": spec.pair,
                "dtype": spec.dtype,
                "shape": [size if isinstance(size, int) else -1 for size in spec.shape[1:]],
            }
            for spec in pasts
        },
        "takes": [spec.name for spec in component.inputs if spec.pair is None],
        "limit": _limit(facts),
        "max_rows": config.max_batch_size,
        **_generation(facts),
    }


def _limit(facts: TextModelFacts) -> int | None:
    """Return the maximum number of tokens in the prompt and the generated text together, or `None` if there is no limit.

    With LongRoPE, the limit is the original training length. If one row were longer, the rotary angles would change for all rows of the
    batch, and the text of a row would depend on the other rows.
    """
    sizes = facts.artifact.components[0].max_sizes
    limit = sizes.get("total", sizes.get("sequence"))
    short = length_of_short_texts(facts.config.get_text_config(decoder=True))
    if short is None or (limit is not None and limit <= short):
        return limit
    logger.warning(
        "The deployed model stops at %d tokens (prompt and generated text together), although the model supports %s. In longer texts, "
        "LongRoPE changes its angles for all rows of a batch. Use accel.pipeline for longer texts.",
        short,
        limit,
    )
    return short


def _generation(facts: TextModelFacts) -> dict[str, Any]:
    """Return the ids of the end tokens, and the default options from the model's generation config."""
    config = open_generation_config(facts.artifact.path, facts.config)
    fields = {name: value for name, value in config.to_diff_dict().items() if not name.startswith(("_", "output_"))}
    off = {name for name, values in _OFF.items() if fields.get(name) in values}
    off |= set(_OF_BEAMS) if fields.get("num_beams", 1) == 1 else set()
    unsupported = sorted(set(fields) - set(_FOLLOWED) - _HARMLESS - off)
    if unsupported:
        raise ConfigError(
            f"The model's generation_config.json sets {', '.join(unsupported)}, which text generation in Triton does not support.",
            fix=f"remove {', '.join(unsupported)} from generation_config.json, then run `accel validate ARTIFACT --accept-files`, which "
            "records the changed file.",
        )
    end = config.eos_token_id
    defaults = {name: fields[name] for name in _FOLLOWED if fields.get(name) is not None}
    return {
        "end": [] if end is None else [end] if isinstance(end, int) else list(end),
        "defaults": {"max_new_tokens": _MAX_NEW_TOKENS, "top_k": _TOP_K, **defaults},
    }
