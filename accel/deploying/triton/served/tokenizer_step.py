"""The first step of an ensemble: texts to ids. Each request is padded by itself, so Triton merges those of equal length."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from .text_batches import TextBatches
from .text_model import read_request, respond
from .tokens import Refused


class TritonPythonModel:
    """What Triton's Python backend runs."""

    def initialize(self, args: Mapping[str, str]) -> None:
        """Read the tokenizer and the settings beside this file."""
        self._batches = TextBatches(Path(__file__).parent)

    def execute(self, requests: Sequence[Any]) -> list[Any]:
        """Ids, masks and so on by the graph's names."""
        return [respond(self._encode(request)) for request in requests]

    def _encode(self, request: Any) -> Any:
        try:
            return self._batches.encode(read_request(request, ("TEXT",)))
        except Refused as reason:
            return reason
