"""Perceiver: three image heads. One of them has learned position embeddings."""

from __future__ import annotations

from typing import Any

from ..interfaces.family import Family


class Perceiver(Family):
    """Family of Perceiver."""

    # Only `size`, because the processor crops before it resizes.
    processor_sizes = ("size",)

    def image_size(self, config: Any, architecture: str) -> Any:
        """Return the config's image size for the head with learned positions. The other heads take images of any size."""
        named = architecture or (getattr(config, "architectures", None) or [""])[0]
        return getattr(config, "image_size", None) if named.endswith("Learned") else None


FAMILY = Perceiver()
