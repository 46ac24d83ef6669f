"""The last step of an ensemble: what the graph returned to answers."""

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
        """Answers to requests, each with its text and the graph's outputs for it."""
        return [respond(self._finish(request)) for request in requests]

    def _finish(self, request: Any) -> Any:
        returned = self._batches.settings["outputs"]
        try:
            outputs = read_request(request, returned).inputs
            return self._batches.finish(read_request(request, ("TEXT",)), outputs)
        except Refused as reason:
            return reason
