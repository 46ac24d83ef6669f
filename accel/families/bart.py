"""BART and its kind: classifiers that pool at the end token."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ..interfaces.family import Family

# Of configs that leave the token out (transformers 5.24).
_END = {"BigBirdPegasusForSequenceClassification": 1}


class Bart(Family):
    """BART, BigBird-Pegasus, mBART, MVP and PLBART."""

    def row_token(self, architecture: str, config: Mapping[str, Any]) -> int | None:
        """The end token, for classifiers."""
        if not architecture.endswith("ForSequenceClassification"):
            return None
        token = config.get("eos_token_id")
        return token if isinstance(token, int) else _END.get(architecture, 2)


FAMILY = Bart()
