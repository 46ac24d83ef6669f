"""What is known of the calls of one kind and size: how they are computed, and what was measured of it."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

from .packing import Tokens
from .sizes import Sizes


class Plan(NamedTuple):
    """How calls of some names, types and sizes are computed.

    Attributes:
        why: Why they run as the model is; empty where they do not.
        have: Their sizes.
        kind: A number for what compiled code depends on besides its sizes.
        want: The sizes that they are padded to.
    """

    why: str
    have: Sizes
    kind: int
    want: Sizes


@dataclass(slots=True)
class CompiledForm:
    """Calls of one kind and size.

    Attributes:
        name: For messages.
        sizes: What calls are padded to.
        call: The compiled code; `None` where such calls run as the model is.
        why: Why they do.
        compile_s: How long compiling took, with the first call.
        difference: Largest difference from the model as it was, as a share of the largest value.
        eager_ms: Fastest call of the model as it was, in milliseconds.
        ms: Fastest call of the compiled code, with padding and cutting.
        checked: Kinds of padding that were compared.
        cuts: For each tensor of the answer, which axes are cut.
        replayed: Whether an answer stays only until the next call: it is in memory of a CUDA graph.
        tokens: What layers compute of it.
        attends: Whether their attention is ours.
        fuses: Whether their products are joined.
    """

    name: str
    sizes: Sizes
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
        """What answers."""
        return "compiled" if self.call is not None else "eager"
