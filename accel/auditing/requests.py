"""Requests to servers of several APIs, and their answers in one form."""

from __future__ import annotations

import base64
import json
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from ..errors import ConfigError, ServingError

Vectors = list[npt.NDArray[np.float64]]
_MISSING = (404, 405, 501)


@dataclass(frozen=True, slots=True)
class Reply:
    """An HTTP response: its status, and its body as JSON, or as text if the body is no JSON."""

    status: int
    body: Any

    @property
    def succeeded(self) -> bool:
        """Whether the status is 2xx."""
        return 200 <= self.status < 300


class Connection:
    """A server.

    Args:
        url: The server's URL, or the URL of an endpoint.
        api_key: Key for the header `Authorization: Bearer`.
        timeout_s: Longest time of a request, in seconds.

    Raises:
        ConfigError: The URL is invalid.
    """

    def __init__(self, url: str, *, api_key: str | None = None, timeout_s: float = 60.0) -> None:
        parts = urllib.parse.urlsplit(url)
        if parts.scheme not in ("http", "https") or not parts.netloc:
            raise ConfigError(f"{url!r} is not a URL of a server.", fix="pass a URL such as http://localhost:8000.")
        self.base = f"{parts.scheme}://{parts.netloc}"
        self.path = parts.path.rstrip("/")
        self._api_key = api_key
        self._timeout_s = timeout_s

    def send(self, path: str, body: Any = None) -> Reply:
        """Send a request: `POST` with a JSON body, or `GET` without a body.

        Raises:
            ServingError: The server does not answer.
        """
        headers = {"Content-Type": "application/json", "Accept": "application/json"}
        if self._api_key is not None:
            headers["Authorization"] = f"Bearer {self._api_key}"
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(self.base + path, data=data, headers=headers)  # the scheme is checked above
        try:
            with urllib.request.urlopen(request, timeout=self._timeout_s) as response:
                return Reply(response.status, _read(response.read()))
        except urllib.error.HTTPError as error:
            return Reply(error.code, _read(error.read()))
        except OSError as error:
            raise ServingError(
                f"The server {self.base} does not answer {path}: {error}",
                fix="start the server, and check the address and the port.",
            ) from error

    def first(self, candidates: Sequence[tuple[str, Any]]) -> tuple[str, Reply]:
        """Send requests until the server has an endpoint for one, and return its path and reply.

        If the URL is that of an endpoint, only requests to this endpoint are sent.

        Raises:
            ServingError: The server has none of the endpoints.
        """
        named = [(path, body) for path, body in candidates if self.path and self.path.endswith(path)]
        # Servers may have a prefix, such as `http://host/prefix/v1`.
        tried = [(self.path, body) for _, body in named] or [
            (f"{self.path.removesuffix('/v1')}{path}", body) for path, body in candidates
        ]
        replies: list[str] = []
        for path, body in tried:
            reply = self.send(path, body)
            if reply.succeeded:
                return path, reply
            replies.append(
                f"{path}: {reply.status}" + ("" if reply.status in _MISSING else f" {str(reply.body)[:200]}")
            )
        raise ServingError(
            f"The server {self.base} has no endpoint that answers: {'; '.join(replies)}.",
            fix="pass the URL of the endpoint, the task with --task, or the server's name of the model with --name.",
        )

    def model_name(self) -> str | None:
        """Return the server's name of its first model, or `None` if it lists no models."""
        prefix = self.path.removesuffix("/embeddings").removesuffix("/chat/completions").removesuffix("/v1")
        for path in (f"{prefix}/v1/models", f"{prefix}/models"):
            reply = self.send(path)
            if reply.succeeded and isinstance(reply.body, Mapping) and reply.body.get("data"):
                return str(reply.body["data"][0].get("id"))
        return None


def _read(content: bytes) -> Any:
    try:
        return json.loads(content)
    except ValueError:
        return content.decode(errors="replace")


class AnswerError(Exception):
    """A server answered a valid request with an error, or in an unexpected form. The message describes the answer."""


class TextClient:
    """A client that returns a vector for each text: an embedding, the scores of the labels, or a relevance score.

    Attributes:
        path: Path of the endpoint.
        dialect: Name of the API.
    """

    path: str
    dialect: str

    def __init__(self, connection: Connection, name: str | None) -> None:
        self.connection = connection
        self.name = name

    def body(self, texts: Sequence[Any], **options: Any) -> Any:
        """Return the body of a request."""
        raise NotImplementedError

    def read(self, body: Any) -> Vectors:
        """Return the vectors in the body of a response, in the order that their indices give."""
        raise NotImplementedError

    def ask(self, texts: Sequence[Any], **options: Any) -> Vectors:
        """Send texts, and return a vector for each answer.

        Raises:
            AnswerError: The server answers with an error, or in an unexpected form.
        """
        reply = self.connection.send(self.path, self.body(texts, **options))
        if not reply.succeeded:
            raise AnswerError(f"status {reply.status}: {str(reply.body)[:200]}")
        try:
            return self.read(reply.body)
        except (KeyError, TypeError, ValueError, IndexError) as error:
            raise AnswerError(f"unexpected answer ({error!r}): {str(reply.body)[:200]}") from error


def _named(body: dict[str, Any], name: str | None) -> dict[str, Any]:
    return body if name is None else {"model": name, **body}


def _numbers(values: Any) -> npt.NDArray[np.float64]:
    if isinstance(values, str):
        return np.frombuffer(base64.b64decode(values, validate=True), dtype="<f4").astype(np.float64)
    return np.asarray(values, dtype=np.float64)


class OpenAiEmbeddings(TextClient):
    """OpenAI's `/v1/embeddings`, which also infinity, vLLM and text-embeddings-inference have."""

    dialect = "openai"

    def body(self, texts: Sequence[Any], **options: Any) -> Any:
        """Return `{"input": [...]}`."""
        return _named({"input": list(texts), **options}, self.name)

    def read(self, body: Any) -> Vectors:
        """Read `data`, in the order of `index`."""
        rows = body["data"]
        indices = [row.get("index", i) for i, row in enumerate(rows)]
        if sorted(indices) != list(range(len(rows))):
            raise ValueError(f"the indices are {indices}")
        return [
            _numbers(row["embedding"]) for _, row in sorted(zip(indices, rows, strict=True), key=lambda pair: pair[0])
        ]


class TeiEmbeddings(TextClient):
    """`/embed` of text-embeddings-inference."""

    dialect = "text-embeddings-inference"

    def body(self, texts: Sequence[Any], **options: Any) -> Any:
        """Return `{"inputs": [...]}`."""
        return {"inputs": list(texts), "truncate": True, **options}

    def read(self, body: Any) -> Vectors:
        """Read a list of vectors."""
        return [_numbers(row) for row in body]


class TritonEmbeddings(TextClient):
    """The Open Inference Protocol of Triton and KServe, for models with an input of texts (`BYTES`)."""

    dialect = "open inference protocol"
    text_input = "TEXT"
    columns = True

    def body(self, texts: Sequence[Any], **options: Any) -> Any:
        """Return the texts as a tensor of bytes."""
        shape = [len(texts), 1] if self.columns else [len(texts)]
        tensor = {"name": self.text_input, "datatype": "BYTES", "shape": shape, "data": list(texts)}
        return {"inputs": [tensor]}

    def read(self, body: Any) -> Vectors:
        """Read the first output of floating-point numbers."""
        output = next(o for o in body["outputs"] if o["datatype"] in ("FP32", "FP16", "FP64"))
        return list(np.asarray(output["data"], dtype=np.float64).reshape(output["shape"][0], -1))


def embedding_client(connection: Connection, name: str | None) -> TextClient:
    """Find the server's endpoint for embeddings.

    Raises:
        ServingError: There is none.
    """
    if connection.path.endswith("/infer") or (connection.path.startswith("/v2/models/")):
        return _triton_client(connection)
    name = name or connection.model_name()
    clients: dict[str, TextClient] = {
        "/v1/embeddings": OpenAiEmbeddings(connection, name),
        "/embeddings": OpenAiEmbeddings(connection, name),
        "/embed": TeiEmbeddings(connection, name),
    }
    path, _ = connection.first([(path, client.body(["a text"])) for path, client in clients.items()])
    client = clients[next(suffix for suffix in clients if path.endswith(suffix))]
    client.path = path
    return client


def _triton_client(connection: Connection) -> TextClient:
    model = connection.path.removesuffix("/infer")
    reply = connection.send(model)
    if not reply.succeeded:
        raise ServingError(
            f"The server {connection.base} has no model at {model}: {reply.status}.",
            fix="pass the URL http://HOST:PORT/v2/models/NAME.",
        )
    client = TritonEmbeddings(connection, None)
    texts = [tensor for tensor in reply.body.get("inputs", []) if tensor.get("datatype") == "BYTES"]
    if not texts:
        raise ServingError(
            f"The model at {model} has no input of texts (datatype BYTES).",
            fix="audit the model that reads texts, such as the front model that `accel deploy triton` writes.",
        )
    client.text_input, client.columns = texts[0]["name"], len(texts[0].get("shape", [-1])) > 1
    client.path = f"{model}/infer"
    return client


class LabelScores(TextClient):
    """`/classify` of accel, infinity and vLLM, and `/predict` of text-embeddings-inference. The vector has a score for each label.

    Args:
        connection: The server.
        name: The server's name of the model.
        labels: Labels of the model, in the order of the vector.
    """

    dialect = "classify"

    def __init__(self, connection: Connection, name: str | None, labels: Sequence[str], form: str) -> None:
        super().__init__(connection, name)
        self.labels = {label: i for i, label in enumerate(labels)}
        self.form = form

    def body(self, texts: Sequence[Any], **options: Any) -> Any:
        """Return the texts in the form of the API."""
        if self.form == "input":
            return _named({"input": list(texts), **options}, self.name)
        if self.form == "nested":
            return {"inputs": [[text] for text in texts], "truncate": True, **options}
        return {"inputs": list(texts), "top_k": None, "truncate": True, **options}

    def read(self, body: Any) -> Vectors:
        """Read the scores of all labels."""
        rows = body["data"] if isinstance(body, Mapping) else body
        vectors: Vectors = []
        for row in rows:
            if isinstance(row, Mapping) and "probs" in row:
                vectors.append(_numbers(row["probs"]))
                continue
            vector = np.full(len(self.labels), np.nan)
            for entry in row if isinstance(row, list) else [row]:
                vector[self.labels[entry["label"]]] = entry["score"]
            vectors.append(vector)
        return vectors


def label_client(connection: Connection, name: str | None, labels: Sequence[str]) -> TextClient:
    """Find the server's endpoint for classes of texts.

    Raises:
        ServingError: There is none.
    """
    name = name or connection.model_name()
    forms = (("/classify", "inputs"), ("/classify", "input"), ("/predict", "nested"))
    return _first_client(connection, [(path, LabelScores(connection, name, labels, form)) for path, form in forms])


class RelevanceScores(TextClient):
    """`/rerank`. The texts of a request are documents; the vector of each document has one score.

    Args:
        connection: The server.
        name: The server's name of the model.
        query: The query of all requests.
        field: Name of the documents in the body: `documents` or `texts`.
    """

    dialect = "rerank"

    def __init__(self, connection: Connection, name: str | None, query: str, field: str) -> None:
        super().__init__(connection, name)
        self.query = query
        self.field = field

    def body(self, texts: Sequence[Any], **options: Any) -> Any:
        """Return the query and the documents."""
        return _named({"query": self.query, self.field: list(texts), **options}, self.name)

    def read(self, body: Any) -> Vectors:
        """Read the scores, in the order of the documents."""
        rows = body["results"] if isinstance(body, Mapping) else body
        scores = {row["index"]: row.get("relevance_score", row.get("score")) for row in rows}
        if sorted(scores) != list(range(len(rows))):
            raise ValueError(f"the indices are {sorted(scores)}")
        return [_numbers([scores[i]]) for i in range(len(rows))]


def relevance_client(connection: Connection, name: str | None, query: str) -> TextClient:
    """Find the server's endpoint for ranking.

    Raises:
        ServingError: There is none.
    """
    name = name or connection.model_name()
    forms = (("/rerank", "documents"), ("/rerank", "texts"), ("/v1/rerank", "documents"))
    return _first_client(connection, [(path, RelevanceScores(connection, name, query, field)) for path, field in forms])


def _first_client(connection: Connection, clients: Sequence[tuple[str, TextClient]]) -> TextClient:
    bodies = [(path, client.body(["a text"])) for path, client in clients]
    path, _ = connection.first(bodies)
    for suffix, client in clients:
        if path.endswith(suffix):
            client.path = path
            try:
                client.ask(["a text"])
            except AnswerError:
                continue
            return client
    raise ServingError(
        f"The answers of {connection.base}{path} have an unknown form.", fix="pass the URL of another endpoint."
    )


class ChatClient:
    """OpenAI's `/v1/chat/completions`, with greedy decoding."""

    def __init__(self, connection: Connection, name: str | None) -> None:
        self.connection = connection
        self.name = name or connection.model_name()
        self.path, _ = connection.first([("/v1/chat/completions", self.body("hello", 1))])

    def body(self, text: str, tokens: int) -> dict[str, Any]:
        """Return the body of a request with one message of the user."""
        messages = [{"role": "user", "content": text}]
        return _named({"messages": messages, "max_tokens": tokens, "temperature": 0}, self.name)

    def ask(self, text: str, tokens: int) -> tuple[str, int | None]:
        """Return the answer and the number of tokens of the prompt, if the server reports it.

        Raises:
            AnswerError: The server answers with an error, or in an unexpected form.
        """
        reply = self.connection.send(self.path, self.body(text, tokens))
        if not reply.succeeded:
            raise AnswerError(f"status {reply.status}: {str(reply.body)[:200]}")
        try:
            usage = reply.body.get("usage") or {}
            return str(reply.body["choices"][0]["message"]["content"] or ""), usage.get("prompt_tokens")
        except (KeyError, TypeError, IndexError, AttributeError) as error:
            raise AnswerError(f"unexpected answer ({error!r}): {str(reply.body)[:200]}") from error


Ask = Callable[[Sequence[Any]], Vectors]
