"""The front of a model in Triton: texts in, answers out. Tokenizes all requests of a dynamic batch and calls the graph once."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import triton_python_backend_utils as pb_utils

from .text_batches import Request, TextBatches
from .tokens import Array, NotFinite, Refused


class TritonPythonModel:
    """What Triton's Python backend runs."""

    def initialize(self, args: Mapping[str, str]) -> None:
        """Read the tokenizer and the settings beside this file."""
        self._batches = TextBatches(Path(__file__).parent)
        self._graph: str = self._batches.settings["graph"]
        self._returned: Sequence[str] = self._batches.settings["outputs"]
        config = json.loads(args["model_config"])
        self._inputs = [one["name"] for one in config["input"]]

    def execute(self, requests: Sequence[Any]) -> list[Any]:
        """Answers to requests that arrived together, in their order."""
        answers = self._batches.answer([read_request(one, self._inputs) for one in requests], self._call)
        return [respond(answer) for answer in answers]

    def _call(self, feeds: Mapping[str, Array]) -> dict[str, Array]:
        response = pb_utils.InferenceRequest(
            model_name=self._graph,
            inputs=[pb_utils.Tensor(name, values) for name, values in feeds.items()],
            requested_output_names=list(self._returned),
            preferred_memory=pb_utils.PreferredMemory(pb_utils.TRITONSERVER_MEMORY_CPU, 0),
        ).exec()
        if response.has_error():
            raise RuntimeError(f"{self._graph}: {response.error().message()}")
        return {name: pb_utils.get_output_tensor_by_name(response, name).as_numpy() for name in self._returned}


def read_request(request: Any, names: Sequence[str]) -> Request:
    """A request of Triton's, as far as it has these inputs."""
    tensors = {name: pb_utils.get_input_tensor_by_name(request, name) for name in names}
    given = {name: tensor.as_numpy() for name, tensor in tensors.items() if tensor is not None}
    return Request(given, json.loads(request.parameters() or "{}"))


def respond(answer: Mapping[str, Array] | Refused) -> Any:
    """An answer as a response of Triton's."""
    if isinstance(answer, Refused):
        code = pb_utils.TritonError.INTERNAL if isinstance(answer, NotFinite) else pb_utils.TritonError.INVALID_ARG
        return pb_utils.InferenceResponse([], pb_utils.TritonError(str(answer), code))
    return pb_utils.InferenceResponse([pb_utils.Tensor(name, values) for name, values in answer.items()])
