"""MPNet: its table of positions is RoBERTa's."""

from __future__ import annotations

from .roberta import Roberta


class MPNet(Roberta):
    """MPNet, which is no decoder."""


FAMILY = MPNet()
