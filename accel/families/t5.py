"""T5 and related models: classifiers that pool at the end token."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ..interfaces.family import Family


class T5(Family):
    """Family of T5, mT5 and UMT5."""

    def row_token(self, architecture: str, config: Mapping[str, Any]) -> int | None:
        """Return the end token for sequence classifiers. It is 1 if `config.json` has no `eos_token_id`."""
        token = config.get("eos_token_id")
        return (token if isinstance(token, int) else 1) if architecture.endswith("ForSequenceClassification") else None


FAMILY = T5()
