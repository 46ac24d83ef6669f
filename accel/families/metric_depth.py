"""GLPN, ZoeDepth and Depth Pro: the depth is in metres, although the config does not contain this."""

from __future__ import annotations

from ..interfaces.family import Family


class MetricDepth(Family):
    """Family of models that estimate the depth in metres."""

    metric_depth = True


FAMILY = MetricDepth()
