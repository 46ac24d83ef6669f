"""Family of MPNet, which has the same position embeddings as RoBERTa."""

from __future__ import annotations

from .roberta import Roberta


class MPNet(Roberta):
    """Family of MPNet."""


FAMILY = MPNet()
