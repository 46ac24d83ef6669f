"""Family of Perceiver, which has three kinds of image classifiers. One kind has learned position embeddings."""

from __future__ import annotations

from typing import Any

from ..interfaces.family import Family


class Perceiver(Family):
    """Family of Perceiver."""

    # Perceiver's image processor crops an image first and then resizes it, so `crop_size` is not the size of the model's input.
    processor_sizes = ("size",)

    def image_size(self, config: Any, architecture: str) -> Any:
        """Return the config's image size for the classifier with learned position embeddings, else `None`.

        The other classifiers accept images of any size.
        """
        named = architecture or (getattr(config, "architectures", None) or [""])[0]
        return getattr(config, "image_size", None) if named.endswith("Learned") else None


FAMILY = Perceiver()
