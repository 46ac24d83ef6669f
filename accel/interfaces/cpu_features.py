"""CPU instruction sets that decide which kernels run and how backends quantize."""

from __future__ import annotations

import functools
import platform
from collections.abc import Sequence
from pathlib import Path

# Ordered by their benefit for matrix products, lowest first.
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
    """Return the flags in `RELEVANT` that this CPU has. Return the architecture's name if the system lists no flags."""
    try:
        text = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return (platform.machine(),)
    words: set[str] = set()
    for line in text.splitlines():
        key, _, value = line.partition(":")
        if key.strip().lower() in ("flags", "features"):
            words.update(value.split())
            break
    return tuple(flag for flag in RELEVANT if flag in words) or (platform.machine(),)


def adds_in_16_bits(flags: Sequence[str]) -> bool:
    """Return whether kernels add pairs of 8-bit products in 16 bits: on x86 without VNNI or AMX.

    Such additions saturate if signed weights use their full range.
    """
    return "avx2" in flags and not {"avx_vnni", "avx512_vnni", "amx_int8"} & set(flags)
