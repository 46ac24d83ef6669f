"""Servers for the tests of audits: a server of embeddings with a fault, and the server of accel."""

from __future__ import annotations

import base64
import json
import socket
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import anyio
import numpy as np
import numpy.typing as npt
import torch
import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route
from transformers import AutoModel, AutoTokenizer

from accel.testing.models import save_tiny

LIMIT = 48
PROMPT = "why when: "
Vectors = npt.NDArray[np.float32]


def save_embedder(folder: Path, seed: int = 0) -> Path:
    """Save a tiny sentence-transformers model with mean pooling, a default prompt, normalization and a limit of 48 tokens."""
    save_tiny(folder, "bert", "feature-extraction", seed=seed)
    modules = [("", "Transformer"), ("1_Pooling", "Pooling"), ("2_Normalize", "Normalize")]
    files: dict[str, Any] = {
        "modules.json": [
            {"idx": i, "name": str(i), "path": path, "type": f"sentence_transformers.models.{name}"}
            for i, (path, name) in enumerate(modules)
        ],
        "sentence_bert_config.json": {"max_seq_length": LIMIT, "do_lower_case": False},
        "config_sentence_transformers.json": {"prompts": {"query": PROMPT}, "default_prompt_name": "query"},
        "1_Pooling/config.json": {"word_embedding_dimension": 32, "pooling_mode_mean_tokens": True},
        "2_Normalize/config.json": {},
    }
    for name, values in files.items():
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text(json.dumps(values), encoding="utf-8")
    return folder


class Embeddings:
    """An independent implementation of a server of embeddings. `fault` plants one fault.

    Args:
        folder: The model.
        stale: Another revision of the model.
        fault: Name of the fault, or `""`.
    """

    def __init__(self, folder: Path, stale: Path, fault: str = "") -> None:
        self.fault = fault
        self.tokenizer = AutoTokenizer.from_pretrained(folder)
        self.model = AutoModel.from_pretrained(stale if fault == "stale model" else folder).eval()
        self._lock = threading.Lock()
        self._running = 0

    def vectors(self, texts: Sequence[str]) -> Vectors:
        prompt = {"no prompt": "", "prompt twice": PROMPT * 2}.get(self.fault, PROMPT)
        texts = [prompt + text for text in texts]
        if self.fault == "truncation by characters":
            texts = [text[:LIMIT] for text in texts]
        if self.fault == "wrong tokenizer":
            texts = [text.replace("card", "fee").replace("money", "bank") for text in texts]
        rows = []
        with self._lock, torch.inference_mode():
            for text in texts:
                inputs = self.tokenizer(text, truncation=True, max_length=LIMIT, return_tensors="pt")
                hidden = self.model(**inputs).last_hidden_state[0]
                vector = hidden[0] if self.fault == "wrong pooling" else hidden.mean(0)
                if self.fault == "float16 sums":
                    total = torch.zeros(hidden.shape[1], dtype=torch.float16)
                    for token in hidden:
                        total += token.half()
                    vector = total.float() / len(hidden)
                if self.fault != "not normalized":
                    vector = vector / vector.norm()
                rows.append(vector.numpy())
        return np.stack(rows)

    async def answer(self, request: Request) -> Response:
        body = await request.json()
        texts = body.get("input") if isinstance(body, dict) else None
        texts = [texts] if isinstance(texts, str) else texts
        if not isinstance(texts, list) or not texts or not all(isinstance(text, str) for text in texts):
            return JSONResponse({"error": {"message": "input must be texts"}}, status_code=400)
        self._running += 1
        busy = self._running > 1
        if self.fault == "rows swapped under load":
            await anyio.sleep(0.005)
            busy = busy or self._running > 1
        vectors = await anyio.to_thread.run_sync(self.vectors, texts)
        self._running -= 1
        if self.fault == "rows swapped under load" and busy:
            vectors = vectors[::-1]
        if self.fault == "dropped rows" and len(texts) > 32:
            vectors = vectors[:-1]
        dimensions = body.get("dimensions")
        if dimensions is not None:
            vectors = vectors[:, :dimensions]
            vectors = vectors / np.linalg.norm(vectors, axis=1, keepdims=True)
        rows: list[Any] = [row.tolist() for row in vectors]
        if body.get("encoding_format") == "base64":
            rows = [base64.b64encode(row.astype("<f4").tobytes()).decode() for row in vectors]
        data = [{"object": "embedding", "index": i, "embedding": row} for i, row in enumerate(rows)]
        return JSONResponse({"object": "list", "data": data[::-1], "model": "m"})

    def app(self) -> Starlette:
        return Starlette(routes=[Route("/v1/embeddings", self.answer, methods=["POST"])])


@contextmanager
def served(app: Any) -> Iterator[str]:
    """Run an ASGI application in a thread, and yield its URL."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    server = uvicorn.Server(uvicorn.Config(app, host="127.0.0.1", port=port, log_level="error", lifespan="on"))
    thread = threading.Thread(target=server.run, daemon=True)
    thread.start()
    while not server.started:
        if not thread.is_alive():
            raise RuntimeError("the server did not start")
        time.sleep(0.02)
    try:
        yield f"http://127.0.0.1:{port}"
    finally:
        server.should_exit = True
        thread.join(timeout=30)
