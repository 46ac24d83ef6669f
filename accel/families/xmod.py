"""Family of X-MOD, whose layers have one adapter for each language."""

from __future__ import annotations

from typing import Any

import torch

from ..interfaces.family import Replacement
from .roberta import Roberta


class Xmod(Roberta):
    """Family of X-MOD, which has the same position ids as RoBERTa."""

    def replacements(self, model: Any) -> list[Replacement]:
        """Keep only the adapters of the default language. The PyTorch model uses these adapters in calls without `lang_ids`.

        With the adapters of all languages, the graph would have to select the rows of each language in every call.
        """
        language = model.config.default_language
        return [
            (layer, "adapter_modules", torch.nn.ModuleDict({language: layer.adapter_modules[language]}))
            for layer in model.modules()
            if language in getattr(layer, "adapter_modules", ())
        ]


FAMILY = Xmod()
