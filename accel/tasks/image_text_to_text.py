"""Text generation about images in the prompt."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ..capture.generation_graphs import vision_language
from ..interfaces.task import Task
from ..models.vision_language import ORTModelForImageTextToText


class ImageTextToText(Task):
    """Text generation about images in the prompt."""

    model = ORTModelForImageTextToText

    def parts(self, source: Any, fusion: Any) -> Sequence[Any] | None:
        return vision_language(source, fusion)
