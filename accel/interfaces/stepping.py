"""Single tokens behind a text: calls whose inputs differ from the last one's in known ways (`SteppingSession`)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from .session_contract import StepCheck

if TYPE_CHECKING:
    import torch

    from ..artifact.manifest import Component
    from .protocols import Feeds

_POSITIONS = "position_ids"
# Calls whose masks and positions are made together: a run goes through all weights, and behind it whatever is called is in no
# cache of the processor any more. A call of torch takes 40 microseconds there, and 2 behind another one.
_AHEAD = 64
_AHEAD_BYTES = 2**20


class SingleTokens:
    """Inputs of calls with one new token a row, written where the first of these calls had them: a runtime binds them once.

    Args:
        component: The decoder's graph.
        feeds: Its inputs of the last call, checked, contiguous, on the host, for which `fits` says yes.
        calls: How many come, at most.
        bound: Makes of a mask `(batch, total)` what the runtime binds; the memory stays until masks of later calls are made.

    Attributes:
        feeds: The inputs by name, the mask as it was; each of the others stays the same memory.
        mask_name: The mask's name, or `None` where the graph takes none.
    """

    def __init__(self, component: Component, feeds: Feeds, calls: int, bound: Callable[[torch.Tensor], Any]) -> None:
        import torch

        check = StepCheck(component)
        self.mask_name = check.mask
        # What is written to is not the caller's.
        written = (check.tokens, _POSITIONS)
        self.feeds = {name: tensor.clone() if name in written else tensor for name, tensor in feeds.items()}
        self._tokens: Any = self.feeds[check.tokens].numpy()[:, 0]
        self._positions: Any = self.feeds[_POSITIONS].numpy() if _POSITIONS in feeds else None
        self._left, self._bound = calls, bound
        self._longest: torch.Tensor | None = None
        self._columns = 0
        if check.mask is not None:
            mask = feeds[check.mask]
            self._columns = mask.shape[1]
            self._longest = torch.cat([mask, mask.new_ones((len(mask), calls))], dim=1)
        # Of the next calls: positions, the mask's memory and what is bound of it. They go together, too.
        self._coming: list[tuple[Any, torch.Tensor | None, Any]] = []
        self._next = 0

    @staticmethod
    def fits(component: Component, feeds: Feeds, calls: int, length: int) -> bool:
        """Whether nothing else than tokens, positions and the mask changes in so many calls, and nothing can come to lie outside of
        what the graph has: likeliest tokens are of its vocabulary.

        Args:
            component: The decoder's graph.
            feeds: Its inputs of the last call.
            calls: How many come, at most.
            length: Tokens that the state holds.
        """
        check = StepCheck(component)
        specs = {spec.name: spec for spec in component.inputs if spec.pair is None}
        tokens, positions = specs[check.tokens], specs.get(_POSITIONS)
        logits = next((spec for spec in component.outputs if spec.name == "logits"), None)
        of_tokens = logits is not None and len(logits.shape) == 3 and logits.dtype == "float32"
        vocabulary = logits.shape[2] if logits is not None and of_tokens else None
        limit = component.most_tokens
        others = [spec for name, spec in specs.items() if name not in (check.tokens, _POSITIONS)]
        return (
            feeds[check.tokens].shape[1:] == (1,)
            and not any("sequence" in spec.shape for spec in others)
            and isinstance(vocabulary, int)
            and (tokens.bounds is None or vocabulary <= tokens.bounds[1] + 1)
            and (not limit or length + calls <= limit)
            and (
                positions is None
                or positions.bounds is None
                or int(feeds[_POSITIONS].max()) + calls <= positions.bounds[1]
            )
        )

    def write(self, tokens: Sequence[int]) -> Any:
        """Put each row's next token and their positions in; returns what is bound of the mask, which has one column more."""
        if self._next == len(self._coming):
            self._prepare()
        positions, _, bound = self._coming[self._next]
        self._next += 1
        self._tokens[:] = tokens
        if positions is not None:
            self._positions[...] = positions
        return bound

    def _prepare(self) -> None:
        """Make what changes in the next calls."""
        count = min(_AHEAD, self._left)
        if self._longest is not None and len(self._longest) > 1:
            count = max(min(count, _AHEAD_BYTES // self._longest.nbytes), 1)
        coming = []
        for i in range(1, count + 1):
            mask = self._longest[:, : self._columns + i].contiguous() if self._longest is not None else None
            positions = self._positions + i if self._positions is not None else None
            coming.append((positions, mask, self._bound(mask) if mask is not None else None))
        self._coming, self._next = coming, 0
        self._columns += count
        self._left -= count
