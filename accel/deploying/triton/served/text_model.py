"""The front model in Triton, which receives texts and returns results.

The front model tokenizes all requests of a dynamic batch together and calls the graph's model with them.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import triton_python_backend_utils as pb_utils

from .text_batches import Request, TextRequestHandler
from .tokens import Array, InvalidRequestError, NonFiniteOutputError


class TritonPythonModel:
    """A model for Triton's Python backend that accepts texts and calls the graph's model."""

    def initialize(self, args: Mapping[str, str]) -> None:
        """Load the tokenizer and the settings from the folder of this file."""
        self._batches = TextRequestHandler(Path(__file__).parent)
        self._graph: str = self._batches.settings["graph"]
        self._returned: Sequence[str] = self._batches.settings["outputs"]
        config = json.loads(args["model_config"])
        self._inputs = [field["name"] for field in config["input"]]

    def execute(self, requests: Sequence[Any]) -> list[Any]:
        """Return the responses to requests that arrived together."""
        answers = self._batches.answer([read_request(request, self._inputs) for request in requests], self._call)
        return [respond(answer) for answer in answers]

    def _call(self, feeds: Mapping[str, Array]) -> dict[str, Array]:
        response = pb_utils.InferenceRequest(
            model_name=self._graph,
            inputs=[pb_utils.Tensor(name, values) for name, values in feeds.items()],
            requested_output_names=list(self._returned),
            preferred_memory=pb_utils.PreferredMemory(pb_utils.TRITONSERVER_MEMORY_CPU, 0),
        ).exec()
        if response.has_error():
            raise RuntimeError(f"the model {self._graph!r}, which runs the graph, failed: {response.error().message()}")
        return {name: pb_utils.get_output_tensor_by_name(response, name).as_numpy() for name in self._returned}


def read_request(request: Any, names: Sequence[str]) -> Request:
    """Return the parameters of a request, and its inputs among `names`."""
    tensors = {name: pb_utils.get_input_tensor_by_name(request, name) for name in names}
    inputs = {name: tensor.as_numpy() for name, tensor in tensors.items() if tensor is not None}
    return Request(inputs, json.loads(request.parameters() or "{}"))


def respond(answer: Mapping[str, Array] | InvalidRequestError) -> Any:
    """Convert the result of a request to Triton's response."""
    if isinstance(answer, InvalidRequestError):
        code = (
            pb_utils.TritonError.INTERNAL
            if isinstance(answer, NonFiniteOutputError)
            else pb_utils.TritonError.INVALID_ARG
        )
        return pb_utils.InferenceResponse([], pb_utils.TritonError(str(answer), code))
    return pb_utils.InferenceResponse([pb_utils.Tensor(name, values) for name, values in answer.items()])
