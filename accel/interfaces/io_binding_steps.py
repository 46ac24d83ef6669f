"""Fast decoding steps with one new token for each row.

A runtime binds the memory of the inputs only once for all steps, because only the tokens, the position ids and the mask change.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import numpy as np
    import torch

    from .protocols import Feeds
    from .session import BaseSession
    from .state import State

_POSITIONS = "position_ids"
# Masks and position ids of this number of calls are prepared together. Each run of the model reads all weights and evicts torch's code
# from the CPU cache. A torch call after a run takes 40 microseconds, but only 2 microseconds after another torch call.
_AHEAD = 64
_AHEAD_BYTES = 2**20


class BoundSteps(ABC):
    """Base class of `accel.interfaces.protocols.TokenStep` functions that reuse the input memory of the first step.

    A subclass for a runtime implements `bound` and `compute`.

    Args:
        session: The session of the decoder. It creates the error if a run fails.
        state: The state that the steps continue. It is changed in place.
        feeds: Inputs of the last call. They must be checked, contiguous and in host memory, and `fits` must return True for them.
        calls: Largest number of steps.

    Attributes:
        feeds: Inputs by name. The mask is the mask of the last call before the steps. All other inputs keep the same memory.
        mask_name: Name of the mask input, or `None` if the graph has none.
    """

    def __init__(self, session: BaseSession[Any], state: State, feeds: Feeds, calls: int) -> None:
        import torch

        check = state.check_step
        self._session = session
        self.mask_name = check.mask
        # The steps write to the tokens and positions. They use copies, because the original tensors belong to the caller.
        written = (check.tokens, _POSITIONS)
        self.feeds = {name: tensor.clone() if name in written else tensor for name, tensor in feeds.items()}
        self._tokens: Any = self.feeds[check.tokens].numpy()[:, 0]
        self._positions: Any = self.feeds[_POSITIONS].numpy() if _POSITIONS in feeds else None
        self._left = calls
        self._longest: torch.Tensor | None = None
        self._columns = 0
        if check.mask is not None:
            mask = feeds[check.mask]
            self._columns = mask.shape[1]
            self._longest = torch.cat([mask, mask.new_ones((len(mask), calls))], dim=1)
        # For each of the next calls: the position ids, the mask, and the runtime's binding of the mask.
        self._coming: list[tuple[Any, torch.Tensor | None, Any]] = []
        self._next = 0

    @staticmethod
    def fits(state: State, feeds: Feeds, calls: int) -> bool:
        """Return whether the next calls change only tokens, positions and the mask, all within the model's limits.

        Args:
            state: The state that the calls continue.
            feeds: Inputs of the last call.
            calls: Largest number of calls.
        """
        check, component = state.check_step, state.component
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
            and (not limit or state.length + calls <= limit)
            and (
                positions is None
                or positions.bounds is None
                or int(feeds[_POSITIONS].max()) + calls <= positions.bounds[1]
            )
        )

    @abstractmethod
    def bound(self, mask: torch.Tensor) -> Any:
        """Return the runtime's binding of a mask `(batch, total)`. The mask's memory stays valid while the binding is used."""

    @abstractmethod
    def compute(self, mask: Any) -> np.ndarray:
        """Run the model with the bound inputs, and return logits `(batch, vocabulary)`. The next call may overwrite the logits.

        Args:
            mask: Result of `bound` for a mask with one more column than in the previous call, or `None` for a graph without a mask.
        """

    def __call__(self, tokens: Sequence[int]) -> np.ndarray:
        """Add one token to each row, and return the logits `(batch, vocabulary)` of the next tokens."""
        if self._next == len(self._coming):
            self._prepare()
        positions, _, mask = self._coming[self._next]
        self._next += 1
        self._tokens[:] = tokens
        if positions is not None:
            self._positions[...] = positions
        try:
            return self.compute(mask)
        except self._session.run_errors as error:
            raise self._session.failed(error, self.feeds) from error

    def _prepare(self) -> None:
        """Prepare the masks and position ids of the next calls."""
        count = min(_AHEAD, self._left)
        if self._longest is not None and len(self._longest) > 1:
            count = max(min(count, _AHEAD_BYTES // self._longest.nbytes), 1)
        coming = []
        for i in range(1, count + 1):
            mask = self._longest[:, : self._columns + i].contiguous() if self._longest is not None else None
            positions = self._positions + i if self._positions is not None else None
            coming.append((positions, mask, self.bound(mask) if mask is not None else None))
        self._coming, self._next = coming, 0
        self._columns += count
        self._left -= count
