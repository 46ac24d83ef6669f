"""The named optimizations, and which level has them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import onnx_ir as ir

from accel.config import OptimizeConfig
from accel.errors import ConfigError, did_you_mean

from . import activations, attention, embeddings, rotary, simplifications

_LEVELS = ("O1", "O2", "O3", "O4")


@dataclass(frozen=True, slots=True)
class Fusion:
    """One optimization.

    Attributes:
        name: The word for `OptimizeConfig.enable` and `disable`.
        level: The lowest level that has it; empty when it must be enabled by name.
        summary: What it does.
        apply: Rewrites a graph in place; returns how many places it changed. `None` for changes of precision, which
            run last and need data.
    """

    name: str
    level: str
    summary: str
    apply: Callable[[ir.Model], int] | None


FUSIONS = (
    Fusion("constant-folding", "O1", "computes what does not depend on inputs", simplifications.fold_constants),
    Fusion("key-transpose", "O1", "one Transpose for a key, not five operators", simplifications.fix_key_transposes),
    Fusion("reshape", "O1", "constant shapes where sizes are only copied", simplifications.fix_reshapes),
    Fusion("certain-masks", "O1", "drops masks that never mask", simplifications.drop_certain_conditions),
    Fusion("layer-norm", "O2", "spelled-out LayerNorm as one operator", activations.fuse_layer_norms),
    Fusion("rms-norm", "O2", "spelled-out RMSNorm as one operator", activations.fuse_rms_norms),
    Fusion("gelu", "O2", "spelled-out exact GELU as one operator", activations.fuse_gelus),
    Fusion("silu", "O2", "x * sigmoid(x) as one operator", activations.fuse_silus),
    Fusion("single-rows", "O1", "adds one-row embedding tables to others", embeddings.fold_single_rows),
    Fusion(
        "embed-layer-norm", "O2", "embedding lookups and their LayerNorm as one operator", embeddings.fuse_embeddings
    ),
    Fusion("rotary", "O2", "rotary positions as one operator", rotary.fuse_rotary),
    Fusion("attention", "O2", "whole attentions as MultiHeadAttention", attention.fuse_attention),
    Fusion("masked-rows", "O2", "zeroes fully masked rows by a product", attention.multiply_masked_rows),
    Fusion("attention-scores", "O2", "scale and transpose inside query times key", attention.fuse_scores),
    Fusion("fast-gelu", "O3", "GELU by its tanh form", activations.approximate_gelus),
    Fusion("duplicates", "O1", "computes once what is computed alike", simplifications.merge_duplicates),
    Fusion("float16", "O4", "half precision, except where values leave its range", None),
    Fusion("bfloat16", "", "bfloat16 precision, by name only", None),
)


def chosen_fusions(config: OptimizeConfig) -> list[Fusion]:
    """A level's fusions without the disabled and with the enabled ones, in the order in which they run.

    Raises:
        ConfigError: A name that is no fusion, or is both enabled and disabled.
    """
    known = [fusion.name for fusion in FUSIONS]
    for name in (*config.enable, *config.disable):
        if name not in known:
            raise ConfigError(
                f"There is no fusion {name!r}.{did_you_mean(name, known)}", fix=f"use one of {', '.join(known)}."
            )
    both = set(config.enable) & set(config.disable)
    if both:
        raise ConfigError(f"{', '.join(sorted(both))} is both enabled and disabled.", fix="leave one of them out.")
    levels = _LEVELS[: _LEVELS.index(config.level) + 1]
    return [f for f in FUSIONS if (f.level in levels or f.name in config.enable) and f.name not in config.disable]
