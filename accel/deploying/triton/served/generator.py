"""Text generation in Triton: the model receives prompts and sends pieces of text. New requests join the running batch between two steps."""

from __future__ import annotations

import json
import queue
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime
import triton_python_backend_utils as pb_utils
from tokenizers import Tokenizer

from .text_decoder import TextDecoder, TextRow
from .tokens import Array, InvalidRequestError, NonFiniteOutputError


class TritonPythonModel:
    """A model for Triton's Python backend that generates text."""

    def initialize(self, args: Mapping[str, str]) -> None:
        """Open the graph in the folder of this file and start the generation loop."""
        folder = Path(__file__).parent
        settings = json.loads((folder / "settings.json").read_text(encoding="utf-8"))
        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = settings["threads"]
        options.add_session_config_entry("session.intra_op.allow_spinning", "0")
        self._session = onnxruntime.InferenceSession(
            str(folder / settings["graph"]), options, providers=["CPUExecutionProvider"]
        )
        self._outputs = [output.name for output in self._session.get_outputs()]
        tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
        tokenizer.no_padding()
        tokenizer.no_truncation()
        self._decoder = TextDecoder(self._run, tokenizer, settings)
        self._most: int = settings["max_rows"]
        self._waiting: queue.SimpleQueue[TextRow | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._loop, daemon=True)
        self._thread.start()

    def execute(self, requests: Sequence[Any]) -> None:
        """Put requests into the queue; the generation loop answers them."""
        for request in requests:
            sender = request.get_response_sender()
            prompt = pb_utils.get_input_tensor_by_name(request, "PROMPT").as_numpy().ravel()[0]
            try:
                row = self._decoder.read(
                    prompt.decode("utf-8"),
                    json.loads(request.parameters() or "{}"),
                    send=_sends(sender),
                    done=_ends(sender),
                    cancelled=sender.is_cancelled,
                )
            except (InvalidRequestError, UnicodeDecodeError) as reason:
                _ends(sender)(reason)
            else:
                self._waiting.put(row)

    def finalize(self) -> None:
        """Stop the generation loop."""
        self._waiting.put(None)
        self._thread.join(10)

    def _run(self, feeds: Mapping[str, Array]) -> dict[str, Array]:
        return dict(zip(self._outputs, self._session.run(self._outputs, dict(feeds)), strict=True))

    def _loop(self) -> None:
        decoder = self._decoder
        while True:
            # If no row is running, wait for a new row. If rows are running, add the rows that are waiting, up to the maximum batch size.
            while not decoder.rows or (len(decoder.rows) < self._most and not self._waiting.empty()):
                row = self._waiting.get()
                if row is None:
                    return
                try:
                    decoder.add(row)
                except Exception as error:  # noqa: BLE001  # the server must continue
                    row.done(error)
            try:
                decoder.step()
            except Exception as error:  # noqa: BLE001  # the server must continue
                decoder.fail(error)


def _sends(sender: Any) -> Any:
    def send(piece: str) -> None:
        tensor = pb_utils.Tensor("TEXT", np.array([piece.encode("utf-8")], dtype=object))
        sender.send(pb_utils.InferenceResponse([tensor]))

    return send


def _ends(sender: Any) -> Any:
    def done(error: Exception | None) -> None:
        if error is not None:
            wrong = isinstance(error, InvalidRequestError) and not isinstance(error, NonFiniteOutputError)
            code = pb_utils.TritonError.INVALID_ARG if wrong else pb_utils.TritonError.INTERNAL
            sender.send(pb_utils.InferenceResponse([], pb_utils.TritonError(str(error), code)))
        sender.send(flags=pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL)

    return done
