"""The tokenizer, processor or generation config beside one of our models."""

from __future__ import annotations

from typing import Any

from ..artifact.companions import open_companion


def companion_of(model: Any, loader: str) -> Any:
    """What transformers' class of that name opens of a model's folder; code in it runs where the model's own may.

    Args:
        model: One of our models.
        loader: As in `open_companion`, whose errors it has.
    """
    trusted = bool(getattr(model, "_trust_remote_code", False))
    return open_companion(loader, model.artifact.path, trust_remote_code=trusted)
