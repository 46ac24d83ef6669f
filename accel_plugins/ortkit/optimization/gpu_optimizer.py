"""Optimization of ONNX artifacts for GPUs: fused attention, embeddings, normalisations and activations; float16."""

from __future__ import annotations

import logging
from collections import Counter
from pathlib import Path

from accel.artifact import Artifact, Step, tool_versions
from accel.capture import quiet
from accel.config import OptimizeConfig
from accel.errors import ConfigError, OptimizeError, did_you_mean

from ..graph.editing import load_graphs, write_artifact
from . import activations, embeddings, gpu_attention, gpu_decoders, gpu_layers, half, rotary, simplifications
from .fusions import Fusion

logger = logging.getLogger(__name__)

_LEVELS = ("O1", "O2", "O3", "O4")

GPU_FUSIONS = (
    Fusion("constant-folding", "O1", "computes what does not depend on inputs", simplifications.fold_constants),
    Fusion("key-transpose", "O1", "one Transpose for a key instead of five", simplifications.fix_key_transposes),
    Fusion("reshape", "O1", "constant shapes where sizes are only copied", simplifications.fix_reshapes),
    Fusion("certain-masks", "O1", "drops masks that never change", simplifications.drop_certain_conditions),
    Fusion("duplicates", "O1", "computes once what is computed alike", simplifications.merge_duplicates),
    Fusion("single-rows", "O1", "adds one-row embedding tables to others", embeddings.fold_single_rows),
    Fusion("token-positions", "O1", "counts tokens for their positions in one type", embeddings.count_tokens),
    Fusion("attention", "O2", "Attention or MultiHeadAttention", gpu_attention.fuse_attention),
    Fusion("embed-layer-norm", "O2", "EmbedLayerNormalization", embeddings.fuse_embeddings),
    Fusion("skip-layer-norm", "O2", "SkipLayerNormalization", gpu_layers.fuse_skip_norms),
    Fusion("rms-norm", "O2", "spelled-out RMSNorm as one operator", activations.fuse_rms_norms),
    Fusion("skip-rms-norm", "O2", "SkipSimplifiedLayerNormalization", gpu_decoders.fuse_skip_rms_norms),
    Fusion("silu", "O2", "x * sigmoid(x) as one operator", activations.fuse_silus),
    Fusion("rotary", "O2", "rotary positions as one operator", rotary.fuse_rotary),
    Fusion("merged-products", "O2", "a decoder's query, key and value in one product", gpu_decoders.merge_products),
    Fusion("head-order", "O2", "transposes of heads that undo each other", gpu_decoders.cancel_transposes),
    Fusion("bias-gelu", "O2", "BiasGelu or FastGelu, as the model has it", gpu_layers.fuse_bias_gelus),
    Fusion("one-token", "O2", "computes only the token that a head reads", gpu_layers.compute_one_token),
    # By name only: no faster than the exact form (roberta-base 16x384 in float16 on an H200: 2.85 against 2.81 ms).
    Fusion("fast-gelu", "", "the tanh form of Gelu for the exact one", gpu_layers.approximate_gelus),
    Fusion("merge", "O1", "computes once what is computed alike, again", simplifications.merge_duplicates),
    Fusion("float16", "O4", "float16 weights and operators", half.to_float16),
    Fusion("bfloat16", "", "bfloat16 weights and operators", half.to_bfloat16),
)


ONNX_RUNTIME_ONLY = (
    "attention",
    "embed-layer-norm",
    "skip-layer-norm",
    "rms-norm",
    "skip-rms-norm",
    "silu",
    "rotary",
    "bias-gelu",
    "fast-gelu",
)
"""Fusions into operators of ONNX Runtime's own."""


def chosen_gpu_fusions(config: OptimizeConfig, *, portable: bool = False) -> list[Fusion]:
    """A level's fusions without the disabled and with the enabled ones, in the order in which they run.

    Args:
        config: The level and the changes to it.
        portable: Whether the graph must stay one of ONNX's own operators.

    Raises:
        ConfigError: A name that is no fusion, or is both enabled and disabled.
    """
    fusions = [fusion for fusion in GPU_FUSIONS if not (portable and fusion.name in ONNX_RUNTIME_ONLY)]
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
    # ONNX Runtime's EmbedLayerNormalization has no bfloat16 (1.31).
    without = {*config.disable, *(("embed-layer-norm", "float16") if "bfloat16" in config.enable else ())}
    return [f for f in fusions if (f.level in levels or f.name in config.enable) and f.name not in without]


class GpuOptimizer:
    """Rewrites graphs into ones that ONNX Runtime's CUDA kernels compute faster.

    The result runs on the CPU provider too, in float32, where it can be checked without a GPU.

    Args:
        backend: Name of the backend that owns it, for the manifest.
        portable: Whether the graph must stay one of ONNX's own operators, for other runtimes than ONNX Runtime.
    """

    def __init__(self, backend: str, *, portable: bool = False) -> None:
        self._backend = backend
        self._portable = portable

    def optimize(self, artifact: Artifact, *, config: OptimizeConfig, out: Path) -> Artifact:
        """Write the optimized graphs; see `accel.backends.interfaces.Optimizer`. Takes seconds.

        Raises:
            ConfigError: A fusion that does not exist.
            OptimizeError: A quantized artifact.
        """
        if artifact.manifest.quantization is not None:
            raise OptimizeError(
                f"{artifact.path} is quantized; its graph is no longer the one that fusions look for.",
                fix="optimize first, then quantize.",
            )
        fusions = chosen_gpu_fusions(config, portable=self._portable)
        models = load_graphs(artifact)
        counts: Counter[str] = Counter()
        before = after = 0
        for model in models.values():
            before += simplifications.count_nodes(model)
            with quiet():
                for fusion in fusions:
                    assert fusion.apply is not None
                    counts[fusion.name] += fusion.apply(model)
            after += simplifications.count_nodes(model)
        done = ", ".join(f"{name} {count}" for name, count in counts.items() if count) or "nothing fused"
        logger.info("%s: %d nodes became %d (%s)", config.level, before, after, done)
        dtype = next((name for name in ("float16", "bfloat16") if counts[name]), None)
        step = Step(
            stage="optimize",
            backend=self._backend,
            config=config.to_dict(),
            versions=tool_versions("onnx_ir", "onnxscript", "onnxruntime", "onnxruntime-gpu"),
            report={"fused": dict(counts), "nodes": {"before": before, "after": after}},
        )
        return write_artifact(artifact, models, out, step=step, dtype=dtype)
