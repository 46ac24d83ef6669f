"""Run an ONNX graph on the CPU with Triton's Python backend, for servers without the ONNX Runtime backend."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime
import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    """A model for Triton's Python backend; requests with equal shapes share one call of the graph."""

    def initialize(self, args: Mapping[str, str]) -> None:
        """Open the graph in the folder of this file."""
        config = json.loads(args["model_config"])
        self._inputs = [field["name"] for field in config["input"]]
        self._outputs = [field["name"] for field in config["output"]]
        settings = json.loads((Path(__file__).parent / "settings.json").read_text(encoding="utf-8"))
        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = settings["threads"]
        # Disable spinning, because idle threads that spin (wait actively) would occupy processors that other models need.
        options.add_session_config_entry("session.intra_op.allow_spinning", "0")
        graph = Path(__file__).parent / settings["graph"]
        self._session = onnxruntime.InferenceSession(str(graph), options, providers=["CPUExecutionProvider"])

    def execute(self, requests: Sequence[Any]) -> list[Any]:
        """Return the graph's outputs for each request.

        Triton merges only requests whose shapes are equal in all axes other than the batch.
        """
        inputs = [
            {name: pb_utils.get_input_tensor_by_name(request, name).as_numpy() for name in self._inputs}
            for request in requests
        ]
        feeds = {name: np.concatenate([arrays[name] for arrays in inputs]) for name in self._inputs}
        returned = self._session.run(self._outputs, feeds)
        ends = np.cumsum([len(arrays[self._inputs[0]]) for arrays in inputs])[:-1]
        parts = zip(*(np.split(values, ends) for values in returned), strict=True)
        return [
            pb_utils.InferenceResponse(
                [pb_utils.Tensor(name, values) for name, values in zip(self._outputs, part, strict=True)]
            )
            for part in parts
        ]
