"""Family of Grounding DINO. One text contains all phrases to detect, with a separator after each phrase."""

from __future__ import annotations

from itertools import cycle
from typing import Any

from ..interfaces.family import Family, Tensors

# Token ids of [CLS], [SEP], "." and "?" in BERT's vocabulary. A token does not attend to tokens beyond these separators.
_ENDS_OF_PHRASES = (101, 102, 1012, 1029)


class GroundingDino(Family):
    """Family of Grounding DINO and MM Grounding DINO."""

    def fill(self, feeds: Tensors, config: Any) -> None:
        """Write a separator at every third position that is not padding, so that the sample contains several phrases."""
        ids, mask = feeds.get("input_ids"), feeds.get("attention_mask")
        separators = [token for token in _ENDS_OF_PHRASES if token < config.text_config.vocab_size]
        if ids is None or mask is None or not separators:
            return
        for place, token in zip(range(0, ids.shape[-1], 3), cycle(separators), strict=False):
            ids[..., place].masked_fill_(mask[..., place] != 0, token)


FAMILY = GroundingDino()
