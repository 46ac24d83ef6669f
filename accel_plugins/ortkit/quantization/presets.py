"""Which 8-bit recipe suits which processor.

What decides is the kernel: processors with a dot-product instruction for unsigned activations times signed weights (VNNI,
AMX, ARM's i8mm) take that pair at full speed; x86 processors without one add 16-bit sums that saturate, so that weights
keep 7 bits; ARM's older dot product wants both signed.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass

from accel.errors import ConfigError, did_you_mean

logger = logging.getLogger(__name__)

DYNAMIC, STATIC, WEIGHT_8, WEIGHT_4 = "dynamic-int8", "static-int8", "weight-int8", "weight-int4"
SCHEMES = (DYNAMIC, STATIC, WEIGHT_8, WEIGHT_4)


@dataclass(frozen=True, slots=True, kw_only=True)
class Preset:
    """A recipe.

    Attributes:
        name: The word users pass.
        requires: CPU flags that its kernels need; empty for targets that are no CPU of this kind.
        activations: Type of static activations, `uint8` or `int8`; dynamic ones are always `uint8`.
        reduce_range: Whether weights keep 7 bits.
        per_channel: One scale for each output channel.
        schemes: What it can be used with.
        why: One line for reports.
    """

    name: str
    requires: tuple[str, ...]
    activations: str = "uint8"
    reduce_range: bool = False
    per_channel: bool = True
    schemes: tuple[str, ...] = SCHEMES
    why: str


PRESETS = {
    preset.name: preset
    for preset in (
        Preset(
            name="amx",
            requires=("amx_int8",),
            why="AMX multiplies 8-bit tiles at full range: unsigned activations, signed weights",
        ),
        Preset(
            name="avx512_vnni",
            requires=("avx512_vnni",),
            why="VNNI multiplies unsigned activations by signed weights into 32 bits without saturating",
        ),
        Preset(
            name="avx512",
            requires=("avx512f",),
            reduce_range=True,
            why="AVX-512 without VNNI adds pairs of products in 16 bits, which saturates: weights keep 7 bits",
        ),
        Preset(
            name="avx2",
            requires=("avx2",),
            reduce_range=True,
            why="AVX2 adds pairs of products in 16 bits, which saturates: weights keep 7 bits",
        ),
        Preset(
            name="arm64",
            requires=("asimd",),
            activations="int8",
            why="ARM's dot product (SDOT) wants signed activations and signed weights",
        ),
        Preset(
            name="ppc64le",
            requires=("ppc64le",),
            why="POWER's MMA multiplies signed weights by unsigned activations at full range",
        ),
        Preset(
            name="tensorrt",
            requires=(),
            activations="int8",
            schemes=(STATIC,),
            why="TensorRT reads Q/DQ pairs with signed, symmetric activations and weights",
        ),
    )
}
_BY_SPEED = ("amx", "avx512_vnni", "avx512", "avx2", "arm64", "ppc64le")


def choose_preset(name: str, flags: Sequence[str]) -> tuple[Preset, str]:
    """The preset for a name, and why; `auto` takes the best that the flags allow.

    A preset that these flags cannot run is warned about and kept: artifacts are often made for another machine.

    Raises:
        ConfigError: No preset has that name.
    """
    if name == "auto":
        have = set(flags)
        # AVX-VNNI is the same instruction on 256 bits.
        if "avx_vnni" in have:
            have.add("avx512_vnni")
        best = next((PRESETS[p] for p in _BY_SPEED if have.issuperset(PRESETS[p].requires)), None)
        if best is None:
            return PRESETS[
                "avx2"
            ], f"no known flag among {', '.join(flags) or 'none'}: the recipe that is safe anywhere"
        return best, f"this CPU has {', '.join(best.requires)}: {best.why}"
    if name not in PRESETS:
        raise ConfigError(
            f"There is no preset {name!r}.{did_you_mean(name, PRESETS)}",
            fix=f"use auto, {', '.join(PRESETS)}.",
        )
    preset = PRESETS[name]
    missing = [flag for flag in preset.requires if flag not in flags]
    if missing:
        logger.warning(
            "This CPU has no %s: the artifact for the preset %s will run here, with slower kernels. "
            "Use preset='auto' for this machine.",
            ", ".join(missing),
            name,
        )
    return preset, f"asked for: {preset.why}"
