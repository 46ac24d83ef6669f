"""Compiled forms: the code for one set of input sizes, with its measurements."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

from .packing import Tokens
from .sizes import CallSizes


class CompilationPlan(NamedTuple):
    """Plan of how to compute calls with certain input names, types and sizes.

    Attributes:
        why: Reason to run these calls without compiled code; empty if compiled code is used.
        have: Sizes of the call.
        kind: Number that stands for the key of the compiled code without its sizes.
        want: Sizes that the call is padded to.
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
        why: Reason for running the original model.
        compile_s: Time of compilation and the first call, in seconds.
        difference: Largest difference from the original model's output, as a fraction of the largest value.
        eager_ms: Fastest call of the original model, in milliseconds.
        ms: Fastest call of the compiled code, with padding and cutting, in milliseconds.
        checked: Kinds of padding whose outputs were compared: (batch is padded, length is padded).
        cuts: Padded axes of each output tensor, by axis, with the name of the size to cut to.
        replayed: Whether outputs are in CUDA graph memory, which the next call overwrites.
        tokens: Number of tokens that the layers compute after the padding is removed; "all" if the batch has no padding to remove;
            `None` if the layers also compute the padding.
        attends: Whether the attention functions of packing.py are used.
        fuses: Whether matrix products are joined (see products.py).
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
