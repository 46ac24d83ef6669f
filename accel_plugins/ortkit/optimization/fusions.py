"""Table of optimizations in the order in which they run: name, level and the kinds of kernels that benefit."""

from __future__ import annotations

from dataclasses import dataclass

from accel.config import OptimizeConfig
from accel.errors import ConfigError, did_you_mean

from ..graph.rewrites import Made
from . import attention, decoder_layers, embeddings, gelu, norms, rotary, simplifications
from . import pooled_token as one_token

_LEVELS = ("O1", "O2", "O3", "O4")
_CPU, _GPU, _ALL = ("cpu",), ("gpu",), ("cpu", "gpu")


@dataclass(frozen=True, slots=True, kw_only=True)
class FusionTarget:
    """The kind of kernels that will run a graph, and the properties of these kernels that decide which fusions apply.

    Attributes:
        kernels: The kind of kernels, as in `Fusion.targets`.
        own_operators: Whether the graph may contain ONNX Runtime's own operators. If not, it contains only standard
            ONNX operators, for any runtime.
        half_dtypes: The half-precision data types that the kernels support.
        rewrites_quantized: Whether fusions are also applied to quantized graphs.
    """

    kernels: str
    own_operators: bool = True
    half_dtypes: tuple[str, ...] = ("float16",)
    rewrites_quantized: bool = False


CPU = FusionTarget(kernels="cpu", rewrites_quantized=True)
"""Target for ONNX Runtime's CPU provider."""
CUDA = FusionTarget(kernels="gpu", half_dtypes=("float16", "bfloat16"))
"""Target for ONNX Runtime's CUDA provider. Graphs for this target also run on the CPU provider, so tests need no GPU."""
TENSORRT = FusionTarget(kernels="gpu", own_operators=False, half_dtypes=("float16", "bfloat16"))
"""Target for TensorRT and other runtimes that support only standard ONNX operators."""


@dataclass(frozen=True, slots=True)
class Fusion:
    """One optimization of the table.

    Attributes:
        name: The name in `OptimizeConfig.enable` and `disable`. Two entries may share a name if their targets differ.
        level: The lowest level that includes the optimization; empty if it must be enabled by name.
        summary: A description in one line.
        rewrite: The function that creates the pass. `None` for conversions to half precision, which run last and need
            data.
        targets: The kernels that benefit: `cpu`, `gpu`.
        own_operators: Whether the optimization adds ONNX Runtime's own operators (`com.microsoft`, and its RMSNorm).
        replaced_by: The name of the optimization that replaces this one if it is enabled and the target supports it.
    """

    name: str
    level: str
    summary: str
    rewrite: Made | None
    targets: tuple[str, ...] = _ALL
    own_operators: bool = False
    replaced_by: str = ""


# Fusions run in the order of this table. On CPUs, attention is fused after rotary embeddings, because the rotary fusion
# finds no pattern inside fused attention. On GPUs, attention is fused before embeddings, because the attention fusion
# must still find the padding mask in the graph. On GPUs, duplicates are removed first, so that the attention fusion
# recognizes that query, key and value are computed from the same value.
FUSIONS = (
    Fusion("constant-folding", "O1", "compute values that do not depend on inputs once", simplifications.fold_constants),
    Fusion("key-transpose", "O1", "transpose attention keys with one operator", simplifications.fix_key_transposes),
    Fusion("reshape", "O1", "give Reshape operators constant shapes", simplifications.fix_reshapes),
    Fusion("certain-masks", "O1", "remove masks that never hide a position", simplifications.drop_certain_conditions),
    Fusion("duplicates", "O1", "compute equal values once", simplifications.merge_duplicates, _GPU),
    Fusion("attention", "O2", "fuse attention into Attention or MultiHeadAttention", attention.fuse_attention, _GPU, True),
    # `EmbedLayerNormalization` does not support bfloat16 (ONNX Runtime 1.31).
    Fusion(
        "embed-layer-norm", "O2", "fuse embedding lookups and their LayerNorm into EmbedLayerNormalization", embeddings.fuse_embeddings,
        _GPU, True, "bfloat16",
    ),
    Fusion("skip-layer-norm", "O2", "fuse Add and LayerNorm into SkipLayerNormalization", norms.fuse_skip_norms, _GPU, True),
    Fusion("rms-norm", "O2", "fuse the operators of an RMSNorm into one operator", norms.fuse_rms_norms, _ALL, True),
    Fusion(
        "skip-rms-norm", "O2", "fuse Add and RMSNorm into SkipSimplifiedLayerNormalization", norms.fuse_skip_rms_norms, _ALL, True,
    ),
    Fusion("rotary", "O2", "fuse rotary position embeddings into RotaryEmbedding", rotary.fuse_rotary, _ALL, True),
    Fusion("attention", "O2", "fuse attention into MultiHeadAttention", attention.fuse_cpu_attention, _CPU, True),
    Fusion("merged-products", "O2", "compute linear layers that have the same input in one product", decoder_layers.merge_products),
    Fusion("head-order", "O2", "remove pairs of transposes that cancel each other", decoder_layers.cancel_transposes),
    Fusion("bias-gelu", "O2", "fuse a bias and GELU into BiasGelu or FastGelu", gelu.fuse_bias_gelus, _GPU, True),
    Fusion("one-token", "O2", "compute only the token that the model's head reads", one_token.compute_pooled_token),
    Fusion("fast-gelu", "O3", "replace exact GELU by its tanh approximation", gelu.approximate_gelus, _CPU, True),
    # On GPUs, this fusion must be enabled by name, because the approximation is not faster there: roberta-base with
    # batches of 16 x 384 tokens in float16 takes 2.85 ms on an H200, and 2.81 ms without the fusion.
    Fusion("fast-gelu", "", "replace exact GELU by its tanh approximation", gelu.approximate_gelus, _GPU, True),
    Fusion("duplicates", "O1", "compute equal values once", simplifications.merge_duplicates, _CPU),
    Fusion("merge", "O1", "compute equal values once, after the other fusions", simplifications.merge_duplicates, _GPU),
    Fusion("float16", "O4", "convert to float16, except operators whose values may overflow", None, replaced_by="bfloat16"),
    Fusion("bfloat16", "", "convert to bfloat16; must be enabled by name", None),
)  # fmt: skip


def fusions_for(target: FusionTarget) -> list[Fusion]:
    """Return all fusions that apply to a target, in the order in which they run."""
    return [f for f in FUSIONS if target.kernels in f.targets and (target.own_operators or not f.own_operators)]


def chosen_fusions(config: OptimizeConfig, target: FusionTarget = CPU) -> list[Fusion]:
    """Return the fusions of a level, plus the enabled fusions, minus the disabled fusions, in the order in which they run.

    Args:
        config: The level, and the names to enable and disable.
        target: The kernels that will run the graph.

    Raises:
        ConfigError: A name is not a fusion of the target, or is both enabled and disabled.
    """
    fusions = fusions_for(target)
    names = [fusion.name for fusion in fusions]
    for name in (*config.enable, *config.disable):
        if name not in names:
            raise ConfigError(
                f"There is no fusion {name!r} for this backend.{did_you_mean(name, names)}",
                fix=f"use one of {', '.join(names)}.",
            )
    contradicting = set(config.enable) & set(config.disable)
    if contradicting:
        raise ConfigError(
            f"{', '.join(sorted(contradicting))} is in both enable=... and disable=....",
            fix="remove the name from enable=... or from disable=....",
        )
    levels = _LEVELS[: _LEVELS.index(config.level) + 1]
    half_types = set(config.enable) & set(target.half_dtypes)
    return [
        fusion
        for fusion in fusions
        if (fusion.level in levels or fusion.name in config.enable)
        and fusion.name not in config.disable
        and fusion.replaced_by not in half_types
    ]
