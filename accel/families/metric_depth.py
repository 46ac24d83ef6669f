"""GLPN, ZoeDepth and Depth Pro: depths in metres, although the config does not say so."""

from __future__ import annotations

from ..interfaces.family import Family


class MetricDepth(Family):
    """Models that estimate metres."""

    metric_depth = True


FAMILY = MetricDepth()
