"""Instruction sets of this processor that decide which kernels run, and how backends quantize for them."""

from __future__ import annotations

import functools
import platform
from collections.abc import Sequence
from pathlib import Path

# In rising order of what they give to matrix products.
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
    """The relevant flags that this CPU has; the architecture's name where the system does not tell flags."""
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
    """Whether 8-bit products are added in pairs in 16 bits, which saturates at the full range of signed weights: x86
    without VNNI or AMX.
    """
    return "avx2" in flags and not {"avx_vnni", "avx512_vnni", "amx_int8"} & set(flags)
