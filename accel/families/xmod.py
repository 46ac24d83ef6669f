"""X-MOD: an adapter for each language in every layer."""

from __future__ import annotations

from typing import Any

import torch

from ..interfaces.family import Replacement
from .roberta import Roberta


class Xmod(Roberta):
    """X-MOD, which counts positions as RoBERTa does."""

    def replacements(self, model: Any) -> list[Replacement]:
        """The adapters of the default language alone, which calls that name none go through: a graph would look for rows of each other
        language in every call, and find none.
        """
        language = model.config.default_language
        return [
            (layer, "adapter_modules", torch.nn.ModuleDict({language: layer.adapter_modules[language]}))
            for layer in model.modules()
            if language in getattr(layer, "adapter_modules", ())
        ]


FAMILY = Xmod()
