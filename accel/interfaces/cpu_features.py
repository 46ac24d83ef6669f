"""CPU instruction sets that decide which kernels run and how backends quantize."""

from __future__ import annotations

import functools
import platform
from collections.abc import Sequence
from pathlib import Path

# CPU flags that matter for matrix products, ordered from the smallest to the largest benefit.
RELEVANT = (
    "avx2",
    "avx_vnni",
    "avx512f",
    "avx512_vnni",
    "avx512_bf16",
    "amx_bf16",
    "amx_int8",
    "asimd",
    "asimddp",
    "i8mm",
    "bf16",
)


@functools.cache
def cpu_flags() -> tuple[str, ...]:
    """Return the flags in `RELEVANT` that this CPU has, or the name of the CPU architecture if the system lists no flags."""
    words = set(_first("flags", "features").split())
    return tuple(flag for flag in RELEVANT if flag in words) or (platform.machine(),)


@functools.cache
def processor_name() -> str:
    """Return the model name of this CPU, or the name of the CPU architecture if the system does not tell the model."""
    return _first("model name") or platform.processor() or platform.machine()


def _first(*keys: str) -> str:
    """Return the first value in `/proc/cpuinfo` with one of these keys in lower case, or an empty string."""
    try:
        text = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""
    for line in text.splitlines():
        key, _, value = line.partition(":")
        if key.strip().lower() in keys:
            return value.strip()
    return ""


def adds_in_16_bits(flags: Sequence[str]) -> bool:
    """Return whether int8 kernels add pairs of products in 16-bit integers. This is the case on x86 CPUs without VNNI and AMX.

    The 16-bit sums can saturate if the weights use the full range of int8.
    """
    return "avx2" in flags and not {"avx_vnni", "avx512_vnni", "amx_int8"} & set(flags)
