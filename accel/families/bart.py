"""BART and related models: classifiers that pool at the end token."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ..interfaces.family import Family

# End token ids of classifiers whose `config.json` has no `eos_token_id` (transformers 5.24).
_END = {"BigBirdPegasusForSequenceClassification": 1}


class Bart(Family):
    """BART, BigBird-Pegasus, mBART, MVP and PLBART."""

    def row_token(self, architecture: str, config: Mapping[str, Any]) -> int | None:
        """Return the end token for sequence classifiers, because their head reads the hidden state of this token."""
        if not architecture.endswith("ForSequenceClassification"):
            return None
        token = config.get("eos_token_id")
        return token if isinstance(token, int) else _END.get(architecture, 2)


FAMILY = Bart()
