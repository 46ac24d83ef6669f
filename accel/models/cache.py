"""A session's state as transformers sees a cache."""

from __future__ import annotations

import torch
from transformers.cache_utils import Cache

from ..backends.interfaces import Session, State


class StateCache(Cache):  # type: ignore[misc]  # transformers is untyped here
    """A session's state as a transformers cache.

    Keys and values stay where the runtime has them: the cache can be continued, reordered, cropped and passed to the next
    `generate`, but its tensors cannot be read.

    Args:
        session: The decoder's session, which makes the state at the first call.
        croppable: Whether tokens can be taken out of its states.
    """

    def __init__(self, session: Session, *, croppable: bool = True) -> None:
        super().__init__(layers=[])
        self.session = session
        self._croppable = croppable
        self.state: State | None = None
        self.constants: dict[str, torch.Tensor] = {}

    @property
    def batch_size(self) -> int:
        """Rows held, -1 before the first call."""
        return getattr(self.state, "batch", -1)

    @property
    def is_croppable(self) -> bool:
        """Whether tokens can be taken back: out of keys and values, not out of the state of a state-space model."""
        return self._croppable

    @property
    def is_initialized(self) -> bool:
        """Whether a call was made."""
        return self.state is not None

    @property
    def is_compileable(self) -> bool:
        """Whether torch can compile over it: no."""
        return False

    def get_seq_length(self, layer_idx: int = 0) -> int:  # transformers' signature
        """Tokens held."""
        return self.state.length if self.state is not None else 0

    def get_max_length(self, layer_idx: int | None = None) -> int:
        """No limit of its own."""
        return -1

    def get_mask_sizes(self, query_length: int, layer_idx: int = 0) -> tuple[int, int]:
        """Tokens after the next call, and the first one's position."""
        return self.get_seq_length() + query_length, 0

    def reorder_cache(self, beam_idx: torch.Tensor) -> None:
        """Row `i` becomes row `beam_idx[i]` (`beam_idx: (batch,) int64`)."""
        if self.state is not None:
            self.state.reorder(beam_idx)
            self.constants = {name: tensor.index_select(0, beam_idx) for name, tensor in self.constants.items()}

    def batch_select_indices(self, indices: torch.Tensor) -> None:
        """Keep these rows: `indices: (rows,) int64`."""
        self.reorder_cache(indices)

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Each row `repeats` times."""
        if self.state is not None and self.batch_size > 0:
            self.reorder_cache(torch.arange(self.batch_size).repeat_interleave(repeats))

    def crop(self, tokens_to_remove: int) -> None:
        """Forget the last tokens, given as a negative number as in transformers."""
        if self.state is not None and tokens_to_remove:
            self.state.crop(self.state.length - abs(tokens_to_remove))

    def reset(self) -> None:
        """Forget everything."""
        self.state = None
        self.constants = {}

    def clone(self) -> StateCache:
        """An independent copy, for trying several continuations of one prompt."""
        copy = StateCache(self.session, croppable=self._croppable)
        copy.state = self.state.clone() if self.state is not None else None
        copy.constants = dict(self.constants)
        return copy

    def __len__(self) -> int:
        return 0

    def __repr__(self) -> str:
        return f"StateCache({self.get_seq_length()} tokens)"
