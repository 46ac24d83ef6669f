"""Data classes for compiled forms (the compiled code for one set of input sizes) and for the plans of calls."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

from .packing import Tokens
from .sizes import CallSizes


class CompilationPlan(NamedTuple):
    """Plan of how to compute calls with certain input names, types and sizes.

    Attributes:
        why: Reason why these calls run without compiled code; an empty string if they run compiled code.
        have: Sizes of the call.
        kind: Number that identifies the key of the compiled code. The key contains input names, types and fixed shapes,
            but not the padded sizes.
        want: Sizes to which the call is padded.
    """

    why: str
    have: CallSizes
    kind: int
    want: CallSizes


@dataclass(slots=True)
class CompiledForm:
    """Compiled code for calls with the same input names and data types and one size, with its measurements.

    Attributes:
        name: Name of the form in messages.
        sizes: Sizes that calls are padded to.
        call: The compiled code, or `None` if these calls run the original model.
        why: Reason why these calls run the original model; an empty string if they run compiled code.
        compile_s: Time of compilation and the first call, in seconds.
        difference: Largest difference from the original model's output, as a fraction of the largest value.
        eager_ms: Fastest call of the original model, in milliseconds.
        ms: Fastest call of the compiled code, with padding and cutting, in milliseconds.
        checked: Kinds of padding for which the outputs were compared with the original model, each as (batch is padded,
            length is padded).
        cuts: For each output tensor, the padded axes with "batch" or "length", the name of the size after the padding
            is removed.
        replayed: Whether the outputs are in the memory of a CUDA graph, which the next call overwrites.
        tokens: Number of tokens that the layers compute after the padding is removed. "all" if the batch contains no
            padding; `None` if the layers also compute the padding.
        attends: Whether the attention functions of packing.py are used.
        fuses: Whether matrix products are joined (see matmul_fusion.py).
    """

    name: str
    sizes: CallSizes
    call: Any = None
    why: str = ""
    compile_s: float = 0.0
    difference: float = 0.0
    eager_ms: float | None = None
    ms: float | None = None
    checked: set[tuple[bool, bool]] = field(default_factory=set)
    cuts: list[dict[int, str]] = field(default_factory=list)
    replayed: bool = False
    tokens: Tokens = None
    attends: bool = False
    fuses: bool = False

    @property
    def state(self) -> Literal["compiled", "eager"]:
        """Return "compiled" if compiled code is used for these calls, "eager" if the original model is used."""
        return "compiled" if self.call is not None else "eager"
