"""Family of GLPN, ZoeDepth and Depth Pro, which estimate depth in metres. Their config does not contain the unit."""

from __future__ import annotations

from ..interfaces.family import Family


class MetricDepth(Family):
    """Family of models that estimate the depth in metres."""

    metric_depth = True


FAMILY = MetricDepth()
