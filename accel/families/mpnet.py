"""MPNet: position embeddings as in RoBERTa."""

from __future__ import annotations

from .roberta import Roberta


class MPNet(Roberta):
    """Family of MPNet, which has no decoder."""


FAMILY = MPNet()
