"""T5 and its kind: classifiers that pool at the end token."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ..interfaces.family import Family


class T5(Family):
    """T5, mT5 and UMT5."""

    def row_token(self, architecture: str, config: Mapping[str, Any]) -> int | None:
        """The end token, for classifiers; 1 where a config leaves it out (transformers 5.24)."""
        token = config.get("eos_token_id")
        return (token if isinstance(token, int) else 1) if architecture.endswith("ForSequenceClassification") else None


FAMILY = T5()
