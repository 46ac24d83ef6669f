"""The first step of an ensemble (texts to token ids) and the last step (outputs of the graph to results).

Each request is padded separately, so Triton can merge only requests of equal length.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from .text_batches import TextRequestHandler
from .text_model import read_request, respond
from .tokens import InvalidRequestError


class TritonPythonModel:
    """A model for Triton's Python backend. If it is the last step, its inputs are the text and the graph's outputs."""

    def initialize(self, args: Mapping[str, str]) -> None:
        """Load the tokenizer and the settings from the folder of this file."""
        self._batches = TextRequestHandler(Path(__file__).parent)
        inputs = [field["name"] for field in json.loads(args["model_config"])["input"]]
        self._outputs = [name for name in inputs if name != "TEXT"]

    def execute(self, requests: Sequence[Any]) -> list[Any]:
        """Return the graph's inputs (first step) or the results of the task (last step) for each request."""
        return [respond(self._answer(request)) for request in requests]

    def _answer(self, request: Any) -> Any:
        texts = read_request(request, ("TEXT",))
        try:
            if not self._outputs:
                return self._batches.encode(texts)
            return self._batches.finish(texts, read_request(request, self._outputs).inputs)
        except InvalidRequestError as reason:
            return reason
