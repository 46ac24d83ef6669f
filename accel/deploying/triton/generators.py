"""What the loop that generates text inside Triton is told about a decoder, and which decoders it can run."""

from __future__ import annotations

from typing import Any

from ...errors import ConfigError, TaskError
from .services import Facts
from .settings import TritonConfig

_TAKES = ("input_ids", "attention_mask", "position_ids", "logits_to_keep")
_FOLLOWED = ("max_new_tokens", "do_sample", "temperature", "top_k", "top_p", "repetition_penalty")
_MAX_NEW_TOKENS = 128
# Fields of a generation config that change no text that the loop makes.
_HARMLESS = frozenset(
    ("transformers_version", "bos_token_id", "eos_token_id", "pad_token_id", "decoder_start_token_id", "use_cache",
     "max_length", "return_dict_in_generate", "cache_implementation", "trust_remote_code", "num_return_sequences")
)  # fmt: skip


def generator_settings(facts: Facts, config: TritonConfig) -> dict[str, Any]:
    """Settings of the loop.

    Raises:
        TaskError: A decoder that keeps something else than keys and values, or takes something else than tokens.
        ConfigError: Settings of the deployment, or of the model's generation, that the loop does not have.
    """
    artifact = facts.artifact
    if artifact.format != "onnx" or len(artifact.components) != 1:
        raise TaskError(
            f"The loop runs decoders that are one ONNX graph; {artifact.path} is {artifact.format} of "
            f"{len(artifact.components)} graph(s).",
            fix="export the model to ONNX: accel export MODEL OUT.",
        )
    if config.backend not in ("auto", "python") or config.device != "cpu":
        raise ConfigError("Decoders run in Triton's Python backend, on the CPU.", fix="leave backend and device out.")
    unheard = [n for n in ("max_length", "buckets", "accelerator", "parameters") if getattr(config, n)]
    if unheard:
        raise ConfigError(f"The loop has no {', '.join(unheard)}.", fix=f"leave {unheard[0]} out.")
    component = artifact.components[0]
    pasts = [spec for spec in component.inputs if spec.pair is not None]
    others = [spec.name for spec in component.inputs if spec.pair is None and spec.name not in _TAKES]
    grow = all(len(s.shape) == 4 and s.shape[0] == "batch" and isinstance(s.shape[2], str) for s in pasts)
    fixed = all(isinstance(s.shape[1], int) and isinstance(s.shape[3], int) for s in pasts if len(s.shape) == 4)
    if others or not pasts or not (grow and fixed) or "attention_mask" not in {s.name for s in component.inputs}:
        what = f"takes {', '.join(others)}" if others else "keeps no keys and values by token, behind a mask"
        raise TaskError(
            f"The decoder of {artifact.path} {what}, which the loop inside Triton does not follow.",
            fix="use a decoder with plain attention, or run it with accel.pipeline.",
        )
    if any(spec.dtype == "bfloat16" for spec in pasts):
        raise TaskError("NumPy has no bfloat16, which the caches are.", fix="deploy a float32 or float16 artifact.")
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
        "limit": component.max_sizes.get("total", component.max_sizes.get("sequence")),
        "max_rows": config.max_batch_size,
        **_generation(facts),
    }


def _generation(facts: Facts) -> dict[str, Any]:
    """Which tokens end a text, and how the model wants to be asked."""
    import transformers

    try:
        config = transformers.GenerationConfig.from_pretrained(facts.artifact.path, local_files_only=True)
    except OSError:
        config = transformers.GenerationConfig.from_model_config(facts.config)
    said = {name: value for name, value in config.to_diff_dict().items() if not name.startswith(("_", "output_"))}
    unheard = sorted(set(said) - set(_FOLLOWED) - _HARMLESS)
    if unheard:
        raise ConfigError(
            f"The model's generation_config.json asks for {', '.join(unheard)}, which the loop inside Triton does not follow.",
            fix="take them out of the file, and record that with: accel validate ARTIFACT --accept-files.",
        )
    end = config.eos_token_id
    defaults = {name: said[name] for name in _FOLLOWED if said.get(name) is not None}
    return {
        "end": [] if end is None else [end] if isinstance(end, int) else list(end),
        "defaults": {"max_new_tokens": _MAX_NEW_TOKENS, **defaults},
    }
