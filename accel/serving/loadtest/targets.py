"""What is sent to which endpoint: rows of a table as the bodies of requests."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

from ...artifact.companions import open_companion
from ...errors import ConfigError, InputError, SessionError
from ..asking import check_options, find_columns, inputs_of
from ..tables import Broken, scan
from .client import Client, Reply

_MOST_BODIES = 20_000
"""Rows of the data that are read; more would show the same lengths."""

Body = Callable[[Any], dict[str, Any]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """An endpoint.

    Attributes:
        operation: Of the engine; see `asking.ASKED`.
        body: Of a request, of the inputs of the operation.
    """

    operation: str
    body: Body


def _inputs(inputs: Any) -> dict[str, Any]:
    return {"inputs": inputs}


TARGETS: Mapping[str, Target] = {
    "/classify": Target(operation="text-classification", body=lambda inputs: {"inputs": inputs, "truncate": True}),
    "/ner": Target(operation="token-classification", body=_inputs),
    "/qa": Target(operation="question-answering", body=dict),
    "/zero-shot": Target(operation="zero-shot-classification", body=_inputs),
    "/fill-mask": Target(operation="fill-mask", body=_inputs),
    "/rerank": Target(operation="rank", body=lambda inputs: {"query": inputs[0], "documents": inputs[1]}),
    "/v1/embeddings": Target(operation="embed", body=lambda inputs: {"input": inputs}),
    "/embed": Target(operation="embed", body=_inputs),
    "/v1/completions": Target(operation="generate", body=lambda inputs: {"prompt": inputs}),
    "/v1/chat/completions": Target(
        operation="generate", body=lambda inputs: {"messages": [{"role": "user", "content": inputs}]}
    ),
    "/generate": Target(operation="generate", body=lambda inputs: {"inputs": inputs, "stream": False}),
    "/tokenize": Target(operation="tokenize", body=_inputs),
}
_TENSORS = "/v2/models/"


@dataclass(frozen=True, slots=True, kw_only=True)
class Traffic:
    """Where requests go, and what is in them.

    Attributes:
        path: Of the endpoint.
        bodies: Of requests, one for each row of the data.
        lengths: Characters of the texts: smallest, median, 95th percentile, largest.
        skipped: Rows that are no inputs.
    """

    path: str
    bodies: tuple[bytes, ...]
    lengths: tuple[int, int, int, int]
    skipped: int = 0


async def prepare(
    client: Client,
    url: str,
    data: Any,
    *,
    model: str | None = None,
    columns: Mapping[str, str] | None = None,
    options: Mapping[str, Any] | None = None,
    tokenizer: str | None = None,
) -> Traffic:
    """The requests for a server.

    Args:
        client: Of the server.
        url: Of an endpoint, or of a server, which is asked what it serves.
        data: See `tables.scan`.
        model: Which one, of several.
        columns: Column by use.
        options: More fields of the body.
        tokenizer: Folder of the tokenizer, for servers that take tokens.

    Raises:
        ConfigError: No endpoint that is known, or options that are missing.
        InputError: Rows that hold no inputs.
        SessionError: The server answers with an error.
    """
    path = urlsplit(url).path.rstrip("/")
    if not path:
        path = await _endpoint(client, model)
    if path.startswith(_TENSORS):
        path = path if path.endswith("/infer") else f"{path}/infer"
        operation, body = "embed", await _tensors(client, path, tokenizer)
    elif path in TARGETS:
        target = TARGETS[path]
        operation = target.operation
        fixed = {**({"model": model} if model else {}), **(options or {})}
        check_options(operation, fixed)

        def body(inputs: Any) -> dict[str, Any]:
            return {**target.body(inputs), **fixed}

    else:
        raise ConfigError(f"{path!r} is no endpoint that is known.", fix=f"use one of {', '.join(TARGETS)}.")
    table = scan(data, _MOST_BODIES)
    found = find_columns(operation, table.columns, columns)
    bodies, lengths, wrong = [], [], 0
    for row in table.read(table.parts[0], tuple(found.values())):
        inputs = inputs_of(operation, row, found)
        if isinstance(inputs, Broken):
            wrong += 1
            continue
        bodies.append(json.dumps(body(inputs)).encode())
        lengths.append(_characters(inputs))
    if not bodies:
        raise InputError(f"None of {wrong} rows is an input for {operation}.", fix="see --column.")
    lengths.sort()
    told = tuple(lengths[min(int(q * len(lengths)), len(lengths) - 1)] for q in (0.0, 0.5, 0.95, 1.0))
    return Traffic(path=path, bodies=tuple(bodies), lengths=told, skipped=wrong)  # type: ignore[arg-type]


async def _endpoint(client: Client, model: str | None) -> str:
    """The endpoint for what a server says that it serves; of servers that say nothing of it, embeddings."""
    reply = _good(await client.request("GET", "/v1/models"), "/v1/models")
    try:
        cards = {card["id"]: card for card in json.loads(reply.body)["data"]}
    except (ValueError, LookupError, TypeError) as error:
        raise SessionError("/v1/models is no list of models.", fix="name an endpoint: .../v1/embeddings.") from error
    if model is not None and model not in cards:
        raise ConfigError(f"The server has no model {model!r}.", fix=f"use one of {', '.join(cards)}.")
    if model is None and len(cards) != 1:
        raise ConfigError(f"The server has {len(cards)} models: {', '.join(cards)}.", fix="say which: --model.")
    offered = cards[model or next(iter(cards))].get("operations", ["embed"])
    for operation in offered:
        for path, target in TARGETS.items():
            if target.operation == operation:
                return path
    raise ConfigError(f"The model does {', '.join(offered)}, which is not asked with texts.", fix="name an endpoint.")


async def _tensors(client: Client, path: str, tokenizer: str | None) -> Body:
    """The body of an Open Inference request: texts for a front that takes them, else tokens."""
    described = path.removesuffix("/infer")
    reply = _good(await client.request("GET", described), described)
    inputs = json.loads(reply.body)["inputs"]
    if len(inputs) == 1 and inputs[0]["datatype"] == "BYTES":
        (one,) = inputs
        shape = [1] * len(one["shape"])
        return lambda text: {"inputs": [{"name": one["name"], "datatype": "BYTES", "shape": shape, "data": [text]}]}
    if tokenizer is None:
        told = ", ".join(f"{one['name']} {one['datatype']}" for one in inputs)
        raise ConfigError(f"The model takes {told}, no text.", fix="name the folder of its tokenizer: --tokenizer.")
    read = open_companion("AutoTokenizer", tokenizer, local_files_only=False)
    names = [one["name"] for one in inputs]

    def body(text: str) -> dict[str, Any]:
        tokens = read(text, truncation=True, return_token_type_ids="token_type_ids" in names)
        missing = [name for name in names if name not in tokens]
        if missing:
            raise ConfigError(f"The tokenizer makes no {', '.join(missing)}.", fix="use the model's own tokenizer.")
        made = [
            {
                "name": one["name"],
                "datatype": one["datatype"],
                "shape": [1, len(tokens[one["name"]])],
                "data": tokens[one["name"]],
            }
            for one in inputs
        ]
        return {"inputs": made}

    return body


def _good(reply: Reply, path: str) -> Reply:
    if reply.status != 200:
        raise SessionError(
            f"{path} answers {reply.status}: {reply.body[:200].decode(errors='replace')}",
            fix="check the URL and the key.",
        )
    return reply


def _characters(inputs: Any) -> int:
    """Of all the texts in there."""
    if isinstance(inputs, str):
        return len(inputs)
    values: Sequence[Any] = list(inputs.values()) if isinstance(inputs, Mapping) else inputs
    return sum(map(_characters, values))
