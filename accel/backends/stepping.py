"""Single tokens behind a text: calls whose inputs differ from the last one's in known ways (`SteppingSession`)."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from .checks import StepCheck

if TYPE_CHECKING:
    import torch

    from ..artifact.manifest import Component
    from .interfaces import Feeds

_POSITIONS = "position_ids"


class SingleTokens:
    """Inputs of calls with one new token a row, written where the first of these calls had them: a runtime binds them once.

    Args:
        component: The decoder's graph.
        feeds: Its inputs of the last call, checked, contiguous, on the host, for which `fits` says yes.
        calls: How many come, at most.

    Attributes:
        feeds: The inputs by name, the mask as it was; each of the others stays the same memory.
        mask_name: The mask's name, or `None` where the graph takes none.
    """

    def __init__(self, component: Component, feeds: Feeds, calls: int) -> None:
        import torch

        check = StepCheck(component)
        self.mask_name = check.mask
        # What is written to is not the caller's.
        written = (check.tokens, _POSITIONS)
        self.feeds = {name: tensor.clone() if name in written else tensor for name, tensor in feeds.items()}
        self._tokens: Any = self.feeds[check.tokens].numpy()
        self._positions: Any = self.feeds[_POSITIONS].numpy() if _POSITIONS in feeds else None
        self._longest: torch.Tensor | None = None
        self._columns = 0
        if check.mask is not None:
            mask = feeds[check.mask]
            self._columns = mask.shape[1]
            self._longest = torch.cat([mask, mask.new_ones((len(mask), calls))], dim=1)

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
        vocabulary = logits.shape[2] if logits is not None and len(logits.shape) == 3 else None
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

    def write(self, tokens: torch.Tensor) -> torch.Tensor | None:
        """Put the next tokens `(batch, 1)` and their positions in; returns the mask `(batch, total)`, which has one column more."""
        self._tokens[:] = tokens.numpy()
        if self._positions is not None:
            self._positions += 1
        if self._longest is None:
            return None
        self._columns += 1
        return self._longest[:, : self._columns].contiguous()
