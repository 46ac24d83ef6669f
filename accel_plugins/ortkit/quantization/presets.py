"""Presets of 8-bit quantization for processors.

The choice depends on the processor's instructions. Processors with a dot product of unsigned activations and signed
weights (VNNI, AMX, ARM's i8mm) run this combination at full speed. x86 processors without such an instruction add
products in 16 bits. To prevent an overflow of the 16 bits, weights have only 7 bits on these processors. ARM's older
dot product requires signed activations and signed weights.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass

from accel.errors import ConfigError, did_you_mean

logger = logging.getLogger(__name__)

DYNAMIC, STATIC, WEIGHT_8, WEIGHT_4 = "dynamic-int8", "static-int8", "weight-int8", "weight-int4"
WEIGHT_ONLY = (WEIGHT_8, WEIGHT_4)
SCHEMES = (DYNAMIC, STATIC, WEIGHT_8, WEIGHT_4)


@dataclass(frozen=True, slots=True)
class Preset:
    """Quantization settings for a kind of processor.

    Attributes:
        name: The name that users pass.
        requires: CPU flags that the kernels need; empty for targets other than CPUs.
        why: The reason for the settings in one line; reports show the reason.
        activations: Data type of static activations, `uint8` or `int8`; dynamic activations are always `uint8`.
        reduce_range: Whether weights keep 7 bits.
        schemes: Schemes that support the preset.
    """

    name: str
    requires: tuple[str, ...]
    why: str
    activations: str = "uint8"
    reduce_range: bool = False
    schemes: tuple[str, ...] = SCHEMES


_SATURATES = "adds pairs of products in 16 bits, which can saturate, so weights keep 7 bits"
# Faster presets come first.
_PRESETS = (
    Preset("amx", ("amx_int8",), "AMX multiplies 8-bit tiles at full range: unsigned activations, signed weights"),
    Preset(
        "avx512_vnni",
        ("avx512_vnni",),
        "VNNI multiplies unsigned activations by signed weights into 32 bits without saturating",
    ),
    Preset("avx512", ("avx512f",), f"AVX-512 without VNNI {_SATURATES}", reduce_range=True),
    Preset("avx2", ("avx2",), f"AVX2 {_SATURATES}", reduce_range=True),
    Preset("arm64", ("asimd",), "ARM's dot product (SDOT) needs signed activations and signed weights", "int8"),
    Preset("ppc64le", ("ppc64le",), "POWER's MMA multiplies signed weights by unsigned activations at full range"),
    Preset(
        "tensorrt",
        (),
        "TensorRT reads Q/DQ pairs with signed, symmetric activations and weights",
        "int8",
        schemes=(STATIC,),
    ),
)
PRESETS = {preset.name: preset for preset in _PRESETS}


def choose_preset(name: str, flags: Sequence[str]) -> tuple[Preset, str]:
    """Return the preset with this name, and the reason for the choice.

    The name `auto` selects the fastest preset that the CPU flags allow. If the CPU flags lack instructions of another
    requested preset, log a warning and use the preset, because users often quantize a model for another machine.

    Raises:
        ConfigError: The preset does not exist.
    """
    if name == "auto":
        available = set(flags)
        # AVX-VNNI provides the instruction of AVX512-VNNI for 256-bit registers, so the same preset applies.
        if "avx_vnni" in available:
            available.add("avx512_vnni")
        best = next((preset for preset in _PRESETS if preset.requires and available.issuperset(preset.requires)), None)
        if best is None:
            return (
                PRESETS["avx2"],
                f"none of the CPU flags ({', '.join(flags) or 'no flags'}) has a preset: settings that are safe on any CPU",
            )
        return best, f"this CPU has {', '.join(best.requires)}: {best.why}"
    if name not in PRESETS:
        raise ConfigError(
            f"There is no quantization preset {name!r}.{did_you_mean(name, PRESETS)}",
            fix=f"use one of auto, {', '.join(PRESETS)}.",
        )
    preset = PRESETS[name]
    missing = [flag for flag in preset.requires if flag not in flags]
    if missing:
        logger.warning(
            "This CPU does not have the instructions %s, which the preset %s is made for. The quantized model will run on this "
            "machine with slower kernels. Use preset='auto' to quantize for this machine.",
            ", ".join(missing),
            name,
        )
    return preset, f"requested by the caller: {preset.why}"
