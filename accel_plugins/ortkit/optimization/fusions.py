"""The named optimizations: which kernels want them, which level has them, in which order they run."""

from __future__ import annotations

from dataclasses import dataclass

from accel.config import OptimizeConfig
from accel.errors import ConfigError, did_you_mean

from ..graph.rewrites import Made
from . import activations, attention, decoder_layers, embeddings, gpu_attention, gpu_layers, rotary, simplifications
from . import pooled_token as one_token

_LEVELS = ("O1", "O2", "O3", "O4")
_CPU, _GPU, _ALL = ("cpu",), ("gpu",), ("cpu", "gpu")


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """Who will run a graph, as far as the choice of fusions depends on it.

    Attributes:
        kernels: Whose kernels: a word of `Fusion.targets`.
        own_operators: Whether ONNX Runtime's own operators may be in the graph; without them it is one of ONNX's alone, for
            any runtime.
        half_dtypes: The half precisions that it computes in.
        rewrites_quantized: Whether the fusions still find what they look for in a quantized graph.
    """

    kernels: str
    own_operators: bool = True
    half_dtypes: tuple[str, ...] = ("float16",)
    rewrites_quantized: bool = False


CPU = Target(kernels="cpu", rewrites_quantized=True)
"""ONNX Runtime's CPU provider."""
CUDA = Target(kernels="gpu", half_dtypes=("float16", "bfloat16"))
"""ONNX Runtime's CUDA provider. The graphs run on the CPU provider too, where they can be checked without a GPU."""
TENSORRT = Target(kernels="gpu", own_operators=False, half_dtypes=("float16", "bfloat16"))
"""TensorRT, and whatever else takes ONNX's operators only."""


@dataclass(frozen=True, slots=True)
class Fusion:
    """One optimization.

    Attributes:
        name: The word for `OptimizeConfig.enable` and `disable`. Where it stands twice in the table, the rows are for
            different targets.
        level: The lowest level that has it; empty when it must be enabled by name.
        summary: What it does.
        rewrite: Makes the pass. `None` for changes of precision, which run last and need data.
        targets: Whose kernels want it: `cpu`, `gpu`.
        own_operators: Whether it writes operators that are ONNX Runtime's own (`com.microsoft`, and RMSNorm under its name).
        replaced_by: The fusion that takes its place when that one is enabled on a target that has it.
    """

    name: str
    level: str
    summary: str
    rewrite: Made | None
    targets: tuple[str, ...] = _ALL
    own_operators: bool = False
    replaced_by: str = ""


# One order for all targets. CPU attention comes behind the rotary positions that it would hide; a GPU's operators take the
# mask itself, which is found before the embeddings are fused. Graphs for GPUs are freed of duplicates first, so that queries,
# keys and values are seen to read one and the same value.
FUSIONS = (
    Fusion("constant-folding", "O1", "computes what does not depend on inputs", simplifications.fold_constants),
    Fusion("key-transpose", "O1", "one Transpose for a key, not five operators", simplifications.fix_key_transposes),
    Fusion("reshape", "O1", "constant shapes where sizes are only copied", simplifications.fix_reshapes),
    Fusion("certain-masks", "O1", "drops masks that never mask", simplifications.drop_certain_conditions),
    Fusion("duplicates", "O1", "computes once what is computed alike", simplifications.merge_duplicates, _GPU),
    Fusion("layer-norm", "O2", "spelled-out LayerNorm as one operator", activations.fuse_layer_norms, _CPU),
    Fusion("gelu", "O2", "spelled-out exact GELU as one operator", activations.fuse_gelus, _CPU, True),
    Fusion("single-rows", "O1", "adds one-row embedding tables to others", embeddings.fold_single_rows),
    Fusion("token-positions", "O1", "counts tokens for their positions in one type", embeddings.count_tokens, _GPU),
    Fusion("attention", "O2", "Attention or MultiHeadAttention", gpu_attention.fuse_attention, _GPU, True),
    # The operator has no bfloat16 (ONNX Runtime 1.31).
    Fusion(
        "embed-layer-norm", "O2", "embedding lookups and their LayerNorm as one operator", embeddings.fuse_embeddings,
        _ALL, True, "bfloat16",
    ),
    Fusion("skip-layer-norm", "O2", "SkipLayerNormalization", gpu_layers.fuse_skip_norms, _GPU, True),
    Fusion("rms-norm", "O2", "spelled-out RMSNorm as one operator", activations.fuse_rms_norms, _ALL, True),
    Fusion("skip-rms-norm", "O2", "SkipSimplifiedLayerNormalization", decoder_layers.fuse_skip_rms_norms, _ALL, True),
    Fusion("silu", "O2", "x * sigmoid(x) as one operator", activations.fuse_silus, _ALL, True),
    Fusion("rotary", "O2", "rotary positions as one operator", rotary.fuse_rotary, _ALL, True),
    Fusion("attention", "O2", "whole attentions as MultiHeadAttention", attention.fuse_attention, _CPU, True),
    Fusion("masked-rows", "O2", "zeroes fully masked rows by a product", attention.multiply_masked_rows, _CPU),
    Fusion("attention-scores", "O2", "scale and transpose inside query times key", attention.fuse_scores, _CPU, True),
    Fusion("merged-products", "O2", "query, key and value in one product", decoder_layers.merge_products),
    Fusion("head-order", "O2", "transposes of heads that undo each other", decoder_layers.cancel_transposes),
    Fusion("bias-gelu", "O2", "BiasGelu or FastGelu, as the model has it", gpu_layers.fuse_bias_gelus, _GPU, True),
    Fusion("one-token", "O2", "computes only the token that a head reads", one_token.compute_pooled_token),
    Fusion("fast-gelu", "O3", "GELU by its tanh form", activations.approximate_gelus, _CPU, True),
    # By name only: no faster than the exact form (roberta-base 16x384 in float16 on an H200: 2.85 against 2.81 ms).
    Fusion("fast-gelu", "", "GELU by its tanh form", gpu_layers.approximate_gelus, _GPU, True),
    Fusion("duplicates", "O1", "computes once what is computed alike", simplifications.merge_duplicates, _CPU),
    Fusion("merge", "O1", "computes once what is computed alike, again", simplifications.merge_duplicates, _GPU),
    Fusion("float16", "O4", "half precision, except where values leave its range", None, replaced_by="bfloat16"),
    Fusion("bfloat16", "", "bfloat16 precision, by name only", None),
)  # fmt: skip


def fusions_for(target: Target) -> list[Fusion]:
    """All that a target can have, in the order in which they run."""
    return [f for f in FUSIONS if target.kernels in f.targets and (target.own_operators or not f.own_operators)]


def chosen_fusions(config: OptimizeConfig, target: Target = CPU) -> list[Fusion]:
    """A level's fusions without the disabled and with the enabled ones, in the order in which they run.

    Args:
        config: The level and the changes to it.
        target: Who will run the graph.

    Raises:
        ConfigError: A name that is no fusion of the target, or is both enabled and disabled.
    """
    fusions = fusions_for(target)
    known = [fusion.name for fusion in fusions]
    for name in (*config.enable, *config.disable):
        if name not in known:
            raise ConfigError(
                f"There is no fusion {name!r}.{did_you_mean(name, known)}", fix=f"use one of {', '.join(known)}."
            )
    both = set(config.enable) & set(config.disable)
    if both:
        raise ConfigError(f"{', '.join(sorted(both))} is both enabled and disabled.", fix="leave one of them out.")
    levels = _LEVELS[: _LEVELS.index(config.level) + 1]
    instead = set(config.enable) & set(target.half_dtypes)
    return [
        fusion
        for fusion in fusions
        if (fusion.level in levels or fusion.name in config.enable)
        and fusion.name not in config.disable
        and fusion.replaced_by not in instead
    ]
