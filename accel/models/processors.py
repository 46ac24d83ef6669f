"""The tokenizer, processor or generation config beside one of our models."""

from __future__ import annotations

import threading
from typing import Any
from weakref import WeakKeyDictionary

from ..artifact.companions import open_companion


class _Kept(threading.local):
    """What one thread has opened, for as long as the models live."""

    def __init__(self) -> None:
        self.by_model: WeakKeyDictionary[Any, dict[str, Any]] = WeakKeyDictionary()


_KEPT = _Kept()


def companion_of(model: Any, loader: str) -> Any:
    """What transformers' class of that name opens of a model's folder; code in it runs where the model's own may.

    Args:
        model: One of our models.
        loader: As in `open_companion`, whose errors it has.
    """
    trusted = bool(getattr(model, "_trust_remote_code", False))
    return open_companion(loader, model.artifact.path, trust_remote_code=trusted)


def kept_companion_of(model: Any, loader: str) -> Any:
    """The same, opened once for a model and a thread: a fast tokenizer keeps settings between calls, so that no two threads share one.

    For calls that a user makes over and over, where opening takes longer than the answer.
    """
    kept = _KEPT.by_model.setdefault(model, {})
    if loader not in kept:
        kept[loader] = companion_of(model, loader)
    return kept[loader]
