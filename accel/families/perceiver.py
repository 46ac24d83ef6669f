"""Perceiver: images by three heads, of which one has learned positions."""

from __future__ import annotations

from typing import Any

from ..interfaces.family import Family


class Perceiver(Family):
    """Perceiver. It computes positions from the size of an image as a Python number, which a trace keeps."""

    any_image_size = False
    # Its processor crops before it resizes.
    processor_sizes = ("size",)

    def image_size(self, config: Any, architecture: str) -> Any:
        """The config's size, for the head with learned positions. The other heads take images of any size."""
        named = architecture or (getattr(config, "architectures", None) or [""])[0]
        return getattr(config, "image_size", None) if named.endswith("Learned") else None


FAMILY = Perceiver()
