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
    """Return whether int8 kernels add pairs of products in 16-bit integers. This is the case on x86 CPUs without VNNI and AMX.

    The 16-bit sums can saturate if the weights use the full range of int8.
    """
    return "avx2" in flags and not {"avx_vnni", "avx512_vnni", "amx_int8"} & set(flags)
