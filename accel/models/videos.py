"""Models of videos: frames one behind the other, as many as the model was made for."""

from __future__ import annotations

from typing import Any

from .base import ORTModel


class ORTModelForVideoClassification(ORTModel):
    """Videos to classes: `pixel_values: (batch, frames, channels, height, width)` to `logits: (batch, num_labels)`."""

    task = "video-classification"

    @property
    def input_modalities(self) -> tuple[str, ...]:
        """What it reads."""
        return ("video",)

    def forward(self, pixel_values: Any = None, **inputs: Any) -> Any:
        """Run the graph on floating-point frames; V-JEPA 2 calls them `pixel_values_videos`."""
        return self._run({"pixel_values": pixel_values, **inputs})
